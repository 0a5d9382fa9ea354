"""Leases and buffers: whose frames these are, until they come back, once."""

import gc
import itertools
import threading

import numpy as np
import pytest

from stepwell.base.errors import InputError, MisuseError, StaleError

PAGE = 4096


def line_of(text, name):
    """The line of a source file that has this text, as messages name it."""
    with open(__file__) as source:  # noqa: PTH123
        lines = [number for number, line in enumerate(source, 1) if line.strip() == text]
    assert len(lines) == 1, name
    return f"{__file__}:{lines[0]}"


def test_a_lease_says_whose_frames_it_has(make_arena):
    arena = make_arena(4)
    with arena.reserve(2, "request 7") as lease:
        assert lease.owner == "request 7"
        assert lease.frames.dtype == np.int32
        assert lease.frames.tolist() == [0, 1]
        assert lease.late == ()
        assert lease.books.place.startswith(f"{__file__}:")


def test_the_frames_that_a_lease_tells_are_a_copy(make_arena):
    arena = make_arena(4)
    with arena.reserve(2, "one") as lease:
        lease.frames[:] = 3
        assert lease.frames.tolist() == [0, 1]
    assert arena.stats().free == 4


def test_a_buffer_is_a_frame_of_the_lease(make_arena, write, read):
    arena = make_arena(4, frame_bytes=100)
    with arena.reserve(3, "one") as lease:
        for index in range(3):
            assert lease.buffer(index).frame == lease.frames[index]
            assert lease.buffer(index).used_bytes == 100
            write(lease.buffer(index), index)
        assert [read(lease.buffer(index)) for index in range(3)] == [
            bytes([index]) * 100 for index in range(3)
        ]


def test_a_buffer_keeps_its_place_when_others_are_returned(make_arena):
    arena = make_arena(4)
    with arena.reserve(3, "one") as lease:
        last = lease.frames[2]
        lease.give_back(lease.frames[:1])
        assert lease.buffer(2).frame == last
        assert lease.frames.tolist() == [1, 2]


@pytest.mark.parametrize("index", [-1, 2, 1.0, True, None, "0"])
def test_an_index_that_a_lease_does_not_have_is_refused_by_value(make_arena, index):
    arena = make_arena(4)
    with arena.reserve(2, "one") as lease:
        with pytest.raises(InputError, match="0 to 1") as caught:
            lease.buffer(index)
        assert repr(index) in str(caught.value)


@pytest.mark.parametrize("used_bytes", [0, -1, 101, 1.0, True, "5"])
def test_a_used_length_that_cannot_be_is_refused_by_value(make_arena, used_bytes):
    arena = make_arena(4, frame_bytes=100)
    with arena.reserve(1, "one") as lease:
        for make in (
            lambda: lease.buffer(0, used_bytes),
            lambda: lease.buffer().narrowed(used_bytes),
        ):
            with pytest.raises(InputError, match="1 to 100") as caught:
                make()
            assert str(used_bytes) in str(caught.value)


def test_a_buffer_becomes_narrower_and_never_wider(make_arena, read):
    arena = make_arena(4, frame_bytes=100)
    with arena.reserve(1, "one") as lease:
        whole = lease.buffer()
        narrow = whole.narrowed(60)
        assert (whole.used_bytes, narrow.used_bytes) == (100, 60)
        assert narrow.narrowed(60).used_bytes == 60
        assert narrow.frame == whole.frame
        assert len(read(narrow)) == narrow.plain().used_bytes == 60
        with pytest.raises(InputError, match="1 to 60"):
            narrow.narrowed(61)
        assert len(read(lease.buffer(0, 1))) == 1


def test_a_plain_buffer_is_where_its_bytes_are(make_arena, make_region, write):
    arena = make_arena(2, frame_bytes=1000, count=6, align_bytes=64)
    arena.add(make_region(2 * PAGE, piece_bytes=PAGE))
    with arena.reserve(6, "one") as lease:
        for index in range(6):
            write(lease.buffer(index), index + 1)
        for index in range(6):
            plain = lease.buffer(index, 900).plain()
            assert (plain.frame, plain.used_bytes) == (lease.frames[index], 900)
            (region,) = (one for one in arena.regions if arena.number(one) == plain.region)
            with region.view(plain.offset, plain.used_bytes) as memory:
                assert set(memory) == {index + 1}


def test_every_life_of_a_frame_has_a_generation_of_its_own(make_arena):
    arena = make_arena(1)
    seen = []
    for _ in range(5):
        with arena.reserve(1, "one") as lease:
            seen.append(lease.buffer().plain().generation)
            assert lease.buffer().plain().generation == seen[-1]
    assert len(set(seen)) == 5


def test_a_returned_frame_is_nobodys_and_every_use_says_so(make_arena):
    arena = make_arena(3)
    lease = arena.reserve(1, "old owner")
    buffer = lease.buffer()
    lease.release()
    uses = (
        buffer.plain,
        lambda: buffer.view().__enter__(),
        lease.buffer().plain,
        lambda: lease.pin("save", [buffer.frame]),
        lambda: lease.give_back([buffer.frame]),
        lambda: arena.addresses(lease, [buffer.frame]),
    )
    for use in uses:
        with pytest.raises(StaleError, match=r"'old owner', returned at .*nobody has it"):
            use()
    with arena.reserve(1, "new owner") as new:
        assert new.frames.tolist() == [buffer.frame]
        for use in uses:
            with pytest.raises(
                StaleError, match=r"'old owner'.*'new owner' has it, from .*test_lease"
            ):
                use()
    assert lease.frames.tolist() == []


def test_a_second_release_names_where_the_first_one_was(make_arena):
    arena = make_arena(3)
    lease = arena.reserve(2, "one")
    lease.release()  # the first release
    with pytest.raises(StaleError) as caught:
        lease.release()
    place = line_of("lease.release()  # the first release", "first")
    assert f"returned at {place}" in str(caught.value)
    assert arena.stats().free == 3


def test_a_release_after_the_block_names_the_block(make_arena):
    arena = make_arena(3)
    with arena.reserve(2, "one") as lease:
        pass
    with pytest.raises(StaleError, match=f"returned at {__file__}:"):
        lease.release()


def test_a_second_release_names_where_the_last_frame_was_given_back(make_arena):
    arena = make_arena(3)
    lease = arena.reserve(2, "one")
    lease.give_back(lease.frames[:1])
    lease.give_back(lease.frames)  # the last frame
    lease.release()
    with pytest.raises(StaleError) as caught:
        lease.release()
    assert line_of("lease.give_back(lease.frames)  # the last frame", "last") in str(caught.value)


def test_a_block_releases_what_is_left(make_arena):
    arena = make_arena(4)
    with arena.reserve(3, "one") as lease:
        lease.give_back(lease.frames[:1])
        assert arena.stats().used == 2
    assert arena.stats().free == 4
    with arena.reserve(2, "one") as lease:
        lease.release()
    with pytest.raises(KeyError), arena.reserve(2, "one"):
        raise KeyError
    assert arena.stats().free == 4


def test_some_frames_come_back_and_the_others_stay(make_arena, write, read):
    arena = make_arena(5)
    with arena.reserve(5, "one") as lease:
        write(lease.buffer(4), 9)
        lease.give_back(lease.frames[[3, 0]])
        assert lease.frames.tolist() == [1, 2, 4]
        assert arena.stats().free == 2
        with arena.reserve(2, "two") as other:
            assert sorted(other.frames.tolist()) == [0, 3]
            with pytest.raises(StaleError, match="'two' has it"):
                lease.give_back(other.frames)
        assert read(lease.buffer(4)) == bytes([9]) * PAGE


BAD = {
    "twice": ([0, 1, 0], MisuseError, "comes twice"),
    "foreign": ([0, 3], StaleError, "'two' has it"),
    "free": ([4, 0], StaleError, "nobody has it"),
    "past the end": ([0, 6], MisuseError, "0 to 5"),
    "negative": ([-1], MisuseError, "0 to 5"),
    "enormous": ([0, 2**40], MisuseError, "0 to 5"),
    "real": ([0.0, 1.0], InputError, "whole numbers"),
    "bool": (np.array([True, False]), InputError, "whole numbers"),
    "text": (["0"], InputError, "whole numbers"),
    "objects": ([None], InputError, "whole numbers"),
    "nested": ([[0, 1]], InputError, "whole numbers"),
    "one number": (0, InputError, "whole numbers"),
    "a set": ({0, 1}, InputError, "whole numbers"),
    "None in a list": ([0, None], InputError, "whole numbers"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("call", ["give_back", "pin", "addresses"])
def test_frames_that_cannot_be_meant_change_nothing(make_arena, what, call):
    """All or none: one bad frame in a batch of good ones."""
    arena = make_arena(6)
    frames, error, match = BAD[what]
    with arena.reserve(3, "one") as lease, arena.reserve(1, "two") as other:
        before = arena.stats()
        calls = {
            "give_back": lambda: lease.give_back(frames),
            "pin": lambda: lease.pin("save", frames),
            "addresses": lambda: arena.addresses(lease, frames),
        }
        with pytest.raises(error, match=match):
            calls[call]()
        assert arena.stats() == before
        assert lease.frames.tolist() == [0, 1, 2]
        assert other.frames.tolist() == [3]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64, list, tuple])
def test_frames_are_told_in_any_type_of_whole_number(make_arena, dtype):
    arena = make_arena(4)
    with arena.reserve(4, "one") as lease:
        some = [3, 1]
        lease.give_back(dtype(some) if dtype in (list, tuple) else np.array(some, dtype))
        assert lease.frames.tolist() == [0, 2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_frames_come_back_in_any_order(make_arena, order):
    arena = make_arena(3)
    lease = arena.reserve(3, "one")
    frames = lease.frames
    for count, index in enumerate(order, 1):
        lease.give_back(frames[[index]])
        assert arena.stats().free == count
    assert lease.books.ended


def test_giving_nothing_back_changes_nothing(make_arena):
    arena = make_arena(3)
    lease = arena.reserve(2, "one")
    lease.give_back([])
    assert arena.stats().used == 2
    lease.release()
    ended = lease.books.ended
    lease.give_back([])
    assert lease.books.ended == ended


def test_a_lost_lease_is_returned_and_reported_with_its_place(make_arena):
    arena = make_arena(4)
    lease = arena.reserve(3, "forgetful")
    place = lease.books.place
    del lease
    with pytest.warns(ResourceWarning) as caught:
        assert arena.stats().free == 4
    assert [str(one.message) for one in caught] == [
        f"the lease of 'forgetful' was lost, not released; it was taken at {place}"
    ]
    assert place.startswith(__file__)
    assert arena.stats().leases_lost == 1
    assert arena.stats().leases == 0


def test_a_lease_lost_in_a_cycle_is_returned(make_arena):
    arena = make_arena(4)
    cycle = [arena.reserve(3, "forgetful")]
    cycle.append(cycle)
    del cycle
    gc.collect()
    with pytest.warns(ResourceWarning, match="forgetful"):
        assert arena.reserve(4, "next").release() is None
    assert arena.stats().free == 4


def test_a_lost_lease_returns_only_what_it_still_had(make_arena):
    arena = make_arena(4)
    lease = arena.reserve(3, "forgetful")
    lease.give_back(lease.frames[:2])
    other = arena.reserve(3, "other")
    del lease
    with pytest.warns(ResourceWarning, match="forgetful"):
        assert arena.stats().used == 3
    assert other.frames.tolist() == sorted(other.frames.tolist())
    other.release()


def test_a_lease_that_was_released_is_not_lost(make_arena):
    arena = make_arena(4)
    lease = arena.reserve(3, "one")
    lease.release()
    del lease
    gc.collect()
    assert arena.stats().leases_lost == 0


def test_a_buffer_keeps_its_lease(make_arena):
    """Somebody who has only the buffer still has the frame."""
    arena = make_arena(2)
    buffer = arena.reserve(1, "one").buffer()
    gc.collect()
    assert arena.stats().used == 1
    buffer.lease.release()


def test_a_release_never_raises_what_somebody_else_forgot(make_arena):
    """With warnings as errors it would not release."""
    arena = make_arena(4)
    mine, lost = arena.reserve(1, "careful"), arena.reserve(1, "forgetful")
    del lost
    mine.release()
    assert mine.books.ended
    with pytest.warns(ResourceWarning, match="forgetful"):
        assert arena.stats().free == 4


def test_a_lease_may_be_released_by_another_thread(make_arena):
    arena = make_arena(4)
    lease = arena.reserve(3, "one")
    thread = threading.Thread(target=lease.release)
    thread.start()
    thread.join(30)
    assert arena.stats().free == 4


def test_of_two_threads_that_release_one_succeeds(make_arena):
    arena = make_arena(4)
    for _ in range(50):
        lease, start, errors = arena.reserve(2, "one"), threading.Barrier(2), []

        def release(lease=lease, start=start, errors=errors):
            start.wait(30)
            try:
                lease.release()
            except StaleError as error:
                errors.append(error)

        threads = [threading.Thread(target=release) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(errors) == 1
        assert arena.stats().free == 4


def test_a_lease_is_of_its_own_arena(make_arena):
    one, two = make_arena(4, name="one"), make_arena(2, name="two")
    with one.reserve(4, "mine") as lease:
        for call in (
            lambda: two.addresses(lease),
            lambda: two.addresses(lease, [0]),
            lambda: two.pin(lease, "save"),
            lambda: two.give_back(lease, [0]),
            lambda: two.release(lease),
        ):
            with pytest.raises(MisuseError, match="'mine' is not of the arena two"):
                call()
        assert two.stats().free == 2
        assert one.stats().used == 4


@pytest.mark.parametrize("frames", [[[0], [1, 2]], [[0, 1]], [0.5], ["0"], None, 3])
def test_what_is_no_list_of_numbers_is_refused(make_arena, frames):
    arena = make_arena(2)
    with arena.reserve(2, "one") as lease:
        with pytest.raises(InputError, match="a list of whole numbers"):
            lease.give_back(frames)
        assert lease.frames.tolist() == [0, 1]


def test_releasing_after_all_was_given_back_returns_nothing_more(make_arena):
    arena = make_arena(2)
    lease = arena.reserve(2, "one")
    lease.give_back(lease.frames)
    lease.release()
    with pytest.raises(StaleError, match="returned at"):
        lease.release()
    assert arena.stats().free == 2
