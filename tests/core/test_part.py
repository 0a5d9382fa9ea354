"""Parts: two slices of one page never share a name."""

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.core.part import Part, Shard

BASE = Part("full", "layer.page.slot.head.dim", (0, 32), (0, 8))

CHANGES = [
    {"group": "window"},
    {"layout": "page.layer.slot.head.dim"},
    {"layers": (1, 32)},
    {"layers": (0, 31)},
    {"layers": (32, 0)},
    {"heads": (1, 8)},
    {"heads": (0, 7)},
    {"shard": Shard("head", 0, 1)},
    {"shard": Shard("none", 0, 2)},
    {"shard": Shard("none", 1, 2)},
    {"engine": ("vllm", 1)},
    {"engine": ("stepwell", 2)},
    {"isa": "avx512"},
]

ranges = st.tuples(st.integers(0, 2), st.integers(0, 2))
parts = st.builds(
    Part,
    group=st.text("ab", max_size=2),
    layout=st.text("ab", max_size=2),
    layers=ranges,
    heads=ranges,
    shard=st.builds(
        lambda axis, rank, more: Shard(axis, rank, rank + more),
        st.sampled_from(["none", "head"]),
        st.integers(0, 2),
        st.integers(1, 2),
    ),
    engine=st.tuples(st.text("ab", max_size=2), st.integers(0, 2)),
    isa=st.none() | st.text("ab", max_size=2),
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_field_changes_the_digest(change):
    assert dataclasses.replace(BASE, **change).digest() != BASE.digest()


def test_no_field_is_forgotten_in_the_test_above():
    assert {name for change in CHANGES for name in change} == {
        field.name for field in dataclasses.fields(Part)
    }


def test_all_changes_differ_from_each_other():
    digests = {dataclasses.replace(BASE, **change).digest() for change in CHANGES}
    assert len(digests) == len(CHANGES)
    assert {len(digest) for digest in digests} == {32}


@given(parts, parts)
def test_two_parts_never_share_a_digest(one, other):
    assume(one != other)
    assert one.digest() != other.digest()


@given(parts)
def test_equal_parts_have_equal_digests(part):
    assert dataclasses.replace(part).digest() == part.digest()


def test_the_digest_is_the_same_in_every_release():
    """Golden: stored objects are found by it. On purpose only together with FORMAT_VERSION."""
    assert BASE.digest().hex() == "7ef4d28b1a13f191848ab0dc00538ba738d352ad737f03c0205dcc35499a12b0"


def test_a_group_that_is_not_cut_is_shard_0_of_1():
    assert Shard() == Shard("none", 0, 1) == BASE.shard


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 1), (0, 0), (3, 2)])
def test_a_rank_outside_its_group_is_refused(rank, size):
    with pytest.raises(InputError, match=f"rank {rank} of {size}"):
        Shard("head", rank, size)
