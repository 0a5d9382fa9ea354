"""Copies between frames in device memory and rows: by a kernel, or by the copy engine.

Owns: the choice between the two. Must not know: CUDA, Triton. Neighbours: `lane` is the seam to the device, `staging` the
way of the copy engine, `triton_copy` the kernel, imported when used. torch is not imported here: whoever gives tensors
has done it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stepwell.core.frames import FrameIds
from stepwell.move.fence import Fence
from stepwell.move.lane import Device, Lane, Launch, Watched
from stepwell.move.stack import Band, Plan, Strip
from stepwell.move.staging import Staging
from stepwell.tiers.tier import Row

LAUNCH_BYTES = 256 << 10
"""What one launch of the copy engine's way has to move on average to be worth it: a launch costs the host about 5 µs, in
which PCIe moves about as much. Below it, one kernel for all pages is faster."""

_WORD_BYTES = 8


class Copies(Protocol):
    """One way to copy some layers; frames and rows have been checked."""

    def out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        """From frames, shape [n], into n rows."""
        ...

    def into(self, rows: Sequence[Row], frames: FrameIds) -> Fence:
        """From n rows into frames, shape [n]."""
        ...


class DeviceCopies:
    """All copies of one place whose frames are on a device.

    Args:
        plan: how frames lie in rows.
        device: where they are.
        rows_mapped: whether the device reaches the memory of all rows.
        debug: waits for each launch and names it when it fails.
    """

    def __init__(self, plan: Plan, device: Device, *, rows_mapped: bool, debug: bool) -> None:
        self._device = device
        self._kernels = rows_mapped and device.kernels
        self._lanes = [Watched(device.lane()) if debug else device.lane() for _ in range(2)]
        whole = plan.band(0, len(plan.bounds) - 1)
        self._staging: Staging | None = None
        if not self._kernels or engine_pays(whole):
            self._staging = Staging(device, plan.bounds[-1], debug=debug)

    def of(self, band: Band) -> Copies:
        """The better way for some layers."""
        if self._staging is not None and (not self._kernels or engine_pays(band)):
            return EngineCopies(band, self._staging)
        return KernelCopies(band, self._device, *self._lanes)


def engine_pays(band: Band) -> bool:
    """Whether the launches for one page, one for each strip and one for the row, move enough."""
    begin, end = band.span
    return end - begin >= LAUNCH_BYTES * (len(band.strips) + 1)


class EngineCopies:
    """Packs each page in device memory and lets the copy engine move it in one piece.

    Args:
        band: the layers.
        staging: what the pages pass through.
    """

    def __init__(self, band: Band, staging: Staging) -> None:
        self._band = band
        self._staging = staging

    def out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        return self._staging.out(self._band, frames, rows, self._pack)

    def into(self, rows: Sequence[Row], frames: FrameIds) -> Fence:
        return self._staging.into(self._band, rows, frames, self._unpack)

    def _pack(self, frame: int, row: Any) -> None:
        for strip in self._band.strips:
            _beside(strip, row).copy_(strip.pages[frame])

    def _unpack(self, row: Any, frame: int) -> None:
        for strip in self._band.strips:
            strip.pages[frame].copy_(_beside(strip, row))


def _beside(strip: Strip, row: Any) -> Any:
    """The bytes of a strip in a tensor of bytes that holds a row; shape [layer, inner, inner, inner]."""
    layers, outermost = strip.pages.shape[1:3]
    size_bytes = (layers - 1) * strip.step_bytes + outermost * strip.row_strides[1]
    items = row[strip.offset_bytes : strip.offset_bytes + size_bytes].view(strip.pages.dtype)
    strides = [stride // strip.item_bytes for stride in strip.row_strides]
    return items.as_strided(strip.pages.shape[1:], strides)


class KernelCopies:
    """Lets one kernel copy all layers of all pages, which reaches rows through their addresses.

    It is compiled here, for rows that begin at multiples of 8 bytes: about a second for the first of a process.

    Args:
        band: the layers.
        device: where the frames are.
        outward: for copies into rows.
        inward: for copies into frames.
    """

    def __init__(self, band: Band, device: Device, outward: Lane, inward: Lane) -> None:
        self._band = band
        self._device = device
        self._outward = outward
        self._inward = inward
        self._word_bytes = math.gcd(_WORD_BYTES, *map(_widest, band.strips))
        self._tables: dict[int, npt.NDArray[np.int64]] = {}
        nothing = np.empty(0, np.int32)
        self.out(nothing, ())
        self.into((), nothing)

    def out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        return self._copy("gather", self._outward, rows, frames)

    def into(self, rows: Sequence[Row], frames: FrameIds) -> Fence:
        return self._copy("scatter", self._inward, rows, frames)

    def _copy(self, name: str, lane: Lane, rows: Sequence[Row], frames: FrameIds) -> Fence:
        from stepwell.move.triton_copy import copy_words

        pages = np.empty((len(rows), 2), np.int64)
        pages[:, 0] = [row.__array_interface__["data"][0] for row in rows]
        pages[:, 1] = frames
        word_bytes = math.gcd(self._word_bytes, int(np.bitwise_or.reduce(pages[:, 0])))
        if word_bytes not in self._tables:
            self._tables[word_bytes] = _table(self._band.strips, word_bytes)
        table, upload, out = self._tables[word_bytes], self._device.upload, lane is self._outward
        lane.launch(
            Launch(name, frames, self._band.layers),
            lambda: copy_words(upload(pages), upload(table), word_bytes, out=out),
        )
        return lane.mark()


def _axes(strip: Strip) -> list[tuple[int, int]]:
    """Inner axes and the bytes of an item in a frame, merged where there is no gap between them.

    Returns:
        (length, bytes from one to the next), outermost first; the last is a run of bytes.
    """
    item_bytes = strip.item_bytes
    strides = (stride * item_bytes for stride in strip.pages.stride()[2:])
    axes: list[tuple[int, int]] = []
    for inner, step in (*zip(strip.pages.shape[2:], strides, strict=True), (item_bytes, 1)):
        whole = axes and axes[-1][1] == inner * step
        axes.append((axes.pop()[0] * inner if whole else inner, step))
    return axes


def _widest(strip: Strip) -> int:
    """Bytes of the largest word in which a strip can be copied."""
    *outer, (run_bytes, _) = _axes(strip)
    strides = (stride * strip.item_bytes for stride in strip.pages.stride()[:2])
    row = (strip.offset_bytes, strip.step_bytes)
    return math.gcd(run_bytes, *(step for _, step in outer), *strides, *row, strip.pages.data_ptr())


def _table(strips: Sequence[Strip], word_bytes: int) -> npt.NDArray[np.int64]:
    """One entry for each layer of each strip, as `triton_copy.copy_words` reads it."""
    entries: list[tuple[int, ...]] = []
    for strip in strips:
        *outer, (run_bytes, _) = _axes(strip)
        axes = [*[(1, 0)] * (3 - len(outer)), *outer, (run_bytes // word_bytes, word_bytes)]
        lengths, steps = zip(*axes, strict=True)
        frame_bytes = strip.pages.stride(0) * strip.item_bytes
        for layer in range(strip.pages.shape[1]):
            address = strip.pages[0, layer].data_ptr()
            offset_bytes = strip.offset_bytes + layer * strip.step_bytes
            sizes = (math.prod(lengths), *lengths[1:], *steps[:3])
            entries.append((address, frame_bytes, offset_bytes, *sizes))
    return np.array(entries, np.int64)
