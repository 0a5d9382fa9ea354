"""The mover, driven step by step: what comes back, what is told when, and what a deadline means."""

import threading

import numpy as np
import pytest

from stepwell.base.errors import InputError
from stepwell.core.plan import KEY_BYTES, Grown, Outcome, Plan, Verb
from stepwell.move.carrier import Rank
from stepwell.testing.device import BytesPlace, GateFence
from stepwell.testing.faults import FaultKind, PlannedFault
from stepwell.tiers.host import HostSize, HostTier

SAVE, LOAD, WIPE = Verb.SAVE, Verb.LOAD, Verb.WIPE
OK, MISS, CORRUPT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT
TIMEOUT, REFUSED, UNAVAILABLE = Outcome.TIMEOUT, Outcome.REFUSED, Outcome.UNAVAILABLE
LATE_S = 1.0
"""Deadline of the plans of a bench."""


# What comes back.


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_saved_comes_back_bit_by_bit(make_bench, at_once, streams):
    bench = make_bench(at_once=at_once, streams=streams)
    for stream in bench.device.streams:
        stream.free_run()
    assert bench.save(*range(8)) == [OK] * 8
    bench.spoil()
    order = [3, 0, 7, 1, 2]
    assert bench.do(LOAD, order, [0, 1, 2, 3, 4]) == [OK] * 5
    assert np.array_equal(bench.rows[:5], bench.first[order])
    assert (bench.rows[5:] == 0xFF).all()
    assert bench.mover.idle
    assert bench.mover.fault == ""


def test_what_is_saved_again_replaces_what_was_there(bench):
    bench.save(0)
    assert bench.do(SAVE, [0], [5], keys=[9]) == [OK]
    bench.spoil()
    assert bench.load(0) == [MISS]
    assert bench.do(LOAD, [0], [1], keys=[9]) == [OK]
    assert np.array_equal(bench.rows[1], bench.first[5])


@pytest.mark.parametrize("at_once", [1, 100])
def test_every_frame_has_its_own_outcome_and_only_good_ones_reach_the_device(make_bench, at_once):
    bench = make_bench(at_once=at_once)
    bench.save(0, 1, 2, 3, 4)
    bench.host.row(1)[-1] ^= 1
    bench.host._sums[3, 0] ^= np.uint64(1)
    bench.spoil()
    # Frame 2 is asked for under the name of another page, frame 5 was never filled.
    outcomes = bench.do(LOAD, range(6), keys=[0, 1, 7, 3, 4, 5])
    assert outcomes == [OK, CORRUPT, MISS, CORRUPT, OK, MISS]
    for frame, outcome in enumerate(outcomes):
        wanted = bench.first[frame] if outcome == OK else np.full(256, 0xFF)
        assert np.array_equal(bench.rows[frame], wanted)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("where", [0, -1])
def test_a_wrong_bit_in_any_layer_is_found(bench, layer, where):
    bench.save(0, 1, 2)
    begin, end = bench.host.size.bounds[layer : layer + 2]
    bench.host.row(1)[begin:end][where] ^= 1 << 7
    bench.spoil()
    assert bench.load(0, 1, 2) == [OK, CORRUPT, OK]
    assert (bench.rows[1] == 0xFF).all()


def test_the_part_and_the_number_in_the_record_are_in_the_name(bench):
    which = 1 << 16 | 5
    assert bench.save(0, which=which) == [OK]
    for other in (0, 5, 1 << 16, 1 << 16 | 4):
        assert bench.load(0, which=other) == [MISS]
    assert bench.load(0, which=which) == [OK]


def test_of_a_sample_one_frame_in_sixteen_is_compared_and_none_is_left_out_for_ever(make_bench):
    bench = make_bench(frames=31, verify="sample")
    everything = range(31)
    bench.save(*everything)
    for frame in everything:
        bench.host.row(frame)[0] ^= 1
    found = []
    for _ in range(16):
        outcomes = bench.load(*everything)
        assert 1 <= outcomes.count(CORRUPT) <= 2
        assert outcomes.count(CORRUPT) + outcomes.count(OK) == 31
        found += [frame for frame, outcome in enumerate(outcomes) if outcome == CORRUPT]
    assert sorted(found) == list(everything)


def test_whoever_never_verifies_still_gets_nothing_under_a_wrong_name(make_bench):
    bench = make_bench(verify="never")
    bench.save(0, 1, 2)
    bench.host.row(0)[0] ^= 1
    bench.host._sums[1, 0] ^= np.uint64(1)
    assert bench.do(LOAD, [0, 1, 2], keys=[0, 1, 9]) == [OK, CORRUPT, MISS]


def test_a_wipe_overwrites_and_forgets(bench):
    bench.save(0, 1, 2)
    assert bench.do(WIPE, [0, 2, 5]) == [OK] * 3
    assert not bench.host.row(0).any()
    assert not bench.host.row(2).any()
    assert not bench.host._sums[[0, 2]].any()
    assert np.array_equal(bench.host.row(1), bench.first[1])
    assert bench.named(0, 1, 2) == [MISS, OK, MISS]


# What no plan may ask for.


def nonsense(bench):
    """Plans that a mover cannot follow, by what is wrong with them."""
    none = np.empty(0, np.int32)
    ids = np.array([0, 1], np.int32)
    right = {"number": 900, "verb": SAVE, "place": 0, "outside": ids, "inside": ids}
    right |= {"keys": bytes(2 * KEY_BYTES), "which": np.zeros(2, np.uint32), "within_ms": 1000}
    wrong = {
        "a frame beyond": {"inside": np.array([0, 8], np.int32)},
        "a negative frame": {"inside": np.array([-1, 0], np.int32)},
        "a device frame beyond": {"outside": np.array([0, 8], np.int32)},
        "a negative device frame": {"outside": np.array([0, -1], np.int32)},
        "too few device frames": {"outside": ids[:1]},
        "no device frames": {"outside": none},
        "a place beyond": {"place": 1},
        "a negative place": {"place": -1},
        "a group beyond": {"which": np.array([0, 2 << 16], np.uint32)},
        "a key too few": {"keys": bytes(KEY_BYTES)},
        "half a key": {"keys": bytes(2 * KEY_BYTES - 1)},
        "one part too few": {"which": np.zeros(1, np.uint32)},
    }
    plans = {what: Plan(**right | change) for what, change in wrong.items()}
    load = right | {"verb": LOAD, "outside": np.array([0, 8], np.int32)}
    wipe = right | {"verb": WIPE, "outside": none, "inside": np.array([0, 8], np.int32)}
    return plans | {
        "a load beyond": Plan(**load),
        "a wipe beyond": Plan(**wipe),
        "a wipe with device frames": Plan(**right | {"verb": WIPE}),
    }


def test_what_cannot_be_followed_is_refused_and_nothing_of_it_is_done(bench):
    bench.save(*range(8))
    before = bench.rows.copy()
    for what, plan in nonsense(bench).items():
        bench.told.clear()
        bench.mover.take(plan)
        assert bench.outcomes(900) == [REFUSED] * 2, what
        assert not bench.mover.work(), what
        assert "plan 900" in bench.mover.fault, what
    assert bench.named(*range(8)) == [OK] * 8
    assert np.array_equal(bench.rows, before)
    assert bench.load(0, 1) == [OK, OK]


def test_a_plan_without_frames_ends_at_once(bench):
    for verb in Verb:
        number = bench.begin(verb, [])
        assert bench.of(number) == [([], True)]
    assert bench.mover.fault == ""


def test_a_plan_that_comes_twice_is_done_once_and_its_first_end_is_its_only_one(bench):
    plan = bench.plan(SAVE, [0, 1])
    bench.mover.take(plan)
    bench.mover.take(plan)
    assert bench.of(plan.number) == [], "the ledger would free what is still copied"
    assert "came twice" in bench.mover.fault
    bench.work()
    assert bench.outcomes(plan.number) == [OK, OK]


def test_a_rank_whose_places_or_parts_do_not_fit_is_refused():
    tier = HostTier(HostSize(16, (0, 3, 16), 2))
    try:
        rows = np.zeros((2, 16), np.uint8)
        right = BytesPlace(rows, (0, 3, 16))
        for place in (BytesPlace(rows, (0, 4, 16)), BytesPlace(rows[:, :3], (0, 3))):
            with pytest.raises(InputError, match="a place has frames of"):
                Rank(tier, (right, place), (bytes(32),))
        for part in (b"", bytes(31), bytes(33)):
            with pytest.raises(InputError, match="32 each"):
                Rank(tier, (right,), (bytes(32), part))
        assert Rank(tier, (right, right), (bytes(32),)).number == 0
    finally:
        tier.close()


def test_every_frame_is_reported_once_as_it_becomes_ready(make_bench):
    bench = make_bench(frames=50)
    for _ in range(3):
        bench.mover.look()
    assert bench.grown() == list(range(50))
    assert all(one.mover == 3 for one in bench.told if isinstance(one, Grown))


# What is told when.


class Watched:
    """A place that notes what it copies."""

    def __init__(self, place, log):
        self.frame_bytes, self.bounds, self.frames = place.frame_bytes, place.bounds, place.frames
        self._place, self._log = place, log

    def copy_out(self, frames, rows):
        self._log.append(("copied", frames.tolist()))
        return self._place.copy_out(frames, rows)

    def copy_in(self, rows, frames, layers=None):
        self._log.append(("loaded", frames.tolist()))
        return self._place.copy_in(rows, frames, layers)


def test_the_source_is_released_after_its_last_copy_and_before_the_sums_of_that(make_bench):
    log = []
    bench = make_bench(at_once=2, wrap=lambda place: Watched(place, log))
    bench.telling = lambda report: log.append(("told", report.outcomes is not None))
    seal = bench.host.seal
    bench.host.seal = lambda frame, name: (log.append(("sealed", frame)), seal(frame, name))
    bench.save(0, 1, 2, 3)
    assert log == [
        ("copied", [0, 1]),
        ("sealed", 0),
        ("sealed", 1),
        ("copied", [2, 3]),
        ("told", False),
        ("sealed", 2),
        ("sealed", 3),
        ("told", True),
    ]


def test_a_copy_that_has_only_begun_releases_nothing(make_bench):
    bench = make_bench(at_once=4, streams=True)
    number = bench.begin(SAVE, range(8))
    while bench.device.out.passed < 8:
        bench.work()
        assert bench.of(number) == []
        bench.device.out.advance()
    bench.work()
    assert bench.of(number) == [(None, False), ([OK] * 8, True)]
    assert np.array_equal(np.array([bench.host.row(n) for n in range(8)]), bench.first)


def test_a_load_has_not_ended_before_its_copies_have(make_bench):
    bench = make_bench(streams=True)
    bench.device.out.free_run()
    bench.save(0, 1)
    bench.spoil()
    number = bench.begin(LOAD, [0, 1])
    bench.work()
    assert bench.device.into.queued
    while bench.device.into.queued:
        bench.work()
        assert bench.of(number) == []
        bench.device.into.advance()
    bench.work()
    assert bench.of(number) == [([OK, OK], True)]
    assert np.array_equal(bench.rows[:2], bench.first[:2])


def test_a_source_that_is_not_ready_is_not_read_and_later_plans_go_first(bench):
    gate = threading.Event()
    waiting = bench.begin(SAVE, [0], fence=GateFence(gate))
    later = bench.begin(SAVE, [1])
    bench.work()
    assert bench.outcomes(later) == [OK]
    assert bench.of(waiting) == []
    bench.rows[0] = 7  # the engine is still writing it
    gate.set()
    bench.work()
    assert bench.outcomes(waiting) == [OK]
    assert (bench.host.row(0) == 7).all()


def test_a_load_does_not_overwrite_what_a_step_still_reads(bench):
    bench.save(0, 1)
    bench.spoil()
    gate = threading.Event()
    waiting = bench.begin(LOAD, [0], fence=GateFence(gate))
    assert bench.load(1) == [OK]
    assert (bench.rows[0] == 0xFF).all()
    gate.set()
    bench.work()
    assert bench.outcomes(waiting) == [OK]
    assert np.array_equal(bench.rows[0], bench.first[0])


# Deadlines.


@pytest.mark.parametrize("verb", Verb)
def test_nothing_of_a_plan_begins_after_its_deadline(make_bench, verb):
    log = []
    bench = make_bench(wrap=lambda place: Watched(place, log))
    bench.save(0, 1)
    log.clear()
    bench.spoil()
    number = bench.begin(verb, [0, 1], within_ms=1000)
    bench.clock.advance_s(LATE_S)
    assert not bench.mover.work(), "nobody has looked at the clock yet"
    bench.mover.look()
    assert not bench.mover.work()
    assert bench.of(number) == [([TIMEOUT] * 2, False), (None, True)]
    assert log == []
    assert np.array_equal(bench.host.row(0), bench.first[0])
    assert (bench.rows == 0xFF).all()


def test_a_fence_that_never_comes_costs_one_deadline(bench):
    never = bench.begin(SAVE, [0], fence=GateFence(threading.Event()))
    bench.clock.advance_s(LATE_S - 0.001)
    bench.mover.look()
    assert bench.of(never) == []
    bench.clock.advance_s(0.001)
    bench.mover.look()
    assert bench.outcomes(never) == [TIMEOUT]
    assert bench.mover.idle
    assert bench.save(0) == [OK]


def test_f001_bytes_that_come_after_the_end_are_never_sealed(make_bench):
    """Late write after time-out: the source is somebody else's by then, and the copy still reads it."""
    bench = make_bench(at_once=2, streams=True)
    number = bench.begin(SAVE, range(6))
    bench.work()
    bench.device.out.advance(4 + 2)  # the first two frames, and half of the next two
    assert bench.mover.work()
    bench.clock.advance_s(LATE_S)
    bench.mover.look()
    told = [OK, OK] + [TIMEOUT] * 4
    assert bench.of(number) == [(told, False)], "it still writes: not clear"
    bench.spoil(0xEE)
    assert not bench.mover.idle
    bench.device.out.advance_all()
    bench.work()
    assert bench.of(number) == [(told, False), (None, True)]
    assert bench.named(*range(6)) == [OK, OK] + [MISS] * 4
    assert [entry.slot for entry in bench.host.scan()] == [0, 1]
    assert np.array_equal(bench.host.row(1), bench.first[1])


def test_f001_a_load_that_is_late_is_not_clear_while_it_writes(make_bench):
    bench = make_bench(streams=True)
    bench.device.out.free_run()
    bench.save(0, 1)
    number = bench.begin(LOAD, [0, 1], [4, 5])
    bench.work()
    bench.clock.advance_s(LATE_S)
    bench.mover.look()
    assert bench.of(number) == [([TIMEOUT] * 2, False)]
    bench.mover.look()
    bench.work()
    assert len(bench.of(number)) == 1, "told once"
    bench.device.into.advance_all()
    bench.work()
    assert bench.of(number) == [([TIMEOUT] * 2, False), (None, True)]


def test_a_seal_that_ends_after_the_deadline_leaves_no_name(make_bench):
    bench = make_bench()
    seal = bench.host.seal

    def slow(frame, name):
        seal(frame, name)
        bench.clock.advance_s(LATE_S)
        bench.mover.look()

    bench.host.seal = slow
    number = bench.begin(SAVE, [0, 1])
    bench.work()
    assert bench.of(number) == [(None, False), ([TIMEOUT] * 2, False), (None, True)]
    assert bench.named(0, 1) == [MISS, MISS]


@pytest.mark.parametrize("call", ["copy_in", "copy_out"])
def test_f068_a_copy_that_never_ends_costs_one_deadline_and_keeps_nobody(make_bench, call):
    fault = PlannedFault(FaultKind.LATE, call, at=1)
    bench = make_bench(copies=[fault])
    assert bench.save(0, 1) == [OK, OK]
    assert bench.load(0, 1) == [OK, OK]
    verb = LOAD if call == "copy_in" else SAVE
    number = bench.begin(verb, [0, 1])
    bench.work()
    bench.clock.advance_s(LATE_S)
    bench.mover.look()
    assert bench.of(number) == [([TIMEOUT] * 2, False)]
    assert bench.save(2) == [OK]
    fault.gate.set()
    bench.work()
    assert bench.of(number)[1:] == [(None, True)]
    assert bench.named(0) == [OK if verb is LOAD else MISS]
