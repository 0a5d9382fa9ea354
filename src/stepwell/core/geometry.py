"""Shapes and reuse rules of a model's KV: a list of groups.

Owns: `Group`, `Geometry`, and the only reading of model configurations. Must not know: tensors,
devices, what a model is called by its makers. In doubt it refuses, and says what it did not understand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepwell.base.errors import GeometryError, InputError

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes of one element, by the name that torch and numpy give the dtype."""


class Rule(StrEnum):
    """What of a group must be there for a prefix to be reusable."""

    FULL = "full"
    """Every page of the prefix."""
    WINDOW = "window"
    """The pages that cover the last `window` - 1 tokens before a boundary."""
    STATE = "state"
    """One state at the boundary."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one geometry and one reuse rule.

    Attributes:
        name: names the group in parts and messages.
        rule: what must be there to go on from a boundary.
        layers: numbers of the model's layers, ascending.
        kv_heads: heads of K and V.
        head_size_k: elements of one K head.
        head_size_v: elements of one V head.
        dtype: of K and V, as torch names it.
        window: tokens that a query sees, itself included; only with `Rule.WINDOW`.
        state_bytes: of all layers at one boundary; only with `Rule.STATE`.
    """

    name: str
    rule: Rule
    layers: tuple[int, ...]
    kv_heads: int
    head_size_k: int
    head_size_v: int
    dtype: str
    window: int | None = None
    state_bytes: int | None = None

    def __post_init__(self) -> None:
        sizes = (len(self.layers), self.kv_heads, self.head_size_k, self.head_size_v)
        if self.rule is not Rule.STATE and min(sizes) < 1:
            raise InputError(
                f"group {self.name!r} has (layers, heads, K size, V size) = {sizes}",
                limit="1 or more of each",
            )
        if self.dtype not in ITEM_BYTES:
            raise InputError(
                f"group {self.name!r} has dtype {self.dtype!r}", limit=", ".join(ITEM_BYTES)
            )
        if (self.window is not None) != (self.rule is Rule.WINDOW):
            raise InputError(f"group {self.name!r} is {self.rule} with window {self.window}")
        if (self.state_bytes is not None) != (self.rule is Rule.STATE):
            raise InputError(f"group {self.name!r} is {self.rule} with state {self.state_bytes}")

    @property
    def token_bytes(self) -> int:
        """K and V bytes of one token in all layers of the group; 0 for a state."""
        if self.rule is Rule.STATE:
            return 0
        per_layer = self.kv_heads * (self.head_size_k + self.head_size_v)
        return per_layer * len(self.layers) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups of a model.

    Attributes:
        groups: at least one, with distinct names.
        replay_tokens: how many tokens at the end of a prompt are always computed, at least 1.
        facts: what changes KV values besides weights and tokens, for `Namespace.facts`.
    """

    groups: tuple[Group, ...]
    replay_tokens: int = 1
    facts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise InputError(f"the groups are {names}", limit="one or more, names distinct")
        if self.replay_tokens < 1:
            raise InputError(
                f"replay_tokens is {self.replay_tokens}",
                limit="1 or more: the last token has to be computed to know the next",
            )

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one page in all groups."""
        return page_tokens * sum(group.token_bytes for group in self.groups)

    @classmethod
    def full(
        cls,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: str = "float32",
        facts: tuple[tuple[str, str], ...] = (),
    ) -> Geometry:
        """A model in which every layer sees every token and all heads have one size."""
        group = Group(
            "full", Rule.FULL, tuple(range(layers)), kv_heads, head_size, head_size, dtype
        )
        return cls((group,), facts=facts)

    @classmethod
    def from_hf_config(cls, config: Any, dtype: str | None = None) -> Geometry:
        """Reads a Hugging Face configuration.

        Args:
            config: a configuration object, or its dict.
            dtype: of K and V; the one that the configuration names by default.

        Raises:
            GeometryError: a kind of layer that is not understood yet, or a missing field; the message
                names it.
        """
        fields: Mapping[str, Any] = config if isinstance(config, dict) else config.to_dict()
        _refuse(fields)
        heads = _positive(fields, "num_attention_heads")
        head_size, rest = divmod(_positive(fields, "hidden_size"), heads)
        if rest and fields.get("head_dim") is None:
            raise GeometryError(
                f"hidden_size is {fields['hidden_size']}", limit=f"a multiple of {heads} heads"
            )
        if fields.get("head_dim") is not None:
            head_size = _positive(fields, "head_dim")
        kv_heads = heads
        if fields.get("num_key_value_heads") is not None:
            kv_heads = _positive(fields, "num_key_value_heads")
        named = dtype or fields.get("dtype") or fields.get("torch_dtype") or "float32"
        named = str(named).removeprefix("torch.")
        facts = (("kv_dtype", named), ("rope", _rope_fact(fields)))
        return cls.full(_positive(fields, "num_hidden_layers"), kv_heads, head_size, named, facts)


_UNDERSTOOD = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose every layer is plain grouped-query attention unless a field below says otherwise."""

_WINDOW_SWITCH = ("qwen2", "qwen3")
"""Families that look at `use_sliding_window`; others have a window whatever it says."""

_FOREIGN_FIELDS = {
    "kv_lora_rank": "latent attention (MLA)",
    "attn_logit_softcapping": "soft-capped attention logits",
    "attention_chunk_size": "attention cut into spans of the prompt",
    "num_kv_shared_layers": "layers that share their KV",
    "layers_block_type": "recurrent layers",
    "linear_num_value_heads": "recurrent layers",
    "conv_L_cache": "recurrent layers",
}
_POSITION_ROPES = (None, "default", "linear", "llama3", "yarn")
"""Kinds of rope by which a token's rotation depends on its position alone, not on the prompt's length."""


def _refuse(fields: Mapping[str, Any]) -> None:
    """Raises on everything that would change geometry or values in a way not understood."""
    family = fields.get("model_type")
    if family not in _UNDERSTOOD:
        raise GeometryError(
            f"model_type is {family!r}, whose layers are not understood yet",
            limit=", ".join(_UNDERSTOOD),
            remedy="describe the groups yourself with Geometry(groups=...)",
        )
    for name, meaning in _FOREIGN_FIELDS.items():
        if fields.get(name):
            raise GeometryError(f"{name} is {fields[name]!r}: {meaning} is not understood yet")
    if fields.get("is_causal") is False:
        raise GeometryError(
            "is_causal is False: a token sees what comes after it, so no prefix can be reused"
        )
    kinds = set(fields.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise GeometryError(
            f"layer_types has {', '.join(sorted(kinds))}: only full_attention is understood yet"
        )
    window = fields.get("sliding_window")
    switched_off = family in _WINDOW_SWITCH and not fields.get("use_sliding_window", True)
    if window is not None and not switched_off:
        raise GeometryError(
            f"sliding_window is {window}: layers with a window are not understood yet",
            remedy="set sliding_window to None if no prompt is longer than the window",
        )
    for rope in (fields.get("rope_scaling"), fields.get("rope_parameters")):
        # One record, or one for each kind of layer.
        nested = [one for one in (rope or {}).values() if isinstance(one, Mapping)]
        for record in nested or [rope or {}]:
            kind = record.get("rope_type") or record.get("type")
            if kind not in _POSITION_ROPES:
                raise GeometryError(
                    f"rope_type is {kind!r}: the KV of a token may depend on the length of the "
                    "whole prompt, so a prefix cannot be reused",
                    limit=", ".join(map(str, _POSITION_ROPES[1:])),
                )


def _positive(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise GeometryError(f"{name} is {value!r}", limit="1 or more")
    return value


def _rope_fact(fields: Mapping[str, Any]) -> str:
    """Everything that turns positions into rotations, as one text that equal settings share."""
    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return json.dumps({name: fields.get(name) for name in names}, sort_keys=True, default=str)
