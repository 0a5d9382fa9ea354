"""Small pools, and a driver that computes with the fingerprint model over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import Flags, PagePool, Ready
from stepwell.core.key import Namespace
from stepwell.testing.fingerprint import Fingerprint, geometry, reference


class Bench:
    """A pool of fingerprints: every step checks that each request reads exactly its own KV."""

    def __init__(
        self, page_tokens: int = 4, frames: int = 12, requests: int = 4, positions: int = 64
    ) -> None:
        capacity = frames * geometry().page_bytes(page_tokens)
        self.pool = PagePool(
            geometry(),
            PoolSettings(page_tokens, capacity, requests, positions, debug=True),
            device="numpy",
        )
        self.space = Namespace(page_tokens, model="weights")
        self.model = Fingerprint()

    def open(self, name: str, tokens: Sequence[int], **more: Any) -> Any:
        return self.pool.open(name, list(tokens), more.pop("space", self.space), **more)

    def compute(self, name: str, tokens: Sequence[int], count: int | None = None) -> int:
        """Computes the next `count` tokens of a sequence (all that are missing by default)."""
        done = self.pool._held.requests[name].committed
        end = len(tokens) if count is None else done + count
        view = self.pool.bind({name: end - done})
        following = self.model.step(view, [tokens[done:end]])
        assert np.array_equal(self.model.read(view, 0), reference(tokens[:end]))
        self.pool.commit(name, tokens[done:end])
        return following[0]

    def serve(self, name: str, tokens: Sequence[int], **more: Any) -> Ready:
        """Opens, computes and closes; returns what `open` said."""
        answer = self.open(name, tokens, **more)
        assert isinstance(answer, Ready), answer
        self.compute(name, list(tokens))
        self.pool.close(name)
        return answer

    def cached(self, tokens: Sequence[int], **more: Any) -> int:
        """Tokens that a request would reuse; seals nothing."""
        answer = self.open("probe", tokens, flags=Flags.NO_WRITE, **more)
        assert isinstance(answer, Ready), answer
        self.pool.close("probe")
        return answer.cached

    def idle_frames(self) -> dict[str, int]:
        stats = self.pool.stats()
        return {name: stats[f"frames_{name}"] for name in ("filling", "held")}


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench
