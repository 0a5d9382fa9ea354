"""The walked index: boundaries, holds, wishes of kept boundaries, and what leaves first."""

import hashlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepwell.base.errors import MisuseError
from stepwell.base.observe import Counters
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.cut import Cut
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import Frames
from stepwell.core.geometry import Group, Rule, StateTensor
from stepwell.core.invariants import check_groups
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.walked import WalkedIndex

SIZE = 4
SPACE = Namespace(SIZE, model="m")
BLOB = (StateTensor("conv", (4,), "float32"),)
STATE = Group("state", Rule.STATE, (0,), 0, 0, 0, "float32", state=BLOB)


def tokens_of(*numbers):
    """A prompt of pages that each have one token throughout."""
    return [token for n in numbers for token in [n] * SIZE]


class World:
    """A walked index with its frames, as its owner uses them."""

    def __init__(self, record_frames=1, reach=1, count=32):
        self.frames = Frames(count)
        self.counters = Counters()
        self.policy = Lru(count)
        self.index = WalkedIndex(
            self.frames, SIZE, Cut(STATE, record_frames, reach), self.policy, self.counters
        )

    def seal(self, chain, first, last, **options):
        """Seals pages `[first, last)`; returns the records, held, and frees what is spare."""
        each = self.index.record_frames
        mine = self.frames.reserve((last - first) * each).reshape(-1, each)
        sealed = self.index.seal(chain, first, mine, **options)
        kept = self.index.frames_of(sealed.kept).reshape(-1)
        self.frames.move(mine[~np.isin(mine, kept)], Status.FREE)
        return sealed.kept

    def put(self, chain, *pages):
        """Records at these pages, sealed and released."""
        for page in pages:
            self.index.release(self.seal(chain, page, page + 1))

    def collect(self):
        left = self.index.collect()
        self.frames.move(left, Status.FREE)
        return sorted(left.tolist())

    def want(self, records):
        self.index.want(records)
        return records, self.frames.generation[records]

    def order(self):
        """Evicts everything that may leave; the records in the order in which they go."""
        gone = []
        while (victim := self.policy.victim()) is not None:
            gone.append(victim)
            self.index.take_out(victim)
        self.collect()
        return gone

    def check(self):
        findings = Findings()
        self.frames.check(findings)
        check_groups(findings, self.frames, None, [self.index], self.policy)
        findings.raise_if_any()


@pytest.fixture
def world():
    made = World()
    yield made
    made.check()


@given(st.sets(st.integers(0, 11)), st.integers(0, 4), st.integers(0, 12))
@example({10}, 1, 12)  # a boundary right behind the first gap
@example({7, 8}, 2, 12)
def test_the_deepest_boundary_is_that_of_a_search_of_all(present, reach, limit):
    world = World(reach=reach)
    chain = Chain(SPACE, range(12 * SIZE))
    world.put(chain, *sorted(present))
    right = max(end for end in range(limit + 1) if set(range(max(0, end - reach), end)) <= present)
    assert world.index.boundary(chain, limit) == right
    world.check()


@given(st.sets(st.integers(0, 30)), st.integers(1, 5))
def test_a_search_looks_up_each_key_once_at_most(present, reach):
    world = World(reach=reach)
    chain = Chain(SPACE, range(31 * SIZE))
    world.put(chain, *sorted(present))
    asked = []
    find = world.index._contents.find
    world.index._contents.find = lambda key: asked.append(key) or find(key)
    world.index.boundary(chain, 31)
    assert len(set(asked)) == len(asked) <= 31


def test_other_tokens_another_place_and_another_namespace_are_no_record(world):
    chain = Chain(SPACE, tokens_of(1, 2, 3))
    world.put(chain, 0, 1, 2)
    assert world.index.boundary(chain, 3) == 3
    assert world.index.boundary(Chain(SPACE, tokens_of(9, 2, 3)), 3) == 0
    assert world.index.boundary(Chain(SPACE, tokens_of(2, 3)), 2) == 0
    assert world.index.boundary(Chain(Namespace(SIZE, model="n"), tokens_of(1, 2, 3)), 3) == 0


def test_a_record_stays_until_its_last_hold_ends(world):
    chain = Chain(SPACE, tokens_of(1, 2))
    first = world.seal(chain, 0, 2)
    second = world.index.hold(chain, 0, 2)
    assert first.tolist() == second.tolist()
    assert (world.index.held, world.index.evictable) == (2, 0)
    world.index.release(first)
    assert (world.index.held, world.policy.victim()) == (2, None)
    world.index.release(second[1:])
    assert world.order() == second[1:].tolist()
    world.index.release(second[:1])
    with pytest.raises(MisuseError, match="nobody holds"):
        world.index.release(second[:1])
    assert (world.index.held, world.index.evictable) == (0, 1)


@pytest.mark.parametrize("record_frames", [1, 3])
def test_a_twin_hands_its_frames_back(record_frames):
    world = World(record_frames)
    chain = Chain(SPACE, tokens_of(1, 2, 3))
    first = world.seal(chain, 0, 2)
    mine = world.frames.reserve(3 * record_frames).reshape(3, record_frames)
    sealed = world.index.seal(chain, 0, mine)
    assert sealed.kept.tolist() == [*first.tolist(), mine[2, 0]]
    assert sealed.spare.tolist() == mine[:2].reshape(-1).tolist()
    world.frames.move(sealed.spare, Status.FREE)
    assert world.counters.snapshot()["records_sealed"] == 3
    world.index.release(first)
    assert world.index.held == 3 * record_frames
    world.check()


def test_who_wants_no_twin_ends_at_one(world):
    chain = Chain(SPACE, tokens_of(1, 2, 3))
    world.put(chain, 1)
    assert len(world.seal(chain, 0, 3, twins=False)) == 1
    assert world.index.boundary(chain, 3) == 2


def test_frames_of_a_record_are_taken_and_leave_together():
    world = World(record_frames=3, count=9)
    chain = Chain(SPACE, tokens_of(1, 2, 3))
    records = world.seal(chain, 0, 3)
    rows = world.index.frames_of(records)
    assert sorted(rows.reshape(-1).tolist()) == list(range(9))
    assert rows[:, 0].tolist() == records.tolist()
    world.index.release(records[1:2])
    assert (world.index.evictable, world.index.held) == (3, 6)
    world.index.take_out(int(records[1]))
    assert world.collect() == sorted(rows[1].tolist())
    world.check()
    assert world.index.frames_of(records[:0]).shape == (0, 3)


def test_what_is_forgotten_while_held_leaves_with_its_last_hold(world):
    chain = Chain(SPACE, tokens_of(1, 2))
    held = world.seal(chain, 0, 2)
    again = world.index.hold(chain, 0, 1)
    world.index.release(held[1:])
    assert world.index.forget([chain.key(0), chain.key(1), b"none of it" * 4]) == 2
    assert world.collect() == held[1:].tolist()
    assert world.index.boundary(chain, 2) == 0
    world.index.release(held[:1])
    assert world.collect() == []
    world.check()
    mine = world.seal(chain, 0, 1)
    assert mine.tolist() != held[:1].tolist()
    world.index.release(again)
    assert world.collect() == held[:1].tolist()
    assert world.index.boundary(chain, 1) == 1


def test_a_namespace_is_forgotten_alone(world):
    other = Chain(Namespace(SIZE, model="n"), tokens_of(1, 2))
    chain = Chain(SPACE, tokens_of(1, 2))
    world.put(chain, 0, 1)
    world.put(other, 0, 1)
    assert world.index.forget_root(chain.root) == 2
    assert (world.index.boundary(chain, 2), world.index.boundary(other, 2)) == (0, 2)
    assert world.index.forget_root(None) == 2
    world.collect()


def test_what_no_boundary_wants_leaves_first_head_first(world):
    """However late it was used; the wanted ones follow in the order of their last use."""
    chain = Chain(SPACE, range(6 * SIZE))
    records = world.seal(chain, 0, 6)
    world.index.want(records[[1, 4]])
    world.index.release(records[[4]])
    world.index.release(records[[1]])
    world.index.release(records[[0, 2, 3, 5]])
    assert world.order() == records[[0, 2, 3, 5, 4, 1]].tolist()


def test_a_use_moves_a_wanted_record_back(world):
    chain = Chain(SPACE, range(3 * SIZE))
    records = world.seal(chain, 0, 3)
    world.index.want(records)
    world.index.release(records)
    world.index.release(world.index.hold(chain, 0, 1))
    assert world.order() == records[[1, 2, 0]].tolist()


def test_a_record_is_wanted_until_no_boundary_wants_it(world):
    chain = Chain(SPACE, range(3 * SIZE))
    records = world.seal(chain, 0, 3)
    wishes = [world.want(records[:2]), world.want(records[1:])]
    world.index.release(records)
    world.index.unwant(*wishes[1])
    assert world.policy.victim() == records[2]
    world.index.unwant(*wishes[0])
    assert world.order() == records[[2, 0, 1]].tolist()


def test_a_wish_for_what_has_left_is_no_wish_for_what_came_after(world):
    """By the generation of the frame once it was freed, and by the record as long as it was not."""
    chain, other = Chain(SPACE, tokens_of(1)), Chain(SPACE, tokens_of(2))
    record = world.seal(chain, 0, 1)
    wish = world.want(record)
    world.index.forget([chain.key(0)])
    world.index.release(record)
    world.index.unwant(*wish)
    world.check()
    world.collect()
    again = world.seal(other, 0, 1)
    assert again.tolist() == record.tolist()
    world.index.want(again)
    world.index.unwant(*wish)
    assert world.index._wanted[again] == 1
    world.index.release(again)


def test_a_held_record_that_is_wanted_no_more_leaves_first_later(world):
    chain = Chain(SPACE, range(2 * SIZE))
    records = world.seal(chain, 0, 2)
    wish = world.want(records[1:])
    world.index.want(records[:1])
    world.index.release(records[:1])
    world.index.unwant(*wish)
    assert world.policy.victim() == records[0]
    world.index.release(records[1:])
    assert world.policy.victim() == records[1]


class Short(Chain):
    """Keys of six bits: collisions all over."""

    @staticmethod
    def _hash(data):
        class Digest:
            def digest(self):
                return bytes([hashlib.sha256(data).digest()[0] & 63]) * 32

        return Digest()

    def key(self, page):
        return bytes([super().key(page)[0] & 63]) * 32


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12))
@example([[0, 1, 0], [1, 1, 0, 0]])  # the same page at another place
def test_keys_that_collide_never_match_other_tokens(prompts):
    world = World(reach=1, count=64)
    known = set()
    for numbers in prompts:
        chain = Short(SPACE, tokens_of(*numbers))
        boundary = world.index.boundary(chain, len(numbers))
        assert not boundary or (numbers[boundary - 1], boundary) in known
        for page in range(len(numbers)):
            kept = world.seal(chain, page, page + 1)
            if len(kept):
                known.add((numbers[page], page + 1))
            world.index.release(kept)
        world.check()


def test_a_key_of_other_tokens_ends_a_call_and_its_frames_stay_the_callers(world):
    class Same(Chain):
        def key(self, page):
            return b"k" * 32 if page == 1 else super().key(page)

    world.put(Same(SPACE, tokens_of(1, 2)), 1)
    chain = Same(SPACE, tokens_of(1, 3, 4))
    assert len(world.seal(chain, 0, 3)) == 1
    assert world.index.boundary(chain, 2) == 1
    assert world.index.boundary(chain, 3) == 1


def test_only_filling_frames_are_sealed(world):
    chain = Chain(SPACE, tokens_of(1, 2))
    records = world.seal(chain, 0, 1)
    with pytest.raises(MisuseError, match="SEALED"):
        world.index.seal(chain, 1, records[:, None])
    with pytest.raises(MisuseError, match="FREE"):
        world.index.seal(chain, 1, np.array([[30]], np.int32))
    assert not world.index.has(chain.key(1))
