"""The host tier: verified reads, what the ledger costs the engine, and a host hit against a device hit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Candidate, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell import (
    Chain,
    Cut,
    Geometry,
    Group,
    HostSettings,
    Namespace,
    Offer,
    PagePool,
    Part,
    PoolSettings,
    Ready,
    Rule,
    StackPlace,
    StoreModel,
    TieredStore,
)
from stepwell.cache.ledger.ledger import Ledger
from stepwell.cache.ledger.records import Shape
from stepwell.core.frames import FrameIds
from stepwell.core.plan import Grown, Report
from stepwell.move.stack import Stack

_LAYERS = 32
_PAGE_TOKENS = 16
_TURN_BYTES = 32 << 20
_PROMPT_PAGES = 8192

_Bytes = npt.NDArray[np.uint8]


def rows(world: World) -> Iterator[Row]:
    """All rows of the group."""
    rounds = 9 if world.quick else 31
    for size, run_bytes in (("128k", 128 << 10), ("32k", 32 << 10)):
        yield from _reads(size, run_bytes, rounds)
    yield _ledger(rounds)
    yield from _hits(rounds)


def _cut(run_bytes: int) -> Cut:
    """A full group with so many bytes of K, and of V, in each layer of a page."""
    elements = run_bytes // _PAGE_TOKENS
    group = Group("full", Rule.FULL, tuple(range(_LAYERS)), 1, elements, elements, "uint8")
    return Cut(group, frames=1, reach=0)


def _model(run_bytes: int) -> StoreModel:
    part = Part("full", "bench", (0, _LAYERS), (0, 1))
    return StoreModel(_PAGE_TOKENS, (_cut(run_bytes),), (part.digest(),))


def _slice(frames: FrameIds, first: int, last: int) -> FrameIds:
    return frames[first:last]


def _reads(size: str, run_bytes: int, rounds: int) -> Iterator[Row]:
    """Pages out of the host tier into a user's buffer, every sum compared; against one memcpy."""
    frame_bytes = 2 * _LAYERS * run_bytes
    pages = max(1, _TURN_BYTES // frame_bytes)
    count = 8 * pages
    buffer: _Bytes = np.full(
        (2, _LAYERS, count * _PAGE_TOKENS, 1, run_bytes // _PAGE_TOKENS), 1, np.uint8
    )
    place = StackPlace([Stack.of_slots(half, _PAGE_TOKENS) for half in buffer])
    settings = HostSettings(capacity_bytes=count * (frame_bytes + 8192))
    store = TieredStore.local(_model(run_bytes), [place], settings)
    store.ready(60)
    space, choose = Namespace(_PAGE_TOKENS, model="bench"), random.Random(1)
    chains = [Chain(space, [n] * (pages * _PAGE_TOKENS)) for n in range(8)]
    for number, chain in enumerate(chains):
        frames = np.arange(number * pages, (number + 1) * pages, dtype=np.int32)
        store.save(Offer(chain, pages, partial(_slice, frames)))
    store.drain(60)
    half = buffer.reshape(-1)[: pages * frame_bytes]
    other = np.full(8 * len(half), 2, np.uint8)

    def begin() -> Any:
        return store.match("bench", choose.choice(chains), pages), choose.randrange(8) * pages

    def read(begun: Any) -> None:
        match, first = begun
        store.load(match, 0, np.arange(first, first + pages, dtype=np.int32))
        if not store.drain(60):
            raise RuntimeError("a read did not end")

    def draw() -> Any:
        at, to = choose.randrange(8), choose.randrange(7)
        whole = buffer.reshape(-1)
        return other[at * len(half) : (at + 1) * len(half)], whole[
            to * len(half) : (to + 1) * len(half)
        ]

    samples = interleaved(
        {
            "read": Candidate(read, begin, store.poll),
            "memcpy": Candidate(lambda drawn: np.copyto(*drawn), draw),
        },
        rounds,
    )
    failed = store.stats()["frames_failed"]
    store.close()
    ratio = samples.ratio("read", "memcpy")
    yield Row(
        f"host.read_{size}",
        "ms",
        samples.median_s("read") * 1e3,
        samples.median_s("memcpy") * 1e3,
        ratio if not failed else None,
        bar=1 / 0.75,
        note=f"{pages * frame_bytes >> 20} MiB of verified pages into a user's buffer by {settings.threads} threads, "
        f"against one memcpy; {1 / ratio:.2f} of its speed, and 0.75 is promised",
    )


def _ledger(rounds: int) -> Row:
    """What the engine's thread spends on a prompt of 128k tokens that hits in the host tier; keys are there."""
    shape = Shape(_PAGE_TOKENS, (_cut(16),), 2 * _PROMPT_PAGES, 1024)
    ledger = Ledger(shape, HostSettings(capacity_bytes=1))
    ledger.report(Grown(0, np.arange(shape.frames, dtype=np.int32)))
    chain = Chain(Namespace(_PAGE_TOKENS, model="bench"), range(_PROMPT_PAGES * _PAGE_TOKENS))
    outside = np.arange(_PROMPT_PAGES, dtype=np.int32)

    def end() -> None:
        for plan in ledger.plans():
            ledger.report(
                Report(plan.number, 0, np.zeros(len(plan), np.uint8), released=True, clear=True)
            )

    ledger.save(Offer(chain, _PROMPT_PAGES, lambda a, b: outside[a:b]))
    end()

    def hit(_: object) -> None:
        match = ledger.match("bench", chain, _PROMPT_PAGES)
        ledger.load(match.request, 0, outside)
        end()
        ledger.poll()

    samples = interleaved({"hit": Candidate(hit)}, rounds)
    held = ledger.stats()
    return Row(
        "host.ledger_128k",
        "ms",
        samples.median_s("hit") * 1e3 if not held["frames_held"] else None,
        bar=5,
        bar_of="ours",
        note="match, plan and report of 8,192 pages that hit in the host tier, without hashing",
    )


def _hits(rounds: int) -> Iterator[Row]:
    """A prompt that comes from host memory, less one that the device has; against a memcpy of its bytes."""
    pages, run_bytes = 64, 16 << 10
    frame_bytes = 2 * _LAYERS * run_bytes
    group = _cut(run_bytes).group
    pool = PagePool(
        Geometry((group,)),
        PoolSettings(_PAGE_TOKENS, (pages + 2) * frame_bytes, positions=(pages + 1) * _PAGE_TOKENS),
        "cpu",
        tiers=HostSettings(capacity_bytes=4 * pages * (frame_bytes + 8192)),
    )
    assert pool.store is not None, "made with tiers"
    pool.store.ready(60)
    space = Namespace(_PAGE_TOKENS, model="bench")
    prompts = [[n] * (pages * _PAGE_TOKENS + 1) for n in range(2)]
    for number, prompt in enumerate(prompts):
        pool.open(number, prompt, space)
        pool.commit(number, prompt)
        pool.close(number)
        pool.store.drain(60)
    source, sink = (np.full(pages * frame_bytes, n, np.uint8) for n in range(2))

    def opened(prompt: list[int]) -> None:
        while not isinstance(pool.open("bench", prompt, space), Ready):
            pool.wait(1.0)

    def ended() -> None:
        pool.close("bench")

    def away() -> list[int]:
        opened(prompts[1])
        ended()
        return prompts[0]

    def here() -> list[int]:
        opened(prompts[0])
        ended()
        return prompts[0]

    samples = interleaved(
        {
            "host": Candidate(opened, away, ended),
            "device": Candidate(opened, here, ended),
            "memcpy": Candidate(lambda _: np.copyto(sink, source)),
        },
        rounds,
    )
    pool.end()
    extra = [a - b for a, b in zip(samples.seconds["host"], samples.seconds["device"], strict=True)]
    ratios = sorted(a / b for a, b in zip(extra, samples.seconds["memcpy"], strict=True))
    yield Row(
        "host.hit_extra",
        "ms",
        sorted(extra)[len(extra) // 2] * 1e3,
        samples.median_s("memcpy") * 1e3,
        ratios[len(ratios) // 2],
        bar=2,
        note=f"a prompt of {pages} pages that hits in host memory, less one that hits on the device, against a memcpy of "
        f"its {pages * frame_bytes >> 20} MiB",
    )
