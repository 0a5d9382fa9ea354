"""One frame at a time: reserve, return, evict; what a decode step does when a page is full."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.churn import Churned
from benchmarks.index import absolute, flat
from benchmarks.measure import Candidate, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.core.frames import FrameIds
from stepwell.core.page import Status

_CALLS = 256


def rows(world: World) -> Iterator[Row]:
    """Reserve, return and evict one frame, in churned pools."""
    pools = world.all_churned()
    rounds = 9 if world.quick else 31
    turns = (
        ("reserve", _reserve, 2, "one frame of a churned stack"),
        ("return", _return, 2, "one frame back to a churned stack, from FILLING to FREE"),
        (
            "evict",
            _evict,
            20,
            "one page leaves a full pool and its frame is free: evict + collect + move",
        ),
    )
    for name, candidate, bar, what in turns:
        samples = interleaved({size: candidate(pool) for size, pool in pools.items()}, rounds)
        note = f"{what}; {_CALLS} calls a sample"
        yield from absolute(f"frames.{name}", samples, world, bar=bar, note=note)
        yield flat(f"frames.{name}", samples, world, gate=True)


def _make_free(pool: Churned) -> None:
    """Frees frames that were used before, so that the stack is as it is in a pool that lives."""
    frames, index = pool.pool._held.frames, pool.index
    while frames.free < _CALLS:
        index.evict(1)
        frames.move(index.collect(), Status.FREE)


def _reserve(pool: Churned) -> Candidate:
    frames = pool.pool._held.frames
    taken: list[FrameIds | None] = []

    def run(_: object) -> None:
        reserve, keep = frames.reserve, taken.append
        for _call in range(_CALLS):
            keep(reserve(1))

    def clean() -> None:
        for one in reversed(taken):
            assert one is not None
            frames.move(one, Status.FREE)
        taken.clear()

    return Candidate(run, lambda: _make_free(pool), clean, calls=_CALLS)


def _return(pool: Churned) -> Candidate:
    frames = pool.pool._held.frames

    def prepare() -> list[FrameIds | None]:
        _make_free(pool)
        return [frames.reserve(1) for _ in range(_CALLS)]

    def run(taken: list[FrameIds]) -> None:
        move = frames.move
        for one in taken:
            move(one, Status.FREE)

    return Candidate(run, prepare, calls=_CALLS)


def _evict(pool: Churned) -> Candidate:
    frames, index = pool.pool._held.frames, pool.index

    def prepare() -> None:
        while frames.free >= _CALLS // 2:
            pool.churn(1)
        pool.touch()

    def run(_: object) -> None:
        for _call in range(_CALLS):
            index.evict(1)
            frames.move(index.collect(), Status.FREE)

    return Candidate(run, prepare, calls=_CALLS)
