"""An excerpt reads like the chain on its pages, and stays as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.base.observe import Counters
from stepwell.core.chain import Chain, Extra
from stepwell.core.cut import Cut
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import Frames
from stepwell.core.geometry import Geometry, Group, Rule, StateTensor
from stepwell.core.key import Namespace
from stepwell.core.prefixes import Prefixes

PLAIN = Namespace(4, model="m")
EXTRAS = [Extra(6, 3, "media", b"d"), Extra(17, 1, "tenant", b"")]


def reads(pages, first, last):
    """All that an index asks of some pages."""
    return {
        "root": pages.root,
        "above": pages.key(first - 1) if first else None,
        "key": [pages.key(page) for page in range(first, last)],
        "keys": pages.keys(first, last),
        "rows": pages.page_rows(first, last).tolist(),
        "extras": [pages.extras_of(page) for page in range(first, last)],
        "extra pages": pages.extra_pages(first, last),
    }


spans = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)


@st.composite
def chains(draw):
    size = draw(st.integers(1, 4))
    tokens = draw(st.lists(st.integers(0, 9), min_size=6 * size, max_size=7 * size))
    extra = st.builds(Extra, st.integers(0, 20), st.integers(1, 9), st.just("media"), st.binary())
    return Chain(Namespace(size, model="m"), tokens, draw(st.lists(extra, max_size=3)))


@given(chains(), spans)
def test_it_reads_like_the_chain(chain, span):
    first, last = span
    excerpt = chain.excerpt(first, last)
    assert reads(excerpt, first, last) == reads(chain, first, last)
    assert excerpt.pages == last
    assert excerpt.page_tokens == chain.namespace.page_tokens


@given(chains(), spans, st.data())
def test_an_excerpt_of_an_excerpt_is_one_of_the_chain(chain, span, data):
    outer, first = chain.excerpt(*span), data.draw(st.integers(*span))
    last = data.draw(st.integers(first, span[1]))
    inner = outer.excerpt(first, last)
    assert reads(inner, first, last) == reads(chain, first, last)
    assert (inner.first, inner.pages, inner.own) == (first, last, tuple(chain.keys(first, last)))
    for page in range(first, last):
        some = outer.page_rows(page, last), outer.keys(page, last), outer.extra_pages(page, last)
        assert some[0].tolist() == chain.page_rows(page, last).tolist()
        assert some[1:] == (chain.keys(page, last), chain.extra_pages(page, last))


def test_the_middle_of_an_excerpt_says_what_is_before_it():
    chain = Chain(PLAIN, range(20))
    inner = chain.excerpt(1, 5).excerpt(3, 4)
    assert (inner.above, inner.key(2)) == (chain.key(2), chain.key(2))
    assert chain.excerpt(1, 5).excerpt(1, 2).above == chain.key(0)


@given(chains(), spans, st.lists(st.integers(0, 9), max_size=9))
def test_nothing_that_becomes_of_the_chain_changes_it(chain, span, more):
    first, last = span
    before = reads(chain, first, last)
    excerpt = chain.excerpt(first, last)
    twin = chain.fork()
    for one, length in ((chain, 0), (twin, 1)):
        one.truncate(length)
        one.append(more)
        one.append([7] * 30)
        one.key(0)
    assert reads(excerpt, first, last) == before


def test_tokens_that_are_written_over_do_not_show():
    """A chain that is cut and goes on writes where its old tokens were."""
    chain = Chain(PLAIN, range(12))
    excerpt = chain.excerpt(1, 3)
    chain.truncate(4)
    chain.append([99] * 8)
    assert excerpt.rows.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert excerpt.rows.base is None


@pytest.mark.parametrize(("first", "last"), [(0, 4), (2, 4), (3, 5), (2, 1), (4, 4)])
def test_pages_that_are_not_full_make_none(first, last):
    chain = Chain(PLAIN, range(15))
    with pytest.raises(InputError, match="page"):
        chain.excerpt(first, last)


def test_no_pages_make_one_that_says_what_is_before_it():
    chain = Chain(PLAIN, range(16))
    empty = chain.excerpt(2, 2)
    assert (empty.pages, empty.above, empty.own) == (2, chain.key(1), ())
    assert empty.key(1) == chain.key(1)
    assert empty.rows.shape == (0, 4)
    assert chain.excerpt(0, 0).above is None


@pytest.mark.parametrize("page", [-1, 0, 4, 9])
def test_pages_outside_of_it_are_not_its_own(page):
    """Python's negative indexes would give the key of another page."""
    excerpt = Chain(PLAIN, range(20)).excerpt(2, 4)
    with pytest.raises(AssertionError, match="page of the excerpt"):
        excerpt.key(page)
    for call in (excerpt.keys, excerpt.page_rows, excerpt.excerpt):
        if page < 2:
            with pytest.raises(AssertionError, match="of the excerpt"):
                call(page, 3)
    with pytest.raises(AssertionError, match="of the excerpt"):
        excerpt.excerpt(2, 5)
    with pytest.raises(AssertionError, match="of the excerpt"):
        Chain(PLAIN, range(8)).excerpt(0, 2).key(-1)


def test_pages_of_another_size_are_refused():
    excerpt = Chain(PLAIN, range(8)).excerpt(0, 2)
    excerpt.require(4)
    with pytest.raises(InputError, match="4 tokens"):
        excerpt.require(8)


def test_it_keeps_the_extras_of_its_pages_only():
    chain = Chain(PLAIN, range(24), EXTRAS)
    assert chain.extra_pages(0, 6) == [1, 2, 4]
    excerpt = chain.excerpt(2, 5)
    assert set(excerpt.extras) == {2, 4}
    assert excerpt.extras_of(3) == b""
    assert set(excerpt.excerpt(3, 4).extras) == set()


def test_it_costs_what_it_covers():
    chain = Chain(PLAIN, range(4 * 1000))
    assert len(chain.excerpt(990, 1000).rows) == len(chain.excerpt(990, 1000).own) == 10


def test_it_has_no_equality_that_arrays_could_break():
    one, other = (Chain(PLAIN, range(8)).excerpt(0, 2) for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_digests_of_a_foreign_engine_make_one_without_tokens():
    chain = Chain.foreign(PLAIN, [b"a", b"b", b"c"])
    excerpt = chain.excerpt(1, 3)
    assert reads(excerpt, 1, 3) == reads(chain, 1, 3)
    assert not excerpt.rows.any()


def prefixes():
    state = (StateTensor("conv", (4,), "float32"),)
    cuts = [
        Cut(Geometry.full(1, 1, 1).groups[0], 1, 0),
        Cut(Group("state", Rule.STATE, (1,), 0, 0, 0, "float32", state=state), 1, 1),
    ]
    frames = Frames(8)
    return frames, Prefixes(frames, 4, cuts, Lru(8), Counters())


@pytest.mark.parametrize("cut", [False, True], ids=["chain", "excerpt"])
def test_an_index_seals_the_same_from_both(cut):
    frames, both = prefixes()
    chain = Chain(PLAIN, range(12), EXTRAS)
    pages = chain.excerpt(0, 3) if cut else chain
    lease = both.closed.hold("r", pages, 0)
    both.closed.seal(lease, pages, frames.reserve(2))
    tail = pages.excerpt(2, 3)
    both.closed.seal(lease, tail, frames.reserve(1))
    records = both.walked[0].seal(tail, 2, frames.reserve(1)[None]).kept
    found = both.match("s", chain, 3)
    assert (found.pages, found.records[0].tolist()) == (3, records.tolist())
    other = both.match("t", Chain(PLAIN, range(12)), 3)
    assert other.pages == 0
    # And what it spells of a page is an excerpt again, from which it could be sealed.
    spelled, path = both.closed.spelled(int(found.frames[-1]))
    assert path.tolist() == found.frames.tolist()
    assert reads(spelled, 0, 3) == reads(chain, 0, 3)
    record = both.walked[0].spelled(int(records[0]))
    assert (record.first, record.pages) == (2, 3)
    assert record.page_rows(2, 3).tolist() == chain.page_rows(2, 3).tolist()
    assert record.key(2) == chain.key(2)
    assert record.extras_of(2) == chain.extras_of(2) != b""
    both.let_go(other)
    both.let_go(found)
    both.closed.release(lease)
    both.walked[0].release(records)


def test_a_hold_below_an_excerpt_needs_only_the_key_above():
    frames, both = prefixes()
    chain = Chain(PLAIN, range(16))
    lease = both.closed.hold("r", chain, 0)
    both.closed.seal(lease, chain, frames.reserve(2))
    tail = chain.excerpt(2, 4)
    below = both.closed.hold("s", tail, tail.first)
    assert below.pages == 2
    assert len(both.closed.seal(below, tail, frames.reserve(2)).kept) == 2
    assert both.closed.hold("t", Chain(PLAIN, range(1, 17)).excerpt(2, 4), 2) is None
    for one in (lease, below):
        both.closed.release(one)
