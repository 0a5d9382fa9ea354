"""Reads configurations of Hugging Face models: which layers keep what, and how large it is.

Owns: what families of decoders are called, and what their fields mean. Must not know: tensors, devices,
transformers. In doubt it refuses, and says what it did not understand: a field that is read wrong would
give wrong KV. What is said here of a family was read in its modeling file and is held against it by tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stepwell.base.errors import GeometryError
from stepwell.core.geometry import Geometry, Group, Rule, StateTensor

Fields = Mapping[str, Any]

_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_CONV, _HYBRID = "conv", "hybrid"
_NO_ROPE = "no_rope_layer_interval"
_OLD_NAMES = {"attention": _FULL, "mamba": _LINEAR}
"""Kinds of layers as older files call them."""


def read_hf_config(config: Any, dtype: str | None = None, latent: bool = False) -> Geometry:
    """As `Geometry.from_hf_config`."""
    fields: Fields = config if isinstance(config, dict) else config.to_dict()
    family = _family_of(fields)
    _refuse_foreign(fields, family)
    _refuse_ropes(fields, family)
    named = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    own_dtype = str(named).removeprefix("torch.")
    dtype = str(dtype or own_dtype).removeprefix("torch.")
    kinds = _kinds(fields, family)
    window = _positive(fields, "sliding_window") if _WINDOW in kinds else None
    windows = {
        n: window if kind == _WINDOW else None
        for n, kind in enumerate(kinds)
        if kind in (_FULL, _WINDOW, _HYBRID)
    }
    groups = attention_groups(windows, _heads(fields, family, latent), dtype, latent)
    states = [n for n, kind in enumerate(kinds) if kind in (_LINEAR, _CONV, _HYBRID)]
    if states and family.state is not None:
        # KV may be kept in a shorter form than the activations that the states follow.
        activations = dtype if dtype in _ACTIVATIONS else own_dtype
        state = family.state(fields, activations)
        groups += (Group("state", Rule.STATE, tuple(states), 0, 0, 0, dtype, state=state),)
    facts = (
        ("kv_dtype", dtype),
        ("rope", _json(fields, _ROPE_FIELDS)),
        ("values", _json({**fields, "layers": kinds, "window": window}, _VALUE_FIELDS)),
    )
    return Geometry(groups, facts=facts)


def attention_groups(
    windows: Mapping[int, int | None], heads: tuple[int, int, int], dtype: str, latent: bool = False
) -> tuple[Group, ...]:
    """Gathers layers with one window into one group each.

    Args:
        windows: of each layer; None for a layer that sees every token.
        heads: their number, elements of one K head, elements of one V head.
        dtype: of K and V.
        latent: whether K holds one vector for each token and V nothing.

    Returns:
        "full" first, then "window"; with several windows "window-24", "window-128", by size.
    """
    groups: list[Group] = []
    full = tuple(layer for layer, window in windows.items() if window is None)
    if full:
        groups.append(Group("full", Rule.FULL, full, *heads, dtype, latent=latent))
    sizes = sorted({window for window in windows.values() if window is not None})
    for size in sizes:
        name = "window" if len(sizes) == 1 else f"window-{size}"
        layers = tuple(layer for layer, window in windows.items() if window == size)
        groups.append(Group(name, Rule.WINDOW, layers, *heads, dtype, window=size, latent=latent))
    return tuple(groups)


_ACTIVATIONS = ("float64", "float32", "bfloat16", "float16")
_POSITION_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rope by which a token's rotation depends on its position alone, not on the prompt's length."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What is particular to models of one `model_type`.

    Attributes:
        kinds: the kind of each layer, where the configuration does not list them.
        may: kinds that it can run.
        listed: whether the model looks at `layer_types`.
        absent: fields that the configuration class fills with a number of its own; a file without
            them cannot be read by their other fields.
        reads: fields that change the geometry in a way that this family's code here reads.
        state: tensors of one layer that has a state.
        ropes: kinds of rope that are understood.
    """

    kinds: Callable[[Fields], list[str]]
    may: tuple[str, ...] = (_FULL,)
    listed: bool = False
    absent: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    state: Callable[[Fields, str], tuple[StateTensor, ...]] | None = None
    ropes: tuple[str, ...] = _POSITION_ROPES


def _count(fields: Fields) -> range:
    return range(_positive(fields, "num_hidden_layers"))


def _all(kind: str) -> Callable[[Fields], list[str]]:
    def kinds(fields: Fields) -> list[str]:
        window = fields.get("sliding_window")
        if window is not None:
            raise GeometryError(f"sliding_window is {window}: this family does not look at it")
        return [kind] * len(_count(fields))

    return kinds


def _windows(
    where: Callable[[Fields, int], bool] = lambda _fields, _layer: True, switch: bool = True
) -> Callable[[Fields], list[str]]:
    """Windows in some layers, if there is a window and, with a switch, `use_sliding_window`."""

    def kinds(fields: Fields) -> list[str]:
        wanted = _given(fields, "sliding_window") is not None
        wanted = wanted and bool(not switch or _given(fields, "use_sliding_window"))
        return [_WINDOW if wanted and where(fields, n) else _FULL for n in _count(fields)]

    return kinds


def _full_every(interval: int, field: str = "", other: str = _WINDOW) -> Callable[..., list[str]]:
    """Every `interval`-th layer is full; a field may name another interval."""

    def kinds(fields: Fields) -> list[str]:
        every = interval if fields.get(field) is None else _positive(fields, field)
        return [other if (n + 1) % every else _FULL for n in _count(fields)]

    return kinds


def _bound(fields: Fields) -> int:
    bound = _given(fields, "max_window_layers")
    return bound if bound == 0 else _positive(fields, "max_window_layers")


def _without_rope(fields: Fields, layer: int) -> bool:
    rotated = fields.get("no_rope_layers")
    if rotated is None:
        return (layer + 1) % _positive({_NO_ROPE: 4, **fields}, _NO_ROPE) == 0
    if layer >= len(rotated):
        raise GeometryError(f"no_rope_layers has {len(rotated)} entries", limit="one each layer")
    return not rotated[layer]


def _short_convolutions(fields: Fields) -> list[str]:
    full = fields.get("full_attn_idxs")
    return [_FULL if full is None or n in full else _CONV for n in _count(fields)]


def _delta_state(fields: Fields, dtype: str) -> tuple[StateTensor, ...]:
    k, v = (_positive(fields, f"linear_{one}_head_dim") for one in ("key", "value"))
    k_heads, v_heads = (_positive(fields, f"linear_num_{one}_heads") for one in ("key", "value"))
    conv = (2 * k * k_heads + v * v_heads, _positive(fields, "linear_conv_kernel_dim"))
    # The recurrence is computed and kept in float32 whatever the activations are.
    return StateTensor("conv", conv, dtype), StateTensor("recurrent", (v_heads, k, v), "float32")


def _conv_state(fields: Fields, dtype: str) -> tuple[StateTensor, ...]:
    shape = (_positive(fields, "hidden_size"), _positive(fields, "conv_L_cache"))
    return (StateTensor("conv", shape, dtype),)


def _mamba_state(fields: Fields, dtype: str) -> tuple[StateTensor, ...]:
    limit = fields.get("time_step_limit", (0.0, float("inf")))
    if not _unlimited(limit):
        raise GeometryError(
            f"time_step_limit is {limit}: a single token is computed without it and many with it, so "
            "that a prompt does not continue exactly"
        )
    heads, state = _positive(fields, "mamba_n_heads"), _positive(fields, "mamba_d_state")
    inner = _positive(fields, "mamba_expand") * _positive(fields, "hidden_size")
    if fields.get("mamba_d_ssm") is not None:
        inner = _positive(fields, "mamba_d_ssm")
    size = inner // heads
    if fields.get("mamba_d_head") not in (None, "auto"):
        size = _positive(fields, "mamba_d_head")
    if size * heads != inner:
        raise GeometryError(
            f"mamba_n_heads is {heads} and mamba_d_head is {size}", limit=f"a product of {inner}"
        )
    channels = inner + 2 * _positive(fields, "mamba_n_groups") * state
    return (
        StateTensor("conv", (channels, _positive(fields, "mamba_d_conv")), dtype),
        StateTensor("recurrent", (heads, size, state), "float32"),
    )


def _unlimited(limit: Any) -> bool:
    """Whether bounds on the time step never bind; steps are positive."""
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return False
    low, high = limit
    if isinstance(high, Mapping):
        # How transformers writes an infinite number into JSON.
        high = float(high.get("__float__", 0.0))
    return bool(low == 0.0 and high == float("inf"))


_KV, _SIZE = "num_key_value_heads", "head_dim"
_MAMBA_FIELDS = ("layers_block_type", "mamba_d_state")


def _mixed(kinds: Callable[[Fields], list[str]], *absent: str, **more: Any) -> _Family:
    """A family that may have windows."""
    return _Family(kinds, (_FULL, _WINDOW), absent=absent, **more)


def _either(kinds: Callable[[Fields], list[str]], other: str, **more: Any) -> _Family:
    """A family in which some layers have attention and others a state."""
    return _Family(kinds, (_FULL, other), listed=True, **more)


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(_all(_FULL)),
    "olmo2": _Family(_all(_FULL)),
    "granite": _Family(_all(_FULL)),
    "glm4": _Family(_all(_FULL), absent=(_KV, _SIZE)),
    "mistral": _mixed(_windows(switch=False), _KV),
    "mixtral": _mixed(_windows(switch=False), _KV),
    # The configuration class turns every other rope into one that depends on the prompt's length.
    "phi3": _mixed(_windows(switch=False), ropes=("default",)),
    "ministral": _mixed(_windows(switch=False), _KV, listed=True),
    "qwen2": _mixed(_windows(lambda f, n: n >= _bound(f)), _KV, listed=True),
    "qwen3": _mixed(_windows(lambda f, n: n >= _bound(f)), _KV, _SIZE, listed=True),
    # The same field, read the other way round.
    "qwen2_moe": _mixed(_windows(lambda f, n: n % 2 == 0 and n < _bound(f)), _KV, listed=True),
    "qwen3_moe": _mixed(_windows(), _KV),
    "smollm3": _mixed(_windows(_without_rope), _KV, listed=True),
    "cohere2": _mixed(_full_every(4, "sliding_window_pattern"), listed=True),
    "gemma2": _mixed(_full_every(2), _KV, _SIZE, listed=True, reads=("attn_logit_softcapping",)),
    "gemma3_text": _mixed(_full_every(6, "sliding_window_pattern"), _KV, _SIZE, listed=True),
    "gpt_oss": _mixed(_full_every(2), _KV, _SIZE, listed=True),
    "deepseek_v2": _Family(_all(_FULL), reads=("kv_lora_rank",)),
    "deepseek_v3": _Family(_all(_FULL), reads=("kv_lora_rank",)),
    "qwen3_next": _either(
        _full_every(4, "full_attention_interval", _LINEAR),
        _LINEAR,
        absent=(_KV, _SIZE),
        reads=("linear_num_value_heads",),
        state=_delta_state,
    ),
    "lfm2": _either(
        _short_convolutions, _CONV, absent=(_KV,), reads=("conv_L_cache",), state=_conv_state
    ),
    "granitemoehybrid": _either(_all(_LINEAR), _LINEAR, reads=_MAMBA_FIELDS, state=_mamba_state),
    "falcon_h1": _Family(
        _all(_HYBRID),
        (_HYBRID,),
        absent=(_KV, "mamba_d_ssm"),
        reads=_MAMBA_FIELDS,
        state=_mamba_state,
    ),
}

_NOT_UNDERSTOOD = {
    "llama4_text": "attention is cut into spans of the prompt",
    "gemma3n_text": "layers share their KV",
    "deepseek_v32": "an indexer keeps keys of its own beside the KV",
    "mamba": "no layer has attention",
    "mamba2": "no layer has attention",
    "bamba": "its states have not been verified",
    "jamba": "its states have not been verified",
}
"""Why a well-known family is refused."""

_FOREIGN_FIELDS = {
    "text_config": "a model that sees more than tokens",
    "is_encoder_decoder": "an encoder",
    "use_bidirectional_attention": "attention to tokens that come later",
    "per_layer_config": "layers of different sizes",
    "kv_lora_rank": "latent attention (MLA)",
    "index_topk": "an indexer with keys of its own",
    "attn_logit_softcapping": "soft-capped attention logits",
    "attention_chunk_size": "attention cut into spans of the prompt",
    "dual_chunk_attention_config": "attention cut into spans of the prompt",
    "num_kv_shared_layers": "layers that share their KV",
    "layers_block_type": "recurrent layers",
    "linear_num_value_heads": "recurrent layers",
    "mamba_d_state": "recurrent layers",
    "conv_L_cache": "recurrent layers",
    "number_of_conv_states": "recurrent layers with several states",
}


def _family_of(fields: Fields) -> _Family:
    name = fields.get("model_type")
    if fields.get("text_config"):
        raise GeometryError(
            f"text_config is inside of {name!r}, a model that sees more than tokens",
            remedy="load the text model alone, if there is one",
        )
    if name not in _FAMILIES:
        why = _NOT_UNDERSTOOD.get(str(name), "its layers are not understood yet")
        raise GeometryError(
            f"model_type is {name!r}: {why}",
            limit=", ".join(_FAMILIES),
            remedy="describe the groups yourself with Geometry(groups=...)",
        )
    return _FAMILIES[name]


def _refuse_foreign(fields: Fields, family: _Family) -> None:
    """Raises on everything that would change geometry or values in a way not understood."""
    for name, meaning in _FOREIGN_FIELDS.items():
        if fields.get(name) and name not in family.reads:
            raise GeometryError(f"{name} is {fields[name]!r}: {meaning} is not understood here")
    if fields.get("is_causal") is False:
        raise GeometryError(
            "is_causal is False: a token sees what comes after it, so no prefix can be reused"
        )


def _refuse_ropes(fields: Fields, family: _Family) -> None:
    for rope in (fields.get("rope_scaling"), fields.get("rope_parameters")):
        # One record, or one for each kind of layer.
        nested = [one for one in (rope or {}).values() if isinstance(one, Mapping)]
        for record in nested or [rope or {}]:
            kind = record.get("rope_type") or record.get("type")
            if kind is not None and kind not in family.ropes:
                raise GeometryError(
                    f"rope_type is {kind!r}: the KV of a token may depend on the length of the "
                    "whole prompt, so a prefix cannot be reused",
                    limit=", ".join(family.ropes),
                )


def _kinds(fields: Fields, family: _Family) -> list[str]:
    """The kind of each layer, from the list in the configuration or by the family's rule."""
    given = fields.get("layer_types") or fields.get("layers_block_type")
    if given is None:
        kinds = family.kinds(fields)
    else:
        kinds = [_OLD_NAMES.get(one, one) for one in given]
        if len(kinds) != len(_count(fields)):
            raise GeometryError(
                f"layer_types has {len(kinds)} entries", limit=f"{len(_count(fields))} layers"
            )
        # A model that does not look at the list does what its other fields say.
        if not family.listed and kinds != family.kinds(fields):
            raise GeometryError(
                f"layer_types has {', '.join(sorted(set(kinds)))}: models of this family do not "
                "look at it, and their other fields say something else"
            )
        if _WINDOW in kinds and family.listed and fields.get("use_sliding_window") is False:
            raise GeometryError("layer_types has sliding_attention without use_sliding_window")
    unknown = set(kinds) - set(family.may)
    if unknown:
        raise GeometryError(
            f"layer_types has {', '.join(sorted(unknown))}", limit=", ".join(family.may)
        )
    if not {_FULL, _WINDOW, _HYBRID} & set(kinds):
        raise GeometryError("layer_types names no layer with attention, so positions are not kept")
    return kinds


def _heads(fields: Fields, family: _Family, latent: bool) -> tuple[int, int, int]:
    """Number of KV heads, elements of one K head and of one V head."""
    if "kv_lora_rank" in family.reads:
        return _latent_heads(fields, latent)
    if latent:
        raise GeometryError(
            f"latent is True, but {fields['model_type']!r} keeps K and V of each head"
        )
    for name in family.absent:
        _given(fields, name)
    heads = _positive(fields, "num_attention_heads")
    size, rest = divmod(_positive(fields, "hidden_size"), heads)
    if fields.get(_SIZE) is not None:
        size = _positive(fields, _SIZE)
    elif rest:
        raise GeometryError(
            f"hidden_size is {fields['hidden_size']}", limit=f"a multiple of {heads} heads"
        )
    kv_heads = heads if fields.get(_KV) is None else _positive(fields, _KV)
    if heads % kv_heads:
        raise GeometryError(f"{_KV} is {kv_heads}", limit=f"a divisor of {heads} heads")
    return kv_heads, size, size


def _latent_heads(fields: Fields, latent: bool) -> tuple[int, int, int]:
    """As the model hands them to attention, or as it could keep them."""
    heads, rope = _positive(fields, "num_attention_heads"), _positive(fields, "qk_rope_head_dim")
    if fields.get(_KV) not in (None, heads):
        raise GeometryError(
            f"{_KV} is {fields[_KV]!r}", limit=f"{heads}: one for each attention head"
        )
    rank = _positive(fields, "kv_lora_rank")
    if latent:
        return 1, rank + rope, 0
    return heads, _positive(fields, "qk_nope_head_dim") + rope, _positive(fields, "v_head_dim")


def _given(fields: Fields, name: str) -> Any:
    """A field that may be None but must be there: the family's default is a number of its own."""
    if name not in fields:
        raise GeometryError(
            f"{name} is missing", remedy="pass the configuration object, which fills it in"
        )
    return fields[name]


def _positive(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise GeometryError(f"{name} is {value!r}", limit="1 or more")
    return value


_ROPE_FIELDS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("rope_local_base_freq", "rope_interleave", "no_rope_layers", "no_rope_layer_interval"),
    *("position_embedding_type", "max_position_embeddings", "original_max_position_embeddings"),
)
"""Everything that turns positions into rotations."""

_VALUE_FIELDS = (
    *("model_type", "attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"),
    *("residual_multiplier", "embedding_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers"),
    *("mlp_multipliers", "mamba_norm_before_gate", "mamba_rms_norm", "hidden_act"),
    *("hidden_activation", "rms_norm_eps", "norm_eps", "layer_norm_eps", "num_experts_per_tok"),
    *("norm_topk_prob", "routed_scaling_factor", "topk_method", "topk_group", "n_group"),
    *("swiglu_alpha", "swiglu_limit", "layers", "window"),
)
"""What changes that which layers compute from the same weights and tokens."""


def _json(fields: Fields, names: Iterable[str]) -> str:
    """Fields that are set, as one text that equal settings share."""
    known = {name: fields[name] for name in names if fields.get(name) is not None}
    return json.dumps(known, sort_keys=True, default=str)
