"""All groups of a model over one set of frames: where they agree, and the one order in which things leave."""

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.base.observe import Counters
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.cut import Cut
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import Frames
from stepwell.core.geometry import Geometry, Group, Rule, StateTensor
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.prefixes import Prefixes
from stepwell.core.reasons import Reason

SIZE = 4
SPACE = Namespace(SIZE, model="m")
FULL = Geometry.full(1, 1, 1).groups[0]
BLOB = (StateTensor("conv", (4,), "float32"),)
STATE = Group("state", Rule.STATE, (0,), 0, 0, 0, "float32", state=BLOB)


class World:
    """Prefixes with their frames, as their owner uses them."""

    def __init__(self, closed=True, walked=((1, 2),), count=64):
        self.frames = Frames(count)
        self.counters = Counters()
        self.found = []  # so that no lease is lost
        cuts = [Cut(FULL, 1, 0)] if closed else []
        cuts += [Cut(STATE, *sizes) for sizes in walked]
        self.prefixes = Prefixes(self.frames, SIZE, cuts, Lru(count), self.counters)

    def match(self, chain, limit=99, minimum=0, request="r"):
        self.found.append(self.prefixes.match(request, chain, limit, minimum))
        return self.found[-1]

    def put(self, chain, pages, *kept, want=True):
        """Pages of the full group, and of each walked group the records at these pages, used last."""
        request = object()
        found = self.prefixes.match(request, chain, 0)
        if found.lease is not None and pages:
            mine = self.take(pages)
            sealed = self.prefixes.closed.seal(found.lease, chain, mine)
            self.frames.move(mine[~np.isin(mine, sealed.kept)], Status.FREE)
        groups = zip(self.prefixes.walked, kept, strict=True)
        records = [self.seal(index, chain, places) for index, places in groups]
        for index, its in zip(self.prefixes.walked, records, strict=True):
            if want:
                index.want(its)
            index.release(its)
        if found.lease is not None:
            self.prefixes.closed.release(found.lease)

    def seal(self, index, chain, places):
        records = [np.empty(0, np.int32)]
        for page in places:
            mine = self.take(index.record_frames)
            sealed = index.seal(chain, page, mine[None])
            self.frames.move(sealed.spare, Status.FREE)
            if not len(sealed.kept):
                self.frames.move(mine, Status.FREE)
            records.append(sealed.kept)
        return np.concatenate(records)

    def take(self, n):
        missing = n - self.frames.free
        assert missing <= 0 or self.prefixes.evict(missing)
        self.collect()
        return self.frames.reserve(n)

    def collect(self):
        left = self.prefixes.collect()
        self.frames.move(left, Status.FREE)
        return left.tolist()

    def check(self):
        self.collect()
        findings = Findings()
        self.frames.check(findings)
        self.prefixes.check(findings)
        findings.raise_if_any()


PLACES = st.sets(st.integers(0, 9))


@settings(deadline=None)
@given(st.integers(0, 10), PLACES, PLACES, st.integers(0, 3), st.booleans(), st.integers(0, 10))
def test_the_boundary_is_the_deepest_at_which_every_group_can_go_on(
    pages, window, states, reach, closed, limit
):
    """And what is held there is what each group needs, no more."""
    world = World(closed, ((1, reach), (2, 1)))
    chain = Chain(SPACE, range(10 * SIZE))
    here = range(pages) if closed else range(10)
    window, states = window & set(here), states & set(here)
    world.put(chain, pages, sorted(window), sorted(states))
    known = min(limit, pages) if closed else limit
    right = max(
        end
        for end in range(known + 1)
        if set(range(max(0, end - reach), end)) <= window and (not end or end - 1 in states)
    )
    found = world.match(chain, limit)
    assert found.pages == right
    assert len(found.frames) == (right if closed else 0)
    assert [len(records) for records in found.records] == [min(reach, right), min(1, right)]
    assert world.prefixes.held == len(found.frames) + min(reach, right) + 2 * min(1, right)
    assert (found.parted > right) == (found.parted > 0)
    if closed:
        assert found.parted == (known if known > right else 0)
    world.check()
    world.prefixes.let_go(found)
    assert world.prefixes.held == 0
    world.check()


def test_a_group_that_steps_back_asks_the_others_again():
    """The window would go on at 6, the state at 4, where the window cannot; both can at 1."""
    world = World(walked=((1, 2), (2, 1)))
    chain = Chain(SPACE, range(6 * SIZE))
    world.put(chain, 6, [0, 1, 4, 5], [0, 3])
    assert world.match(chain).pages == 1


def test_reasons_say_which_cause_came_first():
    world = World()
    chain = Chain(SPACE, range(6 * SIZE))
    assert world.match(chain, 0).reason is Reason.BELOW_A_PAGE
    assert world.match(chain, 6).reason is Reason.NOT_SEALED
    world.put(chain, 6, [0, 1, 4])
    assert (world.match(chain, 2).pages, world.match(chain, 2).reason) == (2, Reason.WHOLE_PREFIX)
    assert (world.match(chain).pages, world.match(chain).reason) == (2, Reason.NO_BOUNDARY)
    least = world.match(chain, minimum=3)
    assert (least.pages, least.reason, least.parted) == (0, Reason.BELOW_MINIMUM, 6)
    assert world.match(chain, minimum=2).pages == 2
    bare = World(closed=False)
    bare.put(chain, 0, [0, 1])
    assert (bare.match(chain, 3).pages, bare.match(chain, 3).reason) == (2, Reason.NOT_SEALED)


def test_without_a_full_group_the_windows_say_where_a_prompt_parts():
    world = World(closed=False, walked=((1, 2), (1, 1)))
    chain = Chain(SPACE, range(6 * SIZE))
    world.put(chain, 0, [0, 1, 2, 3], [1])
    found = world.match(chain)
    assert (found.pages, found.parted) == (2, 4)


def test_what_hangs_on_a_page_leaves_with_it():
    world = World(walked=((1, 2), (3, 1)))
    chain, other = Chain(SPACE, range(4 * SIZE)), Chain(SPACE, [9] * 8)
    world.put(chain, 4, [2, 3], [3])
    world.put(other, 2, [0, 1], [1])
    assert world.prefixes.drop(Chain(SPACE, range(3 * SIZE))) == 2
    assert len(world.collect()) == 2 + 2 + 3
    assert [index.has(chain.key(3)) for index in world.prefixes.walked] == [False, False]
    assert world.match(other).pages == 2
    assert world.prefixes.drop_root(None) == 4
    assert world.match(other, request="s").pages == 0
    world.check()


@pytest.mark.parametrize("n", range(1, 11))
def test_an_eviction_gives_as_much_as_was_asked_for_up_to_all_there_is(n):
    """A page that leaves before what hangs on it takes it along, and those frames count."""
    world = World(walked=((3, 1),), count=10)
    chain = Chain(SPACE, range(4 * SIZE))
    world.put(chain, 4, [3, 0])
    index = world.prefixes.walked[0]
    index.release(index.hold(chain, 3, 4))
    index.release(index.hold(chain, 0, 1))
    assert world.prefixes.evictable == 10
    assert not world.prefixes.evict(11)
    assert world.prefixes.evict(n)
    assert n <= len(world.collect()) <= n + 6
    world.check()


def test_a_match_that_is_given_back_leaves_pages_later_than_what_hangs_on_them():
    world = World(walked=((1, 1),))
    chain = Chain(SPACE, range(2 * SIZE))
    world.put(chain, 2, [1])
    world.prefixes.let_go(world.match(chain))
    assert world.prefixes.evict(1)
    assert not world.prefixes.walked[0].has(chain.key(1))
    assert world.prefixes.closed.frame_of(chain.key(1)) is not None
    world.check()


def test_held_pages_and_records_never_leave():
    world = World(walked=((1, 2),), count=12)
    chain = Chain(SPACE, range(4 * SIZE))
    world.put(chain, 4, [0, 1, 2, 3])
    found = world.match(chain, 3)
    assert (world.prefixes.held, world.prefixes.evictable) == (5, 3)
    assert not world.prefixes.evict(4)
    assert world.prefixes.evict(3)
    assert len(world.collect()) == 3
    world.prefixes.let_go(found)
    assert world.match(chain, request="s").pages == 3
    world.check()


class Weak(Chain):
    """Keys of four bits: collisions all over."""

    @staticmethod
    def _hash(data):
        return hashlib.sha256(data)

    def key(self, page):
        return bytes([super().key(page)[0] & 15]) * 32

    def keys(self, first, last):
        return [self.key(page) for page in range(first, last)]


def test_keys_that_collide_never_match_other_tokens():
    """The full group proves the whole path, so no window page or state of other tokens is found by its key."""
    rng = random.Random(1)
    world = World(walked=((1, 2), (1, 1)), count=48)
    meaning, hits = {}, 0
    for number in range(600):
        numbers = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        chain = Weak(SPACE, [token for n in numbers for token in [n] * SIZE])
        found = world.match(chain, request=number)
        hits += found.pages > 0
        for group, records in enumerate(found.records):
            for page, record in enumerate(records.tolist(), found.pages - len(records)):
                assert meaning[group, record] == numbers[: page + 1]
        lease, closed = found.lease, world.prefixes.closed
        mine = world.take(len(numbers) - lease.pages)
        sealed = closed.seal(lease, chain, mine)
        world.frames.move(mine[~np.isin(mine, sealed.kept)], Status.FREE)
        places = range(lease.pages if lease.grows else 0)
        for group, index in enumerate(world.prefixes.walked):
            records = world.seal(index, chain, places)
            for page, record in enumerate(records.tolist()):
                meaning[group, record] = numbers[: page + 1]
            index.want(records)
            index.release(records)
        world.prefixes.let_go(found)
        world.check()
    assert hits > 100
    assert world.counters.snapshot()["key_collisions"] > 50
