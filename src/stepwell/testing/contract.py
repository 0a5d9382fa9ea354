"""What every tier must do, as tests: for ours, and for a tier of your own.

    from stepwell.testing.contract import TierContract, TierSize

    class TestMyTier(TierContract):
        def make_tier(self, size: TierSize) -> MyTier:
            return MyTier(size.frames, size.frame_bytes)

pytest collects the subclass, and so does a loop over its methods: no fixture and no framework is needed. With
`pytest.register_assert_rewrite("stepwell.testing.contract")` in a conftest, before the import, failures show more.

Owns: the promises of `tiers.tier.Tier`, one test for each. Must not know: any tier. Neighbours: `faults` has tiers
that break each promise.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from unittest import SkipTest

import numpy as np

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.threads import Health, start
from stepwell.core.plan import Outcome
from stepwell.tiers.tier import Entry, Payload, Tier, holds, layer_sums, named

_Answer = TypeVar("_Answer")
_OK, _MISS = Outcome.OK, Outcome.MISS
_LARGEST_TRIED = 64 << 20
"""Bytes of a frame that the suite makes to find out whether a larger one is refused."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """What a tier is made for.

    Attributes:
        bounds: where each layer begins in a frame, and the end of the last; shape [layers + 1].
        frames: how many there must be room for: slots 0 up to frames - 1, where the tier has slots.
    """

    bounds: tuple[int, ...]
    frames: int

    @property
    def frame_bytes(self) -> int:
        """Of one frame."""
        return self.bounds[-1]


USUAL = TierSize((0, 1500, 1501, 5000), 8)
ODD = tuple(
    TierSize(bounds, 3)
    for bounds in ((0, 1), (0, 1, 2, 3), (0, 4095), (0, 1, 4096), (0, 4096, 4097), (0, 7, 100003))
)


class Trial:
    """One tier under test, and calls of it that end: each runs in a thread, with a deadline.

    Frames are numbers here: each has its own name, bytes and sums, and the slot of its number unless told otherwise.

    Args:
        tier: under test.
        size: of the tier.
        within_s: what calls are told.
        grace_s: how much longer they may take, until they count as hanging.
        clock: what their time is measured with.
    """

    def __init__(
        self, tier: Tier, size: TierSize, within_s: float, grace_s: float, clock: Clock
    ) -> None:
        self.tier = tier
        self.size = size
        self._within_s = within_s
        self._grace_s = grace_s
        self._clock = clock

    def entry(self, number: int, slot: int | None = None) -> Entry:
        """Its name differs from that of a neighbour in the last bytes only, as those of one record do."""
        key = hashlib.sha256(b"key %d" % (number // 2)).digest()
        part = hashlib.sha256(b"part").digest()
        name = key + part + (number % 2).to_bytes(2, "little")
        return Entry(name, number % self.size.frames if slot is None else slot)

    def payload(self, number: int, bounds: tuple[int, ...] = ()) -> Payload:
        """Bytes of a frame, and their sums."""
        bounds = bounds or self.size.bounds
        row = np.random.default_rng(number).integers(0, 256, bounds[-1], np.uint8)
        payload = Payload(row, np.zeros(len(bounds), np.uint64))
        layer_sums(row, bounds, payload.sums, self.entry(number).name)
        return payload

    def empty(self, n: int) -> list[Payload]:
        """Memory to get n frames into, full of what was there before."""
        rows = np.full((n, self.size.frame_bytes), 0xA5, np.uint8)
        sums = np.full((n, len(self.size.bounds)), 7, np.uint64)
        return [Payload(row, of) for row, of in zip(rows, sums, strict=True)]

    def call(self, what: str, action: Callable[[], _Answer]) -> _Answer:
        """One call of the tier; fails if it raises, hangs or comes too late."""
        answers: list[_Answer] = []
        health = Health()
        begin_s = self._clock.now_s()
        thread = start("contract", lambda: answers.append(action()), health)
        thread.join(self._within_s + self._grace_s)
        assert not thread.is_alive(), f"{what} hangs"
        assert not health.faults, f"{what} raised: {health.faults[0].trace}"
        took_s = self._clock.now_s() - begin_s
        assert took_s <= self._within_s + self._grace_s, (
            f"{what} took {took_s} s of {self._within_s}"
        )
        return answers[0]

    def _batch(
        self,
        method: Callable[..., list[Outcome]],
        entries: Sequence[Entry],
        *payloads: Sequence[Payload],
    ) -> list[Outcome]:
        what, n = method.__name__, len(entries)
        outcomes = self.call(what, lambda: method(entries, *payloads, self._within_s))
        assert len(outcomes) == n, f"{what} answered {len(outcomes)} times to {n} entries"
        assert all(type(outcome) is Outcome for outcome in outcomes), f"{what}: {outcomes}"
        return list(outcomes)

    def exists(self, entries: Sequence[Entry]) -> list[Outcome]:
        return self._batch(self.tier.exists, entries)

    def get(self, entries: Sequence[Entry], payloads: Sequence[Payload]) -> list[Outcome]:
        return self._batch(self.tier.get_into, entries, payloads)

    def put(self, entries: Sequence[Entry], payloads: Sequence[Payload]) -> list[Outcome]:
        return self._batch(self.tier.put_from, entries, payloads)

    def delete(self, entries: Sequence[Entry]) -> list[Outcome]:
        return self._batch(self.tier.delete, entries)

    def scan(self) -> list[Entry]:
        return self.call("scan", lambda: list(self.tier.scan()))

    def close(self) -> None:
        self.call("close", self.tier.close)

    def fill(self, *numbers: int) -> None:
        """Puts frames, all of which have to be taken."""
        outcomes = self.put(
            [self.entry(number) for number in numbers], [self.payload(number) for number in numbers]
        )
        assert outcomes == [_OK] * len(numbers), f"put_from of new frames answered {outcomes}"

    def require(self, numbers: Iterable[int], missing: Iterable[int] = ()) -> None:
        """Requires frames to be here whole, and others to be misses; all in one batch."""
        here = list(numbers)
        asked = [*here, *missing]
        payloads = self.empty(len(asked))
        outcomes = self.get([self.entry(number) for number in asked], payloads)
        for number, outcome, payload in zip(asked, outcomes, payloads, strict=True):
            wanted = _OK if number in here else _MISS
            assert outcome is wanted, f"get_into answered {outcome!r} and not {wanted!r}"
            if outcome is _OK:
                self.require_same(payload, number)

    def require_same(self, payload: Payload, number: int) -> None:
        """Requires bytes and sums to be those of a frame."""
        wanted = self.payload(number)
        assert np.array_equal(payload.sums, wanted.sums), "OK, and the sums are not those put"
        assert np.array_equal(payload.row, wanted.row), "OK, and the bytes are not those put"

    def proven(self, entry: Entry, payload: Payload) -> bool:
        """What a reader finds out by itself: whether sums belong to the name, and bytes to the sums."""
        layers = range(len(self.size.bounds) - 1)
        return named(payload.sums, entry.name) and all(
            holds(payload.row, self.size.bounds, payload.sums, layer) for layer in layers
        )


class TierContract(ABC):
    """The tests. A subclass makes the tier; each test gets a new and empty one, and closes it.

    Attributes:
        within_s: the deadline that calls are told.
        grace_s: how much longer a call may take on a busy machine.
        clock: measures calls.
    """

    within_s = 5.0
    grace_s = 5.0
    clock: Clock = SystemClock()

    @abstractmethod
    def make_tier(self, size: TierSize) -> Tier:
        """A new tier with nothing in it, all of whose frames are ready."""

    def reopened(self, tier: Tier, size: TierSize) -> Tier:
        """The same tier after its process ended: persistent tiers override it. `tier` is closed."""
        raise SkipTest(f"override `reopened` for {type(tier).__name__} of {size.frames} frames")

    @contextmanager
    def trial(self, size: TierSize = USUAL) -> Iterator[Trial]:
        """A tier for one test, closed at its end."""
        trial = self._trial(self.make_tier(size), size)
        try:
            yield trial
        finally:
            trial.close()

    def _trial(self, tier: Tier, size: TierSize) -> Trial:
        return Trial(tier, size, self.within_s, self.grace_s, self.clock)

    def test_what_is_put_comes_back(self) -> None:
        with self.trial() as trial:
            trial.fill(0, 1, 2)
            trial.require([0, 1, 2])
            trial.require([1])

    def test_frames_of_odd_sizes_come_back(self) -> None:
        for size in ODD:
            with self.trial(size) as trial:
                trial.fill(0, 1, 2)
                trial.require([2, 0, 1])

    def test_an_unknown_name_is_a_miss(self) -> None:
        with self.trial() as trial:
            trial.require([], missing=[0, 1])
            trial.fill(0)
            trial.require(
                [0], missing=[1, 8]
            )  # 1 differs in its last bytes only, 8 has the slot of 0

    def test_a_batch_mixes_what_is_here_and_what_is_not(self) -> None:
        with self.trial() as trial:
            trial.fill(0, 2)
            for order in itertools.permutations([0, 1, 2, 3]):
                entries, payloads = [trial.entry(number) for number in order], trial.empty(4)
                wanted = [_OK if number in (0, 2) else _MISS for number in order]
                assert trial.exists(entries) == wanted, f"exists of {order} is not {wanted}"
                assert trial.get(entries, payloads) == wanted, f"get_into of {order} not {wanted}"
                for number, payload in zip(order, payloads, strict=True):
                    if number in (0, 2):
                        trial.require_same(payload, number)

    def test_an_entry_may_come_twice_in_a_batch(self) -> None:
        with self.trial() as trial:
            trial.fill(0, 1, 0)
            trial.require([0, 0, 1, 0], missing=[2, 2])
            entries = [trial.entry(number) for number in (0, 0, 2)]
            assert trial.exists(entries) == [_OK, _OK, _MISS], "exists counts differently twice"
            first, again, never = trial.delete(entries)
            assert (first, never) == (_OK, _MISS), "delete of one entry twice"
            assert again in (_OK, _MISS), "delete of one entry twice"
            trial.require([1], missing=[0])

    def test_an_empty_batch_is_fine(self) -> None:
        with self.trial() as trial:
            for _ in range(2):
                assert trial.exists([]) == trial.get([], []) == []
                assert trial.put([], []) == trial.delete([]) == []
                trial.fill(0)

    def test_what_is_deleted_is_a_miss(self) -> None:
        with self.trial() as trial:
            trial.fill(0, 1)
            assert trial.delete([trial.entry(0)]) == [_OK], "delete of what is here"
            trial.require([1], missing=[0])
            assert trial.delete([trial.entry(0)]) == [_MISS], "delete of what is not here"
            trial.fill(0)
            trial.require([0, 1])

    def test_deleting_another_name_deletes_nothing(self) -> None:
        with self.trial() as trial:
            trial.fill(0)
            assert trial.delete([trial.entry(1, slot=0), trial.entry(8)]) == [_MISS, _MISS]
            trial.require([0])

    def test_exists_says_what_get_would(self) -> None:
        with self.trial() as trial:
            trial.fill(0, 1, 2)
            assert trial.delete([trial.entry(1)]) == [_OK]
            entries = [trial.entry(number) for number in (0, 1, 2, 3, 8)]
            assert trial.exists(entries) == trial.get(entries, trial.empty(5))

    def test_scan_lists_exactly_what_is_here(self) -> None:
        with self.trial() as trial:
            assert trial.scan() == [], "a new tier lists something"
            trial.fill(0, 1, 2, 3)
            trial.delete([trial.entry(2)])
            self._require_listed(trial, [0, 1, 3])
            here = [trial.entry(number).name for number in (0, 1, 3)]
            for (
                entry
            ) in trial.tier.scan():  # what leaves while it lists may be listed, nothing else
                assert entry.name in here, "scan lists what never was here"
                trial.delete([trial.entry(number) for number in (0, 1, 3)])
            assert trial.scan() == [], "an empty tier lists something"

    def _require_listed(self, trial: Trial, numbers: Sequence[int]) -> None:
        found, wanted = trial.scan(), [trial.entry(number) for number in numbers]
        names = [entry.name for entry in found]
        assert sorted(names) == sorted(entry.name for entry in wanted), "scan lists other names"
        if trial.tier.traits.slots:
            assert set(found) == set(wanted), "scan lists other slots"
        assert trial.exists(found) == [_OK] * len(found), "what scan lists does not exist"

    def test_bytes_are_kept_not_borrowed(self) -> None:
        """Whoever put them writes into that memory again, and so does whoever got them."""
        with self.trial() as trial:
            given, got = trial.payload(0), trial.empty(1)
            assert trial.put([trial.entry(0)], [given]) == [_OK]
            for payload in (given, *got):
                payload.row[:], payload.sums[:] = 0, 0
                trial.require([0])
                assert trial.get([trial.entry(0)], got) == [_OK]

    def test_sums_are_those_that_were_put(self) -> None:
        """Wrong bytes are found by sums, unless the tier sums up what it has: it may say so, never repair them."""
        with self.trial() as trial:
            foreign, flipped = trial.payload(1), trial.payload(1)
            flipped.row[-1] ^= 1
            exchanged = Payload(trial.payload(1).row, trial.payload(2).sums)
            for bad in (trial.payload(2), flipped, exchanged):
                trial.put([trial.entry(0), trial.entry(1)], [foreign, bad])
                for number in (0, 1):
                    entry, (got,) = trial.entry(number), trial.empty(1)
                    (outcome,) = trial.get([entry], [got])
                    proven = outcome is _OK and trial.proven(entry, got)
                    assert not proven, "wrong bytes came back with sums that hold"

    def test_a_name_that_is_put_again_is_one_of_both(self) -> None:
        with self.trial() as trial:
            other = trial.payload(1)
            layer_sums(other.row, trial.size.bounds, other.sums, trial.entry(0).name)
            trial.fill(0)
            assert trial.put([trial.entry(0)], [other]) == [_OK]
            (got,) = trial.empty(1)
            assert trial.get([trial.entry(0)], [got]) == [_OK]
            assert trial.proven(trial.entry(0), got), "a mixture of two frames"

    def test_a_slot_that_is_filled_again_has_the_last_name_only(self) -> None:
        with self.trial() as trial:
            self._require_slots(trial)
            trial.fill(0, 1)
            trial.fill(8)  # the slot of 0
            trial.require([8, 1], missing=[0])
            trial.fill(0, 8, 0)  # the last of a batch
            trial.require([0, 1], missing=[8])
            self._require_listed(trial, [0, 1])

    def test_a_name_is_found_in_its_slot_only(self) -> None:
        with self.trial() as trial:
            self._require_slots(trial)
            trial.fill(0, 1)
            wrong = [trial.entry(0, slot=1), trial.entry(1, slot=0), trial.entry(0, slot=2)]
            assert trial.exists(wrong) == [_MISS] * 3, "a name exists in another slot"
            assert trial.get(wrong, trial.empty(3)) == [_MISS] * 3, "a name is in another slot"
            assert trial.delete(wrong) == [_MISS] * 3, "a name was deleted in another slot"
            trial.require([0, 1])

    def test_a_slot_that_does_not_exist_is_no_fault(self) -> None:
        with self.trial() as trial:
            self._require_slots(trial)
            trial.fill(*range(trial.size.frames))
            for slot in (-1, 2**31 - 1):
                entry = trial.entry(0, slot=slot)
                assert trial.exists([entry]) == trial.delete([entry]) == [_MISS]
                assert trial.get([entry], trial.empty(1)) == [_MISS]
                (outcome,) = trial.put([trial.entry(9, slot=slot)], [trial.payload(9)])
                assert outcome in (Outcome.REFUSED, Outcome.FULL), f"{outcome!r} for slot {slot}"
            trial.require(range(trial.size.frames))

    def _require_slots(self, trial: Trial) -> None:
        if not trial.tier.traits.slots:
            raise SkipTest("the tier has no slots")

    def test_a_frame_that_is_too_large_is_refused_alone(self) -> None:
        with self.trial() as trial:
            largest = trial.tier.traits.largest_bytes
            assert largest >= trial.size.frame_bytes, "it is made for frames that it does not take"
            if largest > _LARGEST_TRIED:
                raise SkipTest(f"frames of {largest} bytes are allowed")
            large = trial.payload(1, (0, largest + 1))
            outcomes = trial.put(
                [trial.entry(number) for number in (0, 1, 2)],
                [trial.payload(0), large, trial.payload(2)],
            )
            assert outcomes == [_OK, Outcome.REFUSED, _OK], f"{outcomes} for one that is too large"
            trial.require([0, 2], missing=[1])

    def test_threads_may_use_different_slots_at_once(self) -> None:
        with self.trial() as trial:
            health, gate = Health(), threading.Barrier(4)

            def use(lane: int) -> None:
                gate.wait(self.within_s + self.grace_s)
                for number in range(lane, lane + 20 * trial.size.frames, trial.size.frames):
                    entries = [trial.entry(number), trial.entry(number + 4)]
                    given, got = [trial.payload(number), trial.payload(number + 4)], trial.empty(2)
                    assert trial.tier.put_from(entries, given, self.within_s) == [_OK, _OK]
                    assert trial.tier.get_into(entries, got, self.within_s) == [_OK, _OK]
                    trial.require_same(got[0], number)
                    trial.require_same(got[1], number + 4)
                    assert trial.tier.delete(entries, self.within_s) == [_OK, _OK]
                    assert trial.tier.exists(entries, self.within_s) == [_MISS, _MISS]

            threads = [start(f"lane-{lane}", partial(use, lane), health) for lane in range(4)]
            for thread in threads:
                thread.join(4 * (self.within_s + self.grace_s))
            assert not any(thread.is_alive() for thread in threads), "a thread hangs"
            assert not health.faults, health.faults[0].trace

    def test_a_deadline_of_zero_is_no_error(self) -> None:
        with self.trial() as trial:
            trial.fill(0)
            entries, (got,) = [trial.entry(0)], trial.empty(1)
            outcome = trial.call("get_into", lambda: trial.tier.get_into(entries, [got], 0))[0]
            assert outcome in (_OK, Outcome.TIMEOUT), f"{outcome!r} in no time"
            if outcome is _OK:
                trial.require_same(got, 0)

    def test_what_persists_is_found_again(self) -> None:
        with self.trial() as trial:
            if not trial.tier.traits.persistent:
                raise SkipTest("the tier is not persistent")
            trial.fill(0, 1, 2)
            assert trial.delete([trial.entry(1)]) == [_OK]
            trial.close()
            again = self._trial(self.reopened(trial.tier, trial.size), trial.size)
            again.require([0, 2], missing=[1])
            self._require_listed(again, [0, 2])
            again.close()

    def test_closing_twice_is_closing_once(self) -> None:
        with self.trial() as trial:
            trial.fill(0)
            trial.close()
            trial.close()
