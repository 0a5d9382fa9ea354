"""Frames of tensors as a place: where a save finds K and V, and a load brings them.

Owns: the checks of a call, and the copies of CPU memory. Must not know: queues, deadlines, tiers. Neighbours: `stack` says
how frames lie in rows; `device_copy` copies where they are on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds
from stepwell.move.device_copy import Copies, DeviceCopies
from stepwell.move.fence import PASSED, Fence
from stepwell.move.lane import CudaDevice, Device
from stepwell.move.place import Place
from stepwell.move.stack import Band, Stack, lay_out
from stepwell.tiers.tier import Row


class StackPlace:
    """Frames whose layers lie in one tensor, or in several: a `Place`.

    On the CPU a copy is over when its call returns. On a device, the producer's fence has to be passed before the call:
    copies are ordered among themselves only.

    Args:
        stacks: all on one device; in each layer of a row, their bytes follow in this order.
        device: what reaches the tensors; by default the CPU, or torch's CUDA runtime for tensors that are there.
        rows_mapped: whether all rows will lie in memory that is registered with the device. Only a kernel
            makes use of it; a wrong promise is a fault of the device that ends the process's use of it.
        debug: waits for each launch on the device and names it when it fails.

    Attributes:
        frame_bytes: see `Place`, as the others.
        bounds: layer by layer.
        frames: as all stacks have.

    Raises:
        InputError: stacks that do not go together, or a device that is not known.
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        *,
        device: Device | None = None,
        rows_mapped: bool = False,
        debug: bool = False,
    ) -> None:
        self._plan = lay_out(stacks)
        self.frames = self._plan.frames
        self.bounds = self._plan.bounds
        self.frame_bytes = self.bounds[-1]
        self._of: Callable[[Band], Copies] = ArrayCopies
        device = device or _device_of(stacks)
        if device is not None:
            self._of = DeviceCopies(self._plan, device, rows_mapped=rows_mapped, debug=debug).of
        self._copies: dict[tuple[int, int], Copies] = {}
        self._through((0, len(self.bounds) - 1))  # where a kernel is compiled, it is now

    def copy_out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        check_call(self, frames, rows)
        if not all(row.flags.writeable for row in rows):
            raise InputError("a row is read-only", limit="rows that can be written")
        return self._through((0, len(self.bounds) - 1)).out(frames, rows) if rows else PASSED

    def copy_in(
        self, rows: Sequence[Row], frames: FrameIds, layers: tuple[int, int] | None = None
    ) -> Fence:
        check_call(self, frames, rows)
        first, end = layers or (0, len(self.bounds) - 1)
        if not 0 <= first < end < len(self.bounds):
            raise InputError(
                f"layers {first} to {end} of a frame", limit=f"0 to {len(self.bounds) - 1}"
            )
        return self._through((first, end)).into(rows, frames) if rows else PASSED

    def _through(self, layers: tuple[int, int]) -> Copies:
        if layers not in self._copies:
            self._copies[layers] = self._of(self._plan.band(*layers))
        return self._copies[layers]


class ArrayCopies:
    """Copies of CPU memory: one `np.copyto` for each page and strip.

    numpy moves each contiguous run in one `memmove`, and lets other threads run meanwhile.

    Args:
        band: the layers; its tensors are numpy's, or torch's on the CPU.
    """

    def __init__(self, band: Band) -> None:
        self._strips = []
        for strip in band.strips:
            pages = strip.pages if isinstance(strip.pages, np.ndarray) else strip.pages.numpy()
            row = (pages.shape[1:], pages.dtype, strip.offset_bytes, strip.row_strides)
            self._strips.append((pages, *row))

    def out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        copyto, beside = np.copyto, np.ndarray
        for frame, row in zip(frames.tolist(), rows, strict=True):
            for pages, shape, dtype, offset, strides in self._strips:
                copyto(beside(shape, dtype, row, offset, strides), pages[frame])
        return PASSED

    def into(self, rows: Sequence[Row], frames: FrameIds) -> Fence:
        copyto, beside = np.copyto, np.ndarray
        for frame, row in zip(frames.tolist(), rows, strict=True):
            for pages, shape, dtype, offset, strides in self._strips:
                copyto(pages[frame], beside(shape, dtype, row, offset, strides))
        return PASSED


def check_call(place: Place, frames: FrameIds, rows: Sequence[Row]) -> None:
    """What has to hold for every call of a place.

    Raises:
        InputError: a frame that is not there, another number of rows, or a row that is not the bytes of one frame.
    """
    if frames.shape != (len(rows),):
        raise InputError(f"{len(rows)} rows for frames of shape {frames.shape}", limit="one each")
    if not rows:
        return
    numbers = frames.tolist()  # behind a large copy, a reduction of numpy takes three times as long
    low, high = min(numbers), max(numbers)
    if low < 0 or high >= place.frames:
        raise InputError(
            f"frame {low if low < 0 else high} is not there", limit=f"0 to {place.frames - 1}"
        )
    kinds = {(row.shape, row.strides) for row in rows}
    if kinds != {((place.frame_bytes,), (1,))}:
        raise InputError(
            f"rows have (shape, strides) {sorted(kinds)}",
            limit=f"{place.frame_bytes} bytes each, without gaps",
        )


def _device_of(stacks: Sequence[Stack]) -> Device | None:
    """What reaches the tensors; None where numpy does."""
    names = sorted({stack.device for stack in stacks})
    if names == ["cpu"]:
        return None
    if len(names) != 1 or not names[0].startswith("cuda"):
        raise InputError(f"the stacks are on {', '.join(names)}", limit="one of cpu, cuda:N")
    return CudaDevice(names[0])
