"""K and V of all frames, on whatever device the engine computes.

Owns: the memory. Must not know: who may write where. torch is imported for a torch device
only: `"numpy"` gives arrays, `"none"` gives nothing, for engines that own their buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds
from stepwell.core.geometry import Geometry, Group

NUMPY = "numpy"
NONE = "none"


@dataclass(frozen=True, slots=True)
class KVBuffers:
    """K and V of one group.

    Attributes:
        group: whose layers they are.
        k: shape [layers, slots, kv_heads, head_size_k].
        v: shape [layers, slots, kv_heads, head_size_v].
    """

    group: Group
    k: Any
    v: Any


def make(geometry: Geometry, slots: int, device: str) -> tuple[KVBuffers, ...]:
    """Buffers for every group, zeroed.

    Args:
        geometry: the groups.
        slots: places for one token each.
        device: `"numpy"`, `"none"`, or a torch device.

    Raises:
        InputError: a dtype that the device's library does not have, or no torch.
    """
    if device == NONE:
        return ()

    def zeros(group: Group, head_size: int) -> Any:
        shape = (len(group.layers), slots, group.kv_heads, head_size)
        if device == NUMPY:
            return _numpy_zeros(shape, group)
        return _torch_zeros(shape, group, device)

    return tuple(
        KVBuffers(group, zeros(group, group.head_size_k), zeros(group, group.head_size_v))
        for group in geometry.groups
    )


def _numpy_zeros(shape: tuple[int, ...], group: Group) -> Any:
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


def poison(buffers: tuple[KVBuffers, ...], frames: FrameIds, page_tokens: int) -> None:
    """Fills frames with NaN (the smallest integer where there is no NaN), so that a stale read shows."""
    for pair in buffers:
        bad = np.iinfo(pair.group.dtype).min if "int" in pair.group.dtype else float("nan")
        for frame in frames.tolist():
            slots = slice(frame * page_tokens, (frame + 1) * page_tokens)
            pair.k[:, slots] = bad
            pair.v[:, slots] = bad
