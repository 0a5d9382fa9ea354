"""The fake device: operations run when a test says so, copies are torn in between, and fences tell the truth."""

import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError, MisuseError
from stepwell.move.fence import PASSED
from stepwell.testing.device import BytesPlace, FakeDevice, FakeFence, FakePlace, GateFence

LONG_S, SHORT_S = 30, 0.01
BOUNDS = (0, 3, 10, 16)


@pytest.fixture
def device():
    return FakeDevice()


def numbered(frames=6, frame_bytes=16):
    """Rows whose bytes are all different, and none of them 0."""
    values = np.arange(frames * frame_bytes, dtype=np.uint8).reshape(frames, frame_bytes)
    return values + 1


def empty_rows(n, frame_bytes=16):
    return list(np.zeros((n, frame_bytes), np.uint8))


def ids(*frames):
    return np.array(frames, np.int32)


def running(action):
    """Runs it in a thread; gives the thread and the list that gets its answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(action()), daemon=True)
    thread.start()
    return thread, answers


def ended(thread):
    thread.join(LONG_S)
    assert not thread.is_alive()


# Streams and fences.


def test_operations_run_in_order_and_only_when_they_are_let(device):
    ran = []
    for number in range(5):
        device.out.enqueue(f"op {number}", lambda number=number: ran.append(number))
    assert (ran, device.out.queued) == ([], 5)
    assert device.out.advance() == 1
    assert device.out.advance(2) == 2
    assert (ran, device.out.passed, device.out.queued) == ([0, 1, 2], 3, 2)
    assert device.out.advance_all() == 2
    assert ran == [0, 1, 2, 3, 4]
    assert device.out.advance() == 0
    assert device.log == [("out", f"op {number}") for number in range(5)]


def test_a_fence_is_a_point_in_its_stream(device):
    begin = device.out.fence()
    device.out.enqueue("a", lambda: None)
    after_a = device.out.fence()
    device.out.enqueue("b", lambda: None)
    after_b = device.out.fence()
    seen = [[fence.done() for fence in (begin, after_a, after_b)]]
    for _ in range(2):
        device.out.advance()
        seen.append([fence.done() for fence in (begin, after_a, after_b)])
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


def test_a_fence_that_nobody_moves_is_waited_for_in_vain(device):
    device.out.enqueue("a", lambda: None)
    fence = device.out.fence()
    assert not fence.wait(0)
    assert not fence.wait(SHORT_S)
    device.out.advance()
    assert fence.wait(0)


def test_a_fence_wakes_whoever_waits(device):
    for _ in range(3):
        device.out.enqueue("a", lambda: None)
    fence = device.out.fence()
    thread, answers = running(lambda: fence.wait(LONG_S))
    for _ in range(3):
        assert not answers
        device.out.advance()
    ended(thread)
    assert answers == [True]


def test_a_stream_waits_for_a_fence_of_another(device):
    device.compute.enqueue("write", lambda: None)
    device.out.wait_for(device.compute.fence())
    device.out.enqueue("read", lambda: None)
    assert (device.out.advance(5), device.out.ready) == (0, False)
    assert device.compute.advance() == 1
    assert device.out.advance(5) == 2
    assert [stream for stream, _ in device.log] == ["compute", "out", "out"]


def test_a_fence_of_another_device_is_refused(device):
    with pytest.raises(InputError, match="another device"):
        device.out.wait_for(FakeDevice().out.fence())


def test_a_free_stream_runs_at_once(device):
    ran = []
    device.out.enqueue("a", lambda: ran.append("a"))
    device.out.free_run()
    assert ran == ["a"]
    device.out.enqueue("b", lambda: ran.append("b"))
    assert ran == ["a", "b"]
    assert device.out.fence().done()
    device.out.free_run(free=False)
    device.out.enqueue("c", lambda: ran.append("c"))
    assert ran == ["a", "b"]


def test_a_free_stream_goes_on_when_its_fence_comes(device):
    device.out.free_run()
    device.compute.enqueue("write", lambda: None)
    device.out.wait_for(device.compute.fence())
    device.out.enqueue("read", lambda: None)
    assert device.out.queued == 2
    device.compute.advance()
    assert device.out.queued == 0


def test_free_streams_serve_threads(device):
    """Each enqueues and waits for its own fence, as threads of a mover do."""
    device.out.free_run()
    device.into.free_run()
    counts = [0, 0]

    def use(which, stream):
        for _ in range(200):
            stream.enqueue("count", lambda: counts.__setitem__(which, counts[which] + 1))
            assert stream.fence().wait(LONG_S)
        return True

    lanes = [
        running(lambda w=w, s=s: use(w % 2, s)) for w, s in enumerate([device.out, device.into] * 2)
    ]
    for thread, answers in lanes:
        ended(thread)
        assert answers == [True]
    assert counts == [400, 400]


def test_a_test_can_wait_until_a_thread_has_enqueued(device):
    assert not device.out.wait_queued(1, SHORT_S)

    def use():
        for _ in range(2):
            device.out.enqueue("a", lambda: None)
        return device.out.fence().wait(LONG_S)

    thread, answers = running(use)
    assert device.out.wait_queued(2, LONG_S)
    device.out.advance_all()
    ended(thread)
    assert answers == [True]


def test_an_operation_that_enqueues_ends_before_what_it_enqueued(device):
    order = []

    def first():
        device.out.enqueue("second", lambda: order.append("second"))
        order.append("first")

    device.out.free_run()
    device.out.enqueue("first", first)
    assert order == ["first", "second"]
    assert [what for _, what in device.log] == ["first", "second"]


def test_an_operation_that_raises_stays_and_its_fence_never_comes(device):
    def broken():
        raise ZeroDivisionError

    device.out.enqueue("broken", broken)
    fence = device.out.fence()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            device.out.advance()
        assert not fence.done()
    device.into.enqueue("a", lambda: None)
    assert device.into.advance() == 1, "the device is not locked"
    assert device.log == [("into", "a")]


def test_the_device_runs_everything_that_can_run(device):
    device.out.wait_for(device.into.fence())
    device.into.enqueue("a", lambda: None)
    device.out.wait_for(device.into.fence())
    device.compute.wait_for(device.out.fence())
    device.compute.enqueue("b", lambda: None)
    assert device.advance_all() == 5
    assert not any(stream.queued for stream in device.streams)
    assert device.advance_all() == 0


def test_streams_that_wait_for_each_other_are_found_by_their_queues(device):
    device.compute.wait_for(FakeFence(device.out, 1))
    device.out.wait_for(device.compute.fence())
    assert device.advance_all() == 0
    assert not device.advance_some(random.Random(0))
    assert (device.compute.queued, device.out.queued) == (1, 1)


def orders(seed):
    device, dice = FakeDevice(), random.Random(seed)
    for stream in device.streams:
        for number in range(4):
            stream.enqueue(str(number), lambda: None)
    device.out.wait_for(device.compute.fence())
    while device.advance_some(dice):
        pass
    assert not any(stream.queued for stream in device.streams)
    return device.log


def test_the_same_seed_is_the_same_order_and_others_are_others():
    assert orders(1) == orders(1)
    assert len({tuple(orders(seed)) for seed in range(20)}) > 10
    for seed in range(20):
        log = orders(seed)
        assert log.index(("out", "after compute")) > log.index(("compute", "3"))
        assert [what for stream, what in log if stream == "into"] == ["0", "1", "2", "3"]


# Places.


def test_a_place_of_bytes_copies_at_once():
    place = BytesPlace(numbered(), BOUNDS)
    assert (place.frames, place.frame_bytes, place.bounds) == (6, 16, BOUNDS)
    rows = empty_rows(2)
    assert place.copy_out(ids(4, 1), rows) is PASSED
    assert np.array_equal(rows, numbered()[[4, 1]])
    assert place.copy_in(rows, ids(0, 5)) is PASSED
    assert np.array_equal(place.rows[[0, 5]], numbered()[[4, 1]])
    assert np.array_equal(place.rows[1:5], numbered()[1:5])


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (1, 3), (0, 3), (2, 2)])
def test_some_layers_are_copied_in_alone(layers):
    place = BytesPlace(np.zeros((2, 16), np.uint8), BOUNDS)
    place.copy_in(list(numbered(1)), ids(1), layers)
    first, last = BOUNDS[layers[0]], BOUNDS[layers[1]]
    wanted = np.zeros((2, 16), np.uint8)
    wanted[1, first:last] = numbered()[0, first:last]
    assert np.array_equal(place.rows, wanted)


@pytest.mark.parametrize(("frames", "rows"), [([-1], 1), ([6], 1), ([0], 2), ([0, 1], 1)])
def test_frames_that_do_not_exist_are_refused(frames, rows):
    place = BytesPlace(numbered(), BOUNDS)
    with pytest.raises(InputError, match="0 to 5"):
        place.copy_out(ids(*frames), empty_rows(rows))
    with pytest.raises(InputError, match="0 to 5"):
        place.copy_in(empty_rows(rows), ids(*frames))
    with pytest.raises(InputError, match="up to 16"):
        BytesPlace(numbered(), (0, 15))


def fake(device, pieces=4):
    below = BytesPlace(numbered(), BOUNDS)
    return below, FakePlace(below, device.out, device.into, pieces)


def test_the_rows_are_torn_until_the_last_piece(device):
    _, place = fake(device)
    rows = empty_rows(1)
    fence = place.copy_out(ids(2), rows)
    whole = numbered()[2]
    for piece in range(5):
        assert np.array_equal(rows[0][: 4 * piece], whole[: 4 * piece])
        assert not rows[0][4 * piece :].any()
        assert fence.done() is (piece == 4)
        device.out.advance()
    assert [what for _, what in device.log] == ["out 1/4", "out 2/4", "out 3/4", "out 4/4"]


def test_frames_are_torn_until_the_last_piece(device):
    below, place = fake(device)
    rows = [np.full(16, 255, np.uint8) for _ in range(6)]
    fence = place.copy_in(rows, ids(5, 4, 3, 2, 1, 0))
    done = []
    while not fence.done():
        assert device.into.advance() == 1
        done.append(int((below.rows == 255).all(axis=1).sum()))
    assert done == [1, 3, 4, 6]
    assert device.log[0] == ("into", "into 1/4")


def test_what_changes_during_a_copy_is_copied_as_a_mixture(device):
    """As on a device: who overwrites a source before it was released must be found out."""
    below, place = fake(device, pieces=2)
    rows = empty_rows(1)
    place.copy_out(ids(0), rows)
    device.out.advance()
    below.rows[0] = 99
    device.out.advance()
    assert rows[0].tolist() == [*range(1, 9), *[99] * 8]
    source = [np.full(16, 7, np.uint8)]
    place.copy_in(source, ids(1))
    device.into.advance()
    source[0][:] = 8
    device.into.advance()
    assert below.rows[1].tolist() == [*[7] * 8, *[8] * 8]


def test_a_layer_that_is_copied_in_leaves_the_others(device):
    below, place = fake(device)
    place.copy_in([np.zeros(16, np.uint8)], ids(3), (1, 2))
    device.into.advance_all()
    wanted = numbered()
    wanted[3, 3:10] = 0
    assert np.array_equal(below.rows, wanted)
    place.copy_in([np.zeros(16, np.uint8)], ids(3), (1, 1))
    assert device.into.queued == 0


@given(st.lists(st.integers(0, 5), max_size=6, unique=True), st.integers(1, 9), st.integers(1, 40))
def test_every_cut_copies_every_byte_once(frames, pieces, frame_bytes):
    device = FakeDevice()
    below = BytesPlace(numbered(6, frame_bytes), (0, frame_bytes))
    place = FakePlace(below, device.out, device.into, pieces)
    rows = empty_rows(len(frames), frame_bytes)
    place.copy_out(ids(*frames), rows)
    assert device.out.queued <= pieces
    assert device.out.queued == pieces or not frames or frame_bytes < pieces
    device.out.advance_all()
    assert np.array_equal(np.array(rows).reshape(-1, frame_bytes), numbered(6, frame_bytes)[frames])
    back = [255 - row for row in rows]
    place.copy_in(back, ids(*frames))
    device.into.advance_all()
    wanted = numbered(6, frame_bytes)
    wanted[frames] = 255 - wanted[frames]
    assert np.array_equal(below.rows, wanted)


def test_the_callers_lists_may_be_used_again(device):
    _, place = fake(device)
    frames, rows = ids(0, 1, 2, 3), empty_rows(4)
    kept = list(rows)
    place.copy_out(frames, rows)
    frames[:] = 5
    rows.clear()
    device.out.advance_all()
    assert np.array_equal(kept, numbered()[:4])


def test_a_copy_waits_for_the_engine_where_the_test_says_so(device):
    """The stream waits, not the call."""
    below, place = fake(device)
    device.compute.enqueue("kernel", lambda: below.rows.__setitem__(0, 42))
    device.out.wait_for(device.compute.fence())
    rows = empty_rows(1)
    fence = place.copy_out(ids(0), rows)
    assert device.out.advance(9) == 0
    device.advance_all()
    assert fence.done()
    assert rows[0].tolist() == [42] * 16


def test_a_place_of_its_kind_below_is_refused_when_it_copies(device):
    _, place = fake(device)
    twice = FakePlace(place, device.compute, device.compute)
    twice.copy_out(ids(0), empty_rows(1))
    with pytest.raises(MisuseError, match="copy at once"):
        device.compute.advance()


def test_pieces_are_one_or_more(device):
    with pytest.raises(InputError, match="1 or more"):
        fake(device, pieces=0)


def test_a_gate_is_a_fence():
    gate = threading.Event()
    fence = GateFence(gate)
    assert (fence.done(), fence.wait(0), fence.wait(SHORT_S)) == (False, False, False)
    gate.set()
    assert (fence.done(), fence.wait(0)) == (True, True)
