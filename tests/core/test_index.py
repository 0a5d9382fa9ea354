"""The closed index: what is found, what is held, what leaves, and that nothing is ever mistaken."""

import gc
import hashlib
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.base.errors import InputError, MisuseError, StaleError
from stepwell.base.observe import Counters
from stepwell.core.chain import Chain, Extra
from stepwell.core.check import Findings
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import Frames
from stepwell.core.index import ClosedIndex
from stepwell.core.key import Digest, Namespace
from stepwell.core.page import Status
from stepwell.core.reasons import Reason

SIZE = 4
SPACE = Namespace(SIZE, model="m")


def ids(*frames):
    return np.array(frames, np.int32)


class World:
    """An index with its frames, as its owner uses them: reserve, seal, free what left."""

    def __init__(self, count=32, size=SIZE):
        self.size = size
        self.frames = Frames(count)
        self.counters = Counters()
        self.index = ClosedIndex(self.frames, size, Lru(count), self.counters)
        self.leases = []  # so that only a test that means to loses one
        self.meaning = {}  # of each frame, for tests that note it

    def count(self, name):
        return self.counters.snapshot()[name]

    def check(self):
        findings = Findings()
        self.frames.check(findings)
        self.index.check(findings)
        findings.raise_if_any()

    def collect(self):
        left = self.index.collect()
        self.frames.move(left, Status.FREE)
        for frame in left.tolist():
            self.meaning.pop(frame, None)
        return left.tolist()

    def room(self, n):
        """Frames to fill, evicting as many pages as it needs."""
        missing = n - self.frames.free
        if missing > 0:
            assert self.index.evict(missing)
            self.collect()
        return self.frames.reserve(n)

    def match(self, request, tokens, limit=10**6):
        chain = tokens if isinstance(tokens, Chain) else Chain(SPACE, tokens)
        match = self.index.match(request, chain, limit)
        self.leases.append(match.lease)
        return match

    def seal(self, lease, chain, n=None, **options):
        """Seals the next n pages (all by default); gives unneeded frames back."""
        n = chain.pages - lease.pages if n is None else n
        mine = self.room(n)
        sealed = self.index.seal(lease, chain, mine, **options)
        self.frames.move(mine[~np.isin(mine, sealed.kept)], Status.FREE)
        return sealed

    def hold(self, request, tokens):
        """Everything of a prompt sealed and held; gives lease and frames."""
        chain = tokens if isinstance(tokens, Chain) else Chain(SPACE, tokens)
        match = self.match(request, chain)
        sealed = self.seal(match.lease, chain)
        return match.lease, [*match.frames.tolist(), *sealed.kept.tolist()]

    def put(self, tokens):
        """A prompt sealed and released; gives its frames."""
        lease, frames = self.hold("put", tokens)
        self.index.release(lease)
        return frames

    def found(self, tokens):
        chain = tokens if isinstance(tokens, Chain) else Chain(SPACE, tokens)
        return self.index.longest(chain, chain.pages)

    def books(self):
        """Everything that a failed call must leave alone."""
        index = self.index
        inside = [frame for frame in range(self.frames.count) if frame in index._paths]
        return (
            self.frames.status.tolist(),
            self.frames.generation.tolist(),
            index.evictable,
            index.held,
            sorted(key.hex() for shard in index._contents._shards for key in shard),
            [(frame, int(index._paths.parent[frame])) for frame in inside],
            [(frame, int(index._paths.children[frame])) for frame in inside],
            self.counters.snapshot(),
        )


@pytest.fixture
def world():
    made = World()
    yield made
    made.check()


def page(n):
    return [n] * SIZE


def pages(*numbers):
    """A prompt of pages that each have one token throughout."""
    return [token for n in numbers for token in page(n)]


# Matching


def test_nothing_is_found_in_an_empty_index(world):
    match = world.match("r", pages(1, 2))
    assert match.frames.tolist() == []
    assert (match.lease.pages, match.reason) == (0, Reason.NOT_SEALED)
    assert world.found(pages(1, 2)) == 0


def test_a_whole_prompt_is_found_again(world):
    frames = world.put(pages(1, 2, 3))
    match = world.match("r", pages(1, 2, 3))
    assert match.frames.tolist() == frames
    assert (match.lease.pages, match.reason) == (3, Reason.WHOLE_PREFIX)
    assert world.index.path(match.lease).tolist() == frames


def test_a_prefix_is_found_as_far_as_it_goes(world):
    frames = world.put(pages(1, 2, 3, 4))
    match = world.match("r", pages(1, 2, 9, 4))
    assert match.frames.tolist() == frames[:2]
    assert match.reason is Reason.NOT_SEALED


def test_a_page_without_those_before_it_is_not_found(world):
    world.put(pages(1, 2, 3))
    assert world.match("r", pages(2, 3)).frames.tolist() == []
    assert world.match("r", pages(9, 2, 3)).frames.tolist() == []


@pytest.mark.parametrize(("limit", "reason"), [(2, "whole_prefix"), (3, "not_sealed")])
def test_no_more_is_reused_than_the_limit(world, limit, reason):
    """The last token is always computed: the limit is what keeps it out."""
    frames = world.put(pages(1, 2))
    match = world.match("r", pages(1, 2, 3), limit)
    assert match.frames.tolist() == frames
    assert match.reason == reason
    assert world.match("s", pages(1, 2, 3), 1).frames.tolist() == frames[:1]


@pytest.mark.parametrize(
    ("tokens", "limit"), [(pages(1), 0), (pages(1)[:-1], 5), ([], 5), (pages(1), -1)]
)
def test_a_prompt_without_a_page_to_reuse_says_so(world, tokens, limit):
    world.put(pages(1))
    match = world.match("r", tokens, limit)
    assert (match.lease.pages, match.reason) == (0, Reason.BELOW_A_PAGE)


def test_prompts_that_share_a_prefix_share_its_frames(world):
    one = world.put(pages(1, 2, 3))
    two = world.put(pages(1, 2, 4))
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert world.count("pages_sealed") == 4


def test_looking_changes_nothing(world):
    world.put(pages(1, 2, 3))
    before = world.books()
    assert world.found(pages(1, 2, 9)) == 2
    assert world.index.find(Chain(SPACE, pages(1, 2))) is not None
    assert world.books() == before


def test_find_names_the_frame_of_the_last_page_if_the_whole_path_is_here(world):
    frames = world.put(pages(1, 2, 3))
    for n in (1, 2, 3):
        assert world.index.find(Chain(SPACE, pages(1, 2, 3)[: n * SIZE])) == frames[n - 1]
    assert world.index.find(Chain(SPACE, pages(1, 2, 3)[:-1])) == frames[1]
    assert world.index.find(Chain(SPACE, pages(1, 2, 3, 4))) is None
    assert world.index.find(Chain(SPACE, pages(2))) is None
    assert world.index.find(Chain(SPACE, [])) is None


def test_namespaces_do_not_see_each_other(world):
    tokens = pages(1, 2)
    spaces = [SPACE, Namespace(SIZE, model="m", tenant="a"), Namespace(SIZE, model="n")]
    chains = [Chain(space, tokens) for space in spaces] + [Chain(SPACE, tokens, secret=b"s")]
    for n, chain in enumerate(chains):
        assert all(world.found(one) == 2 for one in chains[:n])
        assert world.match("r", chain).lease.pages == 0
        world.put(chain)
    assert world.count("pages_sealed") == 8


def test_a_chain_of_other_pages_is_refused(world):
    chain = Chain(Namespace(SIZE + 1, model="m"), range(20))
    lease = world.match("r", pages(1)).lease
    before = world.books()
    for call in (
        lambda: world.index.match("s", chain, 3),
        lambda: world.index.longest(chain, 3),
        lambda: world.index.find(chain),
        lambda: world.index.seal(lease, chain, ids(0)),
    ):
        with pytest.raises(InputError, match=f"pages of {SIZE + 1} tokens"):
            call()
    assert world.books() == before


def test_a_chain_without_keys_is_refused_and_takes_no_lease(world):
    chain = Chain(Namespace(SIZE, model="m", adapter=Digest.UNKNOWN), pages(1))
    with pytest.raises(InputError, match="adapter_unknown"):
        world.index.match("r", chain, 1)
    assert world.index._leases.of("r") is None


def test_the_first_absent_page_costs_one_hash(world):
    """A miss on a prompt of 100,000 tokens must not hash them all."""
    calls = []

    class Counted(Chain):
        __slots__ = ()

        @staticmethod
        def _hash(data):
            calls.append(len(data))
            return hashlib.sha256(data)

    world.match("r", Counted(SPACE, range(4000)))
    assert len(calls) == 1


# Media


def test_other_media_share_only_up_to_the_placeholder(world):
    """The ids of two images' placeholders are equal; their KV is not."""
    tokens = pages(1, 2, 3, 4)
    cat, dog = (Chain(SPACE, tokens, [Extra(5, 2, "media", digest)]) for digest in (b"cat", b"dog"))
    frames = world.put(cat)
    match = world.match("r", dog)
    assert match.frames.tolist() == frames[:1]
    assert match.reason is Reason.NOT_SEALED
    assert world.match("s", Chain(SPACE, tokens)).lease.pages == 1
    assert world.match("t", cat).frames.tolist() == frames
    others = world.put(dog)
    assert others[0] == frames[0]
    assert not {*others[1:]} & {*frames[1:]}


# Collisions


class Weak:
    """SHA-256 cut to a few bits."""

    bits = 4

    def __init__(self, data):
        digest = hashlib.sha256(data).digest()
        self._digest = bytes([digest[0] & ((1 << self.bits) - 1)]) + bytes(31)

    def digest(self):
        return self._digest


class WeakChain(Chain):
    __slots__ = ()
    _hash = Weak


def meaning(chain, count):
    """All that the KV of page `count` - 1 depends on."""
    extras = [chain.extras_of(page) for page in range(count)]
    return chain.namespace, chain.tokens[: count * SIZE].tolist(), extras


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_keys_that_collide_never_match_other_tokens(bits, monkeypatch):
    """Keys alone would hand one prompt another's KV; here nearly all keys collide."""
    monkeypatch.setattr(Weak, "bits", bits)
    rng = random.Random(bits)
    world = World(24)
    spaces = [SPACE, Namespace(SIZE, model="m", tenant="t")]
    hits = 0
    for n in range(2000):
        tokens = pages(*(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
        extras = [Extra(rng.randrange(8), 1, "media", b"x")] if rng.random() < 0.3 else []
        chain = WeakChain(rng.choice(spaces), tokens, extras)
        match = world.match(n, chain)
        for count, frame in enumerate(match.frames.tolist(), 1):
            assert world.meaning[frame] == meaning(chain, count)
        hits += len(match.frames)
        found = world.index.find(chain)
        assert found is None or world.meaning[found] == meaning(chain, chain.pages)
        mine = world.room(chain.pages - match.lease.pages)
        sealed = world.index.seal(match.lease, chain, mine)
        for count, frame in enumerate(sealed.kept.tolist(), len(match.frames) + 1):
            if frame in mine:
                world.meaning[frame] = meaning(chain, count)
            assert world.meaning[frame] == meaning(chain, count)
        assert match.lease.grows == (len(sealed.kept) == len(mine))
        world.frames.move(mine[~np.isin(mine, sealed.kept)], Status.FREE)
        world.index.release(match.lease)
        if rng.random() < 0.3:
            world.index.evict(min(world.index.evictable, rng.randrange(4)))
        world.collect()
        if n % 50 == 0:
            world.check()
    world.check()
    assert world.count("key_collisions") > 0
    assert hits > 0


def test_a_collision_on_a_lookup_says_so(monkeypatch):
    monkeypatch.setattr(Weak, "bits", 0)
    world = World()
    world.put(WeakChain(SPACE, pages(1)))
    match = world.match("r", WeakChain(SPACE, pages(2)))
    assert (match.lease.pages, match.reason) == (0, Reason.TOKENS_DIFFER)
    assert world.count("key_collisions") == 1


class UnchainedChain(Chain):
    """A page's key depends on its own tokens alone: equal pages collide wherever they stand."""

    __slots__ = ()

    @staticmethod
    def _hash(data):
        return hashlib.sha256(data[32:])


def test_an_equal_page_below_another_parent_is_no_twin(world):
    """Its tokens are equal and so is its depth; its KV is not."""
    mine, other = UnchainedChain(SPACE, pages(3, 2)), UnchainedChain(SPACE, pages(1, 2))
    match = world.match("r", mine)
    world.seal(match.lease, mine, 1)
    frames = world.put(other)
    sealed = world.seal(match.lease, mine, 1)
    assert (sealed.kept.tolist(), sealed.spare.tolist()) == ([], [])
    assert not match.lease.grows
    assert world.count("key_collisions") == 1
    assert world.match("s", other).frames.tolist() == frames


# Sealing


def test_sealing_in_pieces_gives_one_path(world):
    chain = Chain(SPACE, pages(1, 2, 3, 4))
    lease = world.match("r", chain).lease
    frames = [world.seal(lease, chain, n).kept.tolist() for n in (1, 2, 1)]
    path = [frame for some in frames for frame in some]
    assert world.index.path(lease).tolist() == path
    assert lease.pages == 4
    assert world.match("s", chain).frames.tolist() == path


def test_sealing_nothing_changes_nothing(world):
    lease, _ = world.hold("r", pages(1))
    before = world.books()
    sealed = world.index.seal(lease, Chain(SPACE, pages(1)), ids())
    assert (sealed.kept.tolist(), sealed.spare.tolist()) == ([], [])
    assert lease.grows
    assert world.books() == before


def test_sealed_pages_are_held_at_once(world):
    """Between sealing and holding another request could evict them."""
    world.hold("r", pages(1, 2, 3))
    assert (world.index.held, world.index.evictable) == (3, 0)
    assert not world.index.evict(1)


def test_a_page_sealed_twice_keeps_its_first_frame(world):
    one, two = (Chain(SPACE, pages(1, 2, 3)) for _ in range(2))
    first = world.match("one", one).lease
    second = world.match("two", two).lease
    mine, its = world.frames.reserve(3), world.frames.reserve(3)
    kept = world.index.seal(first, one, mine).kept
    sealed = world.index.seal(second, two, its)
    assert sealed.kept.tolist() == kept.tolist() == mine.tolist()
    assert sealed.spare.tolist() == its.tolist()
    assert set(world.frames.status[its].tolist()) == {Status.FILLING}
    assert (world.count("pages_sealed"), world.count("pages_duplicate")) == (3, 3)
    assert second.pages == 3
    assert second.grows


def test_a_twin_lives_as_long_as_either_request(world):
    """P8: the second request's page table points at the first one's frames."""
    first, frames = world.hold("one", pages(1, 2))
    chain = Chain(SPACE, pages(1, 2, 3))
    second = world.match("two", [9]).lease
    sealed = world.seal(second, chain)
    assert sealed.kept[:2].tolist() == frames
    world.index.release(first)
    assert not world.index.evict(1)
    assert set(world.frames.status[frames].tolist()) == {Status.SEALED}
    assert world.index.path(second).tolist() == sealed.kept.tolist()
    world.index.release(second)
    assert world.index.evict(3)
    assert sorted(world.collect()) == sorted(sealed.kept.tolist())


def test_twins_are_found_as_far_as_they_go(world):
    frames = world.put(pages(1, 2, 3))
    lease = world.match("r", [9]).lease
    chain = Chain(SPACE, pages(1, 2, 8, 9))
    mine = world.frames.reserve(4)
    sealed = world.index.seal(lease, chain, mine)
    assert sealed.kept.tolist() == [*frames[:2], *mine[2:].tolist()]
    assert sealed.spare.tolist() == mine[:2].tolist()
    world.frames.move(sealed.spare, Status.FREE)


def test_without_twins_a_page_that_is_here_ends_the_call(world):
    frames = world.put(pages(1, 2))
    chain = Chain(SPACE, pages(1, 2, 3))
    lease = world.match("r", chain, 0).lease
    mine = world.frames.reserve(3)
    sealed = world.index.seal(lease, chain, mine, twins=False)
    assert (sealed.kept.tolist(), sealed.spare.tolist()) == ([], [])
    assert set(world.frames.status[mine].tolist()) == {Status.FILLING}
    assert not lease.grows
    assert world.count("pages_duplicate") == 0
    assert world.count("key_collisions") == 0
    assert world.found(pages(1, 2, 3)) == 2
    world.index.release(lease)
    assert world.match("s", chain).frames.tolist() == frames


def test_without_twins_new_pages_are_sealed_all_the_same(world):
    chain = Chain(SPACE, pages(1, 2))
    lease = world.match("r", chain).lease
    assert len(world.seal(lease, chain, twins=False).kept) == 2
    assert lease.grows


def test_pages_that_are_not_full_cannot_be_sealed(world):
    chain = Chain(SPACE, pages(1, 2)[:-1])
    lease = world.match("r", chain).lease
    mine = world.frames.reserve(2)
    before = world.books()
    with pytest.raises(InputError, match="page 1"):
        world.index.seal(lease, chain, mine)
    assert world.books() == before
    assert lease.grows


def test_pages_of_another_namespace_cannot_continue_a_lease(world):
    lease, _ = world.hold("r", pages(1))
    other = Chain(Namespace(SIZE, model="m", tenant="t"), pages(1, 2))
    mine = world.frames.reserve(1)
    before = world.books()
    with pytest.raises(InputError, match="page 0 of the chain"):
        world.index.seal(lease, other, mine)
    assert world.books() == before


BAD = ["free", "sealed", "sealed first", "twice", "does not exist", "below zero"]


def bad_frames(case, world, mine, sealed):
    last = world.frames.count - 1
    return {
        "free": ids(mine[0], last),
        "sealed": ids(mine[0], sealed),
        "sealed first": ids(sealed, mine[0]),
        "twice": ids(mine[0], mine[0]),
        "does not exist": ids(mine[0], last + 1),
        "below zero": ids(mine[0], -1),
    }[case]


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("above", [[], [1]], ids=["first pages", "below a page"])
def test_a_frame_that_cannot_be_sealed_changes_nothing(world, case, above):
    """The keys are noted before the frames move: they must be taken back, and only they."""
    lease, _ = world.hold("r", pages(*above)) if above else (world.match("r", []).lease, [])
    world.put(pages(7))
    chain = Chain(SPACE, pages(*above, 5, 6))
    mine = world.frames.reserve(2)
    (other,) = world.match("s", pages(7)).frames.tolist()
    before = world.books()
    with pytest.raises(MisuseError, match="frame"):
        world.index.seal(lease, chain, bad_frames(case, world, mine, other))
    assert world.books() == before
    world.check()
    assert world.found(chain) == len(above)
    assert world.found(pages(7)) == 1
    assert (lease.pages, lease.grows) == (len(above), True)
    assert world.index.seal(lease, chain, mine).kept.tolist() == mine.tolist()


def test_a_twin_of_a_frame_that_is_not_filling_is_refused(world):
    """Its owner frees what comes back as spare; it must be its own to free."""
    frames = world.put(pages(1))
    lease = world.match("r", []).lease
    before = world.books()
    with pytest.raises(MisuseError, match=f"frame {frames[0]}"):
        world.index.seal(lease, Chain(SPACE, pages(1)), ids(*frames))
    assert world.books() == before


# Holding


def test_the_deepest_page_protects_all_above_it(world):
    frames = world.put(pages(*range(6)))
    match = world.match("r", pages(*range(4)))
    assert (world.index.held, world.index.evictable) == (4, 2)
    assert not world.index.evict(3)
    assert world.index.evict(2)
    assert sorted(world.collect()) == sorted(frames[4:])
    assert not world.index.evict(1)
    world.index.release(match.lease)
    assert (world.index.held, world.index.evictable) == (0, 4)


def test_holds_of_several_requests_are_counted(world):
    world.put(pages(1, 2, 3))
    lengths = [1, 2, 3, 3, 2]
    leases = [world.match(n, pages(1, 2, 3), pages_) for n, pages_ in enumerate(lengths)]
    leases = [match.lease for match in leases]
    assert [lease.pages for lease in leases] == lengths
    while leases:
        assert world.index.held == max(lengths)
        world.index.release(leases.pop())
        lengths.pop()
    assert world.index.held == 0


def test_asking_twice_leaves_one_hold(world):
    world.put(pages(1, 2))
    earlier = world.match("r", pages(1, 2)).lease
    later = world.match("r", pages(1, 2)).lease
    assert world.index.held == 2
    with pytest.raises(StaleError, match="'r'"):
        world.index.release(earlier)
    world.index.release(later)
    assert (world.index.held, world.index.evictable) == (0, 2)
    with pytest.raises(StaleError):
        world.index.release(later)


def test_asking_again_keeps_the_pages_in_between(world):
    """The new hold comes before the old one ends: dropped pages would leave in between."""
    _, frames = world.hold("r", pages(1, 2))
    match = world.match("r", pages(1, 2))
    assert match.frames.tolist() == frames
    assert world.index.held == 2


def test_a_request_that_comes_with_other_tokens_gets_nothing_of_its_old_ones(world):
    """H4: an id is no proof of content."""
    first, frames = world.hold("r", pages(1, 2))
    match = world.match("r", pages(3, 2))
    assert match.frames.tolist() == []
    assert match.lease.pages == 0
    assert (world.index.held, world.index.evictable) == (0, 2)
    with pytest.raises(StaleError):
        world.index.seal(first, Chain(SPACE, pages(1, 2, 5)), world.frames.reserve(1))
    sealed = world.seal(match.lease, Chain(SPACE, pages(3, 2)))
    assert not {*sealed.kept.tolist()} & {*frames}


def test_a_lease_is_released_once(world):
    lease, _ = world.hold("r", pages(1))
    world.index.release(lease)
    for call in (
        lambda: world.index.release(lease),
        lambda: world.index.path(lease),
        lambda: world.index.seal(lease, Chain(SPACE, pages(1, 2)), ids(1)),
    ):
        with pytest.raises(StaleError, match="released already"):
            call()
    assert world.index.held == 0


def test_a_lease_of_another_index_is_refused(world):
    other = World()
    lease, _ = other.hold("r", pages(1))
    mine, _ = world.hold("r", pages(1))
    for call in (
        lambda: world.index.release(lease),
        lambda: world.index.path(lease),
        lambda: world.index.seal(lease, Chain(SPACE, pages(1, 2)), ids(1)),
    ):
        with pytest.raises(StaleError, match="not of this index"):
            call()
    assert world.index.held == other.index.held == 1
    world.index.release(mine)
    other.index.release(lease)


def test_an_empty_lease_holds_nothing(world):
    lease = world.match("r", pages(1)).lease
    assert world.index.path(lease).tolist() == []
    world.index.release(lease)
    with pytest.raises(StaleError):
        world.index.release(lease)


# Lost leases


def test_a_lost_lease_is_reported_with_its_place_and_released_by_the_next_call(world):
    world.put(pages(1, 2))
    match = world.index.match("lost one", Chain(SPACE, pages(1, 2)), 2)
    frames = match.frames.tolist()
    del match
    gc.collect()
    # The collector only queues: nothing may be freed by a thread that happens to collect.
    assert world.index.held == 2
    with pytest.warns(ResourceWarning, match="'lost one'") as caught:
        assert world.index.evict(2)
    assert Path(__file__).name in str(caught[0].message)
    assert caught[0].filename == __file__
    assert world.count("leases_lost") == 1
    assert sorted(world.collect()) == sorted(frames)


CALLS = ["match", "seal", "release", "evict", "drop", "collect"]


def do(call, world, lease):
    index, chain = world.index, Chain(SPACE, pages(9))
    if call == "match":
        world.match("next", chain, 0)
    elif call == "seal":
        index.seal(lease, chain, ids())
    elif call == "release":
        index.release(lease)
    elif call == "evict":
        index.evict(0)
    elif call == "drop":
        index.drop(index.find(chain))
    else:
        index.collect()


@pytest.mark.parametrize("call", CALLS)
def test_every_call_releases_what_was_lost(world, call):
    lease, _ = world.hold("kept", pages(9))
    world.put(pages(1, 2))
    world.index.match("lost one", Chain(SPACE, pages(1, 2)), 2)
    gc.collect()
    with pytest.warns(ResourceWarning, match="'lost one'"):
        do(call, world, lease)
    assert not any(books.request == "lost one" for books in world.index._leases)
    assert world.index.evictable >= 2


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_several_lost_leases_are_all_released_even_if_warnings_are_errors(world):
    """The first warning raises; the holds of the others must not be forgotten with it."""
    world.put(pages(1, 2))
    matches = [world.index.match(n, Chain(SPACE, pages(1, 2)), 2) for n in range(3)]
    assert world.index.held == 2
    del matches
    gc.collect()
    for _ in range(5):
        try:
            world.collect()
        except ResourceWarning:
            continue
        break
    assert world.index.held == 0
    assert world.count("leases_lost") == 3


def test_a_released_lease_may_be_lost(world):
    lease, _ = world.hold("r", pages(1))
    world.index.release(lease)
    world.leases.clear()
    del lease
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.index.collect()
    assert world.count("leases_lost") == 0


# Evicting


def test_pages_leave_tail_first(world):
    """A hole in a path would make everything after it useless."""
    frames = world.put(pages(1, 2, 3, 4))
    for left in (3, 2, 1, 0):
        assert world.index.evict(1)
        assert world.collect() == [frames[left]]
        assert world.found(pages(1, 2, 3, 4)) == left
        world.check()
    assert not world.index.evict(1)


@pytest.mark.parametrize("held", [[], [1, 2]])
def test_eviction_is_all_or_nothing(world, held):
    world.put(pages(1, 2, 3, 4))
    lease = world.match("r", pages(*held)).lease
    before = world.books()
    assert not world.index.evict(5 - len(held))
    assert world.books() == before
    assert world.collect() == []
    assert world.index.evict(4 - len(held))
    assert world.index.path(lease).size == len(held)


def test_evicting_nothing_takes_nothing(world):
    world.put(pages(1))
    before = world.books()
    assert world.index.evict(0)
    assert world.books() == before


def test_evicted_frames_are_leaving_until_they_are_collected(world):
    frames = world.put(pages(1, 2))
    world.index.evict(1)
    assert world.frames.status[frames].tolist() == [Status.SEALED, Status.LEAVING]
    assert world.index.collect().tolist() == frames[1:]
    assert world.index.collect().tolist() == []
    world.frames.move(ids(frames[1]), Status.FREE)
    assert world.count("pages_evicted") == 1


def test_the_prompt_used_longest_ago_goes_first(world):
    for n in range(4):
        world.put(pages(n, 10 + n))
    world.index.release(world.match("r", pages(0, 10)).lease)
    world.index.evict(4)
    world.collect()
    assert [world.found(pages(n, 10 + n)) for n in range(4)] == [2, 0, 0, 2]


def test_an_evicted_page_can_be_sealed_again(world):
    world.put(pages(1, 2))
    world.index.evict(2)
    assert world.found(pages(1, 2)) == 0
    world.put(pages(1, 2))
    world.collect()
    assert world.found(pages(1, 2)) == 2


def test_a_prompt_that_a_thousand_requests_share_survives_ten_indexes_of_noise():
    """Only its tails are ever touched; what they leave behind must keep it."""
    world = World(200)
    system = pages(*range(6))
    world.put(system)
    noise = 0
    for n in range(1000):
        match = world.match("r", system + pages(1000 + n), 6)
        assert match.lease.pages == 6
        world.seal(match.lease, Chain(SPACE, system + pages(1000 + n)))
        world.index.release(match.lease)
        for _ in range(2):
            noise += 1
            world.put(pages(10_000 + noise))
    assert noise >= 10 * 200
    assert world.found(system) == 6
    world.check()


def grown(seed, count=40):
    """An index with a random forest, random uses and a few holds."""
    world, rng = World(count), random.Random(seed)
    leases = []
    for n in range(rng.randrange(1, 30)):
        tokens = pages(*(rng.randrange(3) for _ in range(rng.randrange(1, 7))))
        lease, _ = world.hold(n, tokens)
        if rng.random() < 0.15 and len(leases) < 2:
            leases.append(lease)
        else:
            world.index.release(lease)
    return world, leases


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 40))
def test_evicting_many_at_once_takes_what_one_by_one_would_take(seed, n):
    (one, mine), (other, its) = grown(seed), grown(seed)
    n = min(n, one.index.evictable)
    assert one.index.evict(n)
    for _ in range(n):
        assert other.index.evict(1)
    assert one.collect() == other.collect()
    assert one.books()[:7] == other.books()[:7]
    assert len(mine) == len(its)
    for world in (one, other):
        world.check()
    # What either did must not show later, in the order of what is left.
    rest = one.index.evictable
    assert one.index.evict(rest)
    for _ in range(rest):
        assert other.index.evict(1)
    assert one.collect() == other.collect()


# Dropping


def test_a_dropped_page_takes_everything_below_it_along_at_once(world):
    frames = world.put(pages(1, 2, 3, 4))
    branch = world.put(pages(1, 2, 5))
    beside = world.put(pages(1, 6))
    assert world.index.drop(frames[1]) == 4
    assert [world.found(t) for t in (pages(1, 2, 3, 4), pages(1, 2, 5), pages(1, 6))] == [1, 1, 2]
    assert sorted(world.collect()) == sorted({*frames[1:], branch[2]})
    assert world.count("pages_dropped") == 4
    assert world.index.evictable == 2
    assert world.match("r", pages(1, 6)).frames.tolist() == beside


def test_dropped_pages_live_on_for_their_holder_and_leave_with_it(world):
    lease, frames = world.hold("r", pages(1, 2, 3, 4))
    assert world.index.drop(frames[1]) == 3
    assert world.found(pages(1, 2, 3, 4)) == 1
    assert world.index.path(lease).tolist() == frames
    assert set(world.frames.status[frames].tolist()) == {Status.SEALED}
    assert world.collect() == []
    assert (world.index.held, world.index.evictable) == (4, 0)
    world.check()
    world.index.release(lease)
    assert sorted(world.collect()) == sorted(frames[1:])
    assert (world.index.held, world.index.evictable) == (0, 1)
    assert world.found(pages(1)) == 1


def test_what_nobody_holds_of_a_dropped_path_leaves_at_once(world):
    frames = world.put(pages(1, 2, 3, 4))
    lease = world.match("r", pages(1, 2)).lease
    assert world.index.drop(frames[0]) == 4
    assert sorted(world.collect()) == sorted(frames[2:])
    world.index.release(lease)
    assert sorted(world.collect()) == sorted(frames[:2])


def test_dropped_pages_leave_with_the_last_of_their_holders(world):
    long, frames = world.hold("long", pages(1, 2, 3))
    short = world.match("short", pages(1, 2)).lease
    world.index.drop(frames[1])
    world.index.release(long)
    assert world.collect() == [frames[2]]
    assert world.index.path(short).tolist() == frames[:2]
    world.index.release(short)
    assert world.collect() == [frames[1]]


def test_nothing_grows_below_a_dropped_page(world):
    lease, frames = world.hold("r", pages(1, 2))
    other = world.match("s", pages(1)).lease
    world.index.drop(frames[1])
    assert (lease.grows, other.grows) == (False, True)
    mine = world.frames.reserve(1)
    sealed = world.index.seal(lease, Chain(SPACE, pages(1, 2, 3)), mine)
    assert (sealed.kept.tolist(), sealed.spare.tolist()) == ([], [])
    assert set(world.frames.status[mine].tolist()) == {Status.FILLING}
    assert world.found(pages(1, 2, 3)) == 1
    assert lease.pages == 2


def test_dropped_content_can_be_sealed_again_beside_what_is_still_held(world):
    held, frames = world.hold("r", pages(1, 2))
    world.index.drop(frames[1])
    again = world.put(pages(1, 2))
    assert again[0] == frames[0]
    assert again[1] != frames[1]
    world.check()
    world.index.release(held)
    assert world.collect() == [frames[1]]
    assert world.match("s", pages(1, 2)).frames.tolist() == again


def test_the_parent_of_what_was_dropped_may_leave_again(world):
    frames = world.put(pages(1, 2))
    world.index.drop(frames[1])
    world.collect()
    assert world.index.evictable == 1
    assert world.index.evict(1)
    assert world.collect() == frames[:1]


def test_a_parent_inherits_the_last_use_of_what_was_dropped(world):
    """`policy.inherit` for whatever reason a page leaves; here it alone decides what goes next."""
    world.put(pages(1))
    world.put(pages(3))
    frames = world.put(pages(1, 2))
    world.index.drop(frames[1])
    world.index.evict(1)
    world.collect()
    assert [world.found(pages(1)), world.found(pages(3))] == [1, 0]


def test_only_indexed_pages_can_be_dropped(world):
    lease, frames = world.hold("r", pages(1, 2))
    world.index.drop(frames[1])
    before = world.books()
    for frame in (frames[1], 30, -1, world.frames.count):
        with pytest.raises(MisuseError, match=f"frame {frame} holds no indexed page"):
            world.index.drop(frame)
    assert world.books() == before
    world.index.release(lease)


# Cost


def test_paths_are_read_in_few_slices_after_churn():
    """Ids given out by luck decay: 2,760 slices for one path after six turnovers."""
    count, length, shared = 2000, 24, 6
    world, rng = World(count, 1), random.Random(5)
    space = Namespace(1, model="m")
    open_requests, sealed, n, most = [], 0, 0, 0
    while sealed < 6 * count:
        while len(open_requests) < 64:
            n += 1
            # Half begin with one of four system prompts, half with nothing that anybody shares.
            prompt = [rng.randrange(4)] * shared if n % 2 else []
            chain = Chain(space, [*prompt, *(1000 + n * length + i for i in range(length))])
            match = world.index.match(n, chain, chain.pages)
            open_requests.append((match.lease, chain, 2 if prompt else 1))
        place = rng.randrange(len(open_requests))
        lease, chain, limit = open_requests[place]
        world.seal(lease, chain, 1)
        sealed += 1
        deepest = int(world.index.path(lease)[-1])
        slices = world.index._paths.slices(deepest)
        assert slices <= limit
        most = max(most, slices)
        if lease.pages == chain.pages:
            world.index.release(lease)
            del open_requests[place]
    assert most == 2
    assert world.count("pages_evicted") > 4 * count
    world.check()


def _key_lost(world, frame):
    world.index._contents.forget_all(ids(frame))


def _status(world, frame):
    world.frames.move(ids(frame), Status.LEAVING)


def _not_offered(world, frame):
    world.index._policy.withdraw(frame)


def _hold_lost(world, frame):
    world.index._paths.let_go(world.index._leases.of("r").deepest)


def _too_long(world, frame):
    world.index._leases.of("r").pages += 1


@pytest.mark.parametrize("damage", [_key_lost, _status, _not_offered, _hold_lost, _too_long])
def test_the_checker_finds_broken_books(damage):
    world = World()
    _, frames = world.hold("kept", pages(1, 2))
    lease, tail = world.hold("r", pages(1, 3))
    (offered,) = world.put(pages(4))
    world.check()
    damage(world, frames[0] if damage is _key_lost else offered)
    with pytest.raises(AssertionError):
        world.check()
    assert lease.pages >= len(tail)


def test_a_lease_does_not_grow_by_another_chains_pages():
    """Else the pages of one prompt would be found below the prefix of another."""
    world = World()
    mine, other = [1] * 8 + [3] * 4, [9] * 8 + [3] * 4
    world.put(mine[:8])
    match = world.match("a", mine, 2)
    with pytest.raises(InputError, match="page 1 of the chain"):
        world.seal(match.lease, Chain(SPACE, other), 1)
    world.check()
    assert world.found(other) == 0
