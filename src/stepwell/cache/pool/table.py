"""The request table: from (row, position) to slot.

Owns: which row is whose, and every row's slots. Must not know: statuses, keys. A row is its request's
page table too: page n has frame `slot[n * page_tokens] // page_tokens`, so it is kept once only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds

NO_SLOT = -1
"""Stands at positions that no frame backs."""


class RequestTable:
    """Rows of slots for a fixed number of requests.

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
        self._pages = [0] * rows  # of each row, how many are written
        self._straight = [True] * rows  # of each row, whether its frames ascend without a gap
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """A free row; the caller has seen that there is one."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """The row is free again; what stood in it is no one's."""
        self._pages[row] = 0
        self._straight[row] = True
        self._free.append(row)

    def write(self, row: int, first: int, frames: FrameIds) -> None:
        """Points pages `[first, first + len(frames))` of a row at frames: one vectorised write."""
        size = self.page_tokens
        target = self.slots[row, first * size : (first + len(frames)) * size]
        np.add((frames * size)[:, None], self._within, out=target.reshape(-1, size))
        if first < self._pages[row]:
            # Written over: what was straight may be no more, and the other way round.
            self._straight[row], first = True, 0
            frames = self.frames(row, 0, self._pages[row])
        if first and len(frames):
            before = self.slots[row, first * size - 1] + 1
            self._straight[row] = self._straight[row] and before == frames[0] * size
        if self._straight[row] and len(frames) > 1:
            self._straight[row] = bool((np.diff(frames) == 1).all())
        self._pages[row] = max(self._pages[row], first + len(frames))

    def span(self, row: int, tokens: int) -> tuple[int, int] | None:
        """The slice of slots `(first, last)` that the first tokens of a row are, if they are one."""
        if not self._straight[row]:
            return None
        first = int(self.slots[row, 0])
        return first, first + tokens

    def frames(self, row: int, first: int, last: int) -> FrameIds:
        """Frames of pages `[first, last)` of a row; shape [last - first]; a copy."""
        size = self.page_tokens
        return self.slots[row, first * size : last * size : size] // np.int32(size)
