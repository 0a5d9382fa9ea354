"""The closed index against a tree of plain objects, over whatever requests can do to it."""

import gc
import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stepwell.base.errors import MisuseError, StaleError
from stepwell.base.observe import Counters
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import Frames
from stepwell.core.index import ClosedIndex
from stepwell.core.key import Namespace
from stepwell.core.page import LEGAL, Status
from stepwell.core.reasons import Reason

COUNT = 14
SIZE = 2
REQUESTS = 5
SPACES = [Namespace(SIZE, model="m"), Namespace(SIZE, model="m", tenant="t")]
FIRED: Counter[str] = Counter()
MOVES: Counter[tuple[Status, Status]] = Counter()


class Recorded(Frames):
    """Frames that note every step they really made."""

    def reserve(self, n):
        taken = super().reserve(n)
        if taken is not None:
            MOVES[Status.FREE, Status.FILLING] += len(taken)
        return taken

    def move(self, frames, after):
        before = [Status(int(self.status[f])) for f in frames if 0 <= f < self.count]
        super().move(frames, after)
        MOVES.update((one, after) for one in before)


class Node:
    """One sealed page of the model; a space has one without parent above its first pages."""

    def __init__(self, parent=None, page=(), frame=-1, last_use=0, chain=None):
        self.parent, self.page, self.frame, self.last_use = parent, page, frame, last_use
        self.chain = chain
        self.indexed = True
        self.children = {}
        self.zombies = set()

    def path(self):
        return [] if self.parent is None else [*self.parent.path(), self]

    def leaf(self):
        return not self.children and not self.zombies

    def below(self):
        return [self, *(one for child in self.children.values() for one in child.below())]


class Held:
    """What the model knows of one lease."""

    def __init__(self, lease, chain, node):
        self.lease, self.chain, self.node = lease, chain, node
        self.pages = len(node.path())
        self.grows = True


class Model:
    """Pages as nodes, and what leaves next found by looking at all of them."""

    def __init__(self):
        self.roots = [Node() for _ in SPACES]
        self.held = {}
        self.left = set()
        self.tick = 0

    def now(self):
        self.tick += 1
        return self.tick

    def nodes(self):
        return [one for root in self.roots for one in root.below() if one is not root]

    def kept(self):
        return {node for held in self.held.values() for node in held.node.path()}

    def evictable(self):
        return len(set(self.nodes()) - self.kept())

    def leave(self, node):
        parent = node.parent
        if node.indexed:
            del parent.children[node.page]
        else:
            parent.zombies.discard(node)
        parent.last_use = max(parent.last_use, node.last_use)
        self.left.add(node.frame)

    def settle(self, node):
        """What cannot be found and is not kept leaves, upwards."""
        while not node.indexed and node.leaf() and node not in self.kept():
            self.leave(node)
            node = node.parent

    def match(self, chain, space, limit):
        node = self.roots[space]
        path = []
        for page in chain.page_rows(0, max(0, min(limit, chain.pages))).tolist():
            if tuple(page) not in node.children:
                break
            node = node.children[tuple(page)]
            path.append(node)
        return node, path

    def take(self, request, held):
        earlier = self.held.get(request)
        self.held[request] = held
        if earlier is not None:
            self.end(earlier)

    def release(self, request):
        self.end(self.held.pop(request))

    def end(self, held):
        if held.node.parent is not None:
            held.node.last_use = self.now()
        self.settle(held.node)

    def evict(self, n):
        if n > self.evictable():
            return False
        for _ in range(n):
            kept = self.kept()
            leaves = [node for node in self.nodes() if node.leaf() and node not in kept]
            self.leave(min(leaves, key=lambda node: node.last_use))
        return True

    def drop(self, node):
        gone = node.below()
        for one in gone:
            del one.parent.children[one.page]
            one.parent.zombies.add(one)
            one.indexed = False
        for held in self.held.values():
            held.grows = held.grows and held.node.indexed
        for one in reversed(gone):
            if one.frame not in self.left:
                self.settle(one)
        return len(gone)

    def seal(self, held, frames, twins):
        """Frames of the pages that are indexed now, and the caller's that are spare."""
        if not held.grows:
            return [], []
        kept, spare, now = [], [], 0
        for place, frame in enumerate(frames):
            page = tuple(held.chain.page_rows(held.pages, held.pages + 1)[0].tolist())
            child = held.node.children.get(page)
            if child is not None and not twins:
                held.grows = False
                break
            if child is None:
                now = now or self.now()
                chain = Chain(held.chain.namespace, held.chain.tokens[: (held.pages + 1) * SIZE])
                child = held.node.children[page] = Node(held.node, page, frame, now, chain)
                twins = True
            else:
                spare.append(frames[place])
            held.node = child
            held.pages += 1
            kept.append(child.frame)
        return kept, spare


# Few different pages and short prompts, so that requests meet.
pages = st.sampled_from([[0, 0], [0, 1], [1, 0]])
prompts = st.tuples(st.lists(pages, max_size=6), st.integers(0, SIZE - 1)).map(
    lambda drawn: [token for page in drawn[0] for token in page] + [7] * drawn[1]
)
requests = st.integers(0, REQUESTS - 1)


class IndexMachine(RuleBasedStateMachine):
    """Every rule does the same to index and model, and compares what they say."""

    def __init__(self):
        super().__init__()
        self.frames = Recorded(COUNT)
        self.counters = Counters()
        self.index = ClosedIndex(self.frames, SIZE, Lru(COUNT), self.counters)
        self.model = Model()
        self.stale = []
        self.lost = 0

    def drawn(self, data, among):
        return data.draw(st.sampled_from(sorted(among)), label="request")

    def room(self, n):
        missing = n - self.frames.free
        if missing > 0:
            assert self.index.evict(missing) == self.model.evict(missing)
            FIRED["evict for room"] += 1
            self.collected()
        return self.frames.reserve(n)

    def collected(self):
        left = self.index.collect()
        assert len(set(left.tolist())) == len(left)
        assert set(left.tolist()) == self.model.left
        assert set(self.frames.status[left].tolist()) <= {Status.LEAVING}
        self.frames.move(left, Status.FREE)
        self.model.left.clear()

    def grow(self, request, chain, n, twins):
        """Seals the next n pages; gives back what was not needed."""
        held = self.model.held[request]
        if n - self.frames.free > self.model.evictable():
            FIRED["seal refused"] += 1
            return
        mine = self.room(n)
        sealed = self.index.seal(held.lease, chain, mine, twins=twins)
        kept, spare = self.model.seal(held, mine.tolist(), twins)
        assert sealed.kept.tolist() == kept
        assert sealed.spare.tolist() == spare
        FIRED["seal nothing" if n and not kept else "seal"] += 1
        FIRED["seal twins"] += len(spare) > 0
        rest = mine[~np.isin(mine, sealed.kept)]
        assert (self.frames.status[rest] == Status.FILLING).all()
        self.frames.move(rest, Status.FREE)

    @initialize(data=st.data())
    def begin(self, data):
        """Somewhere in the middle: a few prompts are here already."""
        for request in range(data.draw(st.integers(0, 3), label="prompts")):
            self.match(request, 0, data.draw(prompts), 9)
            self.seal_rest(request)

    def seal_rest(self, request, *, twins=True):
        held = self.model.held[request]
        self.grow(request, held.chain, held.chain.pages - held.pages, twins)

    @rule(
        request=requests,
        space=st.sampled_from([0, 0, 0, 1]),
        tokens=prompts,
        limit=st.integers(0, 6) | st.just(9),
    )
    def match(self, request, space, tokens, limit):
        chain = Chain(SPACES[space], tokens)
        match = self.index.match(request, chain, limit)
        node, path = self.model.match(chain, space, limit)
        assert match.frames.tolist() == [one.frame for one in path]
        assert match.lease.pages == len(path)
        if min(limit, chain.pages) == 0:
            assert match.reason is Reason.BELOW_A_PAGE
        elif len(path) == min(limit, chain.pages):
            assert match.reason is Reason.WHOLE_PREFIX
        else:
            assert match.reason is Reason.NOT_SEALED
        FIRED["match hit" if path else "match miss"] += 1
        earlier = self.model.held.get(request)
        if earlier is not None:
            self.stale.append(earlier.lease)
            FIRED["match again"] += 1
        self.model.take(request, Held(match.lease, chain, node))

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), more=st.lists(pages, min_size=1, max_size=3), twins=st.booleans())
    def seal(self, data, more, twins):
        request = self.drawn(data, self.model.held)
        held = self.model.held[request]
        # What the prompt already has first; then tokens as a decoding request appends them.
        n = len(more)
        room = (held.pages + n) * SIZE - len(held.chain)
        if room > 0:
            held.chain.append([token for page in more for token in page][-room:])
        self.grow(request, held.chain, n, twins)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def seal_whole(self, data):
        self.seal_rest(self.drawn(data, self.model.held))

    @rule(data=st.data(), request=requests, tokens=prompts)
    def meet(self, data, request, tokens):
        """Two requests compute one prompt at the same time."""
        both = (request, (request + 1) % REQUESTS)
        for one in both:
            self.match(one, 0, tokens, data.draw(st.integers(0, 2), label="limit"))
        for one in both:
            self.seal_rest(one, twins=data.draw(st.booleans(), label="twins"))

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def release(self, data):
        request = self.drawn(data, self.model.held)
        lease = self.model.held[request].lease
        self.index.release(lease)
        self.model.release(request)
        self.stale.append(lease)
        FIRED["release"] += 1

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def release_stale(self, data):
        lease = data.draw(st.sampled_from(self.stale[-3:]), label="stale")
        with pytest.raises(StaleError):
            self.index.release(lease)
        FIRED["release stale"] += 1

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def lose(self, data):
        """Nobody releases the lease; the collector queues it; the next call ends it."""
        request = self.drawn(data, self.model.held)
        held = self.model.held[request]
        held.lease = None
        # Reference counts are enough unless something made a cycle.
        if self.index._leases.of(request).lease() is not None:
            gc.collect()
        self.model.release(request)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.collected()
        assert [one.category for one in caught] == [ResourceWarning]
        self.lost += 1
        FIRED["lose"] += 1

    @rule(n=st.integers(1, 3) | st.integers(0, COUNT + 1) | st.just("all"))
    def evict(self, n):
        if n == "all":
            n = self.model.evictable()
            FIRED["evict all"] += 1
        did = self.index.evict(n)
        assert did == self.model.evict(n)
        FIRED["evict" if did else "evict refused"] += 1

    def dropped(self, data, nodes):
        by_frame = {node.frame: node for node in nodes}
        node = by_frame[data.draw(st.sampled_from(sorted(by_frame)), label="frame")]
        held = bool(set(node.below()) & self.model.kept())
        assert self.index.drop(node.frame) == self.model.drop(node)
        FIRED["drop held" if held else "drop"] += 1

    @precondition(lambda self: self.model.evictable())
    @rule(data=st.data())
    def drop(self, data):
        self.dropped(data, set(self.model.nodes()) - self.model.kept())

    @precondition(lambda self: any(node.indexed for node in self.model.kept()))
    @rule(data=st.data())
    def drop_held(self, data):
        self.dropped(data, [node for node in self.model.kept() if node.indexed])

    @rule(frame=st.integers(-1, COUNT))
    def drop_nothing(self, frame):
        if frame in {node.frame for node in self.model.nodes()}:
            return
        with pytest.raises(MisuseError):
            self.index.drop(frame)
        FIRED["drop nothing"] += 1

    @rule()
    def collect(self):
        self.collected()
        FIRED["collect"] += 1

    @invariant()
    def as_the_model(self):
        findings = Findings()
        self.frames.check(findings)
        self.index.check(findings)
        findings.raise_if_any()
        model, nodes = self.model, self.model.nodes()
        kept = model.kept()
        assert self.index.held == len(kept)
        assert self.index.evictable == model.evictable()
        census = self.frames.census()
        assert census[Status.SEALED] == len(set(nodes) | kept)
        assert census[Status.LEAVING] == len(model.left)
        for node in nodes:
            assert self.index.find(node.chain) == node.frame
        for held in model.held.values():
            assert self.index.path(held.lease).tolist() == [n.frame for n in held.node.path()]
            assert (held.lease.pages, held.lease.grows) == (held.pages, held.grows)
        assert self.counters.snapshot()["key_collisions"] == 0
        assert self.counters.snapshot()["leases_lost"] == self.lost


RULES = (
    "match hit",
    "match miss",
    "match again",
    "seal",
    "seal twins",
    "seal nothing",
    "seal refused",
    "release",
    "release stale",
    "lose",
    "evict",
    "evict for room",
    "evict refused",
    "evict all",
    "drop",
    "drop held",
    "drop nothing",
    "collect",
)


def test_the_index_does_what_a_tree_of_objects_does():
    FIRED.clear()
    MOVES.clear()
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A machine that never gets somewhere proves nothing about it. Quarantine is its owner's matter.
    assert {name: FIRED[name] for name in RULES if FIRED[name] < 50} == {}
    steps = {step for step in LEGAL if Status.QUARANTINED not in step}
    assert set(MOVES) == steps
    assert {step: MOVES[step] for step in steps if MOVES[step] < 50} == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_index_does_what_a_tree_of_objects_does_for_long() -> None:
    """Random, not derandomised: every run goes elsewhere, and a failure prints how to come back."""
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=3000,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
