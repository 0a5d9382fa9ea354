"""The closed index: the longest prefix by keys alone, and a match that holds and compares tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from benchmarks.churn import LONG_PAGES, NAMESPACE, PAGE_TOKENS, Churned
from benchmarks.measure import Candidate, Samples, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.core.chain import Chain

_CALLS = 16


def rows(world: World) -> Iterator[Row]:
    """Absolute times at every size, and whether they are flat."""
    pools = world.all_churned()
    rounds = 9 if world.quick else 51
    longest = interleaved({size: _longest(pool) for size, pool in pools.items()}, rounds)
    slices = sorted(count for pool in pools.values() for count in pool.slices)
    note = (
        "8,192-page prompts, keys computed before; calls rotate over "
        f"{', '.join(f'{len(pool.chains)} prompts in {size}' for size, pool in pools.items())}, "
        "every other call with a copy that differs from page 1,024 to 7,680 on"
    )
    yield from absolute("index.longest", longest, world, bar=150, note=note)
    yield flat("index.longest", longest, world, gate=True)
    match = interleaved({size: _match(pool) for size, pool in pools.items()}, rounds)
    note = (
        "match + release of 8,192 pages: the path read, 131,072 tokens compared; "
        f"a path lies in {slices[0]} to {slices[-1]} slices"
    )
    yield from absolute("index.match", match, world, bar=None, note=note)
    yield flat("index.match", match, world, gate=False)


def absolute(
    name: str, samples: Samples, world: World, *, bar: float | None, note: str, unit: str = "us"
) -> Iterator[Row]:
    """One row for each size, with an absolute bar in its unit, never a gate."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    for size in world.sizes.values():
        ours = samples.median_s(size) * scale
        yield Row(f"{name}_{size}", unit, ours, bar=bar, bar_of="ours", note=note)


def flat(name: str, samples: Samples, world: World, *, gate: bool, unit: str = "us") -> Row:
    """The largest size against the smallest; flat is 2 at most."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    large, small = world.sizes[world.largest], world.sizes[world.smallest]
    return Row(
        f"{name}_flat",
        unit,
        samples.median_s(large) * scale,
        samples.median_s(small) * scale,
        samples.ratio(large, small),
        bar=2,
        gate=gate,
        note=f"{large} frames against {small}",
    )


def _differing(chain: Chain, page: int) -> Chain:
    """A copy whose tokens are others from a page on; all keys computed."""
    tokens = chain.tokens.copy()
    tokens[page * PAGE_TOKENS :] ^= 1
    copy = Chain(NAMESPACE, tokens)
    copy.keys(0, LONG_PAGES)
    return copy


def _longest(pool: Churned) -> Candidate:
    """16 lookups, of whole prompts and of prompts known in part only."""
    index = pool.index
    known = cycle(pool.chains)
    parts = [(next(known), page) for page in range(1024, 8192, 951)]
    copies = [(_differing(chain, page), page) for chain, page in parts]
    for chain, page in (*((chain, LONG_PAGES) for chain in pool.chains), *copies):
        assert index.longest(chain, LONG_PAGES) == page
    whole, part = cycle(pool.chains), cycle([copy for copy, _ in copies])

    def probed() -> list[Chain]:
        return [next(part if call % 2 else whole) for call in range(_CALLS)]

    def run(chains: list[Chain]) -> None:
        for chain in chains:
            index.longest(chain, LONG_PAGES)

    return Candidate(run, probed, calls=_CALLS)


def _match(pool: Churned) -> Candidate:
    """One match and its release, another prompt each time."""
    index = pool.index
    whole = cycle(pool.chains)

    def run(chain: Chain) -> None:
        match = index.match("match", chain, LONG_PAGES)
        index.release(match.lease)
        assert len(match.frames) == LONG_PAGES

    return Candidate(run, lambda: next(whole))
