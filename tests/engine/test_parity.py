"""The engine computes what transformers computes: every logit, every token, whatever the batch.

The bar is the noise of transformers itself: how much its own logits move, in the same run, when the same
tokens pass through it in other pieces. A page that is foreign moves them by far more (the last test).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from stepwell.base.settings import EngineSettings, PoolSettings, Settings
from stepwell.cache.pool import Flags
from stepwell.engine.engine import Engine
from stepwell.engine.runner import Runner

PAGE = 4
ANSWER = 24


class Recorder:
    """Stands before the runner, asks for the logits of all positions and keeps them by request."""

    def __init__(self, engine: Engine, inner: Any) -> None:
        self.engine = engine
        self.inner = inner
        self.logits: dict[str, dict[int, torch.Tensor]] = {}

    def run(self, view: Any, tokens: list[int], keep: list[int]) -> torch.Tensor:
        logits = self.inner.run(view, tokens, range(len(tokens)))
        names = {state.row: name for name, state in self.engine.pool._held.requests.items()}
        first = 0
        for row, start, count in view.batch:
            rows = self.logits.setdefault(names[row], {})
            for offset in range(count):
                rows[start + offset] = logits[first + offset].clone()
            first += count
        return logits[list(keep)]

    def close(self) -> None:
        self.inner.close()


def prompts(vocabulary: int) -> list[list[int]]:
    """Twenty prompts; groups of four share their first 23 tokens, so hits end inside a page too."""
    random = np.random.default_rng(7)
    made = []
    for number in range(20):
        if number % 4 == 0:
            shared = random.integers(3, vocabulary, 23).tolist()
        made.append(shared + random.integers(3, vocabulary, int(random.integers(1, 40))).tolist())
    return made


def engine_for(model: Any, frames: int) -> tuple[Engine, Recorder]:
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    page_bytes = PAGE * layers * heads * config.head_dim * 2 * 4
    settings = Settings(
        pool=PoolSettings(PAGE, frames * page_bytes, requests=32, positions=256),
        engine=EngineSettings(step_tokens=37, batch_requests=16),
    )
    engine = Engine(model, settings)
    # A page's frame must not say where it stands in its request: hand frames out in any order.
    np.random.default_rng(3).shuffle(engine.pool._held.frames._stack)
    recorder = engine.runner = Recorder(engine, engine.runner)
    return engine, recorder


def answers(engine: Engine, asked: list[list[int]], flags: Flags) -> dict[str, Any]:
    for number, prompt in enumerate(asked):
        engine.add(prompt, max_tokens=ANSWER, flags=flags, name=str(number))
    return engine.run()


def reference(model: Any, tokens: list[int], pieces: list[int] | None = None) -> torch.Tensor:
    """Logits of transformers' own attention at every position, computed at once or in pieces."""
    cache, rows, first = DynamicCache(config=model.config), [], 0
    for size in pieces or [len(tokens)]:
        with torch.inference_mode():
            out = model(torch.tensor([tokens[first : first + size]]), past_key_values=cache)
        rows.append(out.logits[0].float())
        first += size
    return torch.cat(rows)


class Truth:
    """What transformers says about twenty answered prompts, and how much it wavers."""

    def __init__(self, model: Any, asked: list[list[int]], records: dict[str, Any]) -> None:
        self.sequences = [
            prompt + list(records[str(number)].tokens) for number, prompt in enumerate(asked)
        ]
        self.logits, self.noise = [], 0.0
        for tokens in self.sequences:
            self.logits.append(reference(model, tokens))
            half = len(tokens) // 2
            again = reference(model, tokens, [half] + [1] * 6 + [len(tokens) - half - 6])
            self.noise = max(self.noise, float((again - self.logits[-1]).abs().max()))

    def worst(self, recorder: Recorder) -> float:
        """The largest difference of any logit that the engine computed."""
        worst = 0.0
        for number, truth in enumerate(self.logits):
            for position, row in recorder.logits[str(number)].items():
                worst = max(worst, float((row - truth[position]).abs().max()))
        return worst

    def check_tokens(self, asked: list[list[int]], records: dict[str, Any]) -> None:
        for number, truth in enumerate(self.logits):
            first = len(asked[number])
            greedy = truth[first - 1 : first - 1 + ANSWER].argmax(-1).tolist()
            assert list(records[str(number)].tokens) == greedy


@pytest.fixture(params=["qwen3", "smollm2"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_logits_and_tokens_equal_transformers_in_every_setting(model: Any) -> None:
    asked = prompts(model.config.vocab_size)
    runs = {}

    engine, recorder = engine_for(model, frames=600)
    runs["cold"] = (recorder, answers(engine, asked, Flags.NO_READ | Flags.NO_WRITE))
    assert all(record.reused_tokens == 0 for record in runs["cold"][1].values())
    for name in ("mixed", "hits"):
        recorder = engine.runner = Recorder(engine, recorder.inner)
        runs[name] = (recorder, answers(engine, asked, Flags.NONE))
    for name, record in runs["hits"][1].items():
        assert record.reused_tokens == (len(asked[int(name)]) - 1) // PAGE * PAGE
    engine.close()

    engine, recorder = engine_for(model, frames=60)
    runs["preempted"] = (recorder, answers(engine, asked, Flags.NONE))
    assert sum(record.preemptions for record in runs["preempted"][1].values()) > 3
    engine.pool.check()
    engine.close()

    truth = Truth(model, asked, runs["cold"][1])
    assert truth.noise > 0
    for name, (recorder, records) in runs.items():
        truth.check_tokens(asked, records)
        assert truth.worst(recorder) <= 5 * truth.noise, name
    distinct = {token for record in runs["cold"][1].values() for token in record.tokens}
    assert len(distinct) >= 8


def test_every_random_answer_has_eight_distinct_tokens(qwen3: Any) -> None:
    """Otherwise equal answers would prove little: a model that repeats itself ignores its cache."""
    engine, _ = engine_for(qwen3, frames=600)
    for record in answers(engine, prompts(qwen3.config.vocab_size), Flags.NONE).values():
        assert len(set(record.tokens)) >= 8
    engine.close()


def test_one_foreign_page_is_seen(model: Any) -> None:
    """The control: a bar that a wrong page could pass would be no bar."""
    asked = prompts(model.config.vocab_size)[:2]
    engine, _ = engine_for(model, frames=200)
    records = answers(engine, asked, Flags.NONE)
    engine.runner.close()
    truth = Truth(model, asked, records)
    engine.runner.inner = Runner(model)
    engine.add(asked[0], max_tokens=1, name="hit")
    engine._schedule.next_batch()
    rows = engine.pool._held.table.frames(engine.pool._held.requests["hit"].row, 0, 2)
    for buffer in (engine.pool.planes[0].k, engine.pool.planes[0].v):
        one, other = (slice(frame * PAGE, (frame + 1) * PAGE) for frame in rows.tolist())
        buffer[:, one] = buffer[:, other].clone()
    seen = engine.runner = Recorder(engine, engine.runner.inner)
    engine.run()
    worst = max(
        float((row - truth.logits[0][position]).abs().max())
        for position, row in seen.logits["hit"].items()
    )
    assert worst > 20 * truth.noise
    engine.close()
