"""Memory outside of the tiers: where a save finds bytes and a load brings them.

Neighbours: `copy` implements it for arrays; whoever has frames in another form (packed states, buffers of an engine)
implements it for those; `mover` calls it with rows of the host tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stepwell.core.frames import FrameIds
from stepwell.move.fence import Fence
from stepwell.tiers.tier import Row


class Place(Protocol):
    """Frames of one size outside of the tiers: a source and a sink.

    Calls come from the mover's threads, several at once, about different frames.

    Attributes:
        frame_bytes: of one frame, as it lies in a tier.
        bounds: where the bytes of each layer begin inside of it, and the end of the last; shape [layers + 1].
        frames: how many there are.
    """

    frame_bytes: int
    bounds: tuple[int, ...]
    frames: int

    def copy_out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        """Copies whole frames into rows.

        Args:
            frames: of this memory; shape [n].
            rows: n of them.

        Returns:
            The end of the copy: until then rows are not whole, and frames must not change.
        """
        ...

    def copy_in(
        self, rows: Sequence[Row], frames: FrameIds, layers: tuple[int, int] | None = None
    ) -> Fence:
        """Copies rows, or some layers of them, into frames.

        Args:
            rows: n of them.
            frames: of this memory; shape [n].
            layers: first and one behind the last; all by default.

        Returns:
            The end of the copy: until then rows must not change.
        """
        ...
