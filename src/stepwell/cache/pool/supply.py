"""Frames for whoever fills some, and what becomes of those that come back.

Owns: when a frame is free. Must not know: requests, groups, tiers. Neighbours: `core.prefixes` says what may leave;
`holdings` and `below` take and give back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.page import Status
from stepwell.core.prefixes import Prefixes


class Supply:
    """The frames of a pool. Not thread-safe: the pool has the lock.

    A frame that a save reads stays LEAVING until the save has released it, whatever has become of its page.

    Args:
        frames: with their statuses.
        prefixes: what is sealed in them.
        poison: overwrites frames that become free, or None.
    """

    def __init__(
        self, frames: Frames, prefixes: Prefixes, poison: Callable[[FrameIds], None] | None
    ) -> None:
        self.frames = frames
        self.prefixes = prefixes
        self.parked = 0
        self.let_go: Callable[[], None] | None = None  # ends the holds of who waits
        self._poison = poison
        self._reads: npt.NDArray[np.uint16] = np.zeros(frames.count, np.uint16)
        self._parked: npt.NDArray[np.bool_] = np.zeros(frames.count, np.bool_)

    def take(self, n: int, *, waiters: bool = True) -> FrameIds | None:
        """Takes n FILLING frames, evicting as much as that takes; all of them, or none.

        Args:
            n: frames.
            waiters: whether requests that wait with what came for them may lose their hold on it.
        """
        # What has left and is still read comes back soon: no more is evicted in its place.
        missing = n - self.frames.free - self.parked
        if missing > self.prefixes.evictable and waiters and self.let_go is not None:
            # Else those who wait could hold all that the first of them needs.
            self.let_go()
        if missing > 0 and not self.prefixes.evict(missing):
            return None
        self.collect()
        return self.frames.reserve(n)

    def short(self, n: int) -> int:
        """By how many frames n is too many, even if every page that may leave did."""
        return max(0, n - self.frames.free - self.prefixes.evictable)

    def give_back(self, frames: FrameIds) -> None:
        """Frees frames that are FILLING, LEAVING or QUARANTINED, and that nothing reads."""
        if self._poison is not None:
            self._poison(frames)
        self.frames.move(frames, Status.FREE)

    def collect(self) -> None:
        """Frees what left the indexes since the last time, but for what is read."""
        left = self.prefixes.collect()
        if not len(left):
            return
        read = self._reads[left] > 0
        if read.any():
            self._parked[left[read]] = True
            self.parked += int(read.sum())
            left = left[~read]
        self.give_back(left)

    def read(self, frames: FrameIds) -> None:
        """A save reads these frames, each of them once."""
        self._reads[frames] += 1

    def released(self, frames: FrameIds) -> None:
        """A save has read them: those that have left meanwhile are free."""
        self._reads[frames] -= 1
        free = frames[self._parked[frames] & (self._reads[frames] == 0)]
        self._parked[free] = False
        self.parked -= len(free)
        self.give_back(free)

    def check(self, findings: Findings, reads: npt.NDArray[np.int64]) -> None:
        """Notes frames that are read uncounted, or that have left and are neither free nor read.

        Args:
            findings: gets what is broken.
            reads: by how many saves each frame is read; shape [frames].
        """
        findings.expect(np.array_equal(reads, self._reads), "a save reads a frame uncounted")
        leaving = np.flatnonzero(self.frames.status == Status.LEAVING)
        parked = np.flatnonzero(self._parked)
        findings.expect(np.array_equal(leaving, parked), "a LEAVING frame waits for no save")
        findings.expect(self.parked == len(parked), "parked frames are counted wrong")
