"""The same work by the block pool of vLLM, where vLLM is installed; its own words stay in this file.

Both sides begin with the same Python list of ids, or with keys and hashes that were computed before.
vLLM's pool is filled by long requests one after the other, ours is churned: the easier case is vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from typing import Any

import numpy as np

from benchmarks.churn import LONG_PAGES, LONG_TOKENS, NAMESPACE, PAGE_TOKENS, VOCABULARY, Churned
from benchmarks.measure import Candidate, interleaved
from benchmarks.pool import cold, hit
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.core.chain import Chain

_MISSING = "vLLM is not installed: see docs/internals/benchmarks.md"
_CALLS = 16


@dataclass(frozen=True, slots=True)
class _Work:
    """One row: what is done, and by whom.

    Attributes:
        name: of the row, without the group.
        ours: our side.
        theirs: vLLM's side; None where it is not installed.
        bar: the most that ours / theirs may be; None where nothing is promised.
        note: what each side does.
    """

    name: str
    ours: Candidate
    theirs: Candidate | None
    bar: float | None
    note: str


def rows(world: World) -> Iterator[Row]:
    """Hashing, lookup, a hit and a miss of a long prompt in the largest pool of the run."""
    pool = world.churned(world.largest)
    pool.touch()
    theirs: Mapping[str, Callable[[], Candidate]] = {}
    if find_spec("vllm") is not None:
        peer = _Peer(world.largest)
        theirs = {
            "keys": peer.keys,
            "lookup": peer.lookup,
            "hit": peer.hit,
            "miss": peer.miss,
        }
    for work in _works(pool, theirs):
        yield _row(work, world)


def _works(pool: Churned, theirs: Mapping[str, Callable[[], Candidate]]) -> Iterator[_Work]:
    def peer(name: str) -> Candidate | None:
        return theirs[name]() if name in theirs else None

    frames = f"a full pool of {pool.pool.frames:,} frames"
    ids: list[int] = pool.fresh_chain().tokens.tolist()
    yield _Work(
        "keys_128k",
        Candidate(lambda _: Chain(NAMESPACE, ids).keys(0, LONG_PAGES)),
        peer("keys"),
        None,
        "from a Python list of 131,073 ids: Chain and its keys against Request and its block hashes",
    )
    yield _Work(
        "lookup",
        _lookup(pool),
        peer("lookup"),
        1 / 50,
        f"8,192 pages that are all there, in {frames}: longest, which gives their number, against "
        "get_computed_blocks, which gives the blocks too",
    )
    yield _Work(
        "hit",
        hit(pool),
        peer("hit"),
        None,
        f"the same prompt: open + close, tokens compared, in {frames}, against get_computed_blocks "
        "+ allocate_slots + free",
    )
    yield _Work(
        "miss",
        cold(pool, keys_known=True),
        peer("miss"),
        None,
        f"8,192 pages never seen, keys known, in {frames}, which evicts as many: open + commit + "
        "close against get_computed_blocks + allocate_slots + free",
    )


def _row(work: _Work, world: World) -> Row:
    """Measures one row, alone where there is no peer."""
    sides = {"ours": work.ours} | ({"theirs": work.theirs} if work.theirs else {})
    heavy = work.name == "miss"
    samples = interleaved(sides, rounds=3 if world.quick else 7 if heavy else 15)
    unit, scale = ("us", 1e6) if work.name == "lookup" else ("ms", 1e3)
    ours = samples.median_s("ours") * scale
    name = f"vllm.{work.name}"
    if work.theirs is None:
        return Row(name, unit, ours, bar=work.bar, note=_MISSING)
    against, ratio = samples.median_s("theirs") * scale, samples.ratio("ours", "theirs")
    return Row(name, unit, ours, against, ratio, bar=work.bar, note=work.note)


def _lookup(pool: Churned) -> Candidate:
    index, chains = pool.index, cycle(pool.chains)

    def run(some: list[Chain]) -> None:
        for chain in some:
            index.longest(chain, LONG_PAGES)

    return Candidate(run, lambda: list(islice(chains, _CALLS)), calls=_CALLS)


class _Peer:
    """vLLM's manager of KV blocks, full.

    Args:
        blocks: of its pool.
    """

    def __init__(self, blocks: int) -> None:
        logging.disable(logging.WARNING)  # vLLM tells at length what it finds on the machine
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        digest = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(digest)
        self._hasher = kv_cache_utils.get_request_block_hasher(PAGE_TOKENS, digest)
        self._request = Request
        self._wishes = SamplingParams(max_tokens=8)
        group = KVCacheGroupSpec(
            ["layer"],
            FullAttentionSpec(
                block_size=PAGE_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
            ),
        )
        self._manager: Any = KVCacheManager(
            KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[group],
                hash_block_size=PAGE_TOKENS,
            ),
            max_model_len=LONG_TOKENS + 64,
            scheduler_block_size=PAGE_TOKENS,
            hash_block_size=PAGE_TOKENS,
            log_stats=True,
            enable_kv_cache_events=False,
        )
        self._rng = np.random.default_rng(32)
        self._count = 0
        self._fill(blocks)
        self._known = self._asked(self._ids())
        self._serve(self._known)

    def _ids(self) -> list[int]:
        ids: list[int] = self._rng.integers(0, VOCABULARY, LONG_TOKENS).tolist()
        return ids

    def _asked(self, ids: list[int]) -> Any:
        """A request with its hashes computed."""
        self._count += 1
        return self._request(
            f"request-{self._count}", ids, self._wishes, None, block_hasher=self._hasher
        )

    def _fill(self, blocks: int) -> None:
        """Prompts that share nothing, until the pool has to evict."""
        for _ in range(blocks // LONG_PAGES + 2):
            self._serve(self._asked(self._ids()))

    def _serve(self, request: Any) -> None:
        found, tokens, *_ = self._manager.get_computed_blocks(request)
        new = self._manager.allocate_slots(request, LONG_TOKENS - tokens, tokens, found)
        assert new is not None
        self._manager.free(request)

    def _ready(self) -> Any:
        """The request whose prompt is there, as it is before it is scheduled."""
        _, tokens, *_ = self._manager.get_computed_blocks(self._known)
        assert tokens == LONG_PAGES * PAGE_TOKENS, tokens
        return self._known

    def keys(self) -> Candidate:
        """Builds a request, which hashes its blocks."""
        ids = self._ids()
        return Candidate(lambda _: self._asked(ids))

    def lookup(self) -> Candidate:
        """Finds the blocks of a prompt that is there."""
        return Candidate(self._manager.get_computed_blocks, self._ready)

    def hit(self) -> Candidate:
        """Serves a prompt that is there."""
        return Candidate(self._serve, self._ready)

    def miss(self) -> Candidate:
        """Serves a prompt that was never seen."""
        return Candidate(self._serve, lambda: self._asked(self._ids()))
