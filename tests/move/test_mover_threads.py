"""The mover with threads of its own: deadlines that it finds by itself, hung calls, load, and ends that leave nothing."""

import threading

import numpy as np
import pytest

from stepwell.base.errors import MisuseError
from stepwell.core.plan import Outcome, Verb
from stepwell.move.fence import PASSED
from stepwell.testing.device import GateFence
from stepwell.testing.faults import BrokenError, FaultKind, PlannedFault

SAVE, LOAD, WIPE = Verb.SAVE, Verb.LOAD, Verb.WIPE
OK, MISS, TIMEOUT, UNAVAILABLE = Outcome.OK, Outcome.MISS, Outcome.TIMEOUT, Outcome.UNAVAILABLE
LONG_S = 30
LATE_S = 1.0
"""Deadline of the plans of a bench."""


def alive(bench):
    """All threads of a mover live, and none of them has reported anything."""
    assert bench.mover.health.faults == ()
    return all(thread.is_alive() for thread in bench.mover._threads)


@pytest.mark.parametrize("at_once", [1, 100])
@pytest.mark.parametrize("threads", [1, 4])
def test_threads_move_what_plans_say(make_bench, threads, at_once):
    bench = make_bench(threads=threads, at_once=at_once)
    saves = [bench.begin(SAVE, [n, n + 4]) for n in range(4)]
    assert bench.wait_told(*saves)
    bench.spoil()
    loads = [bench.begin(LOAD, [n]) for n in range(6)]
    wipe = bench.begin(WIPE, [6, 7])
    assert bench.wait_told(*loads, wipe)
    assert [bench.outcomes(number) for number in (*saves, *loads, wipe)] == [
        *[[OK, OK]] * 4,
        *[[OK]] * 6,
        [OK, OK],
    ]
    assert np.array_equal(bench.rows[:6], bench.first[:6])
    assert bench.grown() == list(range(8))
    assert alive(bench)


def test_a_deadline_is_found_by_the_timer_alone(make_bench):
    bench = make_bench(threads=1, real_clock=True)
    never = bench.begin(SAVE, [0], fence=GateFence(threading.Event()), within_ms=20)
    assert bench.wait_told(never)
    assert bench.outcomes(never) == [TIMEOUT]
    assert alive(bench)


def test_a_fence_is_seen_to_have_passed_without_being_told(make_bench):
    gate = threading.Event()
    bench = make_bench(threads=1)
    waiting = bench.begin(SAVE, [0], fence=GateFence(gate))
    later = bench.begin(SAVE, [1])
    assert bench.wait_told(later), "one that waits keeps nobody, not even a single thread"
    assert bench.of(waiting) == []
    bench.rows[0] = 7
    gate.set()
    assert bench.wait_told(waiting)
    assert (bench.host.row(0) == 7).all()


@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
def test_f068_a_call_that_hangs_costs_one_deadline_and_its_own_thread(make_bench, call):
    verb = LOAD if call == "copy_in" else SAVE
    fault = PlannedFault(FaultKind.NEVER, call, at=0)
    bench = make_bench(threads=2, at_once=1, copies=[fault])
    if verb is LOAD:
        saved = bench.begin(SAVE, range(4))
        assert bench.wait_told(saved)
    number = bench.begin(verb, [0])
    assert fault.reached.wait(LONG_S)
    bench.clock.advance_s(LATE_S)
    others = bench.begin(SAVE, [4, 5])
    assert bench.wait_told(others)
    bench.mover.look()
    assert bench.wait_told(number, clear=False)
    assert bench.of(number) == [([TIMEOUT], False)], "not clear: the call may still write"
    bench.spoil(0xEE)
    fault.gate.set()
    assert bench.wait_told(number)
    assert bench.of(number)[1:] == [(None, True)]
    assert bench.named(0) == [OK if verb is LOAD else MISS], "late bytes are never sealed"
    assert alive(bench)


class Ends:
    """A place whose copies of frame 0 end with a fence of the test's."""

    def __init__(self, place, fence):
        self.frame_bytes, self.bounds, self.frames = place.frame_bytes, place.bounds, place.frames
        self._place, self._fence = place, fence
        self.copied = threading.Event()

    def copy_out(self, frames, rows):
        self._place.copy_out(frames, rows)
        if 0 not in frames:
            return PASSED
        self.copied.set()
        return self._fence

    def copy_in(self, rows, frames, layers=None):
        return self._place.copy_in(rows, frames, layers)


class Broken:
    """A fence that raises until it is mended."""

    def __init__(self):
        self.mended = False

    def done(self):
        if not self.mended:
            raise BrokenError("the device is gone")
        return True

    def wait(self, within_s):
        return self.done()


def test_a_fence_that_raises_keeps_no_thread_and_kills_none(make_bench):
    fence = Broken()
    bench = make_bench(threads=1, wrap=lambda place: Ends(place, fence))
    number = bench.begin(SAVE, [0])
    source = bench.begin(SAVE, [1], fence=Broken())
    others = [bench.begin(SAVE, [n]) for n in (2, 3)]
    assert bench.wait_told(source, *others)
    assert bench.outcomes(source) == [UNAVAILABLE]
    assert bench.of(number) == []
    fence.mended = True
    assert bench.wait_told(number)
    assert bench.outcomes(number) == [UNAVAILABLE]
    assert alive(bench)


def test_a_copy_that_is_late_keeps_no_thread(make_bench):
    gate = threading.Event()
    places = []

    def wrap(place):
        places.append(Ends(place, GateFence(gate)))
        return places[0]

    bench = make_bench(threads=1, wrap=wrap)
    number = bench.begin(SAVE, [0])
    assert places[0].copied.wait(LONG_S)
    bench.clock.advance_s(LATE_S)
    bench.mover.look()
    assert bench.of(number) == [([TIMEOUT], False)]
    other = bench.begin(SAVE, [1])
    assert bench.wait_told(other)
    gate.set()
    assert bench.wait_told(number)
    assert bench.named(0) == [MISS]


def test_one_record_is_told_at_a_time_and_in_the_order_of_events(make_bench):
    """A plan that would be clear before its end was told would never end for its ledger."""
    fault = PlannedFault(FaultKind.NEVER, "copy_out", at=0)
    bench = make_bench(threads=1, copies=[fault])
    reached, gate, inside = threading.Event(), threading.Event(), []

    def telling(record):
        inside.append(record)
        assert len(inside) == 1
        if record.outcomes is not None:
            reached.set()
            assert gate.wait(LONG_S)
        inside.pop()

    bench.telling = telling
    number = bench.begin(SAVE, [0])
    assert fault.reached.wait(LONG_S)
    bench.clock.advance_s(LATE_S)
    looking = threading.Thread(target=bench.mover.look)
    looking.start()
    try:
        assert reached.wait(LONG_S)
        fault.gate.set()
        other = bench.begin(SAVE, [1])
        bench.mover._threads[0].join(0.05)  # it would take no longer to tell, if it did
        assert bench.of(number) == [([TIMEOUT], False)]
    finally:
        gate.set()
    looking.join(LONG_S)
    assert bench.wait_told(number, other)
    assert bench.of(number) == [([TIMEOUT], False), (None, True)]
    assert alive(bench)


def test_f075_whoever_is_told_may_raise_and_no_thread_dies(make_bench):
    bench = make_bench(threads=2, at_once=1)

    def telling(_):
        raise ValueError("the ledger is broken")

    bench.telling = telling
    numbers = [bench.begin(SAVE, [n]) for n in range(8)]
    late = bench.begin(SAVE, [7], fence=GateFence(threading.Event()), within_ms=0)
    assert bench.wait_told(*numbers, late)
    assert [bench.outcomes(number) for number in numbers] == [[OK]] * 8
    (fault,) = bench.mover.health.faults
    assert "the ledger is broken" in fault.trace
    assert all(thread.is_alive() for thread in bench.mover._threads)


def test_copies_that_raise_kill_no_thread(make_bench):
    faults = [PlannedFault(FaultKind.RAISE, "copy_out", at=at) for at in range(0, 40, 2)]
    bench = make_bench(threads=2, copies=faults)
    numbers = []
    for turn in range(5):
        numbers += [bench.begin(SAVE, [n]) for n in range(8)]
        assert bench.wait_told(*numbers[turn * 8 :])
    found = [bench.outcomes(number)[0] for number in numbers]
    assert (found.count(OK), found.count(UNAVAILABLE)) == (20, 20)
    assert alive(bench)


# Ends.


def test_a_close_under_load_ends_every_plan(make_bench, usage):
    before = usage()
    for turn in range(10):
        bench = make_bench(threads=3, at_once=1, frames=40)
        numbers, begun, closed = [], threading.Event(), threading.Event()

        def wish(bench=bench, numbers=numbers, begun=begun, closed=closed, turn=turn):
            while not closed.is_set():
                n = len(numbers)
                numbers.append(bench.begin(SAVE if n % 2 else WIPE, range(n % 40, 40)))
                if n == turn:
                    begun.set()

        thread = threading.Thread(target=wish)
        thread.start()
        assert begun.wait(LONG_S)
        assert bench.mover.close(LONG_S)
        told_of = len(numbers)
        closed.set()
        thread.join(LONG_S)
        found = {outcome for number in numbers for outcome in bench.outcomes(number)}
        assert found <= {OK, UNAVAILABLE}
        assert all(bench.outcomes(number)[-1] == UNAVAILABLE for number in numbers[told_of:])
        assert bench.mover.idle
        assert bench.mover.health.faults == ()
    assert usage() == before


@pytest.mark.parametrize("call", ["copy_out", "seal"])
def test_a_close_while_a_call_hangs_leaves_memory_mapped_until_it_returns(make_bench, usage, call):
    before = usage()
    fault = PlannedFault(FaultKind.NEVER, call, at=0)
    faults = {"copies": [fault]} if call == "copy_out" else {"host": [fault]}
    bench = make_bench(threads=2, at_once=1, **faults)
    number = bench.begin(SAVE, [0, 1])
    assert fault.reached.wait(LONG_S)
    for _ in range(2):
        assert not bench.mover.close(0.01)
        (*_, last) = bench.of(number)
        assert last[1] is False
        assert UNAVAILABLE in last[0], "who waits for it hears of it"
    told = len(bench.of(number))
    assert len(bench.host.row(0)) == 256, "a copy may still use it"
    fault.gate.set()
    assert bench.mover.close(LONG_S)
    assert bench.of(number)[told:] == [(None, True)]
    with pytest.raises(MisuseError, match="until `close`"):
        bench.host.row(0)
    assert usage() == before


def test_a_close_waits_for_what_has_begun(make_bench):
    gate, places = threading.Event(), []

    def wrap(place):
        places.append(Ends(place, GateFence(gate)))
        return places[0]

    bench = make_bench(threads=1, wrap=wrap)
    number = bench.begin(SAVE, [0])
    assert places[0].copied.wait(LONG_S)
    answers = []
    closing = threading.Thread(target=lambda: answers.append(bench.mover.close(LONG_S)))
    closing.start()
    bench.mover._threads[0].join(LONG_S)  # the thread has gone; the copy has not
    gate.set()
    closing.join(LONG_S)
    assert answers == [True]
    assert bench.outcomes(number) == [OK]


def test_threads_and_descriptors_are_as_before(make_bench, usage):
    before = usage()
    bench = make_bench(threads=3)
    assert usage() != before
    assert bench.wait_told(bench.begin(SAVE, [0, 1]))
    for _ in range(3):
        assert bench.mover.close(LONG_S)
    assert usage() == before


def test_a_mover_that_was_never_started_can_be_closed(make_bench, usage):
    before = usage()
    bench = make_bench()
    number = bench.begin(SAVE, [0])
    assert bench.mover.close()
    assert bench.outcomes(number) == [UNAVAILABLE]
    assert usage() == before


def test_two_may_close_at_once(make_bench):
    bench = make_bench(threads=2)
    answers = []
    closers = [threading.Thread(target=lambda: answers.append(bench.mover.close())) for _ in "ab"]
    for one in closers:
        one.start()
    for one in closers:
        one.join(LONG_S)
    assert answers == [True, True]
