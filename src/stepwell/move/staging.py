"""Rows of device memory that pages pass through on their way: packed there in one piece, copied by the copy engine.

Owns: a few staged rows and their lanes. Must not know: how a page is packed. Neighbours: `device_copy` packs tensors,
`packed` lets an engine pack. torch is imported when the first page passes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from stepwell.core.frames import FrameIds
from stepwell.move.fence import Fence
from stepwell.move.lane import AllOf, Device, Lane, Launch, Watched
from stepwell.move.stack import Band
from stepwell.tiers.tier import Row

SLOTS = 3
"""For each direction: one is packed, one is copied, one is ready before the others end."""

Pack = Callable[[int, Any], object]
"""Brings a frame into a row."""

Unpack = Callable[[Any, int], object]
"""Brings a row into a frame."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    lane: Lane
    row: Any


class Staging:
    """Rings of staged rows, one for each direction.

    Every slot has a lane of its own. What passes through one slot is in order, so it is never overwritten too early;
    what passes through different slots overlaps. Calls come from several threads: they take turns at a slot.

    Args:
        device: where frames and staged rows are.
        frame_bytes: of a row.
        debug: waits for each launch and names it when it fails.
    """

    def __init__(self, device: Device, frame_bytes: int, *, debug: bool = False) -> None:
        def slot() -> _Slot:
            lane = device.lane()
            return _Slot(Watched(lane) if debug else lane, device.empty(frame_bytes))

        self._outward = _Ring([slot() for _ in range(SLOTS)])
        self._inward = _Ring([slot() for _ in range(SLOTS)])

    def out(self, band: Band, frames: FrameIds, rows: Sequence[Row], pack: Pack) -> Fence:
        """Packs frames, and copies them into rows.

        Args:
            band: the layers that are packed; only their bytes are copied.
            frames: of the device; shape [n].
            rows: n of them.
            pack: gives the device what brings one frame into a staged row.
        """
        import torch

        begin, end = band.span

        def turn(slot: _Slot, frame: int, row: Row) -> None:
            host = torch.from_numpy(row)[begin:end]
            copy = partial(host.copy_, slot.row[begin:end], non_blocking=True)
            slot.lane.launch(Launch("pack", (frame,), band.layers), partial(pack, frame, slot.row))
            slot.lane.launch(Launch("copy to host", (frame,), band.layers), copy)

        return self._outward.each(frames, rows, turn)

    def into(self, band: Band, rows: Sequence[Row], frames: FrameIds, unpack: Unpack) -> Fence:
        """Copies rows to the device, and unpacks them; arguments as `out`."""
        import torch

        begin, end = band.span

        def turn(slot: _Slot, frame: int, row: Row) -> None:
            host = torch.from_numpy(row)[begin:end]
            copy = partial(slot.row[begin:end].copy_, host, non_blocking=True)
            unpacked = partial(unpack, slot.row, frame)
            slot.lane.launch(Launch("copy from host", (frame,), band.layers), copy)
            slot.lane.launch(Launch("unpack", (frame,), band.layers), unpacked)

        return self._inward.each(frames, rows, turn)


class _Ring:
    """Slots that pages take in turn."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self._slots = slots
        self._turns = cycle(slots)
        self._lock = threading.Lock()

    def each(
        self, frames: FrameIds, rows: Sequence[Row], turn: Callable[[_Slot, int, Row], None]
    ) -> Fence:
        used, launched = set(), False
        try:
            for frame, row in zip(frames.tolist(), rows, strict=True):
                with self._lock:
                    slot = next(self._turns)
                    used.add(slot)
                    turn(slot, frame, row)
            launched = True
        finally:
            # Who gets an error takes the rows back at once: nothing may be in flight behind it.
            if not launched:
                self._settle()
        return AllOf([slot.lane.mark() for slot in used])

    def _settle(self) -> None:
        for slot in self._slots:
            with contextlib.suppress(RuntimeError):  # a device that failed copies no more
                slot.lane.synchronise()
