"""`PagePool`: a long prompt that is all there, one that was never seen, and a step of decoding."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import cycle

import numpy as np

from benchmarks.churn import (
    LONG_PAGES,
    NAMESPACE,
    PAGE_TOKENS,
    VOCABULARY,
    Churned,
    empty_pool,
)
from benchmarks.index import absolute, flat
from benchmarks.measure import Candidate, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.cache.pool import Ready
from stepwell.core.chain import Chain

_DECODING = 64
_CONTEXT = 1_500
_STEPS = 16


def rows(world: World) -> Iterator[Row]:
    """Hit and cold at every size, whether they are flat, and the decode step."""
    pools = world.all_churned()
    for pool in pools.values():
        pool.touch()
    rounds = 9 if world.quick else 31
    samples = interleaved({size: hit(pool) for size, pool in pools.items()}, rounds)
    note = "open(chain) + close of 131,073 tokens, 8,192 pages hit and one frame taken; keys known"
    yield from absolute("pool.hit", samples, world, bar=5, note=note, unit="ms")
    yield flat("pool.hit", samples, world, gate=True, unit="ms")
    rounds = 3 if world.quick else 7
    samples = interleaved({size: cold(pool) for size, pool in pools.items()}, rounds)
    note = (
        "open(chain) + commit + close of 131,073 tokens never seen, in a full pool: 8,192 keys "
        "hashed, as many pages evicted"
    )
    yield from absolute("pool.cold", samples, world, bar=None, note=note, unit="ms")
    yield flat("pool.cold", samples, world, gate=True, unit="ms")
    yield _decode(world)


def hit(pool: Churned) -> Candidate:
    """Opens and closes a prompt of which every page is there; another one each time."""
    chains = cycle(pool.chains)

    def run(chain: Chain) -> None:
        answer = pool.pool.open("hit", chain)
        pool.pool.close("hit")
        assert isinstance(answer, Ready)
        assert answer.cached == LONG_PAGES * PAGE_TOKENS

    return Candidate(run, lambda: next(chains))


def cold(pool: Churned, *, keys_known: bool = False) -> Candidate:
    """Opens, commits and closes a prompt that was never seen, in a full pool.

    Afterwards the prompt is dropped and the pool filled again by its small requests, so that what has to
    leave next is the same at every size and in every round.
    """

    def prepare() -> Chain:
        if len(pool.chains) > 1:  # the smallest pool has no room for both
            pool.touch()
        chain = pool.fresh_chain()
        if keys_known:
            chain.keys(0, LONG_PAGES)
        while pool.pool.stats()["frames_free"] > LONG_PAGES // 64:
            pool.churn(1)
        return chain

    last: list[Chain] = []

    def run(chain: Chain) -> None:
        answer = pool.pool.open("cold", chain)
        assert isinstance(answer, Ready)
        assert answer.cached == 0
        pool.pool.commit("cold", chain.tokens)
        pool.pool.close("cold")
        last.append(chain)

    def clean() -> None:
        pool.pool.drop(last.pop().tokens[:PAGE_TOKENS], NAMESPACE)

    return Candidate(run, prepare, clean)


def _decode(world: World) -> Row:
    """The books of 64 requests that decode one token each."""
    pool = empty_pool(2 * _DECODING * (_CONTEXT // PAGE_TOKENS), _DECODING, 4 * _CONTEXT)
    rng = np.random.default_rng(64)
    for request in range(_DECODING):
        tokens = rng.integers(0, VOCABULARY, _CONTEXT - request, dtype=np.uint32)
        pool.open(request, tokens, NAMESPACE)
        pool.commit(request, tokens)
    counts: dict[Hashable, int] = dict.fromkeys(range(_DECODING), 1)

    def run(_: object) -> None:
        for step in range(_STEPS):
            for request in range(_DECODING):
                pool.extend(request, 1)
            pool.bind(counts)
            for request in range(_DECODING):
                pool.commit(request, [step])

    rounds = 5 if world.quick else 21
    samples = interleaved({"ours": Candidate(run, calls=_STEPS)}, rounds)
    note = f"extend + bind + commit for {_DECODING} requests of about {_CONTEXT:,} tokens, a step"
    return Row("pool.decode_step_64", "us", samples.median_s("ours") * 1e6, note=note)
