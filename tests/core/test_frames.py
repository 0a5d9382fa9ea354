"""Frames: handed out once, given back once, and moved only as the table allows."""

import itertools

import numpy as np
import pytest

from stepwell.base.errors import InputError, InvariantError, MisuseError
from stepwell.core.check import Findings
from stepwell.core.frames import MAX_FRAMES, Frames
from stepwell.core.page import LEGAL, Status

WAY = {
    Status.FREE: [],
    Status.FILLING: [],
    Status.SEALED: [Status.SEALED],
    Status.LEAVING: [Status.SEALED, Status.LEAVING],
    Status.QUARANTINED: [Status.QUARANTINED],
}
"""How a reserved frame gets to each status."""


def ids(*frames):
    return np.array(frames, np.int32)


def check(frames):
    findings = Findings()
    frames.check(findings)
    findings.raise_if_any()


def books(frames):
    """Everything that a failed call must leave alone."""
    return (
        frames.free,
        frames.status.tolist(),
        frames.generation.tolist(),
        frames._stack[: frames.free].tolist(),
    )


def driven(status, count=6):
    """Frames of which 1 and 2 have this status, 0 and 3 are FILLING, the others free."""
    frames = Frames(count)
    frames.reserve(4)
    if status is Status.FREE:
        frames.move(ids(1, 2), Status.FREE)
    for step in WAY[status]:
        frames.move(ids(1, 2), step)
    assert set(frames.status[[1, 2]].tolist()) == {status}
    return frames


def test_frames_begin_free_and_ascending():
    frames = Frames(5)
    assert frames.free == 5
    assert frames.reserve(3).tolist() == [0, 1, 2]
    assert frames.reserve(2).tolist() == [3, 4]
    check(frames)


def test_a_reservation_is_all_or_nothing():
    frames = Frames(5)
    frames.reserve(3)
    before = books(frames)
    assert frames.reserve(3) is None
    assert frames.reserve(2**40) is None
    assert books(frames) == before
    assert len(frames.reserve(2)) == 2
    assert frames.reserve(1) is None
    check(frames)


def test_reserving_nothing_gives_nothing():
    frames = Frames(2)
    before = books(frames)
    assert frames.reserve(0).tolist() == []
    frames.move(ids(), Status.FREE)
    assert books(frames) == before


def test_a_negative_reservation_is_refused():
    frames = Frames(2)
    with pytest.raises(InputError, match="-1"):
        frames.reserve(-1)
    assert frames.free == 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_frame_is_handed_out_twice(n):
    frames = Frames(9)
    taken = []
    while (some := frames.reserve(n)) is not None:
        taken += some.tolist()
        check(frames)
    assert sorted(taken) == list(range(9 - 9 % n))


def test_what_was_reserved_does_not_change_when_more_is_moved():
    """A view of the stack would be overwritten by the next return."""
    frames = Frames(4)
    one = frames.reserve(2)
    two = frames.reserve(2)
    frames.move(two, Status.FREE)
    frames.move(one, Status.FREE)
    assert (one.tolist(), two.tolist()) == ([0, 1], [2, 3])


def test_the_first_frame_given_back_is_the_next_one_taken():
    """Runs of neighbours stay runs, which copies in one piece."""
    frames = Frames(6)
    taken = frames.reserve(6)
    frames.move(taken[2:5], Status.FREE)
    assert frames.reserve(3).tolist() == [2, 3, 4]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_generation_grows_when_a_frame_is_freed_and_at_no_other_step(one_by_one):
    frames = Frames(3)
    steps = [Status.SEALED, Status.LEAVING, Status.QUARANTINED, Status.FREE]
    for life in range(3):
        taken = frames.reserve(2)
        for step in steps:
            assert frames.generation.tolist() == [life, life, 0]
            for part in (taken[:1], taken[1:]) if one_by_one else (taken,):
                frames.move(part, step)
    assert frames.generation.tolist() == [3, 3, 0]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
@pytest.mark.parametrize("batch", [(1,), (1, 2)], ids=["one", "two"])
def test_a_step_is_taken_exactly_if_the_table_has_it(before, after, batch):
    frames = driven(before)
    untouched = books(frames)
    if (before, after) == (Status.FREE, Status.FILLING):
        taken = frames.reserve(len(batch))
        assert set(frames.status[taken].tolist()) == {Status.FILLING}
    elif (before, after) in LEGAL:
        frames.move(ids(*batch), after)
        assert {Status(int(frames.status[frame])) for frame in batch} == {after}
        assert frames.free == untouched[0] + len(batch) * (after is Status.FREE)
    else:
        with pytest.raises(MisuseError, match="frame 1 ") as caught:
            frames.move(ids(*batch), after)
        assert before.name in str(caught.value)
        assert after.name in str(caught.value)
        assert books(frames) == untouched
    check(frames)


@pytest.mark.parametrize("batch", [(4,), (4, 5)], ids=["one", "two"])
def test_only_a_reservation_takes_a_free_frame(batch):
    """Moved by hand it would still lie on the stack, and be given to a second request."""
    frames = driven(Status.FILLING)
    untouched = books(frames)
    with pytest.raises(MisuseError, match="frame 4 "):
        frames.move(ids(*batch), Status.FILLING)
    assert books(frames) == untouched
    check(frames)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((4,), "frame 4 would go from FREE to FREE"),
        ((0, 4), "frame 4 would go from FREE to FREE"),
        ((4, 0), "frame 4 would go from FREE to FREE"),
        ((6,), "frame 6 does not exist"),
        ((-1,), "frame -1 does not exist"),
        ((0, 6), "frame 6 does not exist"),
        ((0, -1), "frame -1 does not exist"),
        ((-6, 0), "frame -6 does not exist"),
        ((0, 2**31 - 1), "frame 2147483647 does not exist"),
        ((0, 0), "frame 0 comes twice"),
        ((0, 1, 2, 1), "frame 1 comes twice"),
    ],
    ids=str,
)
def test_a_bad_frame_is_named_and_nothing_changes(batch, named):
    """numpy takes -1 for the last frame; the batch would free somebody else's."""
    frames = Frames(6)
    frames.reserve(6)
    frames.move(ids(4), Status.FREE)
    untouched = books(frames)
    with pytest.raises(MisuseError, match=named):
        frames.move(ids(*batch), Status.FREE)
    assert books(frames) == untouched
    check(frames)


def test_a_free_is_refused_the_second_time():
    frames = Frames(4)
    taken = frames.reserve(2)
    frames.move(taken, Status.FREE)
    with pytest.raises(MisuseError, match=r"frame 0 .*FREE"):
        frames.move(taken, Status.FREE)
    assert frames.free == 4
    check(frames)


def test_a_batch_of_one_duplicate_is_found_wherever_it_stands():
    for first, second in itertools.combinations(range(5), 2):
        frames = Frames(8)
        taken = frames.reserve(5)
        taken[second] = taken[first]
        with pytest.raises(MisuseError, match=f"frame {taken[first]} comes twice"):
            frames.move(taken, Status.SEALED)
        assert frames.census()[Status.FILLING] == 5


def test_the_census_counts_every_status():
    frames = Frames(10)
    taken = frames.reserve(9)
    frames.move(taken[1:], Status.SEALED)
    frames.move(taken[3:], Status.LEAVING)
    frames.move(taken[6:], Status.QUARANTINED)
    assert frames.census() == {
        Status.FREE: 1,
        Status.FILLING: 1,
        Status.SEALED: 2,
        Status.LEAVING: 3,
        Status.QUARANTINED: 3,
    }


@pytest.mark.parametrize("count", [0, -1, MAX_FRAMES + 1, 1.0, True, "4", None])
def test_a_number_of_frames_that_cannot_be_is_refused_by_value(count):
    with pytest.raises(InputError, match="number of frames") as caught:
        Frames(count)
    assert repr(count) in str(caught.value)


def _free_twice(frames):
    frames._stack[0] = frames._stack[1]


def _in_use_on_the_stack(frames):
    frames.status[frames._stack[0]] = Status.SEALED


def _lost(frames):
    frames._free -= 1


def _never_returned(frames):
    frames.status[0] = Status.FREE


@pytest.mark.parametrize("damage", [_free_twice, _in_use_on_the_stack, _lost, _never_returned])
def test_the_checker_finds_broken_books(damage):
    """A checker that finds nothing would make every other test of it worthless."""
    frames = Frames(6)
    frames.reserve(3)
    check(frames)
    damage(frames)
    with pytest.raises(InvariantError):
        check(frames)


@pytest.mark.parametrize("present", [0, 1, 3, 5])
def test_frames_that_are_not_there_yet_are_out_of_use(present):
    frames = Frames(5, present)
    assert frames.free == present
    assert frames.reserve(present + 1) is None
    assert frames.status[present:].tolist() == [Status.QUARANTINED] * (5 - present)
    check(frames)
    assert frames.reserve(present).tolist() == list(range(present))
    check(frames)


def test_frames_come_when_somebody_brings_their_place():
    frames = Frames(5, 2)
    frames.move(ids(2, 3), Status.FREE)
    assert frames.free == 4
    check(frames)
    assert sorted(frames.reserve(4).tolist()) == [0, 1, 2, 3]
    frames.move(ids(4), Status.FREE)
    assert frames.reserve(1).tolist() == [4]
    check(frames)


@pytest.mark.parametrize("present", [-1, 6, 1.0, True, "2"])
def test_a_number_of_present_frames_that_cannot_be_is_refused_by_value(present):
    with pytest.raises(InputError, match="present") as caught:
        Frames(5, present)
    assert repr(present) in str(caught.value)


@pytest.mark.parametrize("wanted", [(), (0,), (5,), (2, 4), (5, 0), (3, 1, 2), (0, 1, 2, 3, 4, 5)])
def test_free_frames_are_taken_wherever_they_lie(wanted):
    frames = Frames(6)
    frames.take(ids(*wanted))
    assert frames.free == 6 - len(wanted)
    assert {frame for frame in range(6) if frames.status[frame] == Status.FILLING} == set(wanted)
    check(frames)
    others = [frame for frame in range(6) if frame not in wanted]
    assert frames.reserve(len(others)).tolist() == others, "the others keep their order"
    frames.move(np.arange(6, dtype=np.int32), Status.FREE)
    assert frames.generation.tolist() == [1] * 6, "taking frees nothing"
    check(frames)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ((6,), "do not all exist"),
        ((-1,), "do not all exist"),
        ((4, -1), "do not all exist"),
        ((4, 6), "do not all exist"),
        ((4, 4), "twice"),
        ((0,), "not free"),
        ((4, 0), "not free"),
        ((4, 5, 4), "twice"),
    ],
    ids=str,
)
def test_taking_what_is_not_free_takes_nothing(wanted, named):
    frames = Frames(6)
    frames.reserve(4)
    untouched = books(frames)
    with pytest.raises(MisuseError, match=named):
        frames.take(ids(*wanted))
    assert books(frames) == untouched
    check(frames)
