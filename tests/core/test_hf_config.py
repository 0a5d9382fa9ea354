"""Configurations: what is understood is read right; what is not is refused in words."""

import json

import pytest
import torch
import transformers

from stepwell.base.errors import GeometryError, InputError
from stepwell.core.geometry import Geometry, Group, Rule, StateTensor
from stepwell.core.hf_config import attention_groups
from stepwell.testing.families import FAMILIES, WINDOW, tiny_model

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


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def rules(config):
    return {group.name: group.layers for group in Geometry.from_hf_config(config).groups}


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
    "unknown family": ({**PLAIN, "model_type": "rwkv9"}, "rwkv9"),
    "no family": (SMALL, "model_type is None"),
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
    "recurrent layers": ({**PLAIN, "layer_types": ["linear_attention"] * 3}, "linear_attention"),
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
    fields = {**PLAIN, "model_type": "qwen2", "sliding_window": 32768, "max_window_layers": 1}
    assert rules({**fields, "use_sliding_window": False}) == {"full": (0, 1, 2)}
    assert rules({**fields, "use_sliding_window": True}) == {"full": (0,), "window": (1, 2)}


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


def test_only_families_with_the_switch_can_switch_their_window_off():
    fields = {**PLAIN, "sliding_window": 8, "use_sliding_window": False}
    assert rules(fields | {"model_type": "qwen2"}) == {"full": (0, 1, 2)}
    assert rules(fields | {"model_type": "mistral"}) == {"window": (0, 1, 2)}
    with pytest.raises(GeometryError, match="sliding_window is 8"):
        Geometry.from_hf_config(fields)


MIXED = {"full": (1, 3), "window": (0, 2)}
STATES = {"full": (1, 3), "state": (0, 2)}
LAYERS_OF = {
    "llama": {"full": (0, 1, 2)},
    "mistral": {"window": (0, 1, 2)},
    "phi3": {"window": (0, 1, 2)},
    "qwen2": {"full": (0,), "window": (1, 2)},
    "qwen3": {"full": (0, 1), "window": (2,)},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "gpt_oss": MIXED,
    "deepseek_v2": {"full": (0, 1, 2)},
    "deepseek_v3": {"full": (0, 1, 2)},
    "mixtral": {"window": (0, 1, 2)},
    "qwen2_moe": MIXED,
    "qwen3_moe": {"window": (0, 1, 2)},
    "olmo2": {"full": (0, 1, 2, 3)},
    "smollm3": {"full": (0, 2), "window": (1, 3)},
    "ministral": MIXED,
    "cohere2": MIXED,
    "granite": {"full": (0, 1, 2)},
    "glm4": {"full": (0, 1, 2)},
    "qwen3_next": STATES,
    "lfm2": STATES,
    "granitemoehybrid": STATES,
    "falcon_h1": {"full": (0, 1, 2), "state": (0, 1, 2)},
}
HYBRIDS = [name for name, groups in LAYERS_OF.items() if "state" in groups]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_alike_in_all_forms(family):
    config = tiny_model(family).config
    geometry = Geometry.from_hf_config(config)
    assert {group.name: group.layers for group in geometry.groups} == LAYERS_OF[family]
    windows = {group.window for group in geometry.groups if group.rule is Rule.WINDOW}
    assert windows == ({WINDOW} if "window" in LAYERS_OF[family] else set())
    assert Geometry.from_hf_config(config.to_dict()) == geometry
    assert Geometry.from_hf_config(json.loads(config.to_json_string())) == geometry
    assert dict(geometry.facts)["values"].count(family) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_heads_are_those_that_attention_is_handed(family):
    """What the reader says is held against what each model does."""
    handed = {}

    def note(module, query, key, value, attention_mask, **keywords):
        handed[module.layer_idx] = key.shape[1], key.shape[3], value.shape[1], value.shape[3]
        return query.transpose(1, 2)[..., : value.shape[3]], None

    transformers.AttentionInterface.register("note_shapes", note)
    model = tiny_model(family)
    model.set_attn_implementation("note_shapes")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
    expected = {}
    for group in Geometry.from_hf_config(model.config).groups:
        if group.rule is not Rule.STATE:
            heads, k, v = group.kv_heads, group.head_size_k, group.head_size_v
            expected |= dict.fromkeys(group.layers, (heads, k, heads, v))
    assert handed == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_states_have_the_shapes_and_dtypes_that_the_model_keeps(family, dtype):
    model = tiny_model(family).to(getattr(torch, dtype))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for tokens in ([[1, 2, 3, 4, 5]], [[6]], [[7, 8]]):
            model(torch.tensor(tokens), past_key_values=cache)
    kept = {}
    for number, layer in enumerate(cache.layers):
        for name in ("conv", "recurrent"):
            states = getattr(layer, f"{name}_states", None)
            if states and states[0] is not None:
                held = str(states[0].dtype).removeprefix("torch.")
                kept[number, name] = tuple(states[0].shape[1:]), held
                assert list(states) == [0]
    group = Geometry.from_hf_config(model.config, dtype).groups[-1]
    read = {(n, t.name): (t.shape, t.dtype) for n, t, _ in group.state_offsets()}
    assert read == kept


def test_states_follow_the_activations_and_not_a_shorter_kv():
    config = tiny_model("lfm2", dtype="bfloat16").config.to_dict()
    config["dtype"] = "bfloat16"
    full, state = Geometry.from_hf_config(config, "float8_e4m3fn").groups
    assert (full.dtype, state.state[0].dtype) == ("float8_e4m3fn", "bfloat16")
    assert Geometry.from_hf_config(config, "float16").groups[1].state[0].dtype == "float16"


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_read_expanded_or_as_one_vector(family):
    config = tiny_model(family).config
    expanded = Group("full", Rule.FULL, (0, 1, 2), 4, 20, 10, "float32")
    one = Group("full", Rule.FULL, (0, 1, 2), 1, 24, 0, "float32", latent=True)
    assert Geometry.from_hf_config(config).groups == (expanded,)
    assert Geometry.from_hf_config(config, latent=True).groups == (one,)
    with pytest.raises(GeometryError, match="num_key_value_heads is 2"):
        Geometry.from_hf_config(config.to_dict() | {"num_key_value_heads": 2})


def test_only_latent_attention_has_a_latent():
    with pytest.raises(GeometryError, match="latent is True"):
        Geometry.from_hf_config(PLAIN, latent=True)


RULES = {
    "gemma2": ({}, {}),
    "gpt_oss": ({}, {}),
    "cohere2": ({}, {"sliding_window_pattern": 2}),
    "gemma3_text": ({}, {"sliding_window_pattern": 3}),
    "qwen2": ({}, {"max_window_layers": 0}),
    "qwen3": ({}, {"max_window_layers": 2}),
    "qwen2_moe": ({}, {"max_window_layers": 2}),
    "smollm3": ({"no_rope_layers": None}, {"no_rope_layers": [0, 1, 1, 0] * 2}),
    "ministral": ({}, {"sliding_window": None}),
    "qwen3_next": ({}, {"full_attention_interval": 2}),
    "lfm2": ({}, {"full_attn_idxs": [0]}),
}


@pytest.mark.parametrize("family", RULES)
def test_without_a_list_of_layers_the_familys_rule_counts(family):
    """The configuration class fills the list in; a file may come without it."""
    for change in RULES[family]:
        raw = tiny_model(family).config.to_dict() | {"num_hidden_layers": 8} | change
        del raw["layer_types"]
        filled = transformers.AutoConfig.for_model(**raw)
        assert rules(raw) == rules(filled)


def test_older_names_of_layers_are_understood():
    new = tiny_model("granitemoehybrid").config.to_dict()
    old = {**new, "layers_block_type": ["mamba", "attention", "mamba", "attention"]}
    del old["layer_types"]
    assert rules(old) == rules(new) == STATES


def test_sizes_of_a_mamba_state_that_are_left_to_the_family():
    config = tiny_model("granitemoehybrid").config.to_dict()
    groups = Geometry.from_hf_config(config).groups
    assert Geometry.from_hf_config(config | {"mamba_d_head": "auto"}).groups == groups
    falcon = tiny_model("falcon_h1").config.to_dict() | {"mamba_d_head": "auto"}
    wide = Geometry.from_hf_config(falcon | {"mamba_d_ssm": 192}).groups[1].state
    assert wide[1] == StateTensor("recurrent", (6, 32, 8), "float32")
    same = Geometry.from_hf_config(falcon | {"mamba_d_ssm": None}).groups[1].state
    assert same[1] == StateTensor("recurrent", (6, 16, 8), "float32")


DOUBTFUL = {
    "two kinds of input": ({"text_config": {"model_type": "gemma3_text"}}, "text_config", "llama"),
    "shared KV": ({"model_type": "gemma3n_text"}, "share", "llama"),
    "indexer": ({"model_type": "deepseek_v32"}, "indexer", "deepseek_v3"),
    "indexer's field": ({"index_topk": 64}, "index_topk", "deepseek_v3"),
    "bamba": ({"model_type": "bamba"}, "verified", "granitemoehybrid"),
    "spans": ({"model_type": "llama4_text"}, "spans", "llama"),
    "looks ahead": ({"use_bidirectional_attention": True}, "later", "gemma3_text"),
    "not causal": ({"is_causal": False}, "is_causal", "llama"),
    "cap that the model leaves out": ({"attn_logit_softcapping": 5.0}, "softcap", "gemma3_text"),
    "layers of several sizes": ({"per_layer_config": {"0": {}}}, "per_layer_config", "llama"),
    "bounded time step": ({"time_step_limit": [0.1, 0.2]}, "time_step_limit", "falcon_h1"),
    "bounded below": ({"time_step_limit": [0.1, float("inf")]}, "time_step_limit", "falcon_h1"),
    "strange bounds": ({"time_step_limit": 3}, "time_step_limit", "granitemoehybrid"),
    "mamba heads": ({"mamba_n_heads": 5}, "product", "granitemoehybrid"),
    "list too short": ({"layer_types": ["full_attention"]}, "1 entries", "qwen2"),
    "unknown kind": ({"layer_types": ["chunked_attention"] * 3}, "chunked", "qwen2"),
    "list that is not read": (
        {"layer_types": ["full_attention"] * 3},
        "do not look at it",
        "mistral",
    ),
    "window switched off": ({"use_sliding_window": False}, "use_sliding_window", "qwen2"),
    "no window": ({"sliding_window": None}, "sliding_window is None", "gemma2"),
    "no attention": ({"layer_types": ["linear_attention"] * 4}, "no layer", "granitemoehybrid"),
    "state of another kind": ({"layer_types": ["conv"] * 4}, "has conv", "qwen3_next"),
    "rope list": ({"no_rope_layers": [1], "layer_types": None}, "no_rope_layers", "smollm3"),
    "rope of phi3": ({"rope_scaling": {"type": "yarn"}}, "yarn", "phi3"),
    "kv heads": ({"num_key_value_heads": 3}, "divisor", "llama"),
    "no latent": ({"kv_lora_rank": None}, "kv_lora_rank", "deepseek_v2"),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_in_doubt_the_reader_refuses(case):
    change, named, family = DOUBTFUL[case]
    config = tiny_model(family).config.to_dict()
    assert Geometry.from_hf_config(config).groups
    with pytest.raises(GeometryError, match=named):
        Geometry.from_hf_config(config | change)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3", "head_dim"),
        ("mistral", "num_key_value_heads"),
        ("mistral", "sliding_window"),
        ("qwen3_moe", "use_sliding_window"),
        ("falcon_h1", "mamba_d_ssm"),
    ],
)
def test_a_field_with_a_default_of_the_familys_own_must_be_there(family, field):
    """Read by other fields it would give a size that the model does not have."""
    config = tiny_model(family).config.to_dict()
    del config[field]
    with pytest.raises(GeometryError, match=f"{field} is missing"):
        Geometry.from_hf_config(config)


def test_layers_with_several_windows_are_several_groups():
    windows = {0: 128, 1: None, 2: 24, 3: 128}
    full, small, large = attention_groups(windows, (1, 8, 8), "float32")
    assert (full.name, full.layers, full.window) == ("full", (1,), None)
    assert (small.name, small.layers, small.window) == ("window-24", (2,), 24)
    assert (large.name, large.layers, large.window) == ("window-128", (0, 3), 128)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
        ("granitemoehybrid", {"position_embedding_type": None}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"sliding_window": 25}),
        ("granite", {"residual_multiplier": 1.0}),
        ("falcon_h1", {"key_multiplier": 0.5}),
    ],
    ids=str,
)
def test_what_bends_kv_with_the_same_weights_changes_the_facts(family, change):
    config = tiny_model(family).config.to_dict()
    assert Geometry.from_hf_config(config | change).facts != Geometry.from_hf_config(config).facts
