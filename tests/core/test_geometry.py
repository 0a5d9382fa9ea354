"""Geometry: groups that cannot be are refused, and sizes add up."""

import pytest
import torch

from stepwell.base.errors import InputError
from stepwell.core.geometry import ITEM_BYTES, Geometry, Group, Rule, StateTensor

TENSOR = StateTensor("conv", (3, 2), "float32")
EMPTY = {"kv_heads": 0, "head_size_k": 0, "head_size_v": 0}


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
    tensor = StateTensor("recurrent", (1000,), "int8")
    state = Group("state", Rule.STATE, (3,), 0, 0, 0, "float32", state=(tensor,))
    assert full.token_bytes == 2 * 2 * (8 + 4) * 4
    assert window.token_bytes == 16
    assert (state.token_bytes, state.state_bytes) == (0, 1008)
    assert full.state_bytes == 0
    assert full.state_offsets() == ()
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
        ({"state": (TENSOR,)}, "with state (StateTensor"),
        ({"rule": Rule.STATE}, "(1, 1, 1, 1)"),
        ({"rule": Rule.STATE, **EMPTY}, "state ()"),
        ({"rule": Rule.STATE, **EMPTY, "layers": (), "state": (TENSOR,)}, "(0, 0, 0, 0)"),
        ({"rule": Rule.STATE, **EMPTY, "kv_heads": 1, "state": (TENSOR,)}, "(1, 1, 0, 0)"),
        ({"rule": Rule.STATE, **EMPTY, "head_size_k": 1, "state": (TENSOR,)}, "(1, 0, 1, 0)"),
        ({"rule": Rule.STATE, **EMPTY, "head_size_v": 1, "state": (TENSOR,)}, "(1, 0, 0, 1)"),
        ({"rule": Rule.STATE, **EMPTY, "state": (TENSOR,), "latent": True}, "latent"),
        ({"head_size_v": 0}, "(1, 1, 1, 0)"),
        ({"latent": True}, "(1, 1, 1, 1)"),
        ({"latent": True, "kv_heads": 2, "head_size_v": 0}, "(1, 2, 1, 0)"),
        ({"latent": True, "head_size_k": 0, "head_size_v": 0}, "(1, 1, 0, 0)"),
        ({"latent": True, "layers": (), "head_size_v": 0}, "(0, 1, 1, 0)"),
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


def test_a_latent_group_of_several_layers_keeps_one_vector_for_each_token():
    group = Group("full", Rule.FULL, (0, 1, 2), 1, 24, 0, "bfloat16", latent=True)
    assert group.token_bytes == 3 * 24 * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": "other"}, "'other'"),
        ({"shape": ()}, "shape ()"),
        ({"shape": (3, 0)}, "shape (3, 0)"),
        ({"dtype": "float7"}, "'float7'"),
    ],
    ids=str,
)
def test_a_state_tensor_that_cannot_be_is_refused(change, named):
    with pytest.raises(InputError) as caught:
        StateTensor(**{"name": "conv", "shape": (3,), "dtype": "int8", **change})
    assert named in str(caught.value)


def test_a_state_lies_layer_by_layer_each_tensor_at_a_multiple_of_16_bytes():
    """Odd sizes, so that every tensor but the first needs its place moved."""
    conv, recurrent = (
        StateTensor("conv", (5, 3), "bfloat16"),
        StateTensor("recurrent", (7,), "int8"),
    )
    group = Group("state", Rule.STATE, (1, 4), 0, 0, 0, "float32", state=(conv, recurrent))
    assert group.state_offsets() == (
        (1, conv, 0),
        (1, recurrent, 32),
        (4, conv, 48),
        (4, recurrent, 80),
    )
    assert group.state_bytes == 96


def test_a_state_that_fits_wastes_nothing():
    tensor = StateTensor("recurrent", (4, 4), "float32")
    group = Group("state", Rule.STATE, (0, 1), 0, 0, 0, "float32", state=(tensor,))
    assert group.state_bytes == 2 * 64


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
