"""Arenas: frames of one or more regions are given to one owner each, come back once, and leave with their region."""

import gc
import threading

import numpy as np
import pytest

from stepwell.base.errors import (
    InputError,
    InvariantError,
    LateError,
    MisuseError,
    RefusedError,
    StaleError,
)
from stepwell.base.threads import Health
from stepwell.core.page import Status
from stepwell.memory.arena import Arena, Short
from stepwell.memory.ask import Ask
from stepwell.memory.growth import Growth
from stepwell.memory.lease import Lease
from stepwell.memory.region import Region
from stepwell.testing.clock import FakeClock
from stepwell.testing.gpu import FakeGpu

PAGE = 4096
WAIT_S = 30


def counts(arena):
    stats = arena.stats()
    assert stats.frames == stats.free + stats.used + stats.quarantined
    return stats.free, stats.used, stats.quarantined


def in_thread(call):
    """Runs a call that has to wait for something; what it returns comes from `join`."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()

    def join():
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return answers[0]

    return join


def test_frames_are_reserved_and_released(make_arena):
    arena = make_arena(4)
    assert counts(arena) == (4, 0, 0)
    lease = arena.reserve(3, "one")
    assert isinstance(lease, Lease)
    assert lease.frames.tolist() == [0, 1, 2]
    assert counts(arena) == (1, 3, 0)
    lease.release()
    assert counts(arena) == (4, 0, 0)
    assert arena.stats().leases == 0


def test_a_reservation_gets_all_or_nothing_and_says_what_is_missing(make_arena):
    arena = make_arena(4)
    lease = arena.reserve(3, "one")
    assert arena.reserve(2, "two") == Short(by=1, count=4)
    assert arena.reserve(9, "two") == Short(by=8, count=4)
    assert counts(arena) == (1, 3, 0)
    with arena.reserve(1, "two"):
        assert arena.reserve(1, "three") == Short(by=1, count=4)
    lease.release()
    with arena.reserve(4, "three") as all_of_them:
        assert sorted(all_of_them.frames.tolist()) == [0, 1, 2, 3]


def test_an_arena_without_a_region_is_short_of_everything(make_arena):
    arena = make_arena(0, count=5)
    assert arena.reserve(2, "one") == Short(by=2, count=5)
    assert counts(arena) == (0, 0, 0)
    assert arena.regions == ()


def test_no_two_owners_have_the_same_bytes(make_arena, read, write):
    arena = make_arena(9, frame_bytes=100, align_bytes=1)
    leases = [arena.reserve(1, number) for number in range(9)]
    for number, lease in enumerate(leases):
        write(lease.buffer(), number)
    for number, lease in enumerate(leases):
        assert read(lease.buffer()) == bytes([number]) * 100
        lease.release()


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "2", None])
def test_a_number_of_frames_that_cannot_be_reserved_is_refused_by_value(make_arena, n):
    arena = make_arena(4)
    with pytest.raises(InputError, match="asked for") as caught:
        arena.reserve(n, "one")
    assert repr(n) in str(caught.value)
    assert counts(arena) == (4, 0, 0)


def test_several_regions_make_one_arena(make_arena, make_region):
    arena = make_arena(2, count=6)
    assert arena.add(make_region(3 * PAGE)) == 3
    assert len(arena.regions) == 2
    with arena.reserve(5, "one") as lease:
        addresses = arena.addresses(lease)
        for region in arena.regions:
            inside = (addresses >= region.address) & (
                addresses < region.address + region.size_bytes
            )
            assert inside.sum() == region.size_bytes // PAGE
    assert counts(arena) == (5, 0, 0)


def test_a_region_that_is_larger_than_the_arena_gives_what_there_is_room_for(
    make_arena, make_region
):
    arena = make_arena(2, count=3)
    assert arena.add(make_region(8 * PAGE)) == 1
    assert counts(arena) == (3, 0, 0)
    with pytest.raises(InputError, match=r"no room.*3 frames"):
        arena.add(make_region(PAGE))
    assert len(arena.regions) == 2


def test_a_region_that_was_prepared_before_is_added(make_arena, make_region):
    arena = make_arena(0, count=4)
    region = make_region(2 * PAGE)
    region.prepare()
    assert arena.add(region) == 2
    assert counts(arena) == (2, 0, 0)


@pytest.mark.parametrize("align_bytes", [1, 64, 512, PAGE])
def test_addresses_are_aligned_and_whole_in_a_piece(make_arena, make_region, align_bytes):
    arena = make_arena(0, 1000, count=50, align_bytes=align_bytes)
    region = make_region(6 * PAGE, piece_bytes=2 * PAGE)
    count = arena.add(region)
    with arena.reserve(count, "one") as lease:
        begins = arena.addresses(lease).astype(np.int64) - region.address
    assert not (begins % align_bytes).any()
    assert (begins // (2 * PAGE) == (begins + 999) // (2 * PAGE)).all()
    assert count == 3 * (2 * PAGE // (-(-1000 // align_bytes) * align_bytes))


def test_a_region_without_room_for_a_frame_is_refused_and_not_kept(make_arena, make_region):
    arena = make_arena(0, 3 * PAGE, count=4)
    small = make_region(2 * PAGE)
    pieced = make_region(9 * PAGE, piece_bytes=2 * PAGE)
    with pytest.raises(InputError, match="room for one frame"):
        arena.add(small)
    with pytest.raises(InputError, match="room for one frame"):
        arena.add(pieced)
    assert arena.regions == ()
    small.close()
    pieced.close()


def test_a_region_that_is_here_or_closed_is_refused(make_arena, make_region):
    arena, closed = make_arena(2, count=9), make_region(PAGE)
    closed.close()
    with pytest.raises(MisuseError, match="already"):
        arena.add(arena.regions[0])
    with pytest.raises(MisuseError, match="already"):
        arena.grow(arena.regions[0], Health())
    with pytest.raises(MisuseError, match="closed"):
        arena.add(closed)
    assert len(arena.regions) == 1
    assert counts(arena) == (2, 0, 0)


def test_a_region_of_an_arena_cannot_be_closed(make_arena):
    arena = make_arena(2, name="kv")
    region = arena.regions[0]
    with pytest.raises(MisuseError, match="arena kv"):
        region.close()
    arena.close()
    region.close()
    assert region.closed


def test_growth_gives_frames_out_while_it_goes_on(make_arena, make_region, gated_gpu):
    arena, health = make_arena(0, count=3), Health()
    region = make_region(3 * PAGE, gpu=gated_gpu, pinned=True, piece_bytes=PAGE)
    growth = arena.grow(region, health)
    for ready in range(3):
        assert gated_gpu.asked.acquire(timeout=WAIT_S)
        assert not growth.done
        assert not growth.wait(0)
        assert counts(arena) == (ready, 0, 0)
        assert arena.reserve(ready + 1, "one") == Short(by=1, count=3)
        gated_gpu.gate.release()
    assert growth.wait(WAIT_S)
    assert growth.done
    assert growth.refused is None
    with arena.reserve(3, "one") as lease:
        assert len(lease.frames) == 3
    assert region.record.ready_bytes == region.record.registered_bytes == 3 * PAGE
    growth.stop()
    assert not health.degraded


def test_growth_that_is_refused_says_so_and_leaves_what_it_brought(make_arena, make_region):
    arena, health = make_arena(0, count=8), Health()
    gpu = FakeGpu(most_bytes=2 * PAGE)
    region = make_region(5 * PAGE, gpu=gpu, pinned=True, piece_bytes=PAGE)
    growth = arena.grow(region, health)
    with pytest.raises(RefusedError, match="pinned refused"):
        growth.wait(WAIT_S)
    growth.stop()
    assert isinstance(growth.refused, RefusedError)
    assert health.degraded
    assert health.faults[0].error is growth.refused
    assert counts(arena) == (2, 0, 0)
    with arena.reserve(2, "one"):
        assert arena.reserve(1, "two") == Short(by=1, count=8)
    assert arena.drain(region) == 0
    region.close()
    assert gpu.registered == {}


def test_adding_that_is_refused_raises_and_leaves_what_it_brought(make_arena, make_region):
    arena = make_arena(0, count=8)
    region = make_region(5 * PAGE, gpu=FakeGpu(most_bytes=3 * PAGE), pinned=True, piece_bytes=PAGE)
    with pytest.raises(RefusedError, match="pinned refused"):
        arena.add(region)
    assert counts(arena) == (3, 0, 0)
    assert arena.regions == (region,)


def test_growth_that_is_stopped_ends_after_what_it_is_doing(make_arena, make_region, gated_gpu):
    arena, health = make_arena(0, count=9), Health()
    region = make_region(9 * PAGE, gpu=gated_gpu, pinned=True, piece_bytes=PAGE)
    growth = arena.grow(region, health)
    assert gated_gpu.asked.acquire(timeout=WAIT_S)
    stopped = in_thread(growth.stop)
    assert growth._stop.wait(WAIT_S)
    gated_gpu.gate.release()
    stopped()
    assert growth.wait(0)
    assert region.record.ready_bytes == PAGE
    assert counts(arena) == (1, 0, 0)
    assert not health.degraded


def test_draining_ends_growth_and_lets_the_region_go(make_arena, make_region, gated_gpu):
    """The books are in order all the while: between its two looks, drain must not hold the lock."""
    arena = make_arena(0, count=9)
    region = make_region(9 * PAGE, gpu=gated_gpu, pinned=True, piece_bytes=PAGE)
    growth = arena.grow(region, Health())
    gated_gpu.gate.release()
    for _ in range(2):
        assert gated_gpu.asked.acquire(timeout=WAIT_S)
    lease = arena.reserve(1, "one")
    lease.release()
    drained = in_thread(lambda: arena.drain(region))
    assert growth._stop.wait(WAIT_S)
    arena.check()
    assert arena.reserve(1, "two") == Short(by=1, count=9)
    gated_gpu.gate.release()
    assert drained() == 0
    assert growth.done
    assert arena.regions == ()
    assert counts(arena) == (0, 0, 0)
    region.close()


def test_the_last_frame_may_come_back_while_draining_waits_for_growth(
    make_arena, make_region, gated_gpu
):
    arena = make_arena(0, count=9)
    region = make_region(9 * PAGE, gpu=gated_gpu, pinned=True, piece_bytes=PAGE)
    growth = arena.grow(region, Health())
    gated_gpu.gate.release()
    for _ in range(2):
        assert gated_gpu.asked.acquire(timeout=WAIT_S)
    lease = arena.reserve(1, "one")
    drained = in_thread(lambda: arena.drain(region))
    assert growth._stop.wait(WAIT_S)
    lease.release()
    assert arena.regions == (region,), "its growth still writes to it"
    gated_gpu.gate.release()
    assert drained() == 0
    assert arena.regions == ()


def test_a_region_with_used_frames_drains_until_the_last_is_back(make_arena, make_region):
    arena = make_arena(2, count=8)
    region = make_region(3 * PAGE)
    arena.add(region)
    everything = arena.reserve(5, "one")
    drained = [frame for frame in everything.frames if arena._places.place(frame)[0] is region]
    assert arena.drain(region) == 3
    assert arena.drain(region) == 3
    everything.give_back(drained[:2])
    assert counts(arena) == (0, 3, 2)
    assert arena.reserve(1, "two") == Short(by=1, count=8)
    with pytest.raises(MisuseError, match="arena"):
        region.close()
    everything.release()
    assert arena.regions[0] is not region
    assert len(arena.regions) == 1
    assert counts(arena) == (2, 0, 0)
    region.close()


@pytest.mark.parametrize("touch", ["pin", "view"])
def test_a_draining_region_stays_for_whoever_touches_its_frames(make_arena, touch):
    arena = make_arena(2)
    region = arena.regions[0]
    lease = arena.reserve(1, "one")
    if touch == "pin":
        pin = lease.pin("save")
        end = pin.end
    else:
        view = lease.buffer().view()
        view.__enter__()
        end = lambda: view.__exit__(None, None, None)  # noqa: E731
    lease.release()
    assert arena.drain(region) == 1
    assert arena.regions == (region,)
    end()
    assert counts(arena) == (0, 0, 0)
    assert arena.regions == ()
    region.close()


def test_an_idle_region_drains_at_once(make_arena):
    arena = make_arena(3)
    region = arena.regions[0]
    assert arena.drain(region) == 0
    assert arena.regions == ()
    assert arena.reserve(1, "one") == Short(by=1, count=3)
    region.close()


def test_the_next_region_gets_the_numbers_of_a_drained_one(make_arena, make_region, write, read):
    arena = make_arena(2, count=2)
    first = arena.regions[0]
    with arena.reserve(2, "one") as lease:
        write(lease.buffer(1), 7)
        stale = lease.buffer(1)
    assert arena.drain(first) == 0
    first.close()
    second = make_region(2 * PAGE)
    assert arena.add(second) == 2
    with arena.reserve(2, "two") as lease:
        assert sorted(lease.frames.tolist()) == [0, 1]
        assert read(lease.buffer(1)) == bytes(PAGE)
        with pytest.raises(MisuseError, match="'two' has it"):
            stale.plain()
        assert sorted(arena.addresses(lease).tolist()) == [second.address, second.address + PAGE]


def test_a_drained_region_can_come_back(make_arena):
    arena = make_arena(2)
    region = arena.regions[0]
    arena.drain(region)
    assert arena.add(region) == 2
    assert counts(arena) == (2, 0, 0)


def test_closing_is_refused_while_frames_are_used_and_names_who(make_arena):
    arena = make_arena(4, name="kv")
    lease = arena.reserve(2, "request 7")
    pin = lease.pin("save to disk")
    view = lease.buffer().view()
    memory = view.__enter__()
    with pytest.raises(MisuseError) as caught:
        arena.close()
    text = str(caught.value)
    assert "the arena kv is in use" in text
    assert f"'request 7' has 2 frames, taken at {lease.books.place}" in text
    assert f"('save to disk'), taken at {pin.books.place}" in text
    assert f"a view taken at {view.books.place}" in text
    assert text.count(__file__) == 3, "each with file and line of this test"
    del memory
    view.__exit__(None, None, None)
    with pytest.raises(MisuseError, match="save to disk"):
        arena.close()
    lease.release()
    with pytest.raises(MisuseError, match="save to disk"):
        arena.close()
    pin.end()
    arena.close()
    assert arena.regions == ()


def test_closing_names_five_users_and_counts_the_others(make_arena):
    arena = make_arena(8)
    leases = [arena.reserve(1, f"request {number}") for number in range(7)]
    with pytest.raises(MisuseError, match="and 2 more") as caught:
        arena.close()
    assert str(caught.value).count("request ") == 5
    for lease in leases:
        lease.release()


def test_a_refused_close_changes_nothing(make_arena):
    arena = make_arena(2)
    lease = arena.reserve(1, "one")
    with pytest.raises(MisuseError):
        arena.close()
    with arena.reserve(1, "two"):
        assert counts(arena) == (0, 2, 0)
    lease.release()


def test_closing_ends_growth(make_arena, make_region, gated_gpu):
    arena = make_arena(0, count=9)
    region = make_region(9 * PAGE, gpu=gated_gpu, pinned=True, piece_bytes=PAGE)
    growth = arena.grow(region, Health())
    assert gated_gpu.asked.acquire(timeout=WAIT_S)
    closed = in_thread(arena.close)
    assert growth._stop.wait(WAIT_S)
    gated_gpu.gate.release()
    closed()
    assert growth.done
    assert arena.stats().frames == 0, "what became ready afterwards was not given out"
    region.close()
    assert gated_gpu.registered == {}


def test_closing_twice_is_closing(make_arena):
    arena = make_arena(2)
    arena.close()
    arena.close()
    assert arena.regions == ()


def test_a_closed_arena_refuses_everything_but_its_counts(make_arena, make_region):
    arena = make_arena(2)
    region = arena.regions[0]
    lease = arena.reserve(1, "one")
    buffer = lease.buffer()
    lease.release()
    arena.close()
    health = Health()
    for call in (
        lambda: arena.add(make_region(PAGE)),
        lambda: arena.grow(make_region(PAGE), health),
        lambda: arena.number(region),
        lambda: arena.reserve(1, "two"),
        lambda: arena.addresses(lease),
        lambda: lease.pin("save"),
        lambda: buffer.view().__enter__(),
        buffer.plain,
        lease.release,
    ):
        with pytest.raises(MisuseError):
            call()
    assert counts(arena) == (0, 0, 0)
    arena.check()
    assert not health.degraded


def test_an_arena_is_a_block(grounds):
    with Arena(PAGE, 2) as arena:
        region = grounds.region(2 * PAGE)
        arena.add(region)
    with pytest.raises(MisuseError, match="closed"):
        arena.reserve(1, "one")
    region.close()


def test_statistics_count_what_is_and_what_was(make_arena):
    arena = make_arena(8)
    one, two = arena.reserve(3, "one"), arena.reserve(2, "two")
    pin, other = one.pin("save", one.frames[:2]), two.pin("load")
    with one.buffer(2).view():
        one.give_back(one.frames[:1])
        stats = arena.stats()
        assert (stats.frames, stats.free, stats.used, stats.quarantined) == (8, 3, 4, 1)
        assert (stats.leases, stats.pins, stats.views) == (2, 2, 1)
    pin.end()
    other.end()
    one.release()
    two.release()
    stats = arena.stats()
    assert (stats.free, stats.leases, stats.pins, stats.views) == (8, 0, 0, 0)
    assert (stats.leases_lost, stats.pins_late, stats.pins_lost) == (0, 0, 0)


def test_debug_fills_returned_frames_with_nan(make_arena, write, read):
    """Whoever reads what was returned computes nonsense that shows, not somebody else's KV."""
    arena = make_arena(2, frame_bytes=64)
    lease = arena.reserve(2, "one")
    write(lease.buffer(0), 1)
    write(lease.buffer(1), 2)
    lease.give_back(lease.frames[:1])
    assert set(read(lease.buffer(1))) == {2}
    lease.release()
    with arena.reserve(2, "two") as lease:
        for index in range(2):
            bytes_of = read(lease.buffer(index))
            for kind in (np.float16, np.float32, np.float64):
                assert np.isnan(np.frombuffer(bytes_of, kind)).all()


def test_debug_fills_no_frame_that_somebody_touches(make_arena, write):
    arena = make_arena(1, frame_bytes=64)
    lease = arena.reserve(1, "one")
    write(lease.buffer(), 5)
    with lease.buffer().view() as memory:
        pin = lease.pin("save")
        lease.release()
        assert set(memory) == {5}
        pin.end()
        assert set(memory) == {5}


@pytest.fixture
def doomed():
    """An arena whose books a test breaks: it cannot be closed in order."""
    arena, region = Arena(PAGE, 4, debug=True), Region.open(Ask(4 * PAGE))
    arena.add(region)
    yield arena
    arena._ground.uses.clear()
    region._mapping.close()


@pytest.mark.parametrize("call", ["reserve", "give_back", "release", "pin", "end", "overdue"])
def test_debug_checks_the_books_after_every_call(doomed, call):
    lease = doomed.reserve(2, "one")
    pin = lease.pin("load", lease.frames[:1])
    calls = {
        "reserve": lambda: doomed.reserve(1, "two"),
        "give_back": lambda: lease.give_back(lease.frames[1:]),
        "release": lease.release,
        "pin": lambda: lease.pin("save"),
        "end": pin.end,
        "overdue": doomed.overdue,
    }
    doomed._custody._touching[3] += 1
    with pytest.raises(InvariantError, match="counts of pins and views"):
        calls[call]()


def _free_and_held(arena):
    frame = int(arena._custody.frames._stack[0])
    arena._custody._holder[frame] = 77


def _nobodys(arena):
    lease = next(iter(arena._custody.leases.values()))
    arena._custody._holder[lease.frames[0]] = 0


def _sealed(arena):
    arena._custody.frames.status[0] = Status.SEALED


def _counted_twice(arena):
    next(iter(arena._custody.leases.values())).left += 1


def _nowhere(arena):
    arena._places._slot[0] = -1


def _not_free(arena):
    frame = arena._custody.frames.reserve(1)
    arena._custody.frames.move(frame, Status.QUARANTINED)


def _drains_elsewhere(arena):
    arena._ground._draining.add(object())


def _drains_and_free(arena):
    arena._ground._draining.add(arena.regions[0])


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (_free_and_held, "free and in use"),
        (_nobodys, "belongs to no lease"),
        (_sealed, "sealed"),
        (_counted_twice, "leases have frames"),
        (_nowhere, "without a place"),
        (_not_free, "an idle frame of .* is not free"),
        (_drains_elsewhere, "a region drains that has left"),
        (_drains_and_free, "drains, is free"),
    ],
)
def test_the_checker_finds_broken_books(doomed, damage, found):
    """A checker that finds nothing would make every other test of it worthless."""
    lease = doomed.reserve(1, "one")
    doomed.check()
    damage(doomed)
    with pytest.raises(InvariantError, match=found):
        doomed.check()
    assert len(lease.books.frames) == 1


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_torn_call_that_left_broken_books_stops_the_arena(doomed, monkeypatch, error):
    lease = doomed.reserve(2, "one")

    def torn(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(doomed._custody.frames, "move", torn)
        with pytest.raises(error):
            lease.release()
    for call in (doomed.stats, doomed.check, lambda: doomed.reserve(1, "two"), lease.release):
        with pytest.raises(InvariantError, match=f"torn by {error.__name__}"):
            call()


def test_a_call_of_another_thread_waits_for_its_turn(make_arena):
    arena = make_arena(2)
    with arena._call.alone(), arena._call:
        waiting = in_thread(lambda: arena.reserve(1, "one"))
        assert arena._custody.frames.free == 2
    with waiting():
        assert counts(arena) == (1, 1, 0)


def test_two_arenas_cannot_have_one_region(make_arena, make_region):
    """They would give the same bytes to two owners."""
    region = make_region(2 * PAGE)
    first, second = make_arena(0, count=2, name="first"), make_arena(0, count=2, name="second")
    first.add(region)
    with pytest.raises(MisuseError, match="is part of arena first"):
        second.add(region)
    with pytest.raises(MisuseError, match="is part of arena first"):
        second.grow(region, Health())
    assert second.regions == ()
    assert first.drain(region) == 0
    assert second.add(region) == 2


def test_the_number_of_a_region_is_its_own_for_ever(make_arena, make_region):
    """Another process has a record with it, and must not read another region by it."""
    arena = make_arena(0, count=6)
    first, second, third = (make_region(2 * PAGE) for _ in range(3))
    arena.add(first)
    arena.add(second)
    number = arena.number(second)
    arena.drain(first)
    assert arena.number(second) == number
    arena.add(third)
    assert arena.number(third) not in (0, number)
    with pytest.raises(MisuseError, match="not part of this arena"):
        arena.number(first)
    with arena.reserve(4, "one") as lease:
        numbers = {lease.buffer(index).plain().region for index in range(4)}
    assert numbers == {number, arena.number(third)}


@pytest.mark.parametrize("owner", [None, ("request", 7), 1.5, True, b"one"])
def test_an_owner_is_text_or_a_number(make_arena, owner):
    arena = make_arena(2)
    with pytest.raises(InputError, match="text or a number"):
        arena.reserve(1, owner)
    assert counts(arena) == (2, 0, 0)


def test_a_reservation_that_is_torn_loses_no_frame(make_arena, monkeypatch):
    arena = make_arena(2)

    def torn():
        raise KeyboardInterrupt

    monkeypatch.setattr(arena, "_check_if_debug", torn)
    with pytest.raises(KeyboardInterrupt):
        arena.reserve(2, "one")
    monkeypatch.undo()
    gc.collect()
    with pytest.warns(ResourceWarning, match="the lease of 'one' was lost"):
        assert arena.stats().free == 2


def test_reports_wait_where_warnings_are_errors(make_arena):
    arena = make_arena(3)
    leases = [arena.reserve(1, owner) for owner in range(3)]
    leases.clear()
    gc.collect()
    told = set()
    for _ in range(3):
        with pytest.raises(ResourceWarning) as caught:
            arena.stats()
        told.add(str(caught.value).partition(",")[0])
    assert told == {f"the lease of {owner} was lost" for owner in range(3)}
    assert counts(arena) == (3, 0, 0)


def test_growth_of_a_region_that_is_ready_gives_its_frames_out(make_arena, make_region):
    """Device memory is ready from the start, and nobody tells so again."""
    arena, health, region = make_arena(0, count=2), Health(), make_region(2 * PAGE)
    region.prepare()
    growth = arena.grow(region, health)
    assert growth.wait(WAIT_S)
    assert counts(arena) == (2, 0, 0)


def test_draining_twice_and_adding_again_frees_no_region_under_its_frames(
    make_arena, make_region, monkeypatch
):
    arena, region = make_arena(0, count=4), make_region(4 * PAGE)
    arena.grow(region, Health()).wait(WAIT_S)
    stop = Growth.stop

    def overtaken(growth):
        stop(growth)
        monkeypatch.setattr(Growth, "stop", stop)
        assert arena.drain(region) == 0  # as another thread would
        assert arena.add(region) == 4

    monkeypatch.setattr(Growth, "stop", overtaken)
    assert arena.drain(region) == 0
    assert arena.regions == (region,)
    assert counts(arena) == (4, 0, 0)
    arena.check()


def test_growth_that_dies_of_something_else_says_so(make_arena, make_region):
    class Broken(FakeGpu):
        def register(self, address, size_bytes):
            raise ZeroDivisionError

    arena, health = make_arena(0, count=2), Health()
    region = make_region(2 * PAGE, gpu=Broken(), pinned=True)
    growth = arena.grow(region, health)
    with pytest.raises(RefusedError, match="growth ended after 0 of"):
        growth.wait(WAIT_S)
    assert isinstance(health.faults[0].error, ZeroDivisionError)
    assert arena.drain(region) == 0


def test_growth_that_was_stopped_before_it_began_never_begins(make_region):
    growth = Growth(make_region(PAGE), lambda _: None, Health())
    growth.stop()
    growth.begin()
    assert growth.done
    assert growth.wait(0)


def test_an_arena_that_is_lost_lets_its_regions_be_closed_and_is_reported(make_region):
    region = make_region(PAGE)
    arena = Arena(PAGE, 1, name="forgotten")
    arena.add(region)
    with pytest.raises(MisuseError, match="arena forgotten"):
        region.close()
    del arena
    gc.collect()
    region.close()
    with pytest.warns(ResourceWarning, match="the arena forgotten, made at .* was lost"):
        make_region(PAGE)


def test_the_frames_of_a_region_are_told_to_whoever_drains_it(make_arena, make_region):
    arena = make_arena(2, count=4)
    region = make_region(2 * PAGE)
    arena.add(region)
    assert arena.frames_in(region).tolist() == [2, 3]
    assert arena.free == 4
    with arena.reserve(3, "one") as lease:
        used = set(lease.frames.tolist()) & {2, 3}
        assert arena.drain(region) == len(used)
        assert arena.frames_in(region).tolist() == [2, 3]
        assert arena.free == len({0, 1} - set(lease.frames.tolist()))
    with pytest.raises(MisuseError, match="not part of this arena"):
        arena.frames_in(region)


def test_a_record_that_comes_back_is_of_this_life_of_the_frame_or_stale(make_arena):
    arena = make_arena(1)
    with arena.reserve(1, "one") as lease:
        plain = lease.buffer().plain()
        arena.require_current(plain)
    with pytest.raises(StaleError, match="in life 1 was returned"):
        arena.require_current(plain)
    with arena.reserve(1, "two"), pytest.raises(StaleError):
        arena.require_current(plain)


def test_growth_without_a_thread_is_refused_and_leaves_the_region(
    make_arena, make_region, monkeypatch
):
    def none(self):
        raise RuntimeError("can't start new thread")

    arena, region = make_arena(0, count=2), make_region(2 * PAGE)
    monkeypatch.setattr(Growth, "begin", none)
    with pytest.raises(RefusedError, match="no thread can be started"):
        arena.grow(region, Health())
    assert arena.regions == ()
    monkeypatch.undo()
    assert arena.add(region) == 2


def test_an_error_inside_of_the_block_is_not_hidden_by_what_it_left_open():
    region, arena = Region.open(Ask(PAGE)), Arena(PAGE, 1, name="kv")
    with pytest.raises(KeyError) as caught, region, arena:  # noqa: PT012
        arena.add(region)
        lease = arena.reserve(1, "one")
        raise KeyError
    assert "not closed: the arena kv is in use" in caught.value.__notes__[0]
    assert "is used by arena kv" in caught.value.__notes__[1]
    lease.release()
    arena.close()
    region.close()


def test_a_record_of_a_frame_that_was_returned_under_a_transfer_is_stale(make_arena):
    """The transfer protects the bytes, not whoever does not want them any more."""
    arena = make_arena(1)
    lease = arena.reserve(1, "one")
    plain, pin = lease.buffer().plain(), lease.pin("save")
    lease.release()
    with pytest.raises(StaleError, match="was returned"):
        arena.require_current(plain)
    pin.end()


def test_a_record_of_a_frame_that_went_out_of_use_is_late(make_arena):
    clock = FakeClock()
    arena = make_arena(1, clock=clock)
    with arena.reserve(1, "one") as lease:
        plain = lease.buffer().plain()
        with lease.pin("load", within_s=1):
            clock.advance_s(2)
            (late,) = arena.overdue()
            with pytest.raises(LateError, match="went out of use"):
                arena.require_current(plain)
            with pytest.raises(
                LateError, match=f"touched by pin {late.number} \\('load'\\), taken at"
            ):
                lease.renew()


def test_draining_says_none_for_a_region_that_has_drained(make_arena, make_region):
    """Whoever asks until it is 0 comes after the last frame."""
    arena, region, stranger = make_arena(0, count=2), make_region(2 * PAGE), make_region(PAGE)
    arena.add(region)
    with arena.reserve(1, "one"):
        assert arena.drain(region) == 1
    assert arena.drain(region) == 0
    assert arena.drain(region) == 0
    with pytest.raises(MisuseError, match="not part of this arena"):
        arena.drain(stranger)
    assert arena.add(region) == 2
    with arena.reserve(1, "two"):
        assert arena.drain(region) == 1


def test_growth_needs_no_health_and_says_how_far_it_is(make_arena, make_region):
    arena, region = make_arena(0, count=2), make_region(2 * PAGE)
    growth = arena.grow(region)
    assert growth.wait(WAIT_S)
    assert growth.ready_bytes == 2 * PAGE


def test_what_falls_short_is_false(make_arena):
    arena = make_arena(1)
    assert not arena.reserve(2, "one")
    lease = arena.reserve(1, "one")
    assert lease
    lease.release()
