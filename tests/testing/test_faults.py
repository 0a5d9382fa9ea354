"""Planned faults: each does what it says, when it says so, and leaves everything else alone."""

import threading

import numpy as np
import pytest

from stepwell.base.errors import InputError, MisuseError
from stepwell.core.plan import Outcome
from stepwell.move.fence import PASSED
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import BytesPlace, FakeDevice, FakePlace
from stepwell.testing.faults import (
    POSSIBLE,
    BrokenError,
    FaultKind,
    FaultyHost,
    FaultyPlace,
    FaultyTier,
    PlannedFault,
)
from stepwell.tiers.host import NAME_BYTES, HostSize, HostTier, payloads_like, sum_up
from stepwell.tiers.tier import Entry, holds, named

BOUNDS = (0, 100, 256)
SIZE = HostSize(256, BOUNDS, 4)
LONG_S, SHORT_S = 30, 0.01
OK, MISS, CORRUPT, TIMEOUT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT, Outcome.TIMEOUT
FULL, UNAVAILABLE = Outcome.FULL, Outcome.UNAVAILABLE
CALLS = ("exists", "get_into", "put_from", "delete")


def entry(number):
    return Entry(bytes([number + 1]) * NAME_BYTES, number)


ENTRIES = [entry(number) for number in range(4)]


def payload(number):
    (made,) = payloads_like(SIZE, 1)
    made.row[:] = np.random.default_rng(number).integers(1, 255, 256)
    sum_up(made, SIZE, entry(number).name)
    return made


def blank(n=1):
    made = payloads_like(SIZE, n)
    for one in made:
        one.row[:], one.sums[:] = 255, 255
    return made


@pytest.fixture
def host():
    """With frames 0, 1 and 2 in it."""
    tier = HostTier(SIZE)
    assert tier.wait(LONG_S)
    tier.grown()
    put(tier, 0, 1, 2)
    yield tier
    tier.close()


@pytest.fixture
def make_host():
    made = []

    def make(*faults, **more):
        made.append(FaultyHost(SIZE, faults, **more))
        assert made[-1].wait(LONG_S)
        made[-1].grown()
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def put(tier, *numbers):
    return tier.put_from([entry(n) for n in numbers], [payload(n) for n in numbers], SHORT_S)


def get(tier, *numbers):
    """Outcomes, and what is in memory then."""
    got = blank(len(numbers))
    return tier.get_into([entry(number) for number in numbers], got, SHORT_S), got


def same(one, number):
    wanted = payload(number)
    return np.array_equal(one.row, wanted.row) and np.array_equal(one.sums, wanted.sums)


def untouched(one):
    return (one.row == 255).all() and (one.sums == 255).all()


def call(tier, what, *numbers):
    if what == "put_from":
        return put(tier, *numbers)
    if what == "get_into":
        return get(tier, *numbers)[0]
    return getattr(tier, what)([entry(number) for number in numbers], SHORT_S)


def in_thread(action):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(action()), daemon=True)
    thread.start()
    return thread, answers


def ended(thread):
    thread.join(LONG_S)
    assert not thread.is_alive()


# When a fault strikes.


def test_a_tier_without_faults_is_the_tier(host):
    tier = FaultyTier(host, [])
    assert tier.traits == host.traits
    assert tier.exists(ENTRIES, 0) == [OK, OK, OK, MISS]
    outcomes, got = get(tier, 2, 3, 0)
    assert outcomes == [OK, MISS, OK]
    assert same(got[0], 2)
    assert same(got[2], 0)
    assert put(tier, 3) == [OK]
    assert tier.delete([entry(0)], 0) == [OK]
    assert list(tier.scan()) == ENTRIES[1:]
    assert tier.met == []
    tier.close()
    assert host.exists(ENTRIES, 0) == [MISS] * 4


@pytest.mark.parametrize("what", CALLS)
def test_it_strikes_the_call_of_its_number_and_no_other(host, what):
    tier = FaultyTier(host, [PlannedFault(FaultKind.UNAVAILABLE, what, at=1)])
    for other in CALLS:
        assert call(tier, other, 3) != [UNAVAILABLE]
    assert [call(tier, what, 0) == [UNAVAILABLE] for _ in range(3)] == [True, False, False]
    assert tier.met == [(what, 1, FaultKind.UNAVAILABLE)]


def test_it_strikes_a_name_wherever_it_comes(host):
    tier = FaultyTier(host, [PlannedFault(FaultKind.FULL, "get_into", name=entry(1).name)])
    outcomes, got = get(tier, 0, 1, 3, 1, 2)
    assert outcomes == [OK, FULL, MISS, FULL, OK]
    assert same(got[0], 0)
    assert untouched(got[1])
    assert same(got[4], 2)
    assert get(tier, 0)[0] == [OK]
    assert len(tier.met) == 1


def test_of_two_faults_of_one_entry_the_first_strikes(host):
    kinds = [FaultKind.FULL, FaultKind.UNAVAILABLE]
    named_first = [
        PlannedFault(kinds[0], "exists", name=entry(1).name),
        PlannedFault(kinds[1], "exists"),
    ]
    assert FaultyTier(host, named_first).exists(ENTRIES[:3], 0) == [UNAVAILABLE, FULL, UNAVAILABLE]
    assert FaultyTier(host, named_first[::-1]).exists(ENTRIES[:3], 0) == [UNAVAILABLE] * 3


def test_what_is_not_struck_goes_through_in_one_batch(host):
    """The last of two frames for one slot stays the last."""
    tier = FaultyTier(host, [PlannedFault(FaultKind.FLIP, "put_from", name=entry(0).name)])
    other = Entry(entry(3).name, 0)
    for order, there in (([entry(0), other], other), ([other, entry(0)], entry(0))):
        given = [payload(one.name[0] - 1) for one in order]
        assert tier.put_from(order, given, 0) == [OK, OK]
        assert [found.name for found in host.scan() if found.slot == 0] == [there.name]


def test_calls_are_counted_from_any_thread(host):
    tier = FaultyTier(host, [PlannedFault(FaultKind.FULL, "exists", at=n) for n in range(0, 80, 2)])
    lanes = [in_thread(lambda: [call(tier, "exists", 0)[0] for _ in range(20)]) for _ in range(4)]
    for thread, _ in lanes:
        ended(thread)
    found = [outcome for _, (outcomes,) in lanes for outcome in outcomes]
    assert (found.count(FULL), found.count(OK)) == (40, 40)
    assert sorted(number for _, number, _ in tier.met) == list(range(0, 80, 2))


ALL_CALLS = sorted(set().union(*POSSIBLE.values()))


def test_every_kind_is_possible_somewhere():
    assert set(POSSIBLE) == set(FaultKind)


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_that_means_nothing_is_refused(kind):
    for what in (*ALL_CALLS, "", "open"):
        if what in POSSIBLE[kind]:
            assert PlannedFault(kind, what).call == what
        else:
            with pytest.raises(InputError, match=kind):
                PlannedFault(kind, what)


# What a fault of a tier does.


@pytest.mark.parametrize("what", CALLS)
def test_raise_raises_and_does_nothing(host, what):
    tier = FaultyTier(host, [PlannedFault(FaultKind.RAISE, what, at=0)])
    with pytest.raises(BrokenError, match=what):
        call(tier, what, 3)
    assert host.exists(ENTRIES, 0) == [OK, OK, OK, MISS]
    assert call(tier, what, 1) == [OK]


@pytest.mark.parametrize("what", ["scan", "close"])
def test_scan_and_close_can_raise(host, what):
    tier = FaultyTier(host, [PlannedFault(FaultKind.RAISE, what, at=0)])
    with pytest.raises(BrokenError, match=what):
        getattr(tier, what)()
    assert len(list(tier.scan())) == 3


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [(FaultKind.FULL, FULL), (FaultKind.UNAVAILABLE, UNAVAILABLE), (FaultKind.LOST, OK)],
)
@pytest.mark.parametrize("what", CALLS)
def test_some_are_answers_and_nothing_else(host, kind, outcome, what):
    tier = FaultyTier(host, [PlannedFault(kind, what, at=0)])
    numbers = [3] if what == "put_from" else [0]
    assert call(tier, what, *numbers) == [outcome]
    assert host.exists(ENTRIES, 0) == [OK, OK, OK, MISS]
    assert call(tier, what, *numbers) == [OK]


def test_a_lost_get_leaves_memory_as_it_was(host):
    (outcome,), (got,) = get(FaultyTier(host, [PlannedFault(FaultKind.LOST, "get_into")]), 0)
    assert outcome is OK
    assert untouched(got)


def spoiled(kind, good):
    """What has to be in memory of 255s."""
    row = good.row.copy()
    if kind is FaultKind.SHORT:
        row[128:] = 255
    elif kind is FaultKind.ZEROS:
        row[:] = 0
    elif kind is FaultKind.FLIP:
        row[1] ^= 1 << 2
    return row


BYTE_KINDS = [FaultKind.SHORT, FaultKind.ZEROS, FaultKind.FLIP]


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_wrong_bytes_come_with_the_sums_of_the_right_ones(host, kind):
    tier = FaultyTier(host, [PlannedFault(kind, "get_into", name=entry(1).name, bit=10)])
    outcomes, (first, bad, missing) = get(tier, 0, 1, 3)
    assert outcomes == [OK, OK, MISS]
    assert same(first, 0)
    assert untouched(missing)
    assert np.array_equal(bad.row, spoiled(kind, payload(1)))
    assert np.array_equal(bad.sums, payload(1).sums)
    assert named(bad.sums, entry(1).name)
    held = [holds(bad.row, BOUNDS, bad.sums, layer) for layer in range(2)]
    assert held == {"short": [True, False], "zeros": [False, False], "flip": [False, True]}[kind]
    assert same(get(host, 1)[1][0], 1), "what the tier has is whole"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_wrong_bytes_are_put_with_the_sums_of_the_right_ones(host, kind):
    tier = FaultyTier(host, [PlannedFault(kind, "put_from", name=entry(1).name, bit=10)])
    given = [payload(0), payload(1)]
    assert tier.put_from(ENTRIES[:2], given, 0) == [OK, OK]
    assert same(given[1], 1), "the caller's memory is not written"
    assert get(host, 0, 1)[0] == [OK, CORRUPT]
    assert host.proves(1, entry(1).name) is OK


def test_a_miss_stays_a_miss_whatever_would_be_done_to_its_bytes(host):
    for kind in (*BYTE_KINDS, FaultKind.OTHER):
        outcomes, (got,) = get(FaultyTier(host, [PlannedFault(kind, "get_into")]), 3)
        assert outcomes == [MISS]
        assert untouched(got)


@pytest.mark.parametrize("bit", [0, 7, 8, 2047, 2048])
def test_any_bit_can_be_flipped(host, bit):
    tier = FaultyTier(host, [PlannedFault(FaultKind.FLIP, "get_into", bit=bit)])
    difference = np.unpackbits(get(tier, 0)[1][0].row ^ payload(0).row, bitorder="little")
    assert np.flatnonzero(difference).tolist() == [bit % 2048]


def test_the_bytes_of_another_entry_come_with_its_sums(host):
    tier = FaultyTier(host, [PlannedFault(FaultKind.OTHER, "get_into", at=0)])
    outcomes, (got, again) = get(tier, 0, 1)
    assert outcomes == [OK, OK]
    assert same(got, 1)
    assert same(again, 0)
    assert same(get(tier, 0)[1][0], 0)


def test_the_bytes_of_another_entry_are_put_with_its_sums(host):
    tier = FaultyTier(host, [PlannedFault(FaultKind.OTHER, "put_from")])
    assert put(tier, 3) == [OK]
    assert np.array_equal(host.row(3), payload(0).row)
    assert host.proves(3, entry(3).name) is CORRUPT


def test_another_entry_has_to_be_there(host):
    host.delete(ENTRIES[1:], 0)
    with pytest.raises(MisuseError, match="no other entry"):
        get(FaultyTier(host, [PlannedFault(FaultKind.OTHER, "get_into")]), 0)


def test_a_slow_call_takes_time_of_the_clock(host):
    clock = FakeClock()
    tier = FaultyTier(host, [PlannedFault(FaultKind.SLOW, "get_into", at=1, wait_s=2.5)], clock)
    for now_s in (0.0, 2.5, 2.5):
        assert get(tier, 0)[0] == [OK]
        assert clock.now_s() == now_s
    with pytest.raises(InputError, match="FakeClock"):
        FaultyTier(host, [PlannedFault(FaultKind.SLOW, "get_into", wait_s=1)])


@pytest.mark.parametrize("what", CALLS)
def test_a_slow_call_that_is_let_go_in_time_does_its_work(host, what):
    fault = PlannedFault(FaultKind.SLOW, what)
    tier = FaultyTier(host, [fault])
    numbers = [3] if what == "put_from" else [0]
    assert call(tier, what, *numbers) == [TIMEOUT], "nobody lets it go"
    assert host.exists(ENTRIES, 0) == [OK, OK, OK, MISS]
    fault.gate.set()
    assert call(tier, what, *numbers) == [OK]


def test_a_call_that_never_ends_ends_when_it_is_let_go(host):
    fault = PlannedFault(FaultKind.NEVER, "get_into", name=entry(1).name)
    tier = FaultyTier(host, [fault])
    assert get(tier, 0)[0] == [OK]
    assert not fault.reached.is_set()
    got = blank(2)
    thread, answers = in_thread(lambda: tier.get_into(ENTRIES[:2], got, 0))
    assert fault.reached.wait(LONG_S)
    thread.join(SHORT_S)
    assert thread.is_alive(), "its deadline was 0"
    fault.gate.set()
    ended(thread)
    assert answers == [[OK, OK]]
    assert same(got[1], 1)


def test_a_late_put_is_done_with_what_then_is_in_memory(host):
    """A frame that a call has been given is not the caller's again because the call said TIMEOUT."""
    tier = FaultyTier(host, [PlannedFault(FaultKind.LATE, "put_from", name=entry(3).name)])
    given = [payload(0), payload(3)]
    assert tier.put_from([entry(0), entry(3)], given, 0) == [OK, TIMEOUT]
    assert get(host, 3)[0] == [MISS]
    given[1].row[:] = 9
    assert tier.finish_late() == [OK]
    assert host.proves(3, entry(3).name) is OK
    assert get(host, 3)[0] == [CORRUPT]
    assert tier.finish_late() == []


def test_a_late_get_writes_memory_that_may_be_somebodys_by_then(host):
    tier = FaultyTier(host, [PlannedFault(FaultKind.LATE, "get_into", at=0)])
    outcomes, (first, second) = get(tier, 0, 3)
    assert outcomes == [TIMEOUT, TIMEOUT]
    assert untouched(first)
    assert tier.finish_late() == [OK, MISS]
    assert same(first, 0)
    assert untouched(second)


def test_a_late_delete_is_done_later(host):
    tier = FaultyTier(host, [PlannedFault(FaultKind.LATE, "delete")])
    assert tier.delete(ENTRIES[:2], 0) == [TIMEOUT, TIMEOUT]
    assert get(host, 0, 1)[0] == [OK, OK]
    assert tier.finish_late() == [OK, OK]
    assert get(host, 0, 1)[0] == [MISS, MISS]


# What a fault of the host tier does in place.


def fill(tier, *numbers):
    for number in numbers:
        tier.row(number)[:] = payload(number).row
        tier.seal(number, entry(number).name)


def test_a_host_without_faults_is_a_host_tier(make_host):
    tier = make_host()
    fill(tier, 0, 1)
    assert get(tier, 0, 1)[0] == [OK, OK]
    assert tier.proves(0, entry(0).name) is OK
    assert tier.holds(1, 1)
    assert tier.met == []


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_bytes_change_behind_the_seal(make_host, kind):
    tier = make_host(PlannedFault(kind, "seal", name=entry(1).name, bit=8 * 100))
    fill(tier, 0, 1, 2)
    assert tier.proves(1, entry(1).name) is OK
    held = [tier.holds(1, layer) for layer in range(2)]
    assert held == [kind is not FaultKind.ZEROS, False]
    assert get(tier, 0, 1, 2)[0] == [OK, CORRUPT, OK]


def test_two_frames_exchange_their_bytes_behind_the_seal(make_host):
    tier = make_host(PlannedFault(FaultKind.OTHER, "seal", at=1))
    fill(tier, 0, 1, 2)
    assert np.array_equal(tier.row(0), payload(1).row)
    assert np.array_equal(tier.row(1), payload(0).row)
    assert get(tier, 0, 1, 2)[0] == [CORRUPT, CORRUPT, OK]


def test_a_first_frame_has_no_other_to_exchange_with(make_host):
    tier = make_host(PlannedFault(FaultKind.OTHER, "seal"))
    with pytest.raises(MisuseError, match="no other frame"):
        fill(tier, 0)


def test_a_name_is_lost_behind_the_seal(make_host):
    tier = make_host(PlannedFault(FaultKind.LOST, "seal", at=0))
    fill(tier, 0, 1)
    assert get(tier, 0, 1)[0] == [MISS, OK]


def test_what_is_proven_can_be_lost(make_host):
    tier = make_host(
        PlannedFault(FaultKind.LOST, "proves", name=entry(0).name),
        PlannedFault(FaultKind.LOST, "holds", name=entry(1).name),
    )
    fill(tier, 0, 1, 2)
    assert [tier.proves(number, entry(number).name) for number in range(3)] == [MISS, OK, OK]
    assert [tier.holds(number, 0) for number in range(3)] == [True, False, True]
    assert get(tier, 0, 1, 2)[0] == [MISS, CORRUPT, OK]


@pytest.mark.parametrize("what", ["row", "seal", "proves", "holds"])
def test_work_in_place_can_raise_take_time_and_hang(make_host, what):
    clock = FakeClock()
    hangs = PlannedFault(FaultKind.NEVER, what, at=3)
    tier = make_host(
        PlannedFault(FaultKind.RAISE, what, at=1),
        PlannedFault(FaultKind.SLOW, what, at=2, wait_s=1.5),
        hangs,
        fake_clock=clock,
    )
    arguments = {
        "row": (0,),
        "seal": (0, entry(0).name),
        "proves": (0, entry(0).name),
        "holds": (0, 1),
    }[what]
    getattr(tier, what)(*arguments)
    with pytest.raises(BrokenError, match=what):
        getattr(tier, what)(*arguments)
    getattr(tier, what)(*arguments)
    assert clock.now_s() == 1.5
    thread, answers = in_thread(lambda: getattr(tier, what)(*arguments))
    assert hangs.reached.wait(LONG_S)
    assert thread.is_alive()
    hangs.gate.set()
    ended(thread)
    assert len(answers) == 1


# What a fault of a place does.


def numbered():
    return np.arange(1, 65, dtype=np.uint8).reshape(4, 16)


def place_with(*faults, clock=None):
    below = BytesPlace(numbered(), (0, 8, 16))
    return below, FaultyPlace(below, faults, clock)


def rows_of(n, value=255):
    return list(np.full((n, 16), value, np.uint8))


IDS = np.array([2, 0], np.int32)


def test_a_place_without_faults_is_the_place():
    below, place = place_with()
    assert (place.frames, place.frame_bytes, place.bounds) == (4, 16, (0, 8, 16))
    rows = rows_of(2)
    assert place.copy_out(IDS, rows).done()
    assert np.array_equal(rows, numbered()[IDS])
    assert place.copy_in(rows_of(2), IDS, (0, 1)).done()
    assert (below.rows[IDS, :8] == 255).all()
    assert np.array_equal(below.rows[IDS, 8:], numbered()[IDS, 8:])
    assert place.met == []


@pytest.mark.parametrize("what", ["copy_out", "copy_in"])
def test_a_copy_can_raise_or_be_lost(what):
    below, place = place_with(
        PlannedFault(FaultKind.RAISE, what, at=0), PlannedFault(FaultKind.LOST, what, at=1)
    )
    rows = rows_of(2)
    arguments = (IDS, rows) if what == "copy_out" else (rows, IDS)
    with pytest.raises(BrokenError, match=what):
        getattr(place, what)(*arguments)
    assert getattr(place, what)(*arguments) is PASSED
    assert (np.array(rows) == 255).all()
    assert np.array_equal(below.rows, numbered())
    getattr(place, what)(*arguments)
    assert np.array_equal(rows, below.rows[IDS])


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_bytes_change_on_their_way_out(kind):
    _, place = place_with(PlannedFault(kind, "copy_out", bit=9))
    rows = rows_of(2)
    assert place.copy_out(IDS, rows).done()
    wanted = numbered()[IDS]
    if kind is FaultKind.SHORT:
        wanted[:, 8:] = 255
    elif kind is FaultKind.ZEROS:
        wanted[:] = 0
    else:
        wanted[:, 1] ^= 2
    assert np.array_equal(rows, wanted)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_bytes_change_on_their_way_in(kind):
    below, place = place_with(PlannedFault(kind, "copy_in", bit=9))
    rows = rows_of(2)
    assert place.copy_in(rows, IDS).done()
    assert (np.array(rows) == 255).all(), "the caller's rows are not written"
    wanted = numbered()
    if kind is FaultKind.SHORT:
        wanted[IDS, :8] = 255
    elif kind is FaultKind.ZEROS:
        wanted[IDS] = 0
    else:
        wanted[IDS] = 255
        wanted[IDS, 1] ^= 2
    assert np.array_equal(below.rows, wanted)


def test_a_copy_can_hang_and_take_time():
    clock = FakeClock()
    hangs = PlannedFault(FaultKind.NEVER, "copy_out", at=0)
    _, place = place_with(hangs, PlannedFault(FaultKind.SLOW, "copy_in", wait_s=4.0), clock=clock)
    rows = rows_of(2)
    thread, answers = in_thread(lambda: place.copy_out(IDS, rows).done())
    assert hangs.reached.wait(LONG_S)
    assert (np.array(rows) == 255).all()
    hangs.gate.set()
    ended(thread)
    assert answers == [True]
    assert np.array_equal(rows, numbered()[IDS])
    place.copy_in(rows, IDS)
    assert clock.now_s() == 4.0


@pytest.mark.parametrize("what", ["copy_out", "copy_in"])
def test_a_fence_comes_when_it_is_let_or_never(what):
    fault = PlannedFault(FaultKind.LATE, what)
    _, place = place_with(fault)
    rows = rows_of(2)
    fence = place.copy_out(IDS, rows) if what == "copy_out" else place.copy_in(rows, IDS)
    assert (fence.done(), fence.wait(SHORT_S)) == (False, False)
    fault.gate.set()
    assert (fence.done(), fence.wait(0)) == (True, True)


def test_faults_lie_on_top_of_streams_or_below_them():
    """On top where calls fail; below where bytes do, since they are there when a piece has run only."""
    device = FakeDevice()
    below, faulty = place_with(PlannedFault(FaultKind.FLIP, "copy_out", at=1))
    place = FakePlace(faulty, device.out, device.into, pieces=2)
    rows = rows_of(2)
    place.copy_out(IDS, rows)
    device.advance_all()
    assert [
        np.array_equal(row, below.rows[frame]) for row, frame in zip(rows, IDS, strict=True)
    ] == [
        True,
        False,
    ]
    top = FaultyPlace(place, [PlannedFault(FaultKind.FLIP, "copy_out")])
    with pytest.raises(MisuseError, match="copy at once"):
        top.copy_out(IDS, rows)
