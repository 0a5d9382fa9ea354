"""An arena: a batch of frames reserved and returned, one frame alone, and a view of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from benchmarks.measure import Candidate, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.memory.arena import Arena
from stepwell.memory.ask import Ask
from stepwell.memory.lease import Lease, Short
from stepwell.memory.region import Region

_SIZES = {1_000: "1k", 10_000: "10k", 100_000: "100k", 1_000_000: "1m"}
_FRAME_BYTES = 64
_BATCH = 64
_CALLS = 64


def rows(world: World) -> Iterator[Row]:
    """Absolute times at every size, and whether they are flat."""
    regions, arenas = {}, {}
    for count, size in _SIZES.items():
        regions[size] = Region.open(Ask(count * _FRAME_BYTES))
        arenas[size] = Arena(_FRAME_BYTES, count, name=size, align_bytes=_FRAME_BYTES)
        arenas[size].add(regions[size])
        _mix(arenas[size], count)
    yield from _rows(arenas, rounds=9 if world.quick else 31)
    for size, arena in arenas.items():
        arena.close()
        regions[size].close()


def _rows(arenas: dict[str, Arena], rounds: int) -> Iterator[Row]:
    turns: tuple[tuple[str, Callable[[Arena], Candidate], float | None, str], ...] = (
        (
            "batch",
            _batch,
            2,
            f"reserve and release a lease of {_BATCH} frames of a mixed stack; for one frame",
        ),
        ("one", _one, None, "reserve and release a lease of one frame"),
        ("view", _view, None, "a view of one frame, entered and left"),
    )
    smallest, *_, largest = arenas
    for name, candidate, bar, what in turns:
        samples = interleaved({size: candidate(arena) for size, arena in arenas.items()}, rounds)
        for size in arenas:
            ours = samples.median_s(size) * 1e6
            yield Row(f"memory.{name}_{size}", "us", ours, bar=bar, bar_of="ours", note=what)
        yield Row(
            f"memory.{name}_flat",
            "us",
            samples.median_s(largest) * 1e6,
            samples.median_s(smallest) * 1e6,
            samples.ratio(largest, smallest),
            bar=2,
            gate=name == "batch",
            note=f"{largest} frames against {smallest}",
        )


def _taken(answer: Lease | Short) -> Lease:
    assert isinstance(answer, Lease)
    return answer


def _mix(arena: Arena, count: int) -> None:
    """Returns all frames in pieces and in another order, as in an arena that lives."""
    leases = [_taken(arena.reserve(count // 500, "mix")) for _ in range(500)]
    random.Random(1).shuffle(leases)
    for lease in leases:
        lease.release()


def _batch(arena: Arena) -> Candidate:
    def run(_: object) -> None:
        for _call in range(_CALLS):
            _taken(arena.reserve(_BATCH, "batch")).release()

    return Candidate(run, calls=_CALLS * _BATCH)


def _one(arena: Arena) -> Candidate:
    def run(_: object) -> None:
        for _call in range(_CALLS):
            _taken(arena.reserve(1, "one")).release()

    return Candidate(run, calls=_CALLS)


def _view(arena: Arena) -> Candidate:
    def run(lease: Lease) -> None:
        buffer = lease.buffer()
        for _call in range(_CALLS):
            with buffer.view() as view:
                view[0] = 1
        lease.release()

    return Candidate(run, lambda: _taken(arena.reserve(1, "view")), calls=_CALLS)
