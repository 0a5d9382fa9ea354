"""The protocol of a tier: synchronous batch calls on named bytes, a status for each name, and traits as data.

Must not know: policies, queues, threads: whoever calls has them. Neighbours: `host` is the first tier; `move` calls
them; `testing.contract` is the suite that every tier passes, users' own too.

Where something lies is the caller's to say (`Entry.slot`), for tiers that have places; that it really lies there is
the tier's to prove: a call that names other bytes than those of the slot is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from stepwell.core.plan import Outcome

Row = npt.NDArray[np.uint8]
"""Bytes of one frame; shape [frame_bytes], contiguous."""

Sums = npt.NDArray[np.uint64]
"""One sum for each layer of a frame, then a digest over them and the name; shape [layers + 1]."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Names one stored frame.

    Attributes:
        name: content key, part digest and number of the frame in its record, which no other frame shares.
        slot: where the caller has put it; tiers that find by name alone ignore it.
    """

    name: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the bytes of one frame go or come from, with their sums beside them.

    Attributes:
        row: the bytes.
        sums: of the row; those that were stored, never made up by who reads.
    """

    row: Row
    sums: Sums


@dataclass(frozen=True, slots=True)
class Traits:
    """What a tier is, as data.

    Attributes:
        persistent: survives its process.
        shared: other processes see it.
        slots: it places by `Entry.slot`.
        largest_bytes: of one frame.
        zero_copy: frames lie in this process's memory.
        ranges: can read parts of a frame.
        lifetimes: drops entries by themselves after a time.
        secrets: asks for credentials.
    """

    persistent: bool
    shared: bool
    slots: bool
    largest_bytes: int
    zero_copy: bool = False
    ranges: bool = False
    lifetimes: bool = False
    secrets: bool = False


class Tier(Protocol):
    """One tier below the device.

    Each call takes any number of entries, duplicates and unknown ones included, and answers with one `Outcome`
    for each. Calls may come from several threads, never two at once about one slot. Faults are outcomes; what is
    raised is misuse, or a fault of the tier, which its caller counts as `UNAVAILABLE`. No call waits longer than it
    is told.
    """

    traits: Traits

    def exists(self, entries: Sequence[Entry], within_s: float) -> list[Outcome]:
        """OK for what a `get_into` would try; a hint where the tier is shared."""
        ...

    def get_into(
        self, entries: Sequence[Entry], payloads: Sequence[Payload], within_s: float
    ) -> list[Outcome]:
        """Copies bytes and sums out; those of anything but OK are not to be used."""
        ...

    def put_from(
        self, entries: Sequence[Entry], payloads: Sequence[Payload], within_s: float
    ) -> list[Outcome]:
        """Keeps bytes and sums under a name; what had the slot before is gone."""
        ...

    def delete(self, entries: Sequence[Entry], within_s: float) -> list[Outcome]:
        """Forgets, and overwrites where the tier can: OK, or MISS for what was not there."""
        ...

    def scan(self) -> Iterable[Entry]:
        """Everything that is here now."""
        ...

    def close(self) -> None:
        """Gives back what the tier holds; a second time does nothing."""
        ...


def layer_sums(row: Row, bounds: Sequence[int], sums: Sums, name: bytes) -> None:
    """Sums up a frame: xxh3 of each layer, then of name and sums.

    Args:
        row: the bytes.
        bounds: where each layer begins, and the end of the last; shape [layers + 1].
        sums: filled.
        name: of the frame.
    """
    digest: Any = xxhash.xxh3_64_intdigest
    for layer in range(len(bounds) - 1):
        sums[layer] = digest(row[bounds[layer] : bounds[layer + 1]])
    sums[-1] = _over(sums, name)


def _over(sums: Sums, name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name + sums[:-1].tobytes())


def named(sums: Sums, name: bytes) -> bool:
    """Whether sums are whole and belong to this name."""
    return int(sums[-1]) == _over(sums, name)


def holds(row: Row, bounds: Sequence[int], sums: Sums, layer: int) -> bool:
    """Whether one layer of a frame is what was summed up."""
    part: Any = row[bounds[layer] : bounds[layer + 1]]
    return xxhash.xxh3_64_intdigest(part) == int(sums[layer])
