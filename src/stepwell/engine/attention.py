"""The attention hook: one module, one function, one plan for each step.

Owns: how queries of a batch read the pool. Must not know: requests, schedules, model families. A
fused kernel would replace `packed_attention` and nothing else. The hook raises on every keyword that it
does not implement: a model that needs more gives an error, never a wrong number.

Source: `AttentionInterface` of Hugging Face transformers lets a named function stand in for attention in
every model that goes through `ALL_ATTENTION_FUNCTIONS`; KV of past tokens need not pass through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from stepwell.base.errors import GeometryError, MisuseError
from stepwell.cache.pool.view import KVView, Plane

NAME = "stepwell_packed"

_HARMLESS = frozenset({"position_ids", "use_cache", "output_router_logits"})
"""Keywords that models pass along and that change nothing here: positions are applied before the hook,
past KV lies in the pool, and what a router thinks is none of attention's business."""

_LOGITS = 1 << 26
"""Logits that are looked at together: 256 MiB of float32."""

_WITHOUT_EFFECT: dict[str, Any] = {"dropout": 0.0, "is_causal": True, "output_attentions": False}
"""Values at which a keyword asks for what the hook does anyway."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How the queries of one request, or of several that compute one token each, read.

    Attributes:
        first: of its queries among the T of the step.
        last: one past the last.
        span: slice of the buffers that holds its KV, if that is consecutive.
        slots: else the slot of every position; shape [tokens], or [requests, tokens] of several, int64.
        mask: what a query sees; shape [queries, tokens], or [requests, 1, 1, tokens] of several, bool;
            None where the other arguments say it.
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
        places: of each layer of the model, its plane and its number there.
        readers: for each plane.
        layers_seen: layers that came through the hook, to notice a model that goes around it.
    """

    view: KVView
    places: Mapping[int, tuple[int, int]]
    readers: tuple[tuple[Reader, ...], ...]
    layers_seen: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, view: KVView, places: Mapping[int, tuple[int, int]], *, together: bool = False
    ) -> StepPlan:
        """Plans a step; its masks are made once, not once a layer.

        Args:
            view: of the step.
            places: of each layer, its plane and its number there.
            together: if all requests compute one token, read them in one padded call: fewer kernels
                for more bytes, which pays on a GPU.
        """
        masks: dict[tuple[int, int | None], Any] = {}
        readers = tuple(_readers(view, plane, masks, together=together) for plane in view.planes)
        return cls(view, places, readers)


def _readers(
    view: KVView, plane: Plane, masks: dict[tuple[int, int | None], Any], *, together: bool
) -> tuple[Reader, ...]:
    readers: list[Reader] = []
    if together and len(view.batch) > 1 and all(count == 1 for _, _, count in view.batch):
        return (_reader_of_all(view, plane),)
    window = plane.buffers.group.window
    first = 0
    for number, (row, start, count) in enumerate(view.batch):
        total, low = start + count, plane.firsts[number]
        plain = count == 1 or (start == 0 and (window is None or count <= window))
        mask = None
        if not plain:
            key = (number, window)
            if key not in masks:
                masks[key] = _mask(low, start, total, window, plane.write_slots.device)
            mask = masks[key]
        span = plane.spans[number]
        slots = None if span else plane.table[row, low:total].long()
        readers.append(Reader(first, first + count, span, slots, mask, plain and count > 1))
        first += count
    return tuple(readers)


def _mask(low: int, start: int, total: int, window: int | None, device: Any) -> torch.Tensor:
    """Which positions from `low` on the queries at `[start, total)` see; shape [queries, positions]."""
    seen = torch.arange(low, total, device=device)[None]
    asking = torch.arange(start, total, device=device)[:, None]
    mask = seen <= asking
    if window is not None:
        mask &= seen > asking - window
    return mask


def _reader_of_all(view: KVView, plane: Plane) -> Reader:
    """One reader for requests that compute one token each: rows padded to the longest."""
    device = plane.write_slots.device
    firsts = torch.tensor(plane.firsts, device=device)[:, None]
    lengths = view.lengths.long()[:, None] - firsts
    seen = zip(view.batch, plane.firsts, strict=True)
    longest = max(start + count - first for (_, start, count), first in seen)
    columns = torch.arange(longest, device=device)[None]
    there = columns < lengths
    rows = view.rows.long()[:, None]
    slots = plane.table[rows, (firsts + columns).clamp(max=plane.table.shape[1] - 1)].long()
    # What padding reads is masked but must be a number: any other slot may hold a NaN of somebody else.
    slots = slots.where(there, slots[:, :1])
    return Reader(0, len(view.batch), None, slots, there[:, None, None], causal=False)


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
        query: shape [B, heads, T, head_size_k], after rotary: one row of all tokens (packed), or one row for
            each request with as many tokens as the others.
        key: shape [B, kv_heads, T, head_size_k], after rotary; the new tokens only.
        value: shape [B, kv_heads, T, head_size_v].
        attention_mask: must be None.
        **keywords: `scaling` and `step` (a `StepPlan`); `softcap` (a bound of the logits), `s_aux` (a logit
            for each head that takes attention to nothing) and `sliding_window` (which must be what the
            geometry says); others only with a value that changes nothing.

    Returns:
        Shape [B, T, heads, head_size_v], and None for the weights.

    Raises:
        GeometryError: a keyword that is not implemented, or a window that the geometry does not know.
        MisuseError: the model was not called by `Runner`.
    """
    plan = keywords.pop("step", None)
    if not isinstance(plan, StepPlan):
        raise MisuseError(
            "the model was called outside of its engine",
            remedy="close the engine first: until then the model's attention reads its pool",
        )
    plane_number, number = plan.places[module.layer_idx]
    plane = plan.view.planes[plane_number]
    scaling = keywords.pop("scaling", None)
    softcap, sinks = keywords.pop("softcap", None), keywords.pop("s_aux", None)
    _refuse(attention_mask, plane, keywords)
    plan.layers_seen.add(module.layer_idx)
    k, v = plane.buffers.k[number], plane.buffers.v[number]
    k.index_copy_(0, plane.write_slots, _flat(key))
    v.index_copy_(0, plane.write_slots, _flat(value))
    queries = _flat(query)
    out = query.new_empty((*queries.shape[:2], v.shape[-1]))
    for reader in plan.readers[plane_number]:
        asking = queries[reader.first : reader.last]
        if reader.span is not None:
            keys, values = k[slice(*reader.span)], v[slice(*reader.span)]
        else:
            keys, values = k[reader.slots], v[reader.slots]
        if softcap is None and sinks is None:
            out[reader.first : reader.last] = _fused(reader, asking, keys, values, scaling)
        else:
            exact = _Plain(scaling, softcap, sinks)
            out[reader.first : reader.last] = exact.attend(reader, asking, keys, values)
    return out.reshape(query.shape[0], query.shape[2], *out.shape[1:]), None


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """Shape [B, heads, T, size] as [B * T, heads, size]."""
    return heads.transpose(1, 2).flatten(0, 1)


def _fused(
    reader: Reader,
    asking: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention through torch's kernels; shape [queries, heads, head_size_v]."""
    several = keys.dim() == 4
    query = asking[:, :, None] if several else asking.transpose(0, 1)[None]
    out = scaled_dot_product_attention(
        query,
        keys.transpose(1, 2) if several else keys.transpose(0, 1)[None],
        values.transpose(1, 2) if several else values.transpose(0, 1)[None],
        attn_mask=reader.mask,
        is_causal=reader.causal,
        scale=scaling,
        enable_gqa=asking.shape[1] != keys.shape[-2],
    )
    return out[:, :, 0] if several else out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Plain:
    """Attention step by step, for what torch's kernels do not have.

    Source: bounded logits are Gemma 2's (2024), a learned logit that takes weight to nothing is GPT-OSS's
    (2025), after "Efficient Streaming Language Models with Attention Sinks" (Xiao et al., 2023).

    Attributes:
        scaling: factor of the logits.
        softcap: they are bent to stay within this bound, or None.
        sinks: a further logit for each head, whose weight goes nowhere; shape [heads], or None.
    """

    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None

    def attend(
        self, reader: Reader, asking: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """As `_fused`, so many queries at a time that their logits stay within bounds."""
        if keys.dim() == 4:
            return self._part(asking, keys, values, reader.mask)
        most = max(1, _LOGITS // (asking.shape[1] * len(keys)))
        parts: list[torch.Tensor] = []
        for first in range(0, len(asking), most):
            some = asking[first : first + most]
            mask = None if reader.mask is None else reader.mask[first : first + most]
            if reader.causal:
                mask = _mask(0, first, first + len(some), None, asking.device)
                mask = pad(mask, (0, len(keys) - mask.shape[1]))
            parts.append(self._part(some, keys[None], values[None], mask))
        return torch.cat(parts)

    def _part(
        self, asking: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        """Keys and values of one request, or of one for each query; shape [rows, tokens, heads, size]."""
        rows, heads = len(keys), asking.shape[1]
        kv_heads = keys.shape[2]
        # Heads that share a KV head side by side: shape [rows, kv_heads, shared, queries, size].
        query = asking.reshape(rows, -1, kv_heads, heads // kv_heads, asking.shape[2])
        query = query.permute(0, 2, 3, 1, 4)
        logits = query @ keys.permute(0, 2, 3, 1)[:, :, None] * self.scaling
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if mask is not None:
            logits = logits.masked_fill(
                ~(mask[:, :, None] if mask.dim() == 4 else mask), float("-inf")
            )
        if self.sinks is not None:
            sinks = self.sinks.reshape(1, kv_heads, -1, 1, 1).expand(
                rows, -1, -1, logits.shape[-2], 1
            )
            logits = torch.cat((logits, sinks.to(logits.dtype)), dim=-1)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(asking.dtype)
        weights = weights[..., : keys.shape[1]]
        out = weights @ values.permute(0, 2, 1, 3)[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(len(asking), heads, -1)


def _refuse(attention_mask: Any, plane: Plane, keywords: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise GeometryError(
            "the model passed an attention mask", limit="None: the plan says what is seen"
        )
    # Qwen2-MoE passes none at all, and means what its configuration says.
    window = keywords.pop("sliding_window", plane.buffers.group.window)
    if window != plane.buffers.group.window:
        raise GeometryError(
            f"the model passed sliding_window={window} to a layer of group "
            f"{plane.buffers.group.name!r}",
            limit=f"{plane.buffers.group.window}, as the geometry says",
        )
    for name, value in keywords.items():
        if name in _HARMLESS or value is None or value == _WITHOUT_EFFECT.get(name):
            continue
        raise GeometryError(
            f"the model passed {name}={value!r} to attention, which is not implemented",
            remedy="use a model whose attention needs no more than softcap, sinks and windows",
        )
