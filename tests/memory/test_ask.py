"""What may be asked of the machine, and the record of what came of it."""

import json

import pytest

from stepwell.base.errors import InputError, RefusedError
from stepwell.memory.ask import MAX_BYTES, Ask, Kind, Refusal, RegionRecord, Trait


def of(kind, **more):
    """A valid ask of this kind."""
    needs = {Kind.NAMED: {"name": "n"}, Kind.FILE: {"folder": "/tmp"}}.get(kind, {})
    return Ask(4096, kind, **(needs | more))


@pytest.mark.parametrize("size_bytes", [1, 4097, MAX_BYTES])
def test_any_size_up_to_the_limit_may_be_asked_for(size_bytes):
    assert Ask(size_bytes).size_bytes == size_bytes


@pytest.mark.parametrize("size_bytes", [0, -1, MAX_BYTES + 1, 1.0, "4096", True, None])
def test_a_size_that_cannot_be_meant_is_refused_with_the_limit(size_bytes):
    with pytest.raises(InputError, match=f"1 to {MAX_BYTES}") as caught:
        Ask(size_bytes)
    assert repr(size_bytes) in caught.value.fact


@pytest.mark.parametrize("kind", ["private", None, 1])
def test_a_kind_is_a_member_of_its_list(kind):
    """A string that happens to be equal would pass here and miss every `is` later."""
    with pytest.raises(InputError, match="member of Kind"):
        Ask(4096, kind)


@pytest.mark.parametrize("node", [-1, 1024, 0.0, True, "0"])
def test_a_node_is_a_number_that_fits_the_kernels_mask(node):
    with pytest.raises(InputError, match="0 to 1023"):
        Ask(4096, node=node)


@pytest.mark.parametrize("node", [0, 1023])
def test_the_first_and_the_last_node_may_be_asked_for(node):
    assert Ask(4096, node=node).wants(Trait.NODE)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_name_belongs_to_named_regions_and_to_no_others(kind):
    if kind is Kind.NAMED:
        assert of(kind).name == "n"
        with pytest.raises(InputError, match="name"):
            Ask(4096, kind)
    else:
        with pytest.raises(InputError, match="name"):
            of(kind, name="n")


@pytest.mark.parametrize("kind", list(Kind))
def test_a_folder_belongs_to_file_regions_and_to_no_others(kind):
    if kind is Kind.FILE:
        assert of(kind).folder == "/tmp"
        with pytest.raises(InputError, match="folder"):
            Ask(4096, kind)
    else:
        with pytest.raises(InputError, match="folder"):
            of(kind, folder="/tmp")


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "0", "x" * 200])
def test_a_name_of_letters_digits_and_signs_is_fine(name):
    assert Ask(4096, Kind.NAMED, name=name).name == name


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "..", "-", "ä", "a b", "a\0b", "x" * 201])
def test_a_name_that_would_lead_elsewhere_or_is_too_long_is_refused(name):
    with pytest.raises(InputError, match="200 of a-z"):
        Ask(4096, Kind.NAMED, name=name)


WANTED = {Trait.PINNED: {"pinned": True}, Trait.HUGE: {"huge": True}, Trait.NODE: {"node": 0}}
IMPOSSIBLE = {
    (Trait.HUGE, Kind.NAMED),
    *((trait, kind) for trait in Trait for kind in (Kind.FILE, Kind.DEVICE)),
}


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("trait", list(Trait))
def test_a_trait_is_refused_where_it_cannot_be(kind, trait):
    if (trait, kind) in IMPOSSIBLE:
        with pytest.raises(InputError, match=f"{kind} region that is {trait}.*{trait}: private"):
            of(kind, **WANTED[trait])
    else:
        ask = of(kind, **WANTED[trait])
        assert [other for other in Trait if ask.wants(other)] == [trait]


def test_nothing_is_wanted_unless_it_is_asked_for():
    assert not any(Ask(4096).wants(trait) for trait in Trait)


@pytest.mark.parametrize("may_lack", [frozenset({"huge"}), frozenset({Kind.FILE}), Trait.HUGE])
def test_what_may_be_lacking_is_a_set_of_traits(may_lack):
    with pytest.raises(InputError, match="set of Trait"):
        Ask(4096, may_lack=may_lack)


def test_a_refusal_is_an_error_with_the_same_words():
    error = Refusal("huge", "9 are needed, 1 is free", "sysctl vm.nr_hugepages=9").error()
    assert type(error) is RefusedError
    assert error.fact == "huge refused: 9 are needed, 1 is free"
    assert error.remedy == "sysctl vm.nr_hugepages=9"


def test_a_record_is_plain_enough_for_json_and_loses_nothing():
    ask = Ask(
        5000,
        Kind.SHARED,
        pinned=True,
        huge=True,
        node=1,
        may_lack=frozenset({Trait.PINNED, *Trait}),
    )
    refusal = Refusal(Trait.HUGE, "why", "what helps")
    record = RegionRecord(ask, 8192, 4096, 4096, node=1, refusals=(refusal,))
    assert json.loads(json.dumps(record.plain())) == {
        "ask": {
            "size_bytes": 5000,
            "kind": "shared",
            "pinned": True,
            "huge": True,
            "node": 1,
            "name": "",
            "folder": "",
            "may_lack": ["huge", "node", "pinned"],
            "piece_bytes": 256 << 20,
        },
        "size_bytes": 8192,
        "page_bytes": 4096,
        "ready_bytes": 4096,
        "locked": False,
        "registered_bytes": 0,
        "node": 1,
        "refusals": [{"what": "huge", "reason": "why", "remedy": "what helps"}],
        "pinned": False,
    }


@pytest.mark.parametrize(
    ("locked", "registered_bytes", "pinned"),
    [(False, 0, False), (False, 4096, False), (False, 8192, True), (True, 0, True)],
)
def test_pinned_is_all_of_it_or_not_at_all(locked, registered_bytes, pinned):
    record = RegionRecord(
        Ask(8192), 8192, 4096, 8192, locked=locked, registered_bytes=registered_bytes
    )
    assert record.pinned is pinned
    assert record.plain()["pinned"] is pinned


@pytest.mark.parametrize(
    "more",
    [
        {"pinned": 1.5},
        {"huge": "x"},
        {"may_lack": None},
        {"may_lack": {"huge"}},
        {"kind": Kind.FILE, "folder": "a\0b"},
        {"kind": Kind.FILE, "folder": b"/tmp"},
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(more):
    with pytest.raises(InputError, match=next(iter(set(more) - {"kind"}))):
        Ask(4096, **more)
