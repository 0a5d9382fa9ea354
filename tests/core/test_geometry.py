"""Geometry: what is understood is read right; what is not is refused in words."""

import json

import pytest
import torch
import transformers

from stepwell.base.errors import GeometryError, InputError
from stepwell.core.geometry import ITEM_BYTES, Geometry, Group, Rule

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
UNDERSTOOD = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
    "phi3": transformers.Phi3Config(**SMALL, sliding_window=None, pad_token_id=0),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None, head_dim=16),
}
PLAIN = {"model_type": "llama", **SMALL}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize("family", UNDERSTOOD)
@pytest.mark.parametrize("form", ["object", "dict", "json"])
def test_families_of_plain_attention_are_understood(family, form):
    config = UNDERSTOOD[family]
    assert config.model_type == family
    if form == "dict":
        config = config.to_dict()
    if form == "json":
        config = json.loads(config.to_json_string())
    geometry = Geometry.from_hf_config(config, "bfloat16")
    assert geometry.groups == (Group("full", Rule.FULL, (0, 1, 2), 2, 16, 16, "bfloat16"),)
    assert geometry.replay_tokens == 1


def test_an_explicit_head_size_wins_over_the_quotient():
    """Qwen3 and Mistral Nemo have heads that do not add up to the hidden size."""
    config = transformers.Qwen3Config(**SMALL, head_dim=128)
    assert Geometry.from_hf_config(config).groups[0].head_size_k == 128
    assert Geometry.from_hf_config({**PLAIN, "head_dim": None}).groups[0].head_size_k == 16


def test_without_kv_heads_every_head_has_its_own():
    fields = {name: value for name, value in PLAIN.items() if name != "num_key_value_heads"}
    assert Geometry.from_hf_config(fields).groups[0].kv_heads == 6
    assert Geometry.from_hf_config({**fields, "num_key_value_heads": None}).groups[0].kv_heads == 6


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": None}, "float32"),
        ({}, "float32"),
    ],
    ids=str,
)
def test_the_dtype_is_the_one_that_the_configuration_names(given, named):
    geometry = Geometry.from_hf_config({**PLAIN, **given})
    assert geometry.groups[0].dtype == named
    assert dict(geometry.facts)["kv_dtype"] == named


def test_the_callers_dtype_wins():
    geometry = Geometry.from_hf_config({**PLAIN, "dtype": "float16"}, "float8_e4m3fn")
    assert geometry.groups[0].dtype == dict(geometry.facts)["kv_dtype"] == "float8_e4m3fn"


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_whatever_turns_positions_differently_changes_the_facts(change):
    """K is stored rotated: pages under another rope are other pages."""
    assert (
        Geometry.from_hf_config({**PLAIN, **change}).facts != Geometry.from_hf_config(PLAIN).facts
    )


def test_facts_fit_a_namespace_and_do_not_depend_on_the_order_of_fields():
    rope = {"rope_type": "linear", "factor": 2.0}
    turned = dict(reversed(rope.items()))
    one = Geometry.from_hf_config({**PLAIN, "rope_parameters": rope})
    other = Geometry.from_hf_config({"rope_parameters": turned, **dict(reversed(PLAIN.items()))})
    assert one.facts == other.facts == tuple(sorted(one.facts))


LAYERS = ["full_attention", "sliding_attention", "full_attention"]
REFUSED = {
    "gemma2": (transformers.Gemma2Config(), "gemma2"),
    "deepseek": (transformers.DeepseekV3Config(), "deepseek_v3"),
    "unknown family": ({**PLAIN, "model_type": "rwkv9"}, "rwkv9"),
    "no family": (SMALL, "model_type is None"),
    "mistral window": (transformers.MistralConfig(**SMALL, sliding_window=4096), "sliding_window"),
    "phi3 window": (
        transformers.Phi3Config(**SMALL, sliding_window=2047, pad_token_id=0),
        "sliding_window is 2047",
    ),
    "qwen2 window": (
        transformers.Qwen2Config(**SMALL, use_sliding_window=True, max_window_layers=1),
        "sliding",
    ),
    "phi3 longrope": (
        transformers.Phi3Config(
            **SMALL,
            sliding_window=None,
            pad_token_id=0,
            rope_parameters={**LONG, "partial_rotary_factor": 1.0},
        ),
        "longrope",
    ),
    "llama dynamic": (transformers.LlamaConfig(**SMALL, rope_parameters=DYNAMIC), "dynamic"),
    "older name of the rope": ({**PLAIN, "rope_scaling": {"type": "dynamic"}}, "dynamic"),
    "layer_types": ({**PLAIN, "layer_types": LAYERS}, "sliding_attention"),
    "recurrent layers": ({**PLAIN, "layer_types": ["linear_attention"]}, "linear_attention"),
    "latent": ({**PLAIN, "kv_lora_rank": 512}, "kv_lora_rank is 512"),
    "soft cap": ({**PLAIN, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50"),
    "chunks": ({**PLAIN, "attention_chunk_size": 8192}, "attention_chunk_size is 8192"),
    "shared layers": ({**PLAIN, "num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    "window of 0": ({**PLAIN, "sliding_window": 0}, "sliding_window is 0"),
    "no layers": ({**PLAIN, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "no heads": ({**PLAIN, "num_attention_heads": None}, "num_attention_heads is None"),
    "no size": ({**PLAIN, "hidden_size": "96"}, "hidden_size is '96'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case):
    config, named = REFUSED[case]
    forms = [config] if isinstance(config, dict) else [config, config.to_dict()]
    for form in forms:
        with pytest.raises(GeometryError) as caught:
            Geometry.from_hf_config(form)
        assert named in str(caught.value)
        assert len(str(caught.value).split()) >= 4


def test_a_window_that_is_switched_off_is_no_window():
    """The files of Qwen2 carry a sliding_window that is not used."""
    fields = {**PLAIN, "model_type": "qwen2", "sliding_window": 32768}
    assert Geometry.from_hf_config({**fields, "use_sliding_window": False}).groups
    with pytest.raises(GeometryError, match="sliding_window is 32768"):
        Geometry.from_hf_config({**fields, "use_sliding_window": True})


@pytest.mark.parametrize("rope", [LONG, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_a_rope_by_kind_of_layer_is_looked_into(rope):
    """transformers 5 also writes rope parameters one level deeper, by kind of layer."""
    with pytest.raises(GeometryError, match=rope["rope_type"]):
        Geometry.from_hf_config({**PLAIN, "rope_parameters": {"full_attention": rope}})


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["su", "of-next-year"])
def test_a_rope_that_is_not_known_is_refused(name, kind):
    """Early files of Phi-3 call longrope "su"; in doubt the reader must say no."""
    with pytest.raises(GeometryError, match=kind):
        Geometry.from_hf_config({**PLAIN, "model_type": "phi3", name: {"type": kind}})


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_a_rope_that_depends_on_positions_alone_is_understood(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    assert Geometry.from_hf_config({**PLAIN, "rope_parameters": rope}).groups


@pytest.mark.parametrize(
    "field", [{"head_dim": -16}, {"head_dim": "16"}, {"num_key_value_heads": "2"}], ids=str
)
def test_a_size_that_is_no_count_is_refused_by_name(field):
    with pytest.raises(GeometryError, match=next(iter(field))):
        Geometry.from_hf_config({**PLAIN, **field})


def test_a_dtype_of_unknown_size_is_refused_by_name():
    with pytest.raises(InputError, match="'float4'"):
        Geometry.from_hf_config(PLAIN, "float4")


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_dtype_has_the_size_that_torch_gives_it(dtype):
    assert ITEM_BYTES[dtype] == torch.empty(0, dtype=getattr(torch, dtype)).element_size()


@pytest.mark.parametrize("page_tokens", [1, 16, 100])
def test_a_page_is_k_and_v_of_its_tokens_in_all_layers(page_tokens):
    k = torch.empty(page_tokens, 3, 2, 16, dtype=torch.bfloat16)
    geometry = Geometry.full(3, 2, 16, "bfloat16")
    assert geometry.page_bytes(page_tokens) == 2 * k.numel() * k.element_size()


def test_groups_add_up_and_a_state_is_no_part_of_a_page():
    full = Group("full", Rule.FULL, (0, 2), 2, 8, 4, "float32")
    window = Group("window", Rule.WINDOW, (1,), 1, 8, 8, "int8", window=4)
    state = Group("state", Rule.STATE, (3,), 1, 1, 1, "float32", state_bytes=1000)
    assert full.token_bytes == 2 * 2 * (8 + 4) * 4
    assert window.token_bytes == 16
    assert state.token_bytes == 0
    geometry = Geometry((full, window, state))
    assert geometry.page_bytes(10) == 10 * (full.token_bytes + window.token_bytes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": ()}, "layers"),
        ({"kv_heads": 0}, "heads"),
        ({"head_size_k": 0}, "K size"),
        ({"head_size_v": -1}, "V size"),
        ({"dtype": "float7"}, "float7"),
        ({"window": 5}, "window 5"),
        ({"rule": Rule.WINDOW}, "window None"),
        ({"rule": Rule.STATE}, "state None"),
        ({"state_bytes": 5}, "state 5"),
    ],
    ids=str,
)
def test_a_group_that_cannot_be_is_refused_with_its_name(change, named):
    fields = {
        "rule": Rule.FULL,
        "layers": (0,),
        "kv_heads": 1,
        "head_size_k": 1,
        "head_size_v": 1,
        "dtype": "float32",
    }
    with pytest.raises(InputError, match="'mine'") as caught:
        Group("mine", **{**fields, **change})
    assert named in str(caught.value)


def test_groups_need_distinct_names_and_there_must_be_one():
    group = Group("full", Rule.FULL, (0,), 1, 1, 1, "float32")
    with pytest.raises(InputError, match="full"):
        Geometry((group, group))
    with pytest.raises(InputError, match="groups"):
        Geometry(())


@pytest.mark.parametrize("tokens", [0, -1])
def test_the_last_token_is_always_computed(tokens):
    group = Group("full", Rule.FULL, (0,), 1, 1, 1, "float32")
    with pytest.raises(InputError, match=f"replay_tokens is {tokens}"):
        Geometry((group,), replay_tokens=tokens)


def test_only_families_with_the_switch_can_switch_their_window_off():
    fields = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "sliding_window": 8,
        "use_sliding_window": False,
    }
    assert Geometry.from_hf_config(fields | {"model_type": "qwen2"}).groups[0].rule is Rule.FULL
    with pytest.raises(GeometryError, match="sliding_window is 8"):
        Geometry.from_hf_config(fields | {"model_type": "mistral"})
