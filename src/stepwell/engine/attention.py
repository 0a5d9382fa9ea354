"""The attention hook of the packed lane: one module, one function, one plan for each step.

Owns: how queries of a ragged batch read the pool. Must not know: requests, schedules, model families. A
fused kernel would replace `packed_attention` and nothing else. The hook raises on every keyword that it
does not implement: a model that needs more gives an error, never a wrong number.

Source: `AttentionInterface` of Hugging Face transformers lets a named function stand in for attention in
every model that goes through `ALL_ATTENTION_FUNCTIONS`; KV of past tokens need not pass through it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from stepwell.base.errors import GeometryError, MisuseError
from stepwell.cache.pool.view import KVView

NAME = "stepwell_packed"

_HARMLESS = frozenset({"position_ids", "use_cache"})
"""Keywords that models pass along and that change nothing here: positions are applied before the hook,
and past KV lies in the pool."""

_WITHOUT_EFFECT: dict[str, Any] = {"dropout": 0.0, "is_causal": True, "output_attentions": False}
"""Values at which a keyword asks for what the hook does anyway."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How the queries of one request read.

    Attributes:
        first: of its queries in the packed row.
        last: one past the last.
        span: slice of the buffers that holds its KV, if that is consecutive.
        slots: else the slot of every position; shape [tokens], int64.
        mask: which positions a query sees; shape [queries, tokens], bool; None where the
            other arguments say it.
        causal: the queries begin at position 0, so the lower triangle says it.
    """

    first: int
    last: int
    span: tuple[int, int] | None
    slots: Any
    mask: Any
    causal: bool


@dataclass(slots=True)
class StepPlan:
    """What all layers of one step share.

    Attributes:
        view: where KV is read and written.
        readers: of each request.
        layers_seen: layers that came through the hook, to notice a model that goes around it.
    """

    view: KVView
    readers: tuple[Reader, ...]
    layers_seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, view: KVView) -> StepPlan:
        """Plans a step; its masks are made once, not once a layer."""
        readers: list[Reader] = []
        first = 0
        device = view.write_slots.device
        for number, (row, start, count) in enumerate(view.batch):
            total = start + count
            mask = None
            if count > 1 and start > 0:
                seen = torch.arange(total, device=device)[None]
                mask = seen <= torch.arange(start, total, device=device)[:, None]
            span = view.spans[number]
            slots = None if span else view.table[row, :total].long()
            causal = start == 0 and count > 1
            readers.append(Reader(first, first + count, span, slots, mask, causal))
            first += count
        return cls(view, tuple(readers))


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the step's KV into the pool and attends to all that each request may see.

    Args:
        module: the attention layer; its `layer_idx` chooses the buffers.
        query: shape [1, heads, T, head_size], after rotary.
        key: shape [1, kv_heads, T, head_size], after rotary; the new tokens only.
        value: shape [1, kv_heads, T, head_size].
        attention_mask: must be None.
        **keywords: `scaling` and `step` (a `StepPlan`); others only with a value that changes nothing.

    Returns:
        Shape [1, T, heads, head_size], and None for the weights.

    Raises:
        GeometryError: a keyword that is not implemented.
        MisuseError: the model was not called by `Runner`.
    """
    plan = keywords.pop("step", None)
    if not isinstance(plan, StepPlan):
        raise MisuseError(
            "the model was called outside of its engine",
            remedy="close the engine first: until then the model's attention reads its pool",
        )
    scaling = keywords.pop("scaling", None)
    _refuse(attention_mask, keywords)
    layer = module.layer_idx
    plan.layers_seen.add(layer)
    buffers = plan.view.buffers[0]
    k, v = buffers.k[layer], buffers.v[layer]
    k.index_copy_(0, plan.view.write_slots, key[0].transpose(0, 1))
    v.index_copy_(0, plan.view.write_slots, value[0].transpose(0, 1))
    out = query.new_empty((1, query.shape[2], query.shape[1], v.shape[-1]))
    for reader in plan.readers:
        if reader.span is not None:
            keys, values = k[slice(*reader.span)], v[slice(*reader.span)]
        else:
            keys, values = k.index_select(0, reader.slots), v.index_select(0, reader.slots)
        out[:, reader.first : reader.last] = scaled_dot_product_attention(
            query[:, :, reader.first : reader.last],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=reader.mask,
            is_causal=reader.causal,
            scale=scaling,
            enable_gqa=query.shape[1] != k.shape[1],
        ).transpose(1, 2)
    return out, None


def _refuse(attention_mask: Any, keywords: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise GeometryError(
            "the model passed an attention mask", limit="None: the plan says what is seen"
        )
    for name, value in keywords.items():
        if name in _HARMLESS or value is None or value == _WITHOUT_EFFECT.get(name):
            continue
        raise GeometryError(
            f"the model passed {name}={value!r} to attention, which is not implemented",
            remedy="use a model with plain attention in every layer",
        )
