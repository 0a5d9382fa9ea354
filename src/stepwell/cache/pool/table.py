"""Request tables: from (row, position) to slot.

Owns: every row's slots. Must not know: statuses, keys. A row is its request's page table too: page n has
frame `slot[n * page_tokens] // page_tokens`, so it is kept once only. All tables of a pool number their rows
alike; `Rows` says whose a row is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds

NO_SLOT = -1
"""Stands at positions that no frame backs."""


class Rows:
    """Which rows of the tables are free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """A free row; the caller has seen that there is one."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """The row is free again."""
        self._free.append(row)


class RequestTable:
    """Slots of the positions of a fixed number of requests.

    Attributes:
        slots: shape [rows, positions], int32; positions are rounded up to whole pages.
    """

    def __init__(self, rows: int, positions: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages = -(-positions // page_tokens)
        try:
            self.slots: npt.NDArray[np.int32] = np.full(
                (rows, self.pages * page_tokens), NO_SLOT, np.int32
            )
        except (MemoryError, ValueError) as error:
            raise InputError(
                f"a table of {rows} requests of {positions} positions does not fit into memory",
                limit="4 bytes for each position of each request",
                remedy="lower pool.requests or pool.positions",
            ) from error
        self._within = np.arange(page_tokens, dtype=np.int32)
        self._first = [0] * rows  # of each row, the first page that is written
        self._end = [0] * rows  # one past the last
        self._straight = [0] * rows  # the page from which on frames ascend without a gap

    def clear(self, row: int) -> None:
        """Nothing is written in the row; what stood in it is no one's."""
        self._first[row] = self._end[row] = self._straight[row] = 0

    def begin(self, row: int, page: int) -> None:
        """An empty row is written from this page on; what is before it is never read."""
        self._first[row] = self._end[row] = self._straight[row] = page

    def write(self, row: int, first: int, frames: FrameIds) -> None:
        """Points pages `[first, first + len(frames))` of a row at frames: one vectorised write."""
        size = self.page_tokens
        target = self.slots[row, first * size : (first + len(frames)) * size]
        np.add((frames * size)[:, None], self._within, out=target.reshape(-1, size))
        end = max(self._end[row], first + len(frames))
        over, self._end[row] = first < self._end[row], end
        if over:
            # What was straight may be no more, and the other way round.
            self._look_over(row)
        else:
            self._append(row, first, frames)

    def _look_over(self, row: int) -> None:
        """Finds out anew from which page on a row is straight."""
        first = self._first[row]
        self._append(row, first, self.frames(row, first, self._end[row]))

    def _append(self, row: int, first: int, frames: FrameIds) -> None:
        """Notes whether the frames of pages from `first` to the end go on in a straight line."""
        size = self.page_tokens
        whole = first == self._first[row]
        if whole or (len(frames) and self.slots[row, first * size - 1] + 1 != frames[0] * size):
            self._straight[row] = first
        if len(frames) > 1:
            gaps = np.flatnonzero(np.diff(frames) != 1)
            if len(gaps):
                self._straight[row] = first + int(gaps[-1]) + 1

    def forget(self, row: int, page: int) -> None:
        """Pages of a row before this one have no frames any more."""
        size = self.page_tokens
        self.slots[row, self._first[row] * size : page * size] = NO_SLOT
        self._first[row] = page
        self._straight[row] = max(self._straight[row], page)

    def cut(self, row: int, page: int) -> None:
        """Pages of a row from this one on have no frames any more."""
        self.slots[row, page * self.page_tokens : self._end[row] * self.page_tokens] = NO_SLOT
        self._end[row] = page
        if self._straight[row] >= page:
            self._look_over(row)

    def span(self, row: int, first: int, last: int) -> tuple[int, int] | None:
        """The slice of slots that positions `[first, last)` of a row are, if they are one."""
        if self._straight[row] * self.page_tokens > first:
            return None
        slot = int(self.slots[row, first])
        return slot, slot + last - first

    def frames(self, row: int, first: int, last: int) -> FrameIds:
        """Frames of pages `[first, last)` of a row; shape [last - first]; a copy."""
        size = self.page_tokens
        return self.slots[row, first * size : last * size : size] // np.int32(size)
