"""Namespaces: whatever changes KV or who may share it changes the root key, and nothing can imitate it."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.core.key import MAX_PAGE_TOKENS, Digest, Namespace, field_bytes, framed
from stepwell.core.reasons import Reason

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())

BASE = Namespace(
    16,
    model="m",
    revision="r",
    adapter="a",
    facts=(("kv_dtype", "bfloat16"), ("rope", "x")),
    tenant="t",
    epoch=1,
)

CHANGES = {
    "page_tokens": 15,
    "model": "n",
    "revision": None,
    "adapter": None,
    "facts": (("kv_dtype", "bfloat16"),),
    "tenant": None,
    "epoch": 2,
}

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)
maybe = st.none() | texts
namespaces = st.builds(
    lambda page_tokens, model, private, **rest: Namespace(
        page_tokens,
        model=None if private else model,
        process=model if private else None,
        **rest,
    ),
    page_tokens=st.integers(1, 3),
    model=texts,
    private=st.booleans(),
    revision=maybe,
    adapter=maybe,
    facts=st.dictionaries(st.text("ab=", max_size=3), st.text("ab=", max_size=3), max_size=3).map(
        lambda facts: tuple(sorted(facts.items()))
    ),
    tenant=maybe,
    epoch=st.integers(0, 2) | st.integers(0, 2**63 - 1),
)


def namespace_of(case):
    fields = dict(case["namespace"])
    fields["facts"] = tuple(map(tuple, fields.get("facts", ())))
    return Namespace(**fields)


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_roots_hold(case):
    """Stored pages would be lost, or taken for others, if equal inputs gave other keys.

    If this fails on purpose, raise FORMAT_VERSION and make new vectors.
    """
    secret = bytes.fromhex(case["secret"]) if case["secret"] else None
    assert namespace_of(case).root(secret).hex() == case["root"]


def test_golden_vectors_cover_every_field():
    named = {name for case in GOLDEN for name in case["namespace"]}
    assert named == {field.name for field in dataclasses.fields(Namespace)}
    assert {case["namespace"]["page_tokens"] for case in GOLDEN} == {1, 4, 16}
    assert any(case["secret"] for case in GOLDEN)
    assert any(case["extras"] for case in GOLDEN)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_field_changes_the_root(name):
    changed = dataclasses.replace(BASE, **{name: CHANGES[name]})
    assert changed.root() != BASE.root()
    assert changed.root(b"s") != BASE.root(b"s")


def test_no_field_is_forgotten_in_the_test_above():
    assert {*CHANGES, "process"} == {field.name for field in dataclasses.fields(Namespace)}


def test_the_process_of_a_private_namespace_changes_the_root():
    one = Namespace(16, process="one")
    assert one.root() != Namespace(16, process="two").root()
    assert one.root() != Namespace(16, model="one").root()


def test_private_namespaces_differ_from_each_other():
    """Two models without a digest would otherwise read each other's pages."""
    many = [Namespace.private(16, tenant="t") for _ in range(50)]
    assert len({one.root() for one in many}) == 50
    assert all(one.model is None and one.tenant == "t" for one in many)


def test_equal_namespaces_have_equal_roots():
    assert dataclasses.replace(BASE) is not BASE
    assert dataclasses.replace(BASE).root() == BASE.root()


def test_the_secret_changes_the_root():
    roots = {BASE.root(), BASE.root(b""), BASE.root(b"one"), BASE.root(b"two")}
    assert len(roots) == 4
    assert {len(root) for root in roots} == {32}


def test_a_fact_cannot_be_moved_between_name_and_value():
    pairs = [
        (("a", "bc"),),
        (("ab", "c"),),
        (("a", "b"), ("c", "")),
        (("", "abc"),),
        (("abc", ""),),
    ]
    assert len({dataclasses.replace(BASE, facts=facts).root() for facts in pairs}) == len(pairs)


def test_a_tenant_cannot_imitate_an_adapter():
    tenant = Namespace(16, model="m", tenant="x")
    adapter = Namespace(16, model="m", adapter="x")
    revision = Namespace(16, model="m", revision="x")
    assert len({tenant.root(), adapter.root(), revision.root()}) == 3


@pytest.mark.parametrize("word", ["None", "-", "unknown", "\0"])
def test_no_text_imitates_an_absent_field(word):
    absent = Namespace(16, model="m")
    assert Namespace(16, model="m", tenant=word).root() != absent.root()
    assert Namespace(16, model="m", adapter=word).root() != absent.root()


@given(namespaces, namespaces)
def test_two_namespaces_never_share_their_bytes(one, other):
    assume(one != other)
    assert one.canonical() != other.canonical()


@given(namespaces, st.data())
def test_one_field_changed_is_seen_in_the_bytes(one, data):
    """Drawing two at random seldom gives neighbours; these differ in one place only."""
    other = data.draw(namespaces)
    name = data.draw(st.sampled_from(["revision", "adapter", "facts", "tenant", "epoch"]))
    changed = dataclasses.replace(one, **{name: getattr(other, name)})
    assert (changed.canonical() == one.canonical()) == (changed == one)


@given(namespaces, namespaces)
def test_no_namespaces_bytes_begin_anothers(one, other):
    """Otherwise a longer record could be taken for a shorter one and its first page."""
    assume(one != other)
    assert not other.canonical().startswith(one.canonical())


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_framed_neighbours_cannot_run_together(one, other):
    joined = [b"".join(map(framed, values)) for values in (one, other)]
    assert (joined[0] == joined[1]) == (one == other)


def test_fields_of_different_kinds_differ():
    values = [None, 0, "", (), (("", ""),), "0", 1]
    assert len({field_bytes("n", value) for value in values}) == len(values)
    assert field_bytes("a", 1) != field_bytes("b", 1)


@pytest.mark.parametrize("bad", [0, -1, MAX_PAGE_TOKENS + 1, 1.5, True, "16", None, 2**70])
def test_page_tokens_out_of_range_are_refused_by_name(bad):
    with pytest.raises(InputError, match="page_tokens") as caught:
        Namespace(bad, model="m")
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("good", [1, 3, MAX_PAGE_TOKENS])
def test_page_tokens_in_range_are_taken(good):
    assert Namespace(good, model="m").page_tokens == good


@pytest.mark.parametrize("bad", [-1, 2**63, 1.0, True, None, "1"])
def test_an_epoch_out_of_range_is_refused_by_name(bad):
    with pytest.raises(InputError, match="epoch") as caught:
        Namespace(16, model="m", epoch=bad)
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("name", ["model", "revision", "adapter", "tenant"])
@pytest.mark.parametrize("bad", ["", b"x", 5])
def test_a_text_that_is_empty_or_none_is_refused_by_name(name, bad):
    with pytest.raises(InputError, match=name) as caught:
        Namespace(16, **{"model": "m", name: bad})
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("name", ["model", "revision", "tenant"])
def test_only_an_adapter_can_be_of_unknown_digest(name):
    """Nothing else has a reason to be refused for it, so it would fail far from here."""
    with pytest.raises(InputError, match=name):
        Namespace(16, **{"model": "m", name: Digest.UNKNOWN})


def test_model_and_process_exclude_each_other():
    with pytest.raises(InputError, match="model"):
        Namespace(16)
    with pytest.raises(InputError, match="process"):
        Namespace(16, model="m", process="p")
    with pytest.raises(InputError, match="model"):
        Namespace.private(16, model="m")


@pytest.mark.parametrize(
    "facts",
    [
        (("b", "1"), ("a", "1")),
        (("a", "1"), ("a", "2")),
        (("a", "1"), ("a", "1")),
        (["a", "1"],),
    ],
)
def test_facts_that_could_be_written_in_two_ways_are_refused(facts):
    """One set of facts in two orders would be two namespaces."""
    with pytest.raises(InputError, match="facts"):
        Namespace(16, model="m", facts=facts)


@pytest.mark.parametrize("facts", [(("a", 1),), (("a",),), ("ab c",), None, 5])
def test_facts_that_are_no_pairs_of_texts_are_refused(facts):
    with pytest.raises(InputError, match="facts"):
        Namespace(16, model="m", facts=facts)


def test_an_unknown_adapter_is_refused_with_its_reason_and_gives_no_key():
    unknown = Namespace(16, model="m", adapter=Digest.UNKNOWN)
    assert unknown.refusal is Reason.ADAPTER_UNKNOWN
    with pytest.raises(InputError, match="adapter"):
        unknown.canonical()
    with pytest.raises(InputError, match="adapter"):
        unknown.root(b"s")
    assert BASE.refusal is None
    assert Namespace(16, model="m", adapter="unknown").refusal is None


def test_a_root_is_no_page_key():
    """A root begins with a label of ours, so no page's bytes are hashed to it."""
    assert BASE.root() == hashlib.sha256(b"stepwell key" + BASE.canonical()).digest()


def test_a_namespace_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.tenant = "other"
