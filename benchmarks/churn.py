"""A `PagePool` that has lived: 64 interleaved requests have turned it over three times.

A fresh pool hands out frames in order and has every prefix in one piece; speed there says nothing.
Here requests grow in pieces that end anywhere in a page, some share the beginning of a document, some
go on from what an earlier request left, and every page of the pool has been evicted and filled again.

In the second turnover a few prompts of 8,192 pages are sealed, piece by piece between the others;
now and then another request branches off the page that such a prompt has reached, so that its
path lies in several runs. Later they are used often enough to survive.

Large pools are churned with large pieces, or it would take minutes. But the pages that leave next are
always those of small requests: their shape is the same at every size, so that sizes can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import PagePool, Ready
from stepwell.core.chain import Chain
from stepwell.core.geometry import Geometry
from stepwell.core.index import ClosedIndex
from stepwell.core.key import Namespace

PAGE_TOKENS = 16
LONG_PAGES = 8_192
LONG_TOKENS = LONG_PAGES * PAGE_TOKENS + 1
"""Whole pages and one token more, because a request always keeps one token to compute."""
VOCABULARY = 128_000
NAMESPACE = Namespace(PAGE_TOKENS, model="benchmarks")

_REQUESTS = 64
_DOCUMENTS = 8  # beginnings that requests share
_LONG_PIECES = (256, 769)  # tokens by which a long prompt grows, at least and below
_BRANCH_ODDS = 1 / 16  # that a piece of a long prompt is followed by a request branching off it
_ZONE_PAGES = 160_000  # pages of small requests that leave next; more than a run of all rows evicts

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Shape:
    """How large the interleaved requests are.

    Attributes:
        lengths: tokens of a request, at least and below.
        pieces: tokens by which it grows, at least and below.
    """

    lengths: tuple[int, int]
    pieces: tuple[int, int]


_SMALL = _Shape((96, 513), (48, 209))


def empty_pool(frames: int, requests: int, positions: int) -> PagePool:
    """A pool without buffers.

    Args:
        frames: pages that it has room for.
        requests: rows of its table.
        positions: tokens that a request may have.
    """
    geometry = Geometry.full(layers=1, kv_heads=1, head_size=1, dtype="int8")
    settings = PoolSettings(
        PAGE_TOKENS, frames * geometry.page_bytes(PAGE_TOKENS), requests, positions
    )
    pool = PagePool(geometry, settings, device="none")
    assert pool.frames == frames
    return pool


class Churned:
    """A full pool of some size, its 64 live requests, and the long prompts that survive in it.

    Attributes:
        pool: the pool.
        chains: the long prompts, of 8,192 pages and one token each, with keys computed.

    Args:
        frames: of the pool, 10,000 or more.
        seed: of everything random.
    """

    def __init__(self, frames: int, seed: int = 5) -> None:
        print(f"  churning a pool of {frames:,} frames", file=sys.stderr, flush=True)
        self.pool = empty_pool(frames, _REQUESTS + 20, LONG_TOKENS)
        self._rng = np.random.default_rng(seed)
        self._noise: Tokens = self._random(1 << 20)
        self._stamp = 0
        self._documents = [self._random(256) for _ in range(_DOCUMENTS)]
        self._ends: list[int | None] = [None] * _REQUESTS
        self._sizes = [0] * _REQUESTS
        self._last: list[Tokens] = [self._random(64)] * _REQUESTS
        self._slot = 0
        longs = 1 if frames < 50_000 else 4 if frames < 500_000 else 16
        self.chains = [Chain(NAMESPACE, self._random(LONG_TOKENS)) for _ in range(longs)]
        for chain in self.chains:
            chain.keys(0, LONG_PAGES)
        self._between_uses = min(frames - longs * LONG_PAGES, frames // 4) // 5
        self._live(frames)

    @property
    def index(self) -> ClosedIndex:
        """What the pool has sealed."""
        index = self.pool._held.prefixes.closed
        assert index is not None, "a full group"
        return index

    def _live(self, frames: int) -> None:
        """The three turnovers."""
        large = _Shape((frames // 50, frames // 20), (frames // 500, frames // 125))
        self._shape = large if frames > 50_000 else _SMALL
        while self._evicted < frames:
            self.churn(frames // 10)
        self._grow_longs()
        self._churn_until_evicted(frames * 12 // 5)
        self._reshape(_SMALL)
        old = Chain(NAMESPACE, self._some(4 * PAGE_TOKENS + 1))
        self._use("old", old)
        self._churn_until_evicted(self._evicted + min(frames, _ZONE_PAGES))
        self._reshape(large if frames > 500_000 else _SMALL)
        self._between_uses = min(self._between_uses, _ZONE_PAGES // 16)
        while self._evicted < 3 * frames or self.index.longest(old, 4):
            self._churn_until_evicted(self._evicted + 1)
        self._reshape(_SMALL)
        self.churn(_REQUESTS * 16)
        self.touch()

    def _reshape(self, shape: _Shape) -> None:
        """All live requests end; those that follow have another shape."""
        for slot in range(_REQUESTS):
            self._end(slot)
        self._shape = shape

    def _random(self, count: int) -> Tokens:
        return self._rng.integers(0, VOCABULARY, count, dtype=np.uint32)

    def _some(self, count: int) -> Tokens:
        """Tokens that nobody has had in this order: made from noise and a stamp."""
        begin = int(self._rng.integers(0, len(self._noise) - count))
        tokens = self._noise[begin : begin + count].copy()
        self._stamp += 1
        tokens[:2] = divmod(self._stamp, VOCABULARY)
        return tokens

    def fresh_chain(self) -> Chain:
        """A prompt of 8,192 pages and a token that the pool has never seen; no key computed."""
        return Chain(NAMESPACE, self._random(LONG_TOKENS))

    @property
    def _evicted(self) -> int:
        return self.pool.stats()["pages_evicted"]

    @property
    def slices(self) -> list[int]:
        """Slices that the path of each long prompt is read in."""
        index = self.index
        deepest = [index._contents.find(chain.key(LONG_PAGES - 1)) for chain in self.chains]
        return [index._paths.slices(frame) for frame in deepest if frame is not None]

    def churn(self, pages: int) -> None:
        """Lets the live requests go on until about so many pages have been sealed."""
        goal = self.pool.stats()["pages_sealed"] + pages
        while self.pool.stats()["pages_sealed"] < goal:
            self._step()

    def touch(self) -> None:
        """Uses every long prompt once; seals what has left of it again."""
        for number, chain in enumerate(self.chains):
            self._use(("touch", number), chain)

    def _use(self, name: object, chain: Chain) -> bool:
        """Whether all pages of the prompt were there."""
        answer = self.pool.open(name, chain)
        assert isinstance(answer, Ready), answer
        whole = answer.cached == chain.pages * PAGE_TOKENS
        if not whole:
            self.pool.commit(name, chain.tokens[answer.cached :])
        self.pool.close(name)
        return whole

    def _churn_until_evicted(self, goal: int) -> None:
        """Churns, and uses the long prompts often enough; they must be sealed already."""
        while self._evicted < goal:
            self.churn(self._between_uses)
            used = [self._use(("touch", n), chain) for n, chain in enumerate(self.chains)]
            assert all(used), "the long prompts are used too seldom to survive"

    def _step(self) -> None:
        """The next request grows by a piece; or it ends, and another begins in its place."""
        self._slot = slot = (self._slot + 1) % _REQUESTS
        end, size = self._ends[slot], self._sizes[slot]
        if end is None or size >= end:
            self._end(slot)
            self._begin(slot)
            return
        piece = self._some(int(self._rng.integers(*self._shape.pieces)))
        if not isinstance(self.pool.extend(slot, len(piece)), Ready):
            self._end(slot)
            return
        self.pool.commit(slot, piece)
        self._sizes[slot] = size + len(piece)

    def _end(self, slot: int) -> None:
        if self._ends[slot] is not None:
            self.pool.close(slot)
            self._ends[slot] = None

    def _begin(self, slot: int) -> None:
        """A request begins: one half anew, the others below a document or an earlier request."""
        tail = self._some(int(self._rng.integers(*self._shape.pieces)))
        choice = self._rng.random()
        if choice < 0.25:
            head = self._documents[int(self._rng.integers(_DOCUMENTS))]
            tail = np.concatenate((head[: int(self._rng.integers(16, 257))], tail))
        elif choice < 0.5:
            head = self._last[slot]
            tail = np.concatenate((head[: int(self._rng.integers(1, len(head) + 1))], tail))
        self._open(slot, tail[: self._shape.lengths[1]])
        self._last[slot] = tail

    def _open(self, slot: int, prompt: Tokens) -> None:
        answer = self.pool.open(slot, prompt, NAMESPACE)
        if isinstance(answer, Ready):
            self.pool.commit(slot, prompt[answer.cached :])
            self._sizes[slot] = len(prompt)
            self._ends[slot] = int(self._rng.integers(*self._shape.lengths))

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Which long prompt grows next, from where, to where."""
        ends = [0] * len(self.chains)
        while min(ends) < LONG_TOKENS:
            for number, first in enumerate(ends):
                if first < LONG_TOKENS:
                    ends[number] = min(LONG_TOKENS, first + int(self._rng.integers(*_LONG_PIECES)))
                    yield number, first, ends[number]

    def _grow_longs(self) -> None:
        """Seals the long prompts in about one turnover, between the others."""
        pieces = len(self.chains) * LONG_TOKENS // (sum(_LONG_PIECES) // 2)
        steps = self.pool.frames * PAGE_TOKENS // (sum(self._shape.pieces) // 2)
        between = max(1, steps // pieces)
        for number, first, last in self._pieces():
            name, tokens = ("long", number), self.chains[number].tokens
            if first == 0:
                answer = self.pool.open(name, tokens[:last], NAMESPACE)
            else:
                answer = self.pool.extend(name, last - first)
            assert isinstance(answer, Ready), answer
            self.pool.commit(name, tokens[first:last])
            if self._rng.random() < _BRANCH_ODDS:
                self._branch(tokens[: last // PAGE_TOKENS * PAGE_TOKENS])
            for _ in range(between):
                self._step()
        for number in range(len(self.chains)):
            self.pool.close(("long", number))

    def _branch(self, head: Tokens) -> None:
        """Another request goes on from the page that a long prompt has just reached."""
        self._end(self._slot)
        if len(head) + 64 <= LONG_TOKENS:
            self._open(self._slot, np.concatenate((head, self._some(64))))
