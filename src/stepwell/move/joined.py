"""Several places as one: for engines whose groups have memory of their own.

Must not know: what the places are. Neighbours: `place` is the protocol; a plan names frames of one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds
from stepwell.move.copy import check_call
from stepwell.move.fence import PASSED, Fence
from stepwell.move.lane import AllOf
from stepwell.move.place import Place
from stepwell.tiers.tier import Row


class JoinedPlace:
    """Frames of several places, numbered one place after the other: a `Place`.

    Args:
        places: with frames and layers of one size; those that are smaller are padded by their engine.

    Attributes:
        firsts: number of the first frame of each place.

    Raises:
        InputError: none, or frames of different sizes.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        sizes = {(place.frame_bytes, tuple(place.bounds)) for place in places}
        if len(sizes) != 1:
            raise InputError(
                f"{len(places)} places have frames and layers of {sorted(sizes)}", limit="one size"
            )
        ((self.frame_bytes, self.bounds),) = sizes
        ends = np.cumsum([place.frames for place in places])
        self.frames = int(ends[-1])
        self.firsts = tuple(
            int(end) - place.frames for end, place in zip(ends, places, strict=True)
        )
        self._places = tuple(places)
        self._ends = ends

    def copy_out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        return self._each(frames, rows, lambda place, its, some: place.copy_out(its, some))

    def copy_in(
        self, rows: Sequence[Row], frames: FrameIds, layers: tuple[int, int] | None = None
    ) -> Fence:
        return self._each(frames, rows, lambda place, its, some: place.copy_in(some, its, layers))

    def _each(
        self,
        frames: FrameIds,
        rows: Sequence[Row],
        copy: Callable[[Place, FrameIds, Sequence[Row]], Fence],
    ) -> Fence:
        check_call(self, frames, rows)
        whose = np.searchsorted(self._ends, frames, side="right")
        fences: list[Fence] = []
        for number in np.unique(whose).tolist():
            mine = np.flatnonzero(whose == number)
            its = frames[mine] - np.int32(self.firsts[number])
            fences.append(copy(self._places[number], its, [rows[at] for at in mine.tolist()]))
        if not fences:
            return PASSED
        return fences[0] if len(fences) == 1 else AllOf(fences)
