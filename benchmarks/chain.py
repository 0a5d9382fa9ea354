"""Content keys of a long prompt, from the Python list that a tokenizer gives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.baselines.hash_loop import page_keys
from benchmarks.churn import LONG_PAGES, NAMESPACE, PAGE_TOKENS, VOCABULARY
from benchmarks.measure import Candidate, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.core.chain import Chain


def rows(world: World) -> Iterator[Row]:
    """`Chain` from a list of ids against the frozen loop from the same list."""
    rng = np.random.default_rng(18)
    ids: list[int] = rng.integers(0, VOCABULARY, LONG_PAGES * PAGE_TOKENS).tolist()
    root = NAMESPACE.root()
    assert Chain(NAMESPACE, ids).keys(0, LONG_PAGES) == page_keys(root, ids, PAGE_TOKENS)
    samples = interleaved(
        {
            "ours": Candidate(lambda _: Chain(NAMESPACE, ids).keys(0, LONG_PAGES)),
            "loop": Candidate(lambda _: page_keys(root, ids, PAGE_TOKENS)),
        },
        rounds=5 if world.quick else 25,
        warmups=2,
    )
    yield Row(
        "chain.keys_128k",
        "ms",
        samples.median_s("ours") * 1e3,
        samples.median_s("loop") * 1e3,
        samples.ratio("ours", "loop"),
        bar=1.2,
        note=(
            "131,072 ids in a Python list, pages of 16: Chain and all 8,192 keys "
            "against baselines/hash_loop.py"
        ),
    )
