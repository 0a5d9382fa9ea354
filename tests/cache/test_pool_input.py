"""Bad input to the pool: a clear error with value, limit and remedy; nothing taken, books in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepwell.base.errors import InputError, MisuseError
from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import PagePool
from stepwell.core.chain import Chain, Extra
from stepwell.core.geometry import Geometry, Group, Rule, StateTensor
from stepwell.core.key import Namespace
from stepwell.testing.fingerprint import geometry


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "empty"),
        (np.zeros(0, np.int64), "empty"),
        ([1, -5], "-5"),
        ([2**32], "4294967296"),
        ([2**70], str(2**70)),
        ([1.0, 2.0], "float64"),
        (["a"], "U1"),
        ([[1, 2], [3, 4]], r"\(2, 2\)"),
        ([True, False], "bool"),
        (np.zeros((2, 2), np.int64), r"\(2, 2\)"),
        (np.array([1, -1]), "-1"),
        ([None], "object"),
        (None, "no flat list"),
        (5, "no flat list"),
    ],
)
def test_prompts_that_are_no_token_ids(bench: Any, prompt: Any, named: str) -> None:
    bench.serve("a", range(9))
    before = bench.pool.stats()
    with pytest.raises(InputError, match=named):
        bench.pool.open("b", prompt, bench.space)
    assert bench.pool.stats() == before
    bench.pool.check()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"page_tokens": -3}, "page_tokens is -3"),
        ({"requests": 0}, "requests is 0"),
        ({"positions": 0}, "positions is 0"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
        ({"capacity_bytes": 127}, "128 bytes"),
        ({"page_tokens": 1.5}, "page_tokens is 1.5"),
        ({"page_tokens": 70_000, "capacity_bytes": 2**30}, "65536"),
        ({"requests": 10**9, "positions": 10**6}, "pool.requests"),
        ({"capacity_bytes": 2**60}, "slots"),
    ],
)
def test_sizes_that_make_no_pool(change: dict[str, Any], named: str) -> None:
    sizes = {"page_tokens": 4, "capacity_bytes": 4096, "requests": 2, "positions": 64} | change
    with pytest.raises(InputError, match=named):
        PagePool(geometry(), PoolSettings(**sizes), device="numpy")


def test_groups_and_dtypes_that_are_not_understood() -> None:
    full = Geometry.full(2, 1, 1).groups[0]
    blob = (StateTensor("conv", (4,), "float32"),)
    state = Group("state", Rule.STATE, (0,), 0, 0, 0, "float32", state=blob)
    sizes = PoolSettings(4, 4096, 2, 64)
    for groups, text in (
        ((full, replace(full, name="draft")), "'draft'"),
        ((state,), "states alone"),
        ((full, replace(full, name="w", rule=Rule.WINDOW, window=8, dtype="float16")), "float16"),
    ):
        with pytest.raises(InputError, match=text):
            PagePool(Geometry(groups), sizes, device="numpy")
    with pytest.raises(InputError, match="state_tokens is 6"):
        PagePool(Geometry((full,)), replace(sizes, state_tokens=6), device="numpy")
    with pytest.raises(InputError, match="bfloat16"):
        PagePool(Geometry.full(1, 1, 1, "bfloat16"), sizes, device="numpy")


def test_a_prompt_without_or_with_another_kind_of_namespace(bench: Any) -> None:
    with pytest.raises(InputError, match="namespace"):
        bench.pool.open("a", [1, 2, 3])
    other = Namespace(8, model="m")
    with pytest.raises(InputError, match="pages of 8"):
        bench.pool.open("a", [1, 2, 3], other)
    with pytest.raises(InputError, match="pages of 8"):
        bench.pool.open("a", Chain(other, [1, 2, 3]))
    bench.pool.check()


def test_arguments_of_another_kind(bench: Any) -> None:
    for arguments in (
        {"namespace": "m"},
        {"namespace": 5},
        {"namespace": bench.space, "flags": 3},
        {"namespace": bench.space, "flags": None},
    ):
        with pytest.raises(InputError):
            bench.pool.open("a", [1, 2, 3], **arguments)
    for counts in (["a"], 5, None):
        with pytest.raises(InputError, match="no requests"):
            bench.pool.bind(counts)
    sizes = PoolSettings(4, 4096, 2, 64)
    with pytest.raises(InputError, match="secret"):
        PagePool(geometry(), sizes, device="numpy", secret="text")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(InputError, match=device):
            PagePool(geometry(), sizes, device=device)
    bench.open("a", [1, 2, 3])
    with pytest.raises(InputError, match="no flat list"):
        bench.pool.commit("a", None)
    bench.pool.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": float("nan")},
        {"count": float("nan")},
        {"start": 1.5},
        {"start": 2**63},
        {"count": 2**40},
        {"kind": 5},
        {"digest": "text"},
    ],
)
def test_extras_that_would_drop_out_of_the_key(wrong: dict[str, Any]) -> None:
    """A NaN compares as nothing, so its page would be like one without media."""
    with pytest.raises(InputError, match="extra"):
        Extra(**({"start": 0, "count": 4, "kind": "media", "digest": b"x"} | wrong))


def test_a_chain_is_cut_to_a_whole_number_of_tokens(bench: Any) -> None:
    chain = Chain(bench.space, range(9))
    for tokens in (-3, 2.5):
        with pytest.raises(InputError, match=str(tokens)):
            chain.truncate(tokens)
    chain.truncate(5)
    assert (len(chain), chain.pages) == (5, 1)
    assert chain.key(0) == Chain(bench.space, range(4)).key(0)


def test_committing_more_than_there_is_room_for(bench: Any) -> None:
    bench.open("a", [1, 2, 3])
    with pytest.raises(InputError, match=r"5 tokens.*room for 4.*extend"):
        bench.pool.commit("a", [1, 2, 3, 4, 5])
    bench.pool.check()
    bench.compute("a", [1, 2, 3])


def test_committing_other_tokens_than_the_prompt_has(bench: Any) -> None:
    bench.open("a", [1, 2, 3, 4, 5])
    with pytest.raises(InputError, match="token 2 was committed as 9"):
        bench.pool.commit("a", [1, 2, 9])
    with pytest.raises(InputError, match="-1"):
        bench.pool.commit("a", [-1])
    bench.pool.check()
    assert bench.cached([1, 2, 3, 4, 5]) == 0
    bench.compute("a", [1, 2, 3, 4, 5])


def test_steps_that_cannot_be(bench: Any) -> None:
    bench.open("a", [1, 2, 3])
    for count in (0, -1, 5, 1.5):
        with pytest.raises(InputError, match=f"{count}"):
            bench.pool.bind({"a": count})
    with pytest.raises(InputError, match="no requests"):
        bench.pool.bind({})
    for tokens in (-1, 2.5):
        with pytest.raises(InputError, match=f"{tokens}"):
            bench.pool.extend("a", tokens)
    bench.pool.check()


def test_requests_that_are_not_open(bench: Any) -> None:
    """Closing twice, and every other call on a name that means nothing (any more)."""
    bench.serve("a", [1, 2, 3])
    calls = (
        lambda: bench.pool.close("a"),
        lambda: bench.pool.extend("a", 1),
        lambda: bench.pool.commit("a", [1]),
        lambda: bench.pool.bind({"a": 1}),
        lambda: bench.pool.room("a"),
        lambda: bench.pool.truncate("a", 5),
    )
    for call in calls:
        with pytest.raises(MisuseError, match="'a' is not open"):
            call()
    bench.pool.check()


def test_prefixes_that_are_not_whole_pages_cannot_be_dropped(bench: Any) -> None:
    bench.serve("a", range(9))
    for prefix in ([], [0, 1, 2], list(range(9))):
        with pytest.raises(InputError, match="whole pages"):
            bench.pool.drop(prefix, bench.space)
    assert bench.pool.drop(range(4), bench.space) == 2
    assert bench.pool.drop(range(4), bench.space) == 0


def test_a_chain_that_was_handed_over_is_not_changed(bench: Any) -> None:
    chain = Chain(bench.space, range(9))
    bench.pool.open("a", chain)
    bench.compute("a", list(range(9)))
    bench.pool.extend("a", 3)
    bench.compute("a", list(range(12)))
    assert len(chain) == 9
    chain.append([7] * 20)
    assert bench.cached([*range(12), 1]) == 12
    bench.pool.check()
