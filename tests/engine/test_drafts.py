"""Drafted tokens as the author of an engine checks them: pool and runner, without our engine.

A step computes the last token and four drafted ones, with all logits. The longest agreeing part is committed,
the rest is cut off. What was rejected is written into frames and never sealed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import PagePool, Ready
from stepwell.cache.pool.limits import Limits
from stepwell.core.geometry import Geometry
from stepwell.core.key import Namespace
from stepwell.engine.runner import Runner
from stepwell.testing.families import VOCABULARY, tiny_model

PAGE = 4
DRAFTED = 4


class Drafter:
    """One request over a pool, with drafts."""

    def __init__(self, model: Any, asked: list[int]) -> None:
        geometry = Geometry.from_hf_config(model.config, "float32")
        one = PoolSettings(PAGE, 1 << 32, 4, 400, ahead_tokens=8, debug=True)
        frame_bytes = Limits.of(geometry, one).frame_bytes
        sizes = dataclasses.replace(one, capacity_bytes=120 * frame_bytes)
        self.pool = PagePool(geometry, sizes)
        self.runner = Runner(model, geometry, self.pool.planes)
        self.space = Namespace.private(PAGE)
        self.tokens = list(asked)
        self.logits: dict[int, torch.Tensor] = {}
        answer = self.pool.open("r", asked, self.space)
        assert isinstance(answer, Ready)
        self.computed = answer.cached
        while self.computed < len(asked):
            self.compute(asked[self.computed : self.computed + 7])
            self.keep(min(7, len(asked) - self.computed))
        self.tokens.append(int(self.logits[len(asked) - 1].argmax()))

    def compute(self, tokens: list[int]) -> torch.Tensor:
        view = self.pool.bind({"r": len(tokens)})
        logits = self.runner.run(view, tokens, range(len(tokens))).logits
        self.logits |= {self.computed + place: row for place, row in enumerate(logits)}
        self.written = tokens
        return logits

    def keep(self, count: int) -> None:
        self.pool.commit("r", self.written[:count])
        self.computed += count

    def step(self, drafted: list[int]) -> int:
        """Checks a draft; returns how many of its tokens were right."""
        assert isinstance(self.pool.extend("r", 1 + len(drafted)), Ready)
        given = [self.tokens[-1], *drafted]
        best = self.compute(given).argmax(-1).tolist()
        right = 0
        while right < len(drafted) and drafted[right] == best[right]:
            right += 1
        self.keep(1 + right)
        self.pool.truncate("r", self.computed)
        self.tokens += best[: right + 1]
        return right

    def found(self, tokens: list[int]) -> int:
        answer = self.pool.open("looks", tokens, self.space)
        assert isinstance(answer, Ready)
        self.pool.close("looks")
        return answer.cached

    def close(self) -> None:
        self.pool.close("r")
        self.runner.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=random).tolist()


def plain(model: Any, asked: list[int], count: int) -> list[int]:
    """Greedy decoding without drafts, by transformers itself."""
    tokens = list(asked)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("length", [13, 14, 15, 16, 37])
def test_drafts_give_what_plain_decoding_gives(family: str, length: int) -> None:
    """Every number of right tokens, at every place in a page."""
    model = tiny_model(family)
    expected = plain(model, prompt(length), 40)
    drafter = Drafter(model, prompt(length))
    assert drafter.tokens == expected[: length + 1]
    rejected: list[list[int]] = []
    seen = set()
    for right in (1, 4, 0, 1, 2, 3, 1, 4, 4, 1):
        known = len(drafter.tokens)
        draft = expected[known : known + DRAFTED]
        wrong = [(token + 1) % VOCABULARY for token in draft[right:]]
        assert drafter.step(draft[:right] + wrong) == right
        seen.add((known % PAGE, right))
        drafter.pool.check()
        if wrong:
            rejected.append(expected[: known + right] + wrong + [1])
        # Nothing of a rejected token was sealed: only full pages of what was accepted can be found.
        for tokens in rejected:
            same = next(place for place, one in enumerate(tokens) if one != expected[place])
            assert drafter.found(tokens) <= same // PAGE * PAGE
    assert drafter.tokens == expected[: len(drafter.tokens)]
    whole = drafter.tokens[: drafter.computed]
    assert drafter.pool.stats()["pages_sealed"] == drafter.computed // PAGE
    assert drafter.found([*whole, 1]) == drafter.computed // PAGE * PAGE
    kept = {place: row for place, row in drafter.logits.items() if place < drafter.computed}
    drafter.close()
    truth = logits_of(model, whole)
    assert max(float((row - truth[place]).abs().max()) for place, row in kept.items()) < 2e-4
    assert len(seen) >= 6
    stats = drafter.pool.stats()
    assert stats["frames_filling"] == stats["frames_held"] == 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_room_of_rejected_tokens_is_given_back(family: str) -> None:
    model = tiny_model(family)
    drafter = Drafter(model, prompt(11))
    drafter.pool.truncate("r", drafter.computed)
    before = drafter.pool.stats()["frames_free"]
    room = drafter.pool.room("r")
    assert isinstance(drafter.pool.extend("r", 1 + DRAFTED), Ready)
    assert drafter.pool.room("r") >= 1 + DRAFTED > room
    drafter.compute([drafter.tokens[-1], 5, 6, 7, 8])
    drafter.keep(1)
    drafter.pool.truncate("r", drafter.computed)
    assert drafter.pool.stats()["frames_free"] == before  # 11 and 12 tokens need 3 pages
    assert drafter.pool.room("r") == 0
    drafter.close()
