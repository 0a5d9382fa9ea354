"""Tiers and places that fail when a test says so: the n-th call, or whatever touches one name.

Owns: what can go wrong below a mover, as records. Must not know: who is tested. Neighbours: `contract` finds each of
these in a tier; `device` has streams for copies that are merely not done yet.

    fault = PlannedFault(FaultKind.FLIP, "get_into", at=2)
    tier = FaultyTier(HostTier(size), [fault])        the third `get_into` gives one wrong bit, and says OK

`FaultyTier` wraps any tier, for its batch calls; `FaultyHost` is a host tier whose work in place fails;
`FaultyPlace` wraps device memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from stepwell.base.errors import InputError, MisuseError
from stepwell.core.frames import FrameIds
from stepwell.core.plan import Outcome
from stepwell.move.fence import PASSED, Fence
from stepwell.move.place import Place
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import GateFence, at_once
from stepwell.tiers.host import HostSize, HostTier
from stepwell.tiers.tier import Entry, Payload, Row, Tier


class FaultKind(StrEnum):
    """What goes wrong.

    Attributes:
        RAISE: the call raises `BrokenError`, and does nothing.
        SLOW: the call takes `wait_s` of the fake clock; without, it waits for the gate, up to its deadline: TIMEOUT.
        NEVER: the call waits for the gate, whatever its deadline, and then goes on.
        SHORT: only the first half of the bytes is copied; sums are those of all; OK.
        ZEROS: all bytes are zeros; sums are those that belong there; OK.
        OTHER: bytes and sums are those of another entry that the tier has; OK.
        FLIP: one bit is wrong; OK.
        LOST: nothing is done; OK.
        LATE: TIMEOUT at once; the work is done when `finish_late` is called, with what then is in the caller's memory.
        FULL: nothing is done; FULL.
        UNAVAILABLE: nothing is done; UNAVAILABLE.
    """

    RAISE = "raise"
    SLOW = "slow"
    NEVER = "never"
    SHORT = "short"
    ZEROS = "zeros"
    OTHER = "other"
    FLIP = "flip"
    LOST = "lost"
    LATE = "late"
    FULL = "full"
    UNAVAILABLE = "unavailable"


_BATCH = frozenset({"exists", "get_into", "put_from", "delete"})
_COPIES = frozenset({"copy_out", "copy_in"})
_BYTES = frozenset({"get_into", "put_from", "seal"}) | _COPIES
_ALL = _BATCH | _COPIES | {"scan", "close", "row", "seal", "proves", "holds"}
_SPOILED = frozenset({FaultKind.SHORT, FaultKind.ZEROS, FaultKind.FLIP, FaultKind.OTHER})
_WHOLE = frozenset({FaultKind.RAISE, FaultKind.SLOW, FaultKind.NEVER})
POSSIBLE = {
    **dict.fromkeys(_WHOLE, _ALL),
    **dict.fromkeys(_SPOILED, _BYTES),
    **dict.fromkeys((FaultKind.FULL, FaultKind.UNAVAILABLE), _BATCH),
    FaultKind.OTHER: _BYTES - _COPIES,
    FaultKind.LOST: _BATCH | _COPIES | {"seal", "proves", "holds"},
    FaultKind.LATE: _BATCH | _COPIES,
}
"""Calls that can have each fault."""

_ANSWERS = {
    FaultKind.LOST: Outcome.OK,
    FaultKind.LATE: Outcome.TIMEOUT,
    FaultKind.SLOW: Outcome.TIMEOUT,
    FaultKind.FULL: Outcome.FULL,
    FaultKind.UNAVAILABLE: Outcome.UNAVAILABLE,
}
"""What is said without asking the tier."""


class BrokenError(Exception):
    """What a faulty tier or place raises: no error of ours, as those of clients and drivers are none."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFault:
    """One fault, and when it strikes.

    Attributes:
        kind: what goes wrong.
        call: name of the method.
        at: which of its calls, counted from 0; None: each.
        name: of the entry; None: each of the call. RAISE, SLOW and NEVER strike the whole call that has it.
        bit: which one a FLIP changes, counted from the first of the frame.
        wait_s: seconds of the fake clock that a SLOW call takes; 0: it waits for the gate.
        gate: set by the test to let a call go on, or to let a fence come.
        reached: set when a call waits for the gate.
    """

    kind: FaultKind
    call: str
    at: int | None = None
    name: bytes | None = None
    bit: int = 0
    wait_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        possible = POSSIBLE[self.kind]
        if self.call not in possible:
            raise InputError(f"{self.kind} of {self.call!r}", limit=", ".join(sorted(possible)))


Script = Sequence[PlannedFault]
"""Of those that strike one entry of one call, the first does."""


class Stage:
    """Plays a script: counts calls, and waits or raises where that is the fault. Thread-safe.

    Args:
        script: what goes wrong.
        clock: what SLOW moves.

    Attributes:
        met: call, its number, and what went wrong with it, in order.
    """

    def __init__(self, script: Script, clock: FakeClock | None) -> None:
        self.met: list[tuple[str, int, FaultKind]] = []
        self._script = tuple(script)
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        if clock is None and any(fault.wait_s for fault in script):
            raise InputError("a fault takes time", remedy="give a FakeClock, too")

    def meet(
        self, call: str, names: Sequence[bytes | None] = (None,), within_s: float | None = None
    ) -> list[PlannedFault | None]:
        """What goes wrong with each entry of a call; the waiting is over when it returns.

        Args:
            call: name of the method.
            names: of the entries; None for a call without.
            within_s: the call's deadline; None for one without.

        Raises:
            BrokenError: that is the fault.
        """
        with self._lock:
            number = self._calls[call]
            self._calls[call] += 1
            strike = [
                fault
                for fault in self._script
                if fault.call == call
                and fault.at in (None, number)
                and (fault.name is None or fault.name in names)
            ]
            self.met += [(call, number, fault.kind) for fault in strike]
        for fault in strike:
            if not self._waited(fault, within_s):
                return [fault] * len(names)
        apart = [fault for fault in strike if fault.kind not in _WHOLE]
        return [
            next((fault for fault in apart if fault.name in (None, name)), None) for name in names
        ]

    def _waited(self, fault: PlannedFault, within_s: float | None) -> bool:
        """Raises or waits, if that is the fault; whether the call goes on."""
        if fault.kind is FaultKind.RAISE:
            raise BrokenError(f"{fault.call} breaks, as planned")
        if fault.wait_s and self._clock is not None:
            self._clock.advance_s(fault.wait_s)
            return True
        if fault.kind in (FaultKind.SLOW, FaultKind.NEVER):
            fault.reached.set()
            return fault.gate.wait(within_s if fault.kind is FaultKind.SLOW else None)
        return True


def _spoil(fault: PlannedFault, good: Row, row: Row) -> None:
    """Fills a row with what a fault makes of the right bytes."""
    size_bytes = len(good)
    if fault.kind is FaultKind.ZEROS:
        row[:] = 0
    elif fault.kind is FaultKind.SHORT:
        row[: size_bytes // 2] = good[: size_bytes // 2]
    else:
        row[:] = good
    if fault.kind is FaultKind.FLIP:
        row[fault.bit // 8 % size_bytes] ^= 1 << fault.bit % 8


def _like(payload: Payload) -> Payload:
    return Payload(np.zeros_like(payload.row), np.zeros_like(payload.sums))


_Faults = list[PlannedFault | None]
_Run = Callable[[list[int], _Faults], list[Outcome]]


class FaultyTier:
    """A tier over another one, whose calls fail as planned; what is not planned passes through in one batch.

    Args:
        tier: what is wrapped, and closed with this one.
        script: what goes wrong.
        clock: what SLOW moves.

    Attributes:
        met: see `Stage`.
    """

    def __init__(self, tier: Tier, script: Script, clock: FakeClock | None = None) -> None:
        self.traits = tier.traits
        self._tier = tier
        self._stage = Stage(script, clock)
        self._late: list[Callable[[], list[Outcome]]] = []
        self.met = self._stage.met

    def exists(self, entries: Sequence[Entry], within_s: float) -> list[Outcome]:
        def run(which: list[int], _: _Faults) -> list[Outcome]:
            return self._tier.exists([entries[index] for index in which], within_s)

        return self._answer("exists", entries, within_s, run)

    def delete(self, entries: Sequence[Entry], within_s: float) -> list[Outcome]:
        def run(which: list[int], _: _Faults) -> list[Outcome]:
            return self._tier.delete([entries[index] for index in which], within_s)

        return self._answer("delete", entries, within_s, run)

    def get_into(
        self, entries: Sequence[Entry], payloads: Sequence[Payload], within_s: float
    ) -> list[Outcome]:
        def run(which: list[int], faults: _Faults) -> list[Outcome]:
            some = [entries[index] for index in which]
            bad = {index: fault for index in which if (fault := _spoiling(faults[index]))}
            got = [_like(payloads[index]) if index in bad else payloads[index] for index in which]
            outcomes = self._tier.get_into(some, got, within_s)
            for index, outcome, good in zip(which, outcomes, got, strict=True):
                if index in bad and outcome is Outcome.OK:
                    self._pass_on(bad[index], entries[index], good, payloads[index])
            return outcomes

        return self._answer("get_into", entries, within_s, run)

    def put_from(
        self, entries: Sequence[Entry], payloads: Sequence[Payload], within_s: float
    ) -> list[Outcome]:
        def run(which: list[int], faults: _Faults) -> list[Outcome]:
            given = []
            for index in which:
                payload, fault = payloads[index], _spoiling(faults[index])
                given.append(_like(payload) if fault else payload)
                if fault:
                    self._pass_on(fault, entries[index], payload, given[-1])
            return self._tier.put_from([entries[index] for index in which], given, within_s)

        return self._answer("put_from", entries, within_s, run)

    def _answer(
        self, call: str, entries: Sequence[Entry], within_s: float, run: _Run
    ) -> list[Outcome]:
        faults = self._stage.meet(call, [entry.name for entry in entries], within_s)
        said = [_ANSWERS.get(fault.kind) if fault else None for fault in faults]
        late = [index for index, one in enumerate(faults) if one and one.kind is FaultKind.LATE]
        if late:
            self._late.append(lambda: run(late, faults))
        asked = [index for index, outcome in enumerate(said) if outcome is None]
        answers = dict(zip(asked, run(asked, faults), strict=True))
        return [answers[i] if outcome is None else outcome for i, outcome in enumerate(said)]

    def _pass_on(self, fault: PlannedFault, entry: Entry, good: Payload, into: Payload) -> None:
        if fault.kind is FaultKind.OTHER:
            good = self._other(entry, good)
        _spoil(fault, good.row, into.row)
        into.sums[:] = good.sums

    def _other(self, entry: Entry, like: Payload) -> Payload:
        payload = _like(like)
        for other in self._tier.scan():
            if other.name != entry.name and self._tier.get_into([other], [payload], 0) == [
                Outcome.OK
            ]:
                return payload
        raise MisuseError("the tier has no other entry", remedy="put one before the fault")

    def finish_late(self) -> list[Outcome]:
        """Does what LATE calls have left, in order; how each of their entries ended, which nobody was told."""
        late, self._late = self._late, []
        return [outcome for run in late for outcome in run()]

    def scan(self) -> Iterable[Entry]:
        self._stage.meet("scan")
        return self._tier.scan()

    def close(self) -> None:
        self._stage.meet("close")
        self._tier.close()


def _spoiling(fault: PlannedFault | None) -> PlannedFault | None:
    return fault if fault and fault.kind in _SPOILED else None


class FaultyHost(HostTier):
    """A host tier whose work in place fails as planned; its own calls of `row`, `proves` and `holds` count, too.

    SHORT, ZEROS and FLIP change the bytes of a frame behind `seal`; OTHER exchanges them with those of another frame;
    LOST forgets the name, and makes `proves` a MISS and `holds` wrong.

    Args:
        size: of the tier.
        script: what goes wrong.
        fake_clock: what SLOW moves.
        **more: as `HostTier`.

    Attributes:
        met: see `Stage`.
    """

    def __init__(
        self, size: HostSize, script: Script, *, fake_clock: FakeClock | None = None, **more: Any
    ) -> None:
        super().__init__(size, **more)
        self._stage = Stage(script, fake_clock)
        self.met = self._stage.met

    def row(self, frame: int) -> Row:
        self._stage.meet("row", [self._name(frame)])
        return super().row(frame)

    def seal(self, frame: int, name: bytes) -> None:
        (fault,) = self._stage.meet("seal", [name])
        super().seal(frame, name)
        if fault is None:
            return
        row = super().row(frame)
        good = row.copy()
        if fault.kind is FaultKind.LOST:
            self.forget(frame)
        elif fault.kind is FaultKind.OTHER:
            other = super().row(self._other(frame))
            row[:], other[:] = other.copy(), good
        else:
            row[:] = 0
            _spoil(fault, good, row)

    def _other(self, frame: int) -> int:
        for entry in self.scan():
            if entry.slot != frame:
                return entry.slot
        raise MisuseError("the tier has no other frame", remedy="seal one before the fault")

    def proves(self, frame: int, name: bytes) -> Outcome:
        (fault,) = self._stage.meet("proves", [name])
        return super().proves(frame, name) if fault is None else Outcome.MISS

    def holds(self, frame: int, layer: int) -> bool:
        (fault,) = self._stage.meet("holds", [self._name(frame)])
        return fault is None and super().holds(frame, layer)

    def _name(self, frame: int) -> bytes:
        name: bytes = self._names[frame].tobytes()
        return name


class FaultyPlace:
    """A place over another one, whose copies fail as planned: see `move.place.Place`.

    SHORT, ZEROS and FLIP strike each frame of a copy; LATE copies, but its fence comes with the gate.

    Args:
        place: what is wrapped; copies at once where a fault strikes bytes.
        script: what goes wrong; faults without a name.
        clock: what SLOW moves.

    Attributes:
        met: see `Stage`.
    """

    def __init__(self, place: Place, script: Script, clock: FakeClock | None = None) -> None:
        self.frame_bytes = place.frame_bytes
        self.bounds = place.bounds
        self.frames = place.frames
        self._place = place
        self._stage = Stage(script, clock)
        self.met = self._stage.met

    def copy_out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        (fault,) = self._stage.meet("copy_out")
        if fault is None or not _spoiling(fault):
            return self._plain(fault, lambda: self._place.copy_out(frames, rows))
        for good, row in zip(self._rows(frames), rows, strict=True):
            _spoil(fault, good, row)
        return PASSED

    def copy_in(
        self, rows: Sequence[Row], frames: FrameIds, layers: tuple[int, int] | None = None
    ) -> Fence:
        (fault,) = self._stage.meet("copy_in")
        if fault is None or not _spoiling(fault):
            return self._plain(fault, lambda: self._place.copy_in(rows, frames, layers))
        spoiled = self._rows(frames)
        for good, row in zip(rows, spoiled, strict=True):
            _spoil(fault, good, row)
        return self._place.copy_in(spoiled, frames, layers)

    def _plain(self, fault: PlannedFault | None, copy: Callable[[], Fence]) -> Fence:
        if fault is None:
            return copy()
        if fault.kind is FaultKind.LATE:
            at_once(copy())
            return GateFence(fault.gate)
        return PASSED

    def _rows(self, frames: FrameIds) -> list[Row]:
        rows: list[Row] = [np.empty(self.frame_bytes, np.uint8) for _ in frames]
        at_once(self._place.copy_out(frames, rows))
        return rows
