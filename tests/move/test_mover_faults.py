"""Whatever breaks below a mover: each fault is an outcome of its own frames, and nothing else changes."""

import numpy as np
import pytest

from stepwell.base.errors import MisuseError
from stepwell.core.plan import Grown, Outcome, Verb
from stepwell.move.fence import PASSED
from stepwell.testing.faults import BrokenError, FaultKind, PlannedFault

SAVE, LOAD, WIPE = Verb.SAVE, Verb.LOAD, Verb.WIPE
OK, MISS, CORRUPT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT
TIMEOUT, UNAVAILABLE = Outcome.TIMEOUT, Outcome.UNAVAILABLE
LATE_S = 1.0
"""Deadline of the plans of a bench."""

PAGES = [1, 2, 3, 4, 5]
THIRD = 3
"""Frame and key of the third page."""


def leading(outcomes):
    """Frames that are OK before the first that is not."""
    return next((at for at, outcome in enumerate(outcomes) if outcome != OK), len(outcomes))


# Five pages, of which the third cannot be had.

TIER_FAULTS = {
    "raises where it lies": (FaultKind.RAISE, "row", UNAVAILABLE),
    "raises when it is proved": (FaultKind.RAISE, "proves", UNAVAILABLE),
    "raises when it is summed up": (FaultKind.RAISE, "holds", UNAVAILABLE),
    "half of it": (FaultKind.SHORT, "seal", CORRUPT),
    "zeros": (FaultKind.ZEROS, "seal", CORRUPT),
    "another page": (FaultKind.OTHER, "seal", CORRUPT),
    "one wrong bit": (FaultKind.FLIP, "seal", CORRUPT),
    "its name is lost": (FaultKind.LOST, "seal", MISS),
    "it is lost": (FaultKind.LOST, "proves", MISS),
    "its sums are wrong": (FaultKind.LOST, "holds", CORRUPT),
}


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("what", TIER_FAULTS)
def test_f002_f003_of_five_pages_two_are_left_when_the_tier_fails_the_third(
    make_bench, name_of, what, at_once
):
    kind, call, wanted = TIER_FAULTS[what]
    bench = make_bench(at_once=at_once)
    bench.save(0, *PAGES)  # page 0 is the other one of `OTHER`
    bench.strike(kind, call, name=name_of(THIRD))
    if call == "seal":
        assert bench.save(*PAGES) == [OK] * 5
    bench.rows[:] = 0xFF
    assert np.isnan(bench.rows.view(np.float16)).all()
    outcomes = bench.load(*PAGES)
    assert outcomes == [OK, OK, wanted, OK, OK]
    assert leading(outcomes) == 2
    assert bench.host.met, "the fault has struck"
    for frame, outcome in zip(PAGES, outcomes, strict=True):
        wanted_bytes = bench.first[frame] if outcome == OK else np.full(256, 0xFF)
        assert np.array_equal(bench.rows[frame], wanted_bytes)
    assert bench.mover.health.faults == ()


def test_f002_a_copy_that_fails_for_the_third_page_leaves_two(make_bench):
    fault = PlannedFault(FaultKind.RAISE, "copy_in", at=2)
    bench = make_bench(at_once=1, copies=[fault])
    bench.save(*PAGES)
    bench.spoil()
    outcomes = bench.load(*PAGES)
    assert outcomes == [OK, OK, UNAVAILABLE, OK, OK]
    assert (bench.rows[THIRD] == 0xFF).all()
    assert "copy_in breaks" in bench.mover.fault


def test_f003_a_copy_that_fails_for_several_pages_has_brought_none_of_them(make_bench):
    """Nobody knows how far it came."""

    class HalfWay:
        def __init__(self, place):
            self.frame_bytes, self.bounds = place.frame_bytes, place.bounds
            self.frames, self.copy_out, self._place = place.frames, place.copy_out, place

        def copy_in(self, rows, frames, layers=None):
            self._place.copy_in(rows[:1], frames[:1], layers)
            raise BrokenError("half-way")

    bench = make_bench(wrap=HalfWay)
    bench.save(*PAGES)
    bench.spoil()
    assert bench.load(*PAGES) == [UNAVAILABLE] * 5


@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_copy_that_raises_costs_its_own_frames(make_bench, call, at_once):
    bench = make_bench(at_once=at_once, copies=[PlannedFault(FaultKind.RAISE, call, at=0)])
    verb = LOAD if call == "copy_in" else SAVE
    if verb is LOAD:
        bench.save(*range(6))
    outcomes = bench.do(verb, range(6))
    lost = min(6, at_once)
    assert outcomes == [UNAVAILABLE] * lost + [OK] * (6 - lost)
    assert bench.mover.fault.startswith(f"{verb.name} of plan")
    assert bench.do(verb, range(6)) == [OK] * 6
    assert bench.mover.health.faults == ()


def test_what_could_not_be_copied_has_no_name_and_its_source_is_released(make_bench):
    bench = make_bench(copies=[PlannedFault(FaultKind.RAISE, "copy_out", at=1)])
    bench.save(0, 1)
    number = bench.begin(SAVE, [0, 1])
    bench.work()
    assert bench.of(number) == [(None, False), ([UNAVAILABLE] * 2, True)]
    assert bench.named(0, 1) == [MISS, MISS]
    assert list(bench.host.scan()) == []


@pytest.mark.parametrize("call", ["row", "seal"])
def test_a_tier_that_raises_for_one_frame_keeps_the_others(make_bench, name_of, call):
    bench = make_bench()
    bench.save(0, 1, 2)
    bench.strike(FaultKind.RAISE, call, name=name_of(1))
    if call == "row":
        bench.host.forget = lambda _: None  # else it has no name by then that could be struck
    assert bench.save(0, 1, 2) == [OK, UNAVAILABLE, OK]
    assert "breaks, as planned" in bench.mover.fault


def test_a_frame_that_has_no_memory_yet_costs_itself(bench):
    bench.save(0, 1, 2)
    bench.host._offsets[1] = -1
    assert bench.load(0, 1, 2) == [OK, MISS, OK]
    assert bench.save(0, 1, 2) == [OK, UNAVAILABLE, OK]
    assert bench.do(WIPE, [0, 1, 2]) == [OK, UNAVAILABLE, OK]


def test_a_slow_call_is_found_late_when_it_returns(make_bench):
    fault = PlannedFault(FaultKind.SLOW, "copy_out", at=0, wait_s=LATE_S)
    bench = make_bench(at_once=2, copies=[fault])
    number = bench.begin(SAVE, range(6))
    assert bench.mover.work()
    assert not bench.mover.work(), "the rest does not begin any more"
    bench.mover.look()
    assert bench.outcomes(number) == [OK] * 2 + [TIMEOUT] * 4
    assert bench.named(*range(6)) == [OK] * 2 + [MISS] * 4


# Fences that break.


class Broken:
    """A fence that raises until it is mended."""

    def __init__(self):
        self.error = BrokenError("the device is gone")
        self.over = False

    def done(self):
        if self.error is not None:
            raise self.error
        return self.over

    def wait(self, within_s):
        return self.done()


@pytest.mark.parametrize("verb", Verb)
def test_a_source_whose_fence_raises_is_not_moved_and_keeps_nobody(bench, verb):
    bench.save(0, 1)
    bench.spoil()
    number = bench.begin(verb, [0, 1], fence=Broken())
    later = bench.begin(SAVE, [2])
    bench.work()
    assert bench.outcomes(number) == [UNAVAILABLE] * 2
    assert bench.outcomes(later) == [OK]
    assert "the device is gone" in bench.mover.fault
    assert np.array_equal(bench.host.row(0), bench.first[0])
    assert bench.rows[0, 0] == 0xFF


class BrokenEnd:
    """A place whose copies end with a fence of the test's."""

    def __init__(self, place, fence):
        self.frame_bytes, self.bounds, self.frames = place.frame_bytes, place.bounds, place.frames
        self._place, self._fence = place, fence

    def copy_out(self, frames, rows):
        self._place.copy_out(frames, rows)
        return self._fence if 0 in frames else PASSED

    def copy_in(self, rows, frames, layers=None):
        self._place.copy_in(rows, frames, layers)
        return self._fence if 0 in frames else PASSED


@pytest.mark.parametrize("verb", [SAVE, LOAD])
def test_a_copy_whose_fence_raises_has_failed_and_is_not_clear_before_it_is_over(make_bench, verb):
    """The frames of a copy that may still run must not be given to anybody."""
    fence = Broken()
    bench = make_bench(wrap=lambda place: BrokenEnd(place, fence))
    if verb is LOAD:
        fence.error, fence.over = None, True
        bench.save(0, 1)
        fence.error, fence.over = BrokenError("the device is gone"), False
    number = bench.begin(verb, [0, 1])
    bench.work()
    assert bench.of(number) == []
    assert bench.save(2) == [OK], "it keeps nobody"
    fence.error = None
    bench.work()
    assert bench.of(number) == []
    bench.clock.advance_s(LATE_S)
    bench.mover.look()
    assert bench.of(number) == [([TIMEOUT] * 2, False)]
    fence.over = True
    bench.work()
    assert bench.of(number)[1:] == [(None, True)]


def test_a_copy_whose_fence_raised_once_is_not_good_afterwards(make_bench):
    fence = Broken()
    bench = make_bench(wrap=lambda place: BrokenEnd(place, fence))
    number = bench.begin(SAVE, [0, 1])
    bench.work()
    fence.error, fence.over = None, True
    bench.work()
    assert bench.outcomes(number) == [UNAVAILABLE] * 2
    assert bench.named(0, 1) == [MISS, MISS]


# Others that break.


def test_whoever_is_told_may_raise_and_everybody_is_told(make_bench):
    bench = make_bench(at_once=1)
    heard = []

    def telling(record):
        heard.append(record)
        raise ValueError("the ledger is broken")

    bench.telling = telling
    numbers = [bench.begin(SAVE, [0, 1]), bench.begin(SAVE, [2])]
    bench.mover.take(bench.plan(SAVE, [99]))
    late = bench.begin(SAVE, [3], fence=Broken(), within_ms=0)
    bench.mover.look()
    bench.work()
    assert [bench.outcomes(number) for number in numbers] == [[OK, OK], [OK]]
    assert bench.outcomes(late) == [TIMEOUT]
    assert heard == [one for one in bench.told if not isinstance(one, Grown)]
    (fault,) = bench.mover.health.faults
    assert "the ledger is broken" in fault.trace
    assert "the ledger is broken" in bench.mover.fault


def test_what_is_told_inside_of_what_is_told_comes_after_it(make_bench):
    """A ledger may send the next plan when it hears of the last one."""
    bench = make_bench()
    depth = []

    def telling(_):
        depth.append(len(depth))
        assert depth == [0], "one at a time"
        if bench._numbers < 5:
            bench.mover.take(bench.plan(SAVE, [99]))
        depth.pop()

    bench.telling = telling
    bench.save(0)
    assert [one.plan for one in bench.told if not isinstance(one, Grown)] == [1, 2, 3, 4, 5, 1]
    assert bench.mover.health.faults == ()


def test_a_tier_that_cannot_grow_is_seen_and_what_is_there_is_used(make_bench):
    bench = make_bench()

    def broken():
        raise BrokenError("no more frames")

    bench.mover._growing, bench.host.grown = True, broken
    bench.mover.look()
    bench.mover.look()
    (fault,) = bench.mover.health.faults
    assert "no more frames" in fault.trace
    assert bench.save(0) == [OK]


def test_looking_after_the_close_does_nothing(bench):
    assert bench.mover.close()
    told = len(bench.told)
    bench.mover._growing = True
    bench.mover.look()
    assert not bench.mover.work()
    assert len(bench.told) == told
    assert bench.mover.health.faults == ()


def test_a_wish_that_comes_too_late_is_unavailable(bench):
    assert bench.mover.close()
    for verb in Verb:
        assert bench.do(verb, [0, 1]) == [UNAVAILABLE] * 2


def test_closing_gives_up_what_has_not_begun(make_bench):
    bench = make_bench(at_once=2, streams=True)
    number = bench.begin(SAVE, range(6))
    bench.mover.work()
    bench.device.out.advance_all()
    assert bench.mover.close()
    assert bench.outcomes(number) == [OK] * 2 + [UNAVAILABLE] * 4


def test_closing_while_a_copy_goes_on_says_so_until_it_is_over(make_bench):
    fault = PlannedFault(FaultKind.LATE, "copy_out", at=0)
    bench = make_bench(at_once=2, copies=[fault])
    number = bench.begin(SAVE, range(4))
    bench.mover.work()
    for _ in range(2):
        assert not bench.mover.close(0)
        assert bench.of(number) == [([UNAVAILABLE] * 4, False)], "told once, and not clear"
    assert len(bench.host.row(0)) == 256, "the copy may still write there"
    fault.gate.set()
    assert bench.named(0) == [MISS]
    assert bench.mover.close(0)
    assert bench.of(number)[1:] == [(None, True)]
    with pytest.raises(MisuseError, match="until `close`"):
        bench.host.row(0)
    assert bench.mover.close(0)
