"""Least recently used, with recency that flows from a leaving page to its parent.

Source: LRU itself is folklore; merging the whole record into the parent is what keeps a system
prompt that a thousand requests share alive after all their tails have left.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds


class Lru:
    """The offered page whose last use is longest ago goes first, after those of which nothing is expected.

    Order is a heap with one entry at most per frame. An entry may be older than the frame's last
    use (it was used again while it lay there): it then surfaces early and is put back where it
    belongs. Last uses only grow, so an entry is never younger than the truth, and the heap never
    holds more entries than there are frames: nothing is ever rebuilt.

    Args:
        count: frames.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tick = 0
        self._last_use: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._used = self._last_use.data
        self._offered = bytearray(count)
        self._queued = bytearray(count)
        self._heap: list[int] = []  # last use * count + frame: integers compare faster than pairs
        self._first: OrderedDict[int, None] = OrderedDict()  # a dict would walk over its gaps

    def reset(self, frames: FrameIds) -> None:
        # Being sealed is a use: an entry that an earlier page left in the heap is then never younger.
        self._tick += 1
        self._last_use[frames] = self._tick

    def touch(self, frame: int) -> None:
        self._tick += 1
        self._last_use[frame] = self._tick

    def offer(self, frame: int, *, first: bool = False) -> None:
        self._offered[frame] = 1
        if first:
            self._first[frame] = None
            return
        if not self._queued[frame]:
            self._queued[frame] = 1
            heapq.heappush(self._heap, self._used[frame] * self._count + frame)

    def withdraw(self, frame: int) -> None:
        self._offered[frame] = 0
        if self._first:
            self._first.pop(frame, None)

    def victim(self) -> int | None:
        if self._first:
            return next(iter(self._first))
        heap = self._heap
        while heap:
            entry = heap[0]
            frame = entry % self._count
            if not self._offered[frame]:
                heapq.heappop(heap)
                self._queued[frame] = 0
                continue
            true = self._used[frame] * self._count + frame
            if true == entry:
                return frame
            heapq.heapreplace(heap, true)
        return None

    def in_a_row(self, frames: FrameIds) -> int:
        if len(frames) == 1:
            return 1
        victim = int(frames[0])
        self.withdraw(victim)
        rival = self.victim()
        self.offer(victim)
        used = self._last_use[frames]
        if rival is None or used.max() < self._used[rival]:
            return len(frames)
        # What each page's last use will be once all before it have merged into it.
        entries = np.maximum.accumulate(used) * self._count + frames
        later = entries > self._used[rival] * self._count + rival
        return max(1, int(np.argmax(later)) if later.any() else len(frames))

    def inherit(self, frames: FrameIds, parent: int) -> None:
        if len(frames) == 1:
            latest = self._used[int(frames[0])]
        else:
            latest = int(self._last_use[frames].max())
        self._used[parent] = max(self._used[parent], latest)

    def check(self, findings: Findings, offered: Callable[[int], bool]) -> None:
        queued = [entry % self._count for entry in self._heap]
        findings.expect(len(set(queued)) == len(queued), "a frame lies in the LRU heap twice")
        findings.expect(
            sorted(queued) == [f for f in range(self._count) if self._queued[f]],
            "the LRU heap and its marks disagree",
        )
        for entry in self._heap:
            frame = entry % self._count
            findings.expect(
                entry // self._count <= self._last_use[frame],
                f"frame {frame} was used at {self._last_use[frame]} but is queued as {entry}",
            )
        for frame in range(self._count):
            findings.expect(
                bool(self._offered[frame]) == offered(frame),
                f"frame {frame}: LRU has offered={bool(self._offered[frame])}, the index not",
            )
            findings.expect(
                not self._offered[frame] or self._queued[frame] or frame in self._first,
                f"frame {frame} is offered but not in the LRU heap",
            )
        findings.expect(
            all(self._offered[frame] for frame in self._first), "a frame leaves first, unoffered"
        )
