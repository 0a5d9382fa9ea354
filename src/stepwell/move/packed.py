"""Frames that an engine packs itself, such as states of recurrent layers, as a place.

Must not know: what the engine packs. Neighbours: `staging`, where the engine packs in device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds
from stepwell.move.copy import check_call
from stepwell.move.fence import PASSED, Fence
from stepwell.move.stack import Band
from stepwell.move.staging import Pack, Staging, Unpack
from stepwell.tiers.tier import Row


class PackedPlace:
    """Frames behind two functions of an engine: a `Place`.

    Without a staging, both get rows of the tier and are done when they return. With one, they get rows of device
    memory (torch tensors, uint8, shape [frame_bytes]) inside of a lane, give the device its work and return; they
    are called one at a time for each direction.

    Args:
        pack: called with (frame, row), brings the frame into the row.
        unpack: called with (row, frame), brings the row into the frame.
        frame_bytes: of a row.
        bounds: where each layer begins in a row, and the end of the last; shape [layers + 1].
        frames: how many there are.
        staging: rows of device memory that frames are packed into on their way; made for `frame_bytes`.

    Raises:
        InputError: bounds that do not go from 0 to `frame_bytes`.
    """

    def __init__(
        self,
        pack: Pack,
        unpack: Unpack,
        frame_bytes: int,
        bounds: Sequence[int],
        frames: int,
        staging: Staging | None = None,
    ) -> None:
        self.frame_bytes = frame_bytes
        self.bounds = tuple(bounds)
        self.frames = frames
        ends = (*self.bounds[:1], *self.bounds[-1:])
        if ends != (0, frame_bytes) or any(b <= a for a, b in pairwise(self.bounds)):
            raise InputError(
                f"the bounds are {self.bounds}", limit=f"ascending, from 0 to {frame_bytes}"
            )
        self._pack = pack
        self._unpack = unpack
        self._staging = staging
        self._band = Band((0, len(self.bounds) - 1), (0, frame_bytes), ())

    def copy_out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        check_call(self, frames, rows)
        if self._staging is not None:
            return self._staging.out(self._band, frames, rows, self._pack)
        for frame, row in zip(frames.tolist(), rows, strict=True):
            self._pack(frame, row)
        return PASSED

    def copy_in(
        self, rows: Sequence[Row], frames: FrameIds, layers: tuple[int, int] | None = None
    ) -> Fence:
        """See `Place`.

        Raises:
            InputError: only some layers are asked for.
        """
        check_call(self, frames, rows)
        if layers not in (None, self._band.layers):
            raise InputError(
                f"layers {layers} of frames that are packed as a whole",
                limit=f"{self._band.layers}",
                remedy="load all layers at once",
            )
        if self._staging is not None:
            return self._staging.into(self._band, rows, frames, self._unpack)
        for frame, row in zip(frames.tolist(), rows, strict=True):
            self._unpack(row, frame)
        return PASSED
