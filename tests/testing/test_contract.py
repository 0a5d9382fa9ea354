"""The contract of tiers: right ones keep it, and every way to break it fails the test that is named for it."""

import subprocess
import sys
import threading
import unittest

import numpy as np
import pytest

from stepwell.core.plan import Outcome
from stepwell.testing.clock import FakeClock
from stepwell.testing.contract import TierContract
from stepwell.testing.faults import POSSIBLE, FaultKind, FaultyTier, PlannedFault
from stepwell.tiers.host import HostSize, HostTier
from stepwell.tiers.tier import Entry, Payload, Traits, layer_sums

OK, MISS = Outcome.OK, Outcome.MISS


class PlainTier:
    """Names and their bytes: the smallest tier that keeps the contract."""

    def __init__(self, size):
        self.size = size
        self.kept = {}
        self.traits = Traits(
            persistent=False, shared=False, slots=False, largest_bytes=size.frame_bytes
        )

    def place(self, entry):
        """Where it would be kept."""
        return entry.name

    def found(self, entry):
        """The payload of an entry, or None."""
        name, payload = self.kept.get(self.place(entry), (None, None))
        return payload if name == entry.name else None

    def allows(self, entry, payload):
        return len(payload.row) <= self.traits.largest_bytes

    def keep(self, entry, payload):
        copy = Payload(payload.row.copy(), payload.sums.copy())
        self.kept[self.place(entry)] = (entry.name, copy)

    def exists(self, entries, within_s):
        return [OK if self.found(entry) else MISS for entry in entries]

    def get_into(self, entries, payloads, within_s):
        return [self.get(entry, payload) for entry, payload in zip(entries, payloads, strict=True)]

    def get(self, entry, payload):
        found = self.found(entry)
        if found is None:
            return MISS
        np.copyto(payload.row, found.row)
        np.copyto(payload.sums, found.sums)
        return OK

    def put_from(self, entries, payloads, within_s):
        return [self.put(entry, payload) for entry, payload in zip(entries, payloads, strict=True)]

    def put(self, entry, payload):
        if not self.allows(entry, payload):
            return Outcome.REFUSED
        self.keep(entry, payload)
        return OK

    def delete(self, entries, within_s):
        return [self.remove(entry) for entry in entries]

    def remove(self, entry):
        if self.found(entry) is None:
            return MISS
        del self.kept[self.place(entry)]
        return OK

    def scan(self):
        return [Entry(name, 0) for name, _ in self.kept.values()]

    def close(self):
        pass


class SlotTier(PlainTier):
    """Slots, and the name of what is in each."""

    def __init__(self, size):
        super().__init__(size)
        self.traits = Traits(
            persistent=False, shared=False, slots=True, largest_bytes=size.frame_bytes
        )

    def place(self, entry):
        return entry.slot

    def allows(self, entry, payload):
        return super().allows(entry, payload) and 0 <= entry.slot < self.size.frames

    def scan(self):
        return [Entry(name, slot) for slot, (name, _) in self.kept.items()]


class LastingTier(PlainTier):
    """Its bytes survive it."""

    def __init__(self, size, kept=None):
        super().__init__(size)
        self.traits = Traits(
            persistent=True, shared=True, slots=False, largest_bytes=size.frame_bytes
        )
        self.kept = {} if kept is None else kept


class TestPlainTier(TierContract):
    def make_tier(self, size):
        return PlainTier(size)


class TestSlotTier(TierContract):
    def make_tier(self, size):
        return SlotTier(size)


class TestLastingTier(TierContract):
    def make_tier(self, size):
        return LastingTier(size)

    def reopened(self, tier, size):
        return type(tier)(size, tier.kept)


# Planned faults.


class FaultyContract(TierContract):
    """Over host tiers, with one fault. Where that is to hang, calls are given up soon."""

    within_s = 0.05

    def __init__(self, fault):
        self.fault, self.clock, self.hosts = fault, FakeClock(), []
        self.grace_s = 0.2 if fault.kind is FaultKind.NEVER else 30

    def make_tier(self, size):
        host = HostTier(HostSize(size.frame_bytes, size.bounds, size.frames))
        assert host.wait(30)
        host.grown()
        self.hosts.append(host)
        return FaultyTier(host, [self.fault], self.clock)

    def end(self):
        """Lets go of what hangs, and waits for it."""
        self.fault.gate.set()
        for thread in threading.enumerate():
            if thread.name == "stepwell-contract":
                thread.join(30)
        for host in self.hosts:
            host.close()


MIXED = "test_a_batch_mixes_what_is_here_and_what_is_not"
PUT_AND_GET = "test_what_is_put_comes_back"
DELETED = "test_what_is_deleted_is_a_miss"
FINDS = {
    "exists": (MIXED, "exists of"),
    "get_into": (PUT_AND_GET, "get_into answered|are not those put"),
    "put_from": (PUT_AND_GET, "put_from of new frames|get_into answered <Outcome.(MISS|CORRUPT)"),
    "delete": (DELETED, "delete of what is here|get_into answered <Outcome.OK"),
    "scan": ("test_scan_lists_exactly_what_is_here", ""),
    "close": ("test_closing_twice_is_closing_once", ""),
}
"""The test that finds every fault of a call, and what it says."""
SAYS = {FaultKind.RAISE: "BrokenError", FaultKind.SLOW: "took 100.0 s", FaultKind.NEVER: "hangs"}
FAULTS = [(kind, call) for kind in FaultKind for call in FINDS if call in POSSIBLE[kind]]


def test_every_kind_of_fault_is_tried():
    assert {kind for kind, _ in FAULTS} == set(FaultKind)


@pytest.mark.parametrize(("kind", "call"), FAULTS)
def test_every_fault_of_a_tier_fails_the_contract(kind, call):
    test, says = FINDS[call]
    at = None
    if (kind, call) == (FaultKind.OTHER, "put_from"):
        test, at = DELETED, 1  # its second put finds another entry
    contract = FaultyContract(PlannedFault(kind, call, at, wait_s=100.0 * (kind == "slow")))
    try:
        with pytest.raises(AssertionError, match=SAYS.get(kind, says)):
            getattr(contract, test)()
    finally:
        contract.end()


# Tiers that are wrong in other ways.


class Borrows(PlainTier):
    def keep(self, entry, payload):
        self.kept[entry.name] = (entry.name, payload)


class Lends(PlainTier):
    def get(self, entry, payload):
        outcome = super().get(entry, payload)
        if outcome is OK:
            self.kept[entry.name] = (entry.name, payload)
        return outcome


class Repairs(PlainTier):
    """Makes sums up for whatever it was given."""

    def keep(self, entry, payload):
        sums = payload.sums.copy()
        layer_sums(payload.row, self.size.bounds, sums, entry.name)
        super().keep(entry, Payload(payload.row, sums))


class Mixes(PlainTier):
    """Keeps old bytes, for the names are the same."""

    def keep(self, entry, payload):
        row, found = payload.row.copy(), self.found(entry)
        if found:
            row[: len(row) // 2] = found.row[: len(row) // 2]
        super().keep(entry, Payload(row, payload.sums))


class ForgetsTheTailOfNames(PlainTier):
    def found(self, entry):
        return next(
            (kept for name, kept in self.kept.values() if name[:64] == entry.name[:64]), None
        )


class HasWholeWords(PlainTier):
    def get(self, entry, payload):
        whole = len(payload.row) // 8 * 8
        tail = payload.row[whole:].copy()
        outcome = super().get(entry, payload)
        payload.row[whole:] = tail
        return outcome


class AnswersOnceForTwins(PlainTier):
    def exists(self, entries, within_s):
        return super().exists(list(dict.fromkeys(entries)), within_s)


class CountsTwinsAsMisses(PlainTier):
    def get_into(self, entries, payloads, within_s):
        outcomes = super().get_into(entries, payloads, within_s)
        return [MISS if entry in entries[:i] else outcomes[i] for i, entry in enumerate(entries)]


class StopsAtAMiss(PlainTier):
    def get_into(self, entries, payloads, within_s):
        outcomes = super().get_into(entries, payloads, within_s)
        first = (*outcomes, MISS).index(MISS)
        return outcomes[:first] + [MISS] * (len(outcomes) - first)


class WantsABatch(PlainTier):
    def exists(self, entries, within_s):
        return super().exists([entries[0], *entries[1:]], within_s)


class KeepsWhatIsDeleted(PlainTier):
    def remove(self, entry):
        return OK if self.found(entry) else MISS


class DeletesWhatIsNotThere(PlainTier):
    def remove(self, entry):
        super().remove(entry)
        return OK


class SaysPlainNumbers(PlainTier):
    def exists(self, entries, within_s):
        return [int(outcome) for outcome in super().exists(entries, within_s)]


class ExistsForEver(PlainTier):
    def __init__(self, size):
        super().__init__(size)
        self.seen = set()

    def keep(self, entry, payload):
        self.seen.add(entry.name)
        super().keep(entry, payload)

    def exists(self, entries, within_s):
        return [OK if entry.name in self.seen else MISS for entry in entries]


class ListsTooMuch(ExistsForEver):
    def scan(self):
        return [Entry(name, 0) for name in self.seen]


class ListsHalf(PlainTier):
    def scan(self):
        return super().scan()[::2]


class ListsWhatLeaves(PlainTier):
    """As a scan over memory that is wiped meanwhile."""

    def scan(self):
        for name in tuple(self.kept):
            yield Entry(name if name in self.kept else bytes(len(name)), 0)


class ListsOtherSlots(SlotTier):
    def scan(self):
        return [Entry(entry.name, 0) for entry in super().scan()]


class BelievesTheSlot(SlotTier):
    def found(self, entry):
        return self.kept.get(entry.slot, (None, None))[1]


class FindsByNameAlone(SlotTier):
    def found(self, entry):
        return next((kept for name, kept in self.kept.values() if name == entry.name), None)


class DeletesTheSlot(SlotTier):
    def remove(self, entry):
        return OK if self.kept.pop(entry.slot, None) else MISS


class KeepsTheOldNames(SlotTier):
    def place(self, entry):
        return (entry.slot, entry.name)

    def scan(self):
        return [Entry(name, slot) for slot, name in self.kept]


class CountsFromTheEnd(SlotTier):
    def place(self, entry):
        return entry.slot % self.size.frames

    def allows(self, entry, payload):
        return len(payload.row) <= self.size.frame_bytes


class TakesAnyLength(PlainTier):
    def allows(self, entry, payload):
        return True


class RaisesAtTooMuch(PlainTier):
    def allows(self, entry, payload):
        return bool(payload.row.reshape(self.size.frame_bytes).size)


class PromisesLess(PlainTier):
    def __init__(self, size):
        super().__init__(size)
        self.traits = Traits(persistent=False, shared=False, slots=False, largest_bytes=1)


class WantsTime(PlainTier):
    def get_into(self, entries, payloads, within_s):
        assert within_s
        return super().get_into(entries, payloads, within_s)


class OneAtATime(PlainTier):
    """Raises when two threads are inside at once; the first one waits until they are."""

    def __init__(self, size):
        super().__init__(size)
        self.lock, self.met = threading.Lock(), threading.Event()

    def put_from(self, entries, payloads, within_s):
        if not self.lock.acquire(blocking=False):
            self.met.set()
            raise RuntimeError("two at once")
        self.met.wait(10)
        self.lock.release()
        return super().put_from(entries, payloads, within_s)


class ClosesOnce(PlainTier):
    closed = False

    def close(self):
        assert not self.closed
        self.closed = True


class LosesOnClose(LastingTier):
    def close(self):
        self.kept.clear()


class KeepsWhatWasDeletedBefore(LastingTier):
    def __init__(self, size, kept=None):
        super().__init__(size, kept)
        self.log = {}

    def keep(self, entry, payload):
        super().keep(entry, payload)
        self.log[entry.name] = self.kept[entry.name]

    def close(self):
        self.kept = self.log


TWICE = "test_an_entry_may_come_twice_in_a_batch"
UNKNOWN = "test_an_unknown_name_is_a_miss"
OWN_SLOT = "test_a_name_is_found_in_its_slot_only"
BORROWED = "test_bytes_are_kept_not_borrowed"
SCAN = "test_scan_lists_exactly_what_is_here"
TOO_LARGE = "test_a_frame_that_is_too_large_is_refused_alone"
LASTS = "test_what_persists_is_found_again"
WRONG = {
    Borrows: BORROWED,
    Lends: BORROWED,
    Repairs: "test_sums_are_those_that_were_put",
    Mixes: "test_a_name_that_is_put_again_is_one_of_both",
    ForgetsTheTailOfNames: UNKNOWN,
    HasWholeWords: "test_frames_of_odd_sizes_come_back",
    AnswersOnceForTwins: TWICE,
    CountsTwinsAsMisses: TWICE,
    StopsAtAMiss: MIXED,
    WantsABatch: "test_an_empty_batch_is_fine",
    KeepsWhatIsDeleted: DELETED,
    DeletesWhatIsNotThere: DELETED,
    SaysPlainNumbers: MIXED,
    ExistsForEver: "test_exists_says_what_get_would",
    ListsTooMuch: SCAN,
    ListsHalf: SCAN,
    ListsWhatLeaves: SCAN,
    ListsOtherSlots: SCAN,
    BelievesTheSlot: UNKNOWN,
    FindsByNameAlone: OWN_SLOT,
    DeletesTheSlot: "test_deleting_another_name_deletes_nothing",
    KeepsTheOldNames: "test_a_slot_that_is_filled_again_has_the_last_name_only",
    CountsFromTheEnd: "test_a_slot_that_does_not_exist_is_no_fault",
    TakesAnyLength: TOO_LARGE,
    RaisesAtTooMuch: TOO_LARGE,
    PromisesLess: TOO_LARGE,
    WantsTime: "test_a_deadline_of_zero_is_no_error",
    OneAtATime: "test_threads_may_use_different_slots_at_once",
    ClosesOnce: "test_closing_twice_is_closing_once",
    LosesOnClose: LASTS,
    KeepsWhatWasDeletedBefore: LASTS,
}


class WrongContract(TestLastingTier):
    def __init__(self, kind):
        self.kind = kind

    def make_tier(self, size):
        return self.kind(size)


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_every_wrong_tier_fails_the_test_that_is_named_for_it(kind):
    with pytest.raises(AssertionError):
        getattr(WrongContract(kind), WRONG[kind])()


def test_every_test_of_the_contract_can_fail():
    known = {*WRONG.values(), *(test for test, _ in FINDS.values())}
    assert known == {name for name in dir(TierContract) if name.startswith("test_")}


@pytest.mark.parametrize("name", [OWN_SLOT, LASTS])
def test_what_a_tier_does_not_promise_is_skipped(name):
    with pytest.raises(unittest.SkipTest, match=r"not persistent|no slots"):
        getattr(WrongContract(PlainTier), name)()


def test_a_persistent_tier_has_to_be_reopened_by_its_author():
    class Incomplete(TierContract):
        def make_tier(self, size):
            return LastingTier(size)

    with pytest.raises(unittest.SkipTest, match="override `reopened` for LastingTier"):
        getattr(Incomplete(), LASTS)()


def test_a_contract_without_a_tier_is_none():
    with pytest.raises(TypeError, match="make_tier"):
        TierContract()


def test_very_large_frames_are_not_tried():
    class Huge(PlainTier):
        def __init__(self, size):
            super().__init__(size)
            self.traits = Traits(persistent=False, shared=False, slots=False, largest_bytes=1 << 40)

    with pytest.raises(unittest.SkipTest, match="bytes are allowed"):
        getattr(WrongContract(Huge), TOO_LARGE)()


def test_the_suite_needs_no_test_framework():
    code = "import sys, stepwell.testing.contract; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"pytest", "torch", "hypothesis"} & set(done.stdout.split())
