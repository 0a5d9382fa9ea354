"""States of recurrent layers during one step: our Cache object for transformers.

Owns: which bytes of a state are which tensor of which layer. Must not know: frames beyond reading and
writing them, families of models. Neighbours: `runner` makes one for each call of the model.

Attention layers find nothing in here: their past lies in the pool, and `update` hands the new K and V on to
the attention hook. Recurrent layers update their states in place, in views of one array of bytes that was
read from the pool and is written back when the step counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from stepwell.base.errors import GeometryError
from stepwell.cache.pool.view import StateView
from stepwell.core.geometry import STATE_ALIGNMENT, Group


class StepCache(Cache):  # type: ignore[misc]
    """The states of a batch of requests, one request a row.

    Args:
        layers: of the model.
        states: where they are before and after the step.
    """

    def __init__(self, layers: int, states: Sequence[StateView]) -> None:
        super().__init__(layers=[LinearAttentionLayer() for _ in range(layers)])
        self._states = states
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []
        for one in states:
            raw = one.buffers.read(one.reads, one.fresh)
            size = one.buffers.cut.group.state_bytes
            aligned = raw.shape[1] % STATE_ALIGNMENT == 0
            states_bytes = raw[:, :size] if aligned else raw[:, :size].contiguous()
            self._read.append((raw, states_bytes))
            self._place(one.buffers.cut.group, states_bytes)

    def _place(self, group: Group, states: torch.Tensor) -> None:
        for layer, tensor, offset in group.state_offsets():
            dtype = getattr(torch, tensor.dtype)
            size = torch.Size(tensor.shape).numel() * dtype.itemsize
            view = states[:, offset : offset + size].view(dtype).unflatten(1, tensor.shape)
            place = self.layers[layer]
            # What is read is always valid: a request without tokens begins with zeros, as the layers do.
            place.has_previous_state[0] = True
            place.dtype, place.device = dtype, states.device
            if tensor.name == "conv":
                place.conv_states[0], place.is_conv_states_initialized[0] = view, True
                place.conv_kernel_size[0] = tensor.shape[-1]
            else:
                place.recurrent_states[0], place.is_recurrent_states_initialized[0] = view, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new K and V as they are: the attention hook writes them into the pool."""
        return key_states, value_states

    def check(self) -> None:
        """Notices a model that replaced a state instead of updating it.

        Raises:
            GeometryError: a tensor of the cache is none that the geometry describes.
        """
        for one, (_, states) in zip(self._states, self._read, strict=True):
            low = states.data_ptr()
            high = low + states.numel() + states.stride(0)
            for layer, tensor, _ in one.buffers.cut.group.state_offsets():
                place = self.layers[layer]
                held = place.conv_states if tensor.name == "conv" else place.recurrent_states
                if not low <= held[0].data_ptr() < high:
                    raise GeometryError(
                        f"layer {layer} keeps its {tensor.name} state outside of the cache",
                        remedy="use a model that updates its states in place, as transformers' do",
                    )

    def save(self) -> None:
        """Writes the states after the step into the pool."""
        for one, (raw, states) in zip(self._states, self._read, strict=True):
            if states.data_ptr() != raw.data_ptr():
                raw[:, : states.shape[1]] = states
            one.buffers.write(one.writes, raw)
