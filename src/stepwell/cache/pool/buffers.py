"""K and V of all frames, on whatever device the engine computes.

Owns: the memory, and what a frame's bytes are to each group. Must not know: who may write where. torch is
imported for a torch device only: `"numpy"` gives arrays, `"none"` gives nothing, for engines that own
their buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.base.errors import InputError
from stepwell.cache.pool.limits import Limits
from stepwell.core.cut import Cut
from stepwell.core.frames import FrameIds
from stepwell.core.geometry import Group
from stepwell.move.copy import StackPlace
from stepwell.move.stack import Stack

NUMPY = "numpy"
NONE = "none"


@dataclass(frozen=True, slots=True)
class KVBuffers:
    """K and V of those layers of a group that lie in the same frames.

    Attributes:
        group: whose layers they are.
        layers: their numbers in the model; the first axis of `k` and `v`.
        k: shape [layers, slots, kv_heads, head_size_k]; None on `"none"`.
        v: shape [layers, slots, kv_heads, head_size_v]; None on `"none"`.
    """

    group: Group
    layers: tuple[int, ...]
    k: Any
    v: Any


@dataclass(frozen=True, slots=True)
class StateBuffers:
    """The same memory as bytes of states.

    Attributes:
        cut: the state group, and frames of one state.
        k: shape [layers of a frame, frames, bytes], uint8; None on `"none"`.
        v: shape [layers of a frame, frames, bytes], uint8; None on `"none"`.
    """

    cut: Cut
    k: Any
    v: Any

    def read(self, frames: Any, fresh: Any) -> Any:
        """States as bytes.

        Args:
            frames: of each state; shape [n, frames of a state], of the buffers' library.
            fresh: which states begin with zeros instead; shape [n], bool.

        Returns:
            A copy; shape [n, bytes of these frames].
        """
        ids = frames.reshape(-1)
        layers, _, k_bytes = self.k.shape
        v_bytes = self.v.shape[2]
        shape = (len(ids), layers * (k_bytes + v_bytes))
        out = np.empty(shape, np.uint8) if _is_numpy(self.k) else self.k.new_empty(shape)
        out[:, : layers * k_bytes] = self.k[:, ids].swapaxes(0, 1).reshape(len(ids), -1)
        out[:, layers * k_bytes :] = self.v[:, ids].swapaxes(0, 1).reshape(len(ids), -1)
        out = out.reshape(len(frames), -1)
        out[fresh] = 0
        return out

    def write(self, frames: Any, states: Any) -> None:
        """Writes what `read` gave, changed; shapes as there."""
        ids = frames.reshape(-1)
        layers, _, k_bytes = self.k.shape
        v_bytes = self.v.shape[2]
        rows = states.reshape(len(ids), -1)
        k, v = rows[:, : layers * k_bytes], rows[:, layers * k_bytes :]
        self.k[:, ids] = k.reshape(len(ids), layers, k_bytes).swapaxes(0, 1)
        self.v[:, ids] = v.reshape(len(ids), layers, v_bytes).swapaxes(0, 1)


class Memory:
    """All K and V of a pool: two arrays, of which every group sees its own part.

    Args:
        limits: sizes.
        device: `"numpy"`, `"none"`, or a torch device.

    Attributes:
        planes: of every group that has pages, the layers that share frames.
        states: of every state group.

    Raises:
        InputError: a dtype that the device's library does not have, or no torch.
    """

    def __init__(self, limits: Limits, device: str) -> None:
        self._page_tokens = limits.page_tokens
        self._both: tuple[Any, ...] = ()
        cuts = [cut for cut in limits.cuts if cut not in limits.states]
        if device == NONE:
            self.planes = tuple(_planes(cut, limits.frame_layers, None, None) for cut in cuts)
            self.states = tuple(StateBuffers(cut, None, None) for cut in limits.states)
            return
        group, slots = cuts[0].group, limits.frames * limits.page_tokens
        zeros = _numpy_zeros if device == NUMPY else _torch_zeros
        k = zeros((limits.frame_layers, slots, limits.row_k), group, device)
        v = zeros((limits.frame_layers, slots, limits.row_v), group, device)
        self._both = (k, v)
        self.planes = tuple(_planes(cut, limits.frame_layers, k, v) for cut in cuts)
        self._dtype = group.dtype
        self.states = tuple(
            StateBuffers(cut, _as_bytes(k, limits), _as_bytes(v, limits)) for cut in limits.states
        )

    def place(self) -> StackPlace:
        """All frames, as saves and loads copy them.

        Raises:
            InputError: the buffers are an engine's own.
        """
        size, both = self._page_tokens, [one for one in self._both if one.shape[2]]
        if not both:
            raise InputError(
                f"a pool on device {NONE!r} has no bytes to save",
                remedy="use a TieredStore over the engine's buffers",
            )
        return StackPlace([Stack.of_slots(one[:, :, None], size) for one in both])

    def poison(self, frames: FrameIds) -> None:
        """Fills frames with NaN (the smallest integer where there is no NaN), so that a stale read shows."""
        for buffer in self._both:
            bad = np.iinfo(self._dtype).min if "int" in self._dtype else float("nan")
            for frame in frames.tolist():
                buffer[:, frame * self._page_tokens : (frame + 1) * self._page_tokens] = bad


def _planes(cut: Cut, frame_layers: int, k: Any, v: Any) -> tuple[KVBuffers, ...]:
    group = cut.group
    planes: list[KVBuffers] = []
    for begin in range(0, len(group.layers), frame_layers):
        layers = group.layers[begin : begin + frame_layers]
        parts: list[Any] = []
        for buffer, head_size in ((k, group.head_size_k), (v, group.head_size_v)):
            if buffer is None:
                parts.append(None)
                continue
            part = buffer[: len(layers), :, : group.kv_heads * head_size]
            parts.append(part.reshape(*part.shape[:2], group.kv_heads, head_size))
        planes.append(KVBuffers(group, layers, parts[0], parts[1]))
    return tuple(planes)


def _is_numpy(buffer: Any) -> bool:
    return isinstance(buffer, np.ndarray)


def _as_bytes(buffer: Any, limits: Limits) -> Any:
    shape = (limits.frame_layers, limits.frames, -1)
    if not buffer.shape[2]:
        shape = (limits.frame_layers, limits.frames, 0)
    if _is_numpy(buffer):
        return buffer.reshape(shape).view(np.uint8)
    import torch

    return buffer.view(shape).view(torch.uint8)


def _numpy_zeros(shape: tuple[int, ...], group: Group, _device: str) -> Any:
    try:
        dtype = np.dtype(group.dtype)
    except TypeError as error:
        raise InputError(
            f"group {group.name!r} has dtype {group.dtype!r}, which numpy does not have",
            limit="float16, float32, float64, int8, int64",
            remedy='use a torch device such as "cpu"',
        ) from error
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise InputError(
            f"a buffer of shape {shape} does not fit into memory",
            remedy="lower pool.capacity_bytes",
        ) from error


def _torch_zeros(shape: tuple[int, ...], group: Group, device: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"device {device!r} needs torch, which is not installed",
            remedy='install torch (the extra "hf"), or use device="numpy" or "none"',
        ) from error
    try:
        return torch.zeros(shape, dtype=getattr(torch, group.dtype), device=device)
    # torch raises these for a device that it does not know, was not built for, or that is full.
    except (RuntimeError, AssertionError, MemoryError) as error:
        raise InputError(
            f"a buffer of shape {shape} cannot be had on device {device!r}: {error}",
            remedy="name a torch device that is there, or lower pool.capacity_bytes",
        ) from error
