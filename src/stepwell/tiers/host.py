"""The host tier: fixed frames in this machine's memory, pinned where that is permitted.

Owns: one arena, and which name and sums the bytes of each frame have. Must not know: what is evicted, who waits,
what a key means: who calls says in which frame something lies, and the name proves it. Neighbours: `memory.arena` has
the bytes; `move.mover` fills and reads frames in place, and everybody else uses the calls of `tier`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.base.clock import Clock
from stepwell.base.errors import InputError, MisuseError
from stepwell.base.threads import Health
from stepwell.core.frames import MAX_FRAMES, FrameIds
from stepwell.core.plan import Outcome
from stepwell.memory.arena import Arena
from stepwell.memory.ask import PIECE_BYTES, Ask, RegionRecord, Trait
from stepwell.memory.gpu import Gpu
from stepwell.memory.growth import Growth
from stepwell.memory.lease import Lease, Short
from stepwell.memory.region import Region
from stepwell.memory.system import PAGE_BYTES
from stepwell.tiers.tier import Entry, Payload, Row, Sums, Traits, holds, layer_sums, named

NAME_BYTES = 66
"""Content key and part digest of 32 bytes each, and two for the number of the frame in its record."""

_NAMELESS = bytes(NAME_BYTES)
_NOWHERE = -1
_BOOK_BYTES = 51
"""Of one frame in the books of tier (8) and arena (43): where it lies, whose it is, what may be done with it."""


@dataclass(frozen=True, slots=True)
class HostSize:
    """How many frames a number of bytes holds, with all that they need beside their bytes.

    Attributes:
        frame_bytes: of one frame.
        bounds: where each layer begins inside of it, and the end of the last; shape [layers + 1].
        frames: in all.
        pinned: whether the memory should stay where it is.
        node: memory node, or None for any.
    """

    frame_bytes: int
    bounds: tuple[int, ...]
    frames: int
    pinned: bool = False
    node: int | None = None

    def __post_init__(self) -> None:
        if type(self.frame_bytes) is not int or self.frame_bytes < 1:
            raise InputError(f"frames of {self.frame_bytes!r} bytes", limit="1 or more")
        if type(self.frames) is not int or not 1 <= self.frames <= MAX_FRAMES:
            raise InputError(
                f"{self.frames!r} frames of {self.frame_bytes} bytes",
                limit=f"1 to {MAX_FRAMES}",
                remedy="raise host.capacity_bytes to at least one page",
            )
        bounds = self.bounds
        if (
            type(bounds) is not tuple
            or any(type(bound) is not int for bound in bounds)
            or (*bounds[:1], *bounds[1:][-1:]) != (0, self.frame_bytes)
            or any(first >= last for first, last in itertools.pairwise(bounds))
        ):
            raise InputError(
                f"layers begin at {bounds!r}", limit=f"rising from 0 up to {self.frame_bytes}"
            )

    @classmethod
    def within(
        cls,
        capacity_bytes: int,
        frame_bytes: int,
        bounds: tuple[int, ...],
        *,
        pinned: bool = False,
        node: int | None = None,
    ) -> HostSize:
        """As many frames as fit into a number of bytes, names, sums and books included.

        Raises:
            InputError: not even one does.
        """
        each = cls(frame_bytes, bounds, 1).each_bytes
        return cls(frame_bytes, bounds, min(capacity_bytes // each, MAX_FRAMES), pinned, node)

    @property
    def stride_bytes(self) -> int:
        """From one frame to the next: whole memory pages, as direct disk access wants them."""
        return -(-self.frame_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def each_bytes(self) -> int:
        """All memory that one frame costs."""
        return self.stride_bytes + 8 * len(self.bounds) + NAME_BYTES + _BOOK_BYTES

    @property
    def region_bytes(self) -> int:
        """Of a region for all of them: a piece is whole frames, so none lies in two."""
        return self.frames * self.stride_bytes

    @property
    def piece_bytes(self) -> int:
        """What is registered at once: as `memory` has it, or one frame where that is larger."""
        return max(PIECE_BYTES // self.stride_bytes, 1) * self.stride_bytes


class HostTier:
    """Frames in memory, by number.

    What an entry is: a frame with a name and sums. It enters with `seal` or `put_from`, and leaves with `delete` or
    when its frame is filled anew. Frames become ready in the background; `grown` tells which. Different threads may
    use different frames at once; nobody may use one frame from two. A reader is given only bytes whose name and sums
    hold, so a mistake of whoever numbers the frames is a miss. What cannot lie here (an unknown frame, one that is
    not ready, another length) is refused, one entry at a time. Nothing waits. A closed tier has nothing and takes
    nothing.

    Args:
        size: of the tier.
        gpu: registers the memory if it is to be pinned; without one, pinned means locked.
        clock: for the deadlines of the arena.
        health: told when memory could not be had; the tier then stays at what it has.

    Raises:
        InputError: it is more than a region can have, or the node is none.
        RefusedError: there is no such memory.
    """

    def __init__(
        self,
        size: HostSize,
        *,
        gpu: Gpu | None = None,
        clock: Clock | None = None,
        health: Health | None = None,
    ) -> None:
        self.size = size
        self.traits = Traits(
            persistent=False,
            shared=False,
            slots=True,
            largest_bytes=size.frame_bytes,
            zero_copy=True,
            ranges=True,
        )
        count, layers = size.frames, len(size.bounds) - 1
        self._sums: npt.NDArray[np.uint64] = np.zeros((count, layers + 1), np.uint64)
        self._names: npt.NDArray[np.uint8] = np.zeros((count, NAME_BYTES), np.uint8)
        self._offsets: npt.NDArray[np.int64] = np.full(count, _NOWHERE, np.int64)
        self._leases: list[Lease] = []
        with ExitStack() as undo:
            ask = Ask(
                size.region_bytes,
                pinned=size.pinned,
                node=size.node,
                may_lack=frozenset({Trait.PINNED, Trait.NODE}),
                piece_bytes=size.piece_bytes,
            )
            self._region = undo.enter_context(Region.open(ask, gpu=gpu))
            self._arena = undo.enter_context(
                Arena(size.frame_bytes, count, name="host", clock=clock)
            )
            self._growth: Growth = self._arena.grow(self._region, health)
            undo.pop_all()
        self._base = _bytes_of(self._region)
        self._closed = False

    @property
    def record(self) -> RegionRecord:
        """What was asked of the machine, and what it gave."""
        return self._region.record

    @property
    def frames(self) -> int:
        """The most frames."""
        return self.size.frames

    def grown(self) -> FrameIds:
        """The frames that have become ready since the last call; shape [n]."""
        ready = self._arena.free
        lease = self._arena.reserve(ready, "host tier") if ready else None
        if lease is None or isinstance(lease, Short):
            return np.empty(0, np.int32)
        self._leases.append(lease)
        frames = lease.frames
        begin = self._arena.addresses(lease).astype(np.int64)
        self._offsets[frames] = begin - self._region.address
        return frames

    @property
    def grew(self) -> bool:
        """Whether no more frames will become ready."""
        return self._growth.done

    def wait(self, within_s: float | None = None) -> bool:
        """Waits until all frames are ready; whether they are.

        Raises:
            RefusedError: the machine refused a part.
        """
        return self._growth.wait(within_s)

    def _ready(self, frame: int) -> bool:
        return 0 <= frame < self.size.frames and int(self._offsets[frame]) != _NOWHERE

    def _offset(self, frame: int) -> int:
        if not self._ready(frame):
            raise MisuseError(
                f"frame {frame} of the host tier", limit="those that `grown` gave, until `close`"
            )
        return int(self._offsets[frame])

    def row(self, frame: int) -> Row:
        """The bytes of a frame, for whoever fills or reads it in place.

        Raises:
            MisuseError: it is not ready, or the tier is closed.
        """
        begin = self._offset(frame)
        return self._base[begin : begin + self.size.frame_bytes]

    def address(self, frame: int) -> int:
        """Of the first byte of a frame, for copies by a device.

        Raises:
            MisuseError: it is not ready, or the tier is closed.
        """
        return self._offset(frame) + self._region.address

    def seal(self, frame: int, name: bytes) -> None:
        """Says that a frame was filled in place, and sums it up.

        Raises:
            InputError: the name has another length.
            MisuseError: the frame is not ready, or the tier is closed.
        """
        if len(name) != NAME_BYTES:
            raise InputError(f"a name of {len(name)} bytes", limit=f"{NAME_BYTES}")
        layer_sums(self.row(frame), self.size.bounds, self._sums[frame], name)
        self._names[frame] = np.frombuffer(name, np.uint8)

    def proves(self, frame: int, name: bytes) -> Outcome:
        """Whether a frame has this name, and sums that belong to it; its bytes are not looked at."""
        if not self._ready(frame) or self._names[frame].tobytes() != name:
            return Outcome.MISS
        return Outcome.OK if named(self._sums[frame], name) else Outcome.CORRUPT

    def holds(self, frame: int, layer: int) -> bool:
        """Whether the bytes of one layer are those that were sealed."""
        return holds(self.row(frame), self.size.bounds, self._sums[frame], layer)

    def _whole(self, frame: int, name: bytes) -> Outcome:
        outcome = self.proves(frame, name)
        if outcome is Outcome.OK and not all(
            self.holds(frame, layer) for layer in range(len(self.size.bounds) - 1)
        ):
            return Outcome.CORRUPT
        return outcome

    def exists(self, entries: Sequence[Entry], within_s: float) -> list[Outcome]:  # noqa: ARG002
        return [self.proves(entry.slot, entry.name) for entry in entries]

    def get_into(
        self,
        entries: Sequence[Entry],
        payloads: Sequence[Payload],
        within_s: float,  # noqa: ARG002 - memory does not wait
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for entry, payload in zip(entries, payloads, strict=True):
            whole = self._whole(entry.slot, entry.name)
            outcome = whole if self._fits(payload) else Outcome.REFUSED
            if outcome is Outcome.OK:
                np.copyto(payload.row, self.row(entry.slot))
                np.copyto(payload.sums, self._sums[entry.slot])
            outcomes.append(outcome)
        return outcomes

    def put_from(
        self,
        entries: Sequence[Entry],
        payloads: Sequence[Payload],
        within_s: float,  # noqa: ARG002 - memory does not wait
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for entry, payload in zip(entries, payloads, strict=True):
            frame, name = entry.slot, entry.name
            if len(name) != NAME_BYTES or not self._ready(frame) or not self._fits(payload):
                outcomes.append(Outcome.REFUSED)
                continue
            self.forget(frame)
            np.copyto(self.row(frame), payload.row)
            np.copyto(self._sums[frame], payload.sums)
            self._names[frame] = np.frombuffer(name, np.uint8)
            outcomes.append(Outcome.OK)
        return outcomes

    def _fits(self, payload: Payload) -> bool:
        """Whether it is one frame: numpy would copy a shorter one again and again."""
        row, sums = payload.row, payload.sums
        return (row.shape, sums.shape) == ((self.size.frame_bytes,), (len(self.size.bounds),))

    def delete(self, entries: Sequence[Entry], within_s: float) -> list[Outcome]:  # noqa: ARG002
        outcomes: list[Outcome] = []
        for entry in entries:
            outcome = self.proves(entry.slot, entry.name)
            if outcome is not Outcome.MISS:
                self.wipe(entry.slot)
                outcome = Outcome.OK
            outcomes.append(outcome)
        return outcomes

    def wipe(self, frame: int) -> None:
        """Overwrites a frame, whatever is in it."""
        self._names[frame] = 0
        self._sums[frame] = 0
        self.row(frame)[:] = 0

    def forget(self, frame: int) -> None:
        """A frame is about to be filled anew: until it is sealed it has no name."""
        self._names[frame] = 0

    def scan(self) -> Iterator[Entry]:
        for frame in np.flatnonzero(self._names.any(axis=1)).tolist():
            name = self._names[frame].tobytes()
            if name != _NAMELESS:  # it has left since the scan began
                yield Entry(name, frame)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._growth.stop()
        self._names[:] = 0
        self._offsets[:] = _NOWHERE
        self._base = np.empty(0, np.uint8)
        for lease in self._leases:
            lease.release()
        self._arena.close()
        self._region.close()


def _bytes_of(region: Region) -> Row:
    """All bytes of a region as one array: who has it must not outlive the region."""
    buffer: Any = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
    rows: Row = np.frombuffer(buffer, np.uint8)
    return rows


def payloads_like(size: HostSize, n: int) -> list[Payload]:
    """Memory for n frames of a tier, to get them into."""
    rows = np.empty((n, size.frame_bytes), np.uint8)
    sums: npt.NDArray[np.uint64] = np.empty((n, len(size.bounds)), np.uint64)
    return [Payload(row, of) for row, of in zip(rows, sums, strict=True)]


def sum_up(payload: Payload, size: HostSize, name: bytes) -> Sums:
    """Sums of a payload that its maker has filled."""
    layer_sums(payload.row, size.bounds, payload.sums, name)
    return payload.sums
