"""Small pools, and drivers that compute with the fingerprint model over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import Flags, PagePool, Ready
from stepwell.core.geometry import Group, Rule, StateTensor
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


def _paged(rule: Rule, layers: range, window: int | None = None, **more: Any) -> Group:
    sizes = {"kv_heads": 1, "head_size_k": 1, "head_size_v": 1} | more
    return Group(rule.value, rule, tuple(layers), dtype="int64", window=window, **sizes)


def _state(layers: range) -> Group:
    tensors = (StateTensor("conv", (2, 1), "int64"), StateTensor("recurrent", (6,), "int64"))
    return Group("state", Rule.STATE, tuple(layers), 0, 0, 0, "int64", state=tensors)


GROUPS: dict[str, tuple[Group, ...]] = {
    "full": (_paged(Rule.FULL, range(2)),),
    "equal": (_paged(Rule.FULL, range(2)), _paged(Rule.WINDOW, range(2, 4), 6)),
    "several": (_paged(Rule.FULL, range(2)), _paged(Rule.WINDOW, range(2, 7), 9)),
    "windows": (_paged(Rule.WINDOW, range(2), 6),),
    "states": (_paged(Rule.FULL, range(2)), _state(range(2, 5))),
    "all": (
        _paged(Rule.FULL, range(2)),
        _paged(Rule.WINDOW, range(2, 5), 6),
        _state(range(5, 7)),
    ),
    "no full": (_paged(Rule.WINDOW, range(2), 6), _state(range(2, 5))),
    "narrow": (
        _paged(Rule.FULL, range(2), kv_heads=2, head_size_k=2, head_size_v=3),
        _paged(Rule.WINDOW, range(2, 4), 9, head_size_k=3),
    ),
    "latent": (
        _paged(Rule.FULL, range(2), head_size_k=3, head_size_v=0, latent=True),
        _state(range(2, 4)),
    ),
}
"""Models of every kind: with pages of four tokens, pages and states of one frame and of several."""


class GroupBench:
    """A pool of any groups, in which every step proves all that it reads and writes.

    Prompts end their steps at the checkpoints that `open` told, unless a step is asked for by its count.
    """

    def __init__(
        self, groups: str = "all", frames: int = 64, replay_tokens: int = 1, **more: Any
    ) -> None:
        self.geometry = geometry(GROUPS[groups], replay_tokens)
        first = self.geometry.groups[0]
        paged = [group for group in self.geometry.groups if group.rule is not Rule.STATE]
        row = sum(
            max(group.kv_heads * size for group, size in sizes)
            for sizes in (
                [(group, group.head_size_k) for group in paged],
                [(group, group.head_size_v) for group in paged],
            )
        )
        sizes = {
            "page_tokens": 4,
            "requests": 4,
            "positions": 128,
            "ahead_tokens": 8,
            "debug": True,
        }
        sizes |= more
        self.size = sizes["page_tokens"]
        capacity = frames * self.size * len(first.layers) * row * 8
        self.pool = PagePool(
            self.geometry, PoolSettings(capacity_bytes=capacity, **sizes), device="numpy"
        )
        assert self.pool.frames == frames
        self.space = Namespace(self.size, model="weights")
        self.model = Fingerprint()
        self.tokens: dict[str, list[int]] = {}

    def open(self, name: str, tokens: Sequence[int], **more: Any) -> Any:
        answer = self.pool.open(name, list(tokens), more.pop("space", self.space), **more)
        if isinstance(answer, Ready):
            self.tokens[name] = list(tokens)
        return answer

    def opened(self, name: str) -> Any:
        return self.pool._held.requests[name]

    def done(self, name: str) -> int:
        return self.opened(name).committed

    def step(self, name: str, count: int, drafted: Sequence[int] = ()) -> int:
        """Computes the next `count` tokens of what is known, and drafted ones that are not committed."""
        done, tokens = self.done(name), self.tokens[name]
        end = done + count
        piece = [*tokens[done:end], *drafted]
        view = self.pool.bind({name: len(piece)})
        assert self.model.wrong(view, 0, tokens[:done]) == []
        following = self.model.step(view, [piece])
        assert self.model.wrong(view, 0, [*tokens[:end], *drafted]) == []
        self.pool.commit(name, piece[:count])
        return following[0]

    def compute(self, name: str, count: int | None = None) -> int:
        """Computes the next `count` tokens (all that are missing by default), and checkpoint by checkpoint."""
        following = -1
        end = len(self.tokens[name]) if count is None else self.done(name) + count
        while self.done(name) < end:
            done = self.done(name)
            stops = [place for place in self.opened(name).answer.checkpoints if place > done]
            if not self.pool.room(name):
                answer = self.pool.extend(name, 0)
                assert isinstance(answer, Ready), answer
            stop = min([end, done + self.pool.room(name), *stops])
            following = self.step(name, stop - done)
        return following

    def grow(self, name: str, count: int) -> None:
        """Generates tokens one by one; those that the model gives, and no new one after the last."""
        for _ in range(count):
            answer = self.pool.extend(name, 1)
            assert isinstance(answer, Ready), answer
            self.tokens[name].append((len(self.tokens[name]) * 7 + self.tokens[name][-1]) % 97)
            self.step(name, 1)

    def close(self, name: str) -> None:
        self.pool.close(name)
        del self.tokens[name]

    def serve(self, name: str, tokens: Sequence[int], grow: int = 0, **more: Any) -> Ready:
        """Opens, computes, generates and closes; returns what `open` said."""
        answer = self.open(name, tokens, **more)
        assert isinstance(answer, Ready), answer
        self.compute(name)
        self.grow(name, grow)
        self.close(name)
        return answer

    def cached(self, tokens: Sequence[int], **more: Any) -> int:
        """Tokens that a request would reuse, which it proves by going on from there; seals nothing."""
        answer = self.open("probe", tokens, flags=Flags.NO_WRITE, **more)
        assert isinstance(answer, Ready), answer
        self.compute("probe", 1)
        self.close("probe")
        return answer.cached

    def used(self, name: str) -> int:
        """Frames that an open request keeps from others: its own, and what it holds."""
        held, opened = self.pool._held, self.opened(name)
        count = opened.pages
        for group, row in zip(held.windows, opened.windows, strict=True):
            count += (row.end - row.first) * group.cut.frames
        for group, state in zip(held.states, opened.states, strict=True):
            count += (1 + len(state.held)) * group.cut.frames
        return count

    def idle(self) -> None:
        """Once all are closed, nobody may hold or fill anything."""
        for name in list(self.tokens):
            self.close(name)
        stats = self.pool.stats()
        assert (stats["frames_filling"], stats["frames_held"]) == (0, 0)


@pytest.fixture
def make_groups() -> type[GroupBench]:
    return GroupBench


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench
