"""Tiny decoders with random weights, one of every family of models that `Geometry` understands.

Owns: their configurations. Must not know: pools, engines. torch and transformers are imported when a model
is made, so that the names alone cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stepwell.base.errors import InputError

VOCABULARY = 199
"""Token ids of every model here are smaller."""

WINDOW = 24
"""Tokens that a query of a windowed layer sees, itself included."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # With tied embeddings a greedy answer repeats its input and hides even a zeroed cache.
    "tie_word_embeddings": False,
    # Wide weights, so that greedy answers have many distinct tokens.
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HEADS = {"head_dim": 12}
_WINDOWS = {"sliding_window": WINDOW}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXED_WINDOWS = {**_WINDOWS, "num_hidden_layers": 4, "layer_types": _MIXED}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _HEADS,
        "mistral": {**_HEADS, **_WINDOWS},
        "phi3": _WINDOWS,
        "qwen2": {**_WINDOWS, "use_sliding_window": True, "max_window_layers": 1},
        "qwen3": {**_HEADS, **_WINDOWS, "use_sliding_window": True, "max_window_layers": 2},
        "gemma2": {
            **_HEADS,
            **_MIXED_WINDOWS,
            "query_pre_attn_scalar": 16,
            # Small caps, so that they bend the scores of so small a model too.
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 10.0,
        },
        "gemma3_text": {**_HEADS, **_MIXED_WINDOWS, "query_pre_attn_scalar": 12},
        "gpt_oss": {
            **_HEADS,
            **_MIXED_WINDOWS,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "mixtral": {
            **_HEADS,
            **_WINDOWS,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "qwen2_moe": {
            **_EXPERTS,
            **_WINDOWS,
            "use_sliding_window": True,
            "max_window_layers": 3,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 32,
        },
        "qwen3_moe": {**_HEADS, **_EXPERTS, **_WINDOWS, "use_sliding_window": True},
        "olmo2": {"num_hidden_layers": 4},
        "smollm3": {
            **_WINDOWS,
            "use_sliding_window": True,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
        },
        "ministral": {**_HEADS, **_MIXED_WINDOWS},
        "cohere2": {**_MIXED_WINDOWS, "logit_scale": 1.0},
        "granite": {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
        "glm4": _HEADS,
        "qwen3_next": {
            **_HEADS,
            **_EXPERTS,
            "num_hidden_layers": 4,
            # Wider ones make the recurrence amplify rounding.
            "initializer_range": 0.1,
            "shared_expert_intermediate_size": 32,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
            ],
        },
        "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_L_cache": 3},
        "granitemoehybrid": {
            **_MAMBA,
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
            ],
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 32,
        },
        "falcon_h1": {**_MAMBA, "mamba_d_ssm": 96},
    }
)
"""What each family changes of one small configuration, by its `model_type`."""


def tiny_model(family: str, **changes: Any) -> Any:
    """Makes a small decoder with random weights: always the same ones, float32, ready to answer.

    Args:
        family: a name of `FAMILIES`.
        **changes: fields of its configuration.

    Raises:
        InputError: an unknown family.
    """
    if family not in FAMILIES:
        raise InputError(f"family is {family!r}", limit=", ".join(FAMILIES))
    import torch  # noqa: PLC0415 - names of families are needed without it
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.for_model(family, **{**_BASE, **FAMILIES[family], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            # The others leave soft caps out without a word.
            attn_implementation="eager",
        )
    return model.eval()
