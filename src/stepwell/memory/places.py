"""Where each frame of an arena lies: its region and offset, for any number of regions.

Must not know who uses frames. Neighbours: `arena` has one of these; movers ask it for addresses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError, MisuseError
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds
from stepwell.memory.region import Region

_NOWHERE = -1
Addresses = npt.NDArray[np.uint64]
"""Addresses of first bytes; shape [n]."""


class Places:
    """Frames of equal size in several regions. Not thread-safe: the owner has the lock.

    Frames lie `stride_bytes` apart and never across the border of two registered pieces, so a copy of one
    frame is one transfer. The frames of a region that left are given to the next one under their numbers.

    Args:
        frame_bytes: of one frame.
        count: the most frames.
        align_bytes: frames begin at multiples of it, a power of two up to the page size.
    """

    def __init__(self, frame_bytes: int, count: int, align_bytes: int) -> None:
        self.count = count
        self.frame_bytes = frame_bytes
        self.stride_bytes = -(-frame_bytes // align_bytes) * align_bytes
        self._slot: npt.NDArray[np.int16] = np.full(count, _NOWHERE, np.int16)
        self._address: Addresses = np.zeros(count, np.uint64)
        self._regions: list[Region | None] = []
        self._numbers: dict[Region, int] = {}
        self._entered = 0
        self._counts: dict[Region, int] = {}
        # Vacant frame numbers as a stack, so that a region of many pieces costs no look at all frames for each.
        self._vacant: FrameIds = np.arange(count - 1, -1, -1, dtype=np.int32)

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them."""
        return tuple(region for region in self._regions if region is not None)

    def capacity(self, region: Region) -> int:
        """Frames that a region has room for."""
        return self._fitting(region.size_bytes, region.piece_bytes)

    def _fitting(self, ready_bytes: int, piece_bytes: int) -> int:
        """Frames that lie in the first bytes of a region whole."""
        whole, rest = divmod(ready_bytes, piece_bytes)
        return whole * (piece_bytes // self.stride_bytes) + rest // self.stride_bytes

    def enter(self, region: Region) -> None:
        """A region that has no frames yet.

        Raises:
            MisuseError: it is here already.
        """
        if region in self._regions:
            raise MisuseError(
                "the region is part of this arena already", limit="once", remedy="drain it"
            )
        if not len(self._vacant):
            raise InputError("the arena has no room for a region", limit=f"{self.count} frames")
        self._numbers[region] = self._entered
        self._entered += 1
        self._counts[region] = 0
        if None in self._regions:
            self._regions[self._regions.index(None)] = region
        elif len(self._regions) < np.iinfo(np.int16).max:
            self._regions.append(region)
        else:
            raise InputError(f"{len(self._regions)} regions", limit="32,767 in one arena")

    def extend(self, region: Region, ready_bytes: int) -> FrameIds:
        """Gives numbers to the frames that have become ready.

        Args:
            region: has entered.
            ready_bytes: usable from its first byte on, not less than before.

        Returns:
            The new frames; fewer than became ready when all numbers are given.
        """
        slot = self._slot_of(region)
        piece_bytes = region.piece_bytes
        have = self._counts[region]
        fitting = min(self._fitting(ready_bytes, piece_bytes), have + len(self._vacant))
        new = np.arange(have, max(have, fitting))
        left = len(self._vacant) - len(new)
        vacant: FrameIds = self._vacant[left:][::-1].copy()
        self._vacant = self._vacant[:left]
        self._counts[region] = have + len(new)
        in_piece = piece_bytes // self.stride_bytes
        offsets = new // in_piece * piece_bytes + new % in_piece * self.stride_bytes
        self._slot[vacant] = slot
        self._address[vacant] = (region.address + offsets).astype(np.uint64)
        return vacant

    def number(self, region: Region) -> int:
        """Of a region that is here; no other one ever gets it."""
        self._slot_of(region)
        return self._numbers[region]

    def of(self, region: Region) -> FrameIds:
        """The frames of a region, ascending; linear in all frames."""
        return np.flatnonzero(self._slot == self._slot_of(region)).astype(np.int32)

    def within(self, frames: FrameIds, region: Region) -> npt.NDArray[np.bool_]:
        """Which of some frames lie in a region."""
        inside: npt.NDArray[np.bool_] = self._slot[frames] == self._slot_of(region)
        return inside

    def leave(self, region: Region) -> None:
        """The region's frames are nowhere from now on."""
        slot = self._slot_of(region)
        freed = self.of(region)
        self._slot[freed] = _NOWHERE
        self._vacant = np.sort(np.concatenate([self._vacant, freed]))[::-1]
        self._regions[slot] = None
        del self._counts[region]
        del self._numbers[region]

    def address(self, frame: int) -> int:
        """Of the first byte of one frame."""
        return int(self._address[frame])

    def addresses(self, frames: FrameIds) -> Addresses:
        """Of the first bytes of some frames, in their order."""
        addresses: Addresses = self._address[frames]
        return addresses

    def place(self, frame: int) -> tuple[Region, int]:
        """Region and offset of a frame that is somewhere."""
        region = self._regions[int(self._slot[frame])]
        assert region is not None, "a frame that is somewhere"
        return region, self.address(frame) - region.address

    def _slot_of(self, region: Region) -> int:
        if region not in self._regions:
            raise MisuseError("the region is not part of this arena", remedy="add it first")
        return self._regions.index(region)

    @property
    def absent(self) -> npt.NDArray[np.bool_]:
        """Which frames lie nowhere; shape [count]."""
        absent: npt.NDArray[np.bool_] = self._slot == _NOWHERE
        return absent

    def check(self, findings: Findings) -> None:
        """Notes frames that overlap or leave their region."""
        for region in self.regions:
            begin = np.sort(self._address[self.of(region)]).astype(np.int64) - region.address
            findings.expect((np.diff(begin) >= self.stride_bytes).all(), "two frames overlap")
            inside = (begin >= 0) & (begin + self.frame_bytes <= region.size_bytes)
            findings.expect(inside.all(), f"a frame leaves the region of {region.place}")
