"""How tensors of an engine lie beside rows: strips, each of which one strided copy moves.

Owns: `Stack`, and the order of bytes in a row. Must not know: how bytes are copied, devices. Neighbours: `copy` and
`device_copy` move what is laid out here.

    row      | layer 0: K bytes, V bytes | layer 1: K bytes, V bytes | ...
    strip    the K bytes of all layers: they begin `step_bytes` apart, and `pages[frame]` has them in the same order
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from stepwell.base.errors import InputError
from stepwell.core.geometry import ITEM_BYTES
from stepwell.core.layout import AXES, LAYER_FIRST_NHD, PAGE_FIRST_NHD, Layout


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """One tensor that has some layers of all frames: of K, of V, or of whatever else belongs to a page.

    Attributes:
        tensor: of numpy or torch, in any shape that `sizes` divide without a copy; gaps are allowed.
        sizes: elements along each of the five axes; `page` counts the frames.
        layout: the order of the axes in `tensor`.
        row: the order of the axes in a row; page and layer come first.
        first_layer: of the frame, that is the first here.

    Raises:
        InputError: not such a tensor, an unknown dtype, sizes that are not the tensor's, or a row that is not
            page-first.
    """

    tensor: Any
    sizes: Mapping[str, int]
    layout: Layout = LAYER_FIRST_NHD
    row: Layout = PAGE_FIRST_NHD
    first_layer: int = 0

    def __post_init__(self) -> None:
        torch = sys.modules.get("torch")  # where there is a tensor of torch, torch is loaded
        if not (isinstance(self.tensor, np.ndarray) or (torch and torch.is_tensor(self.tensor))):
            raise InputError(
                f"the tensor is a {type(self.tensor).__name__}", limit="one of numpy or torch"
            )
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"the tensor has dtype {self.dtype}", limit=", ".join(ITEM_BYTES))
        if sorted(self.sizes) != sorted(AXES) or min(self.sizes.values()) < 1:
            raise InputError(
                f"the sizes are {dict(self.sizes)}", limit=f"1 or more of each: {AXES}"
            )
        wanted, shape = math.prod(self.sizes.values()), tuple(self.tensor.shape)
        if math.prod(shape) != wanted:
            raise InputError(f"the tensor has shape {shape}", limit=f"{wanted} elements")
        if self.row.axes[:2] != ("page", "layer"):
            raise InputError(f"the row is {self.row.id}", limit="page and layer first")
        if self.first_layer < 0:
            raise InputError(f"the first layer is {self.first_layer}", limit="0 or more")

    @classmethod
    def of_slots(
        cls, tensor: Any, page_tokens: int, row: Layout = PAGE_FIRST_NHD, first_layer: int = 0
    ) -> Stack:
        """A buffer as `PagePool` has it.

        Args:
            tensor: shape [layers, slots, heads, dim]; a frame is `page_tokens` slots.
            page_tokens: slots of a frame.
            row: see the class.
            first_layer: see the class.
        """
        if len(tensor.shape) != 4 or page_tokens < 1 or tensor.shape[1] % page_tokens:
            raise InputError(
                f"the tensor has shape {tuple(tensor.shape)} for pages of {page_tokens} tokens",
                limit="[layers, frames * page_tokens, heads, dim]",
            )
        layers, slots, heads, dim = tensor.shape
        lengths = (layers, slots // page_tokens, page_tokens, heads, dim)
        return cls(tensor, dict(zip(AXES, lengths, strict=True)), LAYER_FIRST_NHD, row, first_layer)

    @property
    def dtype(self) -> str:
        """Name of the dtype, the same for numpy and torch."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Where the tensor lies: `"cpu"`, or as torch names it."""
        return "cpu" if isinstance(self.tensor, np.ndarray) else str(self.tensor.device)

    @property
    def end_layer(self) -> int:
        """One behind the last layer."""
        return self.first_layer + self.sizes["layer"]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one frame."""
        inner = math.prod(self.sizes[axis] for axis in self.row.axes[2:])
        return inner * ITEM_BYTES[self.dtype]

    def pages(self) -> Any:
        """The same memory with its axes in the order of a row.

        Returns:
            Shape [page, layer, inner, inner, inner], integers as large as the items: a copy moves bits, whatever they
            mean.

        Raises:
            InputError: `sizes` do not divide the tensor without a copy.
        """
        shape, item_bytes = self.layout.shape(self.sizes), ITEM_BYTES[self.dtype]
        order = [self.layout.axes.index(axis) for axis in self.row.axes]
        if isinstance(self.tensor, np.ndarray):
            whole = self.tensor.reshape(shape)
            if not np.may_share_memory(whole, self.tensor):
                raise self._undivided(shape)
            return whole.transpose(order).view(f"u{item_bytes}")
        import torch

        try:
            whole = self.tensor.detach().view(shape)
        except RuntimeError as error:
            raise self._undivided(shape) from error
        return whole.permute(order).view(getattr(torch, f"int{8 * item_bytes}"))

    def _undivided(self, shape: tuple[int, ...]) -> InputError:
        return InputError(
            f"a tensor of shape {tuple(self.tensor.shape)} is no view of shape {shape}",
            remedy="give the tensor that the engine writes to, in its own order of axes",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """Layers of one stack that lie at even distances in a row.

    Attributes:
        pages: see `Stack.pages`, of these layers only.
        first_layer: of the frame, that is the first here.
        offset_bytes: where it begins in a row.
        step_bytes: from the beginning of one layer in a row to the next.
    """

    pages: Any
    first_layer: int
    offset_bytes: int
    step_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return int(self.pages.itemsize)

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Bytes in a row from one element of each axis of `pages[frame]` to the next."""
        lengths = self.pages.shape[2:]
        inner = [self.item_bytes * math.prod(lengths[n:]) for n in range(1, len(lengths) + 1)]
        return (self.step_bytes, *inner)

    def within(self, first: int, end: int) -> Strip | None:
        """What of it is in some layers of the frame; None if nothing is."""
        begin = max(first, self.first_layer)
        stop = min(end, self.first_layer + self.pages.shape[1])
        if begin >= stop:
            return None
        skipped = begin - self.first_layer
        pages = self.pages[:, skipped : stop - self.first_layer]
        offset_bytes = self.offset_bytes + skipped * self.step_bytes
        return replace(self, pages=pages, first_layer=begin, offset_bytes=offset_bytes)


@dataclass(frozen=True, slots=True)
class Band:
    """Some neighbouring layers of all frames.

    Attributes:
        layers: first, and one behind the last.
        span: their bytes in a row: first, and one behind the last.
        strips: of these layers.
    """

    layers: tuple[int, int]
    span: tuple[int, int]
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the frames of some stacks lie in rows.

    Attributes:
        frames: how many there are.
        bounds: where each layer begins in a row, and the end of the last; shape [layers + 1].
        strips: of all layers.
    """

    frames: int
    bounds: tuple[int, ...]
    strips: tuple[Strip, ...]

    def band(self, first: int, end: int) -> Band:
        """Some layers of it, at least one."""
        found = (strip.within(first, end) for strip in self.strips)
        strips = tuple(strip for strip in found if strip is not None)
        return Band((first, end), (self.bounds[first], self.bounds[end]), strips)


def lay_out(stacks: Sequence[Stack]) -> Plan:
    """Orders the bytes of a row: layer by layer, and in a layer as the stacks are given.

    Raises:
        InputError: no stack, different numbers of frames, a layer that no stack has, or items that would not
            be aligned in a row.
    """
    counts = sorted({stack.sizes["page"] for stack in stacks})
    if len(counts) != 1:
        raise InputError(
            f"{len(stacks)} stacks have {counts} frames", limit="one number of frames for all"
        )
    edges = sorted({0, *(s.first_layer for s in stacks), *(s.end_layer for s in stacks)})
    pages = [stack.pages() for stack in stacks]
    bounds, strips = [0], []
    # Between two edges the same stacks have every layer, so that the distances there are even.
    for first, end in pairwise(edges):
        here = [n for n, s in enumerate(stacks) if s.first_layer <= first and end <= s.end_layer]
        step_bytes = sum(stacks[n].layer_bytes for n in here)
        if not here:
            raise InputError(f"no stack has layer {first}", limit="layers from 0 on without a hole")
        offset_bytes = bounds[-1]
        for n in here:
            since = stacks[n].first_layer
            part = pages[n][:, first - since : end - since]
            strips.append(_aligned(Strip(part, first, offset_bytes, step_bytes)))
            offset_bytes += stacks[n].layer_bytes
        bounds += [bounds[-1] + step_bytes * n for n in range(1, end - first + 1)]
    return Plan(counts[0], tuple(bounds), tuple(strips))


def _aligned(strip: Strip) -> Strip:
    if strip.offset_bytes % strip.item_bytes or strip.step_bytes % strip.item_bytes:
        raise InputError(
            f"items of {strip.item_bytes} bytes would begin at byte {strip.offset_bytes} of a row, "
            f"and every {strip.step_bytes} bytes",
            limit=f"multiples of {strip.item_bytes}",
            remedy="give the stacks with the largest items first",
        )
    return strip
