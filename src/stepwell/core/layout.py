"""The order of the axes of KV bytes, as strides: one value instead of branches on names.

Owns: what an order of axes means for shapes and addresses. Must not know: devices, tiers. Neighbours:
`part` carries the id; whoever copies pages between two orders copies between two views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError

AXES = ("layer", "page", "slot", "head", "dim")
"""The axes of KV in their canonical order; `slot` counts the tokens inside a page."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An order of the five axes, outermost first.

    `NHD` and `HND` say whether tokens or heads are further out inside a page; layer-first and page-first
    say what is outermost.
    """

    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if sorted(self.axes) != sorted(AXES):
            raise InputError(
                f"the axes are {self.axes!r}", limit=f"each of {', '.join(AXES)} exactly once"
            )

    @property
    def id(self) -> str:
        """Names the layout in a part, such as `layer.page.slot.head.dim`."""
        return ".".join(self.axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the axes in this order."""
        return tuple(sizes[axis] for axis in self.axes)

    def strides(self, sizes: Mapping[str, int], itemsize: int) -> dict[str, int]:
        """Bytes from one element of an axis to the next, for a buffer without gaps.

        Args:
            sizes: elements along each axis.
            itemsize: bytes of one element.
        """
        strides: dict[str, int] = {}
        step = itemsize
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= sizes[axis]
        return strides

    def view(self, buffer: npt.NDArray[Any], sizes: Mapping[str, int]) -> npt.NDArray[Any]:
        """A buffer of this layout with its axes in canonical order, so that any two can be copied.

        Args:
            buffer: contiguous, with as many elements as `sizes` say.

        Returns:
            Shape [layer, page, slot, head, dim]; shares memory with `buffer`.
        """
        wanted = int(np.prod(self.shape(sizes)))
        if buffer.size != wanted or not buffer.flags.c_contiguous:
            raise InputError(
                f"the buffer has {buffer.size} elements, contiguous={buffer.flags.c_contiguous}",
                limit=f"{wanted} elements without gaps",
            )
        order = [self.axes.index(axis) for axis in AXES]
        return buffer.reshape(self.shape(sizes)).transpose(order)


LAYER_FIRST_NHD = Layout(("layer", "page", "slot", "head", "dim"))
LAYER_FIRST_HND = Layout(("layer", "page", "head", "slot", "dim"))
PAGE_FIRST_NHD = Layout(("page", "layer", "slot", "head", "dim"))
PAGE_FIRST_HND = Layout(("page", "layer", "head", "slot", "dim"))
