"""What ledger and movers tell each other: numbered plans go down, reports come back.

Owns: the records and their plain form, which any channel of bytes can carry. Must not know: threads, memory, where a
frame lies. Neighbours: `cache.ledger` makes plans and reads reports; `move.mover` does the reverse.

    ledger ──Plan──▶ mover     one for every movement, to every rank
    ledger ◀──Report── mover   released: the source may be overwritten · ended: what became of each frame ·
                               clear: nothing of the plan is touched any more
    ledger ◀──Grown── mover    frames of the tier that have become ready

A movement may end before it is clear: when its deadline passes while a call hangs. What it touches stays out of use
until it is clear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds

KEY_BYTES = 32
MAX_PLAN_FRAMES = 1 << 24

Which = npt.NDArray[np.uint32]
"""Which bytes of a content key a frame has: group in the upper 16 bits, and which of the frames of a window page or
state in the lower; shape [n]."""


class Verb(IntEnum):
    """What a plan moves."""

    SAVE = 1
    """From the device into frames of the host tier."""
    LOAD = 2
    """From frames of the host tier into the device."""
    WIPE = 3
    """Nowhere: the bytes are overwritten."""


class Outcome(IntEnum):
    """What became of one frame: the whole set, for every tier and every copy."""

    OK = 0
    MISS = 1
    """It is not there, or something else is."""
    CORRUPT = 2
    """It is there, and its sums do not hold."""
    TIMEOUT = 3
    REFUSED = 4
    """The tier does not do this."""
    FULL = 5
    UNAVAILABLE = 6
    """The tier failed or is gone."""


def _bad(kind: str, why: str) -> InputError:
    return InputError(f"a {kind} cannot be read: {why}", remedy="both sides must run one release")


def _ints(kind: str, plain: Any, names: tuple[str, ...]) -> list[int]:
    values: list[int] = []
    for name in names:
        value = plain[name]
        if type(value) is not int or not 0 <= value < 2**53:
            # The value is not shown: text of a number of 5,000 digits, or of 100,000 lists, raises by itself.
            raise _bad(kind, f"{name} is no whole number from 0 up to {2**53 - 1}")
        values.append(value)
    return values


def _array(kind: str, plain: Any, name: str, dtype: str) -> npt.NDArray[Any]:
    value = plain[name]
    size = np.dtype(dtype).itemsize
    if not isinstance(value, bytes) or len(value) % size or len(value) > MAX_PLAN_FRAMES * size:
        raise _bad(kind, f"{name} is no array of {size}-byte numbers")
    return np.frombuffer(value, dtype).copy()


def _fields(kind: str, plain: Any, names: set[str]) -> None:
    if not isinstance(plain, Mapping) or set(plain) != names:
        raise _bad(kind, f"its fields are not {sorted(names)}")


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One movement of frames; the n-th of each array belong together.

    Attributes:
        number: of the plan, never used again.
        verb: what is moved where.
        place: number of the device memory, as the mover knows it.
        outside: frames of that memory; shape [n], or [0] for a wipe.
        inside: frames of the host tier; shape [n].
        keys: content keys, 32 bytes each, one after the other.
        which: which bytes of each key.
        within_ms: milliseconds until it is too late.
    """

    number: int
    verb: Verb
    place: int
    outside: FrameIds
    inside: FrameIds
    keys: bytes
    which: Which
    within_ms: int

    def __len__(self) -> int:
        return len(self.inside)

    def key(self, index: int) -> bytes:
        """The content key of one frame."""
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def plain(self) -> dict[str, int | bytes]:
        """Numbers and bytes only, for any encoder."""
        return {
            "number": self.number,
            "verb": int(self.verb),
            "place": self.place,
            "outside": self.outside.astype("<i4").tobytes(),
            "inside": self.inside.astype("<i4").tobytes(),
            "keys": self.keys,
            "which": self.which.astype("<u4").tobytes(),
            "within_ms": self.within_ms,
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """Reads what `plain` gave.

        Raises:
            InputError: it is no plan; whoever sent it, nothing of it is believed.
        """
        names = ("number", "verb", "place", "within_ms")
        _fields("plan", plain, {*names, "outside", "inside", "keys", "which"})
        number, verb, place, within_ms = _ints("plan", plain, names)
        if verb not in Verb.__members__.values():
            raise _bad("plan", f"verb is {verb}")
        outside = _array("plan", plain, "outside", "<i4").astype(np.int32, copy=False)
        inside = _array("plan", plain, "inside", "<i4").astype(np.int32, copy=False)
        which = _array("plan", plain, "which", "<u4").astype(np.uint32, copy=False)
        keys, n = plain["keys"], len(inside)
        if not isinstance(keys, bytes) or len(keys) != n * KEY_BYTES or len(which) != n:
            raise _bad("plan", f"it has {n} frames and other numbers of keys")
        if len(outside) != (0 if verb == Verb.WIPE else n):
            raise _bad("plan", f"it has {n} frames inside and {len(outside)} outside")
        if n and min(int(inside.min()), int(outside.min()) if len(outside) else 0) < 0:
            raise _bad("plan", "a frame is negative")
        filled = outside if verb == Verb.LOAD else inside
        if len(np.unique(filled)) != n:
            raise _bad("plan", "a frame is filled twice")
        return cls(number, Verb(verb), place, outside, inside, keys, which, within_ms)


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What a mover says of one plan.

    Attributes:
        plan: its number.
        mover: rank of who says it.
        outcomes: of each frame, as `Outcome`; shape [n]; None before it has ended.
        released: the source may be overwritten.
        clear: nothing of the plan is touched any more.
    """

    plan: int
    mover: int
    outcomes: npt.NDArray[np.uint8] | None
    released: bool
    clear: bool

    def plain(self) -> dict[str, int | bytes]:
        """Numbers and bytes only, for any encoder."""
        ended = self.outcomes is not None
        return {
            "plan": self.plan,
            "mover": self.mover,
            "ended": int(ended),
            "outcomes": b"" if self.outcomes is None else self.outcomes.tobytes(),
            "released": int(self.released),
            "clear": int(self.clear),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """Reads what `plain` gave.

        Raises:
            InputError: it is no report.
        """
        names = ("plan", "mover", "ended", "released", "clear")
        _fields("report", plain, {*names, "outcomes"})
        plan, mover, ended, released, clear = _ints("report", plain, names)
        if max(ended, released, clear) > 1:
            raise _bad("report", "a flag is neither 0 nor 1")
        outcomes = _array("report", plain, "outcomes", "u1")
        if len(outcomes) and (not ended or int(outcomes.max()) > max(Outcome)):
            raise _bad("report", "its outcomes are none")
        return cls(plan, mover, outcomes if ended else None, bool(released), bool(clear))


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """Frames of a mover's tier that have become ready.

    Attributes:
        mover: rank of who says it.
        frames: their numbers; shape [n].
    """

    mover: int
    frames: FrameIds

    def plain(self) -> dict[str, int | bytes]:
        """Numbers and bytes only, for any encoder."""
        return {"mover": self.mover, "frames": self.frames.astype("<i4").tobytes()}

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """Reads what `plain` gave.

        Raises:
            InputError: it is no such record.
        """
        _fields("record of new frames", plain, {"mover", "frames"})
        (mover,) = _ints("record of new frames", plain, ("mover",))
        frames = _array("record of new frames", plain, "frames", "<i4").astype(np.int32, copy=False)
        if len(frames) and int(frames.min()) < 0:
            raise _bad("record of new frames", "a frame is negative")
        return cls(mover, frames)
