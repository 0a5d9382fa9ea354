"""Tiny models of every family: they continue exactly, and a wrong cache would show."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache

from stepwell.base.errors import InputError
from stepwell.testing.families import FAMILIES, VOCABULARY, WINDOW, tiny_model

TOKENS = 100


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def prompt(tokens=TOKENS):
    return torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_pieces_over_a_cache_give_the_logits_of_the_whole(family):
    """A family whose own cache does not continue exactly must not be here."""
    model = tiny_model(family)
    ids = prompt()
    whole = model(ids, use_cache=False).logits
    assert whole.std() > 0.3
    for cuts in ((37, 1, 1, 2, 29, 30), (1, 2, 97), (70, *[1] * 30)):
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, past_key_values=cache).logits for piece in ids.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", [one for one in FAMILIES if "sliding_window" in FAMILIES[one]])
@torch.no_grad()
def test_a_window_is_so_many_tokens_the_query_included(family):
    """One layer, one token changed: the last query that notices says how far a window reaches."""
    listed = {"layer_types": ["sliding_attention"], "no_rope_layers": [1]}
    changes = {} if family in ("mistral", "phi3", "mixtral", "qwen3_moe") else listed
    model = tiny_model(family, num_hidden_layers=1, **changes)
    ids = prompt(60)
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % VOCABULARY
    moved = (model(changed).logits - model(ids).logits).abs().amax(-1)[0]
    assert int(moved.nonzero().max()) == 10 + WINDOW - 1


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_answers_have_many_distinct_tokens(family):
    model = tiny_model(family)
    cache, ids, answer = DynamicCache(config=model.config), prompt(40), []
    for _ in range(32):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        answer.append(int(ids))
    assert len(set(answer)) >= 10


@torch.no_grad()
def test_soft_caps_and_sinks_have_an_effect():
    """With the attention of torch they would silently have none."""
    ids = prompt()
    capped = tiny_model("gemma2")(ids).logits
    assert (
        tiny_model("gemma2", attn_logit_softcapping=None)(ids).logits - capped
    ).abs().max() > 0.1
    model = tiny_model("gpt_oss")
    sunk = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    assert (model(ids).logits - sunk).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_weights_are_the_same_each_time_and_the_callers_generator_is_not_disturbed(family):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, other = tiny_model(family), tiny_model(family)
    assert torch.equal(torch.get_rng_state(), before)
    assert not one.training
    assert one.get_output_embeddings().weight is not one.get_input_embeddings().weight
    for name, weights in one.state_dict().items():
        assert torch.equal(weights, other.state_dict()[name]), name


def test_changes_reach_the_configuration_and_unknown_families_are_refused():
    assert tiny_model("llama", num_hidden_layers=1).config.num_hidden_layers == 1
    with pytest.raises(InputError, match="'rwkv9'"):
        tiny_model("rwkv9")


def test_the_names_of_families_need_no_torch():
    code = "import stepwell.testing.families, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
