"""Contents: keys find frames, and tokens prove them."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InvariantError
from stepwell.core.chain import Chain, Extra
from stepwell.core.check import Findings
from stepwell.core.contents import Contents
from stepwell.core.key import Namespace

SPACE = Namespace(4, model="m")


def ids(*frames):
    return np.array(frames, np.int32)


def key(number):
    return hashlib.sha256(bytes([number % 256, number // 256])).digest()


def check(contents):
    findings = Findings()
    contents.check(findings)
    findings.raise_if_any()


def holding(tokens, frames, extras=()):
    contents, chain = Contents(16, 4), Chain(SPACE, tokens, extras)
    assert contents.claim(chain.keys(0, chain.pages), frames) == chain.pages
    contents.write(frames, chain, 0)
    check(contents)
    return contents, chain


def test_a_claimed_key_finds_its_frame_and_no_other_does():
    contents = Contents(300, 4)
    keys = [key(n) for n in range(300)]
    assert contents.claim(keys, np.arange(300, dtype=np.int32)) == 300
    check(contents)
    assert [contents.find(one) for one in keys] == list(range(300))
    assert contents.find(key(300)) is None
    assert all(contents.has(frame) for frame in range(300))


def test_claiming_ends_at_the_first_key_that_is_taken():
    contents = Contents(8, 4)
    contents.claim([key(2)], ids(0))
    assert contents.claim([key(n) for n in range(4)], ids(4, 5, 6, 7)) == 2
    assert [contents.find(key(n)) for n in range(4)] == [4, 5, 0, None]
    assert [contents.has(frame) for frame in (6, 7)] == [False, False]
    check(contents)


def test_one_key_twice_in_a_claim_is_taken_once():
    contents = Contents(8, 4)
    assert contents.claim([key(1), key(1)], ids(4, 5)) == 1
    assert contents.find(key(1)) == 4
    check(contents)


def test_a_forgotten_page_is_found_no_more_and_its_key_is_free():
    contents = Contents(8, 4)
    contents.claim([key(0), key(1)], ids(3, 4))
    assert contents.forget_all(ids(3)) == [key(0)]
    assert contents.forget_all(ids(3)) == []
    assert contents.find(key(0)) is None
    assert contents.find(key(1)) == 4
    assert contents.claim([key(0)], ids(5)) == 1
    assert contents.find(key(0)) == 5
    check(contents)


@given(st.integers(0, 70), st.integers(0, 70))
def test_galloping_finds_as_many_as_a_walk(present, limit):
    contents = Contents(70, 4)
    contents.claim([key(n) for n in range(present)], np.arange(present, dtype=np.int32))
    assert contents.gallop(key, limit) == min(present, limit)


@pytest.mark.parametrize(("present", "limit"), [(0, 4096), (1, 4096), (4096, 4096), (2049, 4096)])
def test_galloping_asks_for_few_keys(present, limit):
    contents = Contents(4096, 1)
    keys = [key(n) for n in range(4096)]
    contents.claim(keys[:present], np.arange(present, dtype=np.int32))
    asked = []
    assert contents.gallop(lambda page: asked.append(page) or keys[page], limit) == present
    assert len(asked) <= 2 * 12 + 2
    if not present:
        assert asked == [0]


def test_equal_counts_leading_pages_of_equal_tokens():
    contents, chain = holding(range(16), ids(5, 3, 9, 1))
    assert contents.equal(ids(5, 3, 9, 1), chain, 0) == 4
    assert contents.equal(ids(9, 1), chain, 2) == 2
    assert contents.equal(ids(5, 9), chain, 0) == 1
    assert contents.equal(ids(3, 5), chain, 0) == 0
    assert contents.equal(ids(), chain, 0) == 0


@pytest.mark.parametrize("place", range(16))
def test_no_token_is_left_out_of_the_comparison(place):
    contents, _ = holding(range(16), ids(0, 1, 2, 3))
    tokens = list(range(16))
    tokens[place] = 99
    assert contents.equal(ids(0, 1, 2, 3), Chain(SPACE, tokens), 0) == place // 4


IMAGE = Extra(5, 2, "media", b"cat")


@pytest.mark.parametrize(
    "other",
    [
        (),
        (Extra(5, 2, "media", b"dog"),),
        (Extra(5, 2, "audio", b"cat"),),
        (Extra(6, 2, "media", b"cat"),),
        (Extra(5, 3, "media", b"cat"),),
        (IMAGE, Extra(7, 1, "media", b"cat")),
    ],
    ids=str,
)
def test_equal_tokens_with_other_extras_differ_from_the_placeholder_on(other):
    frames = ids(0, 1, 2)
    contents, chain = holding(range(12), frames, (IMAGE,))
    assert contents.equal(frames, chain, 0) == 3
    assert contents.equal(frames, Chain(SPACE, range(12), other), 0) == 1
    contents, _ = holding(range(12), frames, other)
    assert contents.equal(frames, chain, 0) == 1


def test_a_frame_does_not_keep_the_extras_of_its_earlier_page():
    contents, _ = holding(range(12), ids(0, 1, 2), (IMAGE,))
    assert len(contents.forget_all(ids(2, 1, 0))) == 3
    check(contents)
    chain = Chain(SPACE, range(12))
    contents.claim(chain.keys(0, 3), ids(1, 0, 2))
    contents.write(ids(1, 0, 2), chain, 0)
    assert contents.equal(ids(1, 0, 2), chain, 0) == 3
    check(contents)


def _key_lost(contents):
    contents._keys[0] = None


def _frame_lost(contents):
    contents._shards[contents._keys[0][0]].clear()


def _extras_left(contents):
    contents._extras[7] = b"x"


@pytest.mark.parametrize("damage", [_key_lost, _frame_lost, _extras_left])
def test_the_checker_finds_broken_books(damage):
    contents, _ = holding(range(12), ids(0, 1, 2))
    damage(contents)
    with pytest.raises(InvariantError):
        check(contents)
