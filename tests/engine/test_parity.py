"""The engine computes what transformers computes: every logit, every token, whatever the batch.

The bar is the noise of transformers itself: how much its own logits move, in the same run, when the same
tokens pass through it in other pieces. A page that is foreign moves them by far more (the last test).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepwell.cache.pool import Flags
from stepwell.engine.engine import Engine

PAGE = 4
ANSWER = 24


def prompts(vocabulary: int) -> list[list[int]]:
    """Twenty prompts; groups of four share their first 23 tokens, so hits end inside a page too."""
    random = np.random.default_rng(7)
    made = []
    for number in range(20):
        if number % 4 == 0:
            shared = random.integers(3, vocabulary, 23).tolist()
        made.append(shared + random.integers(3, vocabulary, int(random.integers(1, 40))).tolist())
    return made


def answers(engine: Engine, asked: list[list[int]], flags: Flags, prefix: str) -> dict[str, Any]:
    for number, prompt in enumerate(asked):
        engine.add(prompt, max_tokens=ANSWER, flags=flags, name=f"{prefix}{number}")
    return engine.run()


def check(parity: Any, recorder: Any, asked: list[list[int]], records: dict[str, Any]) -> None:
    """Greedy tokens equal, and every logit that was computed within five times the noise."""
    whole = {name: asked[int(name[1:])] + list(record.tokens) for name, record in records.items()}
    for tokens in whole.values():
        truth, _ = parity.truth(tokens)
        first = len(tokens) - ANSWER
        assert tokens[first:] == truth[first - 1 : -1].argmax(-1).tolist()
    worst, noise = parity.worst(recorder, whole)
    assert noise > 0
    assert worst <= 5 * noise


@pytest.fixture(params=["qwen3", "smollm2"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_logits_and_tokens_equal_transformers_in_every_setting(model: Any, parity_of: Any) -> None:
    asked = prompts(model.config.vocab_size)
    parity = parity_of(model)

    engine, recorder = parity.engine(frames=600)
    cold = answers(engine, asked, Flags.NO_READ | Flags.NO_WRITE, "c")
    assert all(record.reused_tokens == 0 for record in cold.values())
    mixed = answers(engine, asked, Flags.NONE, "m")
    hits = answers(engine, asked, Flags.NONE, "h")
    for name, record in hits.items():
        assert record.reused_tokens == (len(asked[int(name[1:])]) - 1) // PAGE * PAGE
    engine.close()
    check(parity, recorder, asked, cold | mixed | hits)

    engine, recorder = parity.engine(frames=60)
    preempted = answers(engine, asked, Flags.NONE, "p")
    assert sum(record.preemptions for record in preempted.values()) > 3
    engine.pool.check()
    engine.close()
    check(parity, recorder, asked, preempted)
    assert len({token for record in cold.values() for token in record.tokens}) >= 8


def test_every_random_answer_has_eight_distinct_tokens(qwen3: Any, parity_of: Any) -> None:
    """Otherwise equal answers would prove little: a model that repeats itself ignores its cache."""
    engine, _ = parity_of(qwen3).engine(frames=600)
    for record in answers(engine, prompts(qwen3.config.vocab_size), Flags.NONE, "r").values():
        assert len(set(record.tokens)) >= 8
    engine.close()


def test_one_foreign_page_is_seen(model: Any, parity_of: Any) -> None:
    """The control: a bar that a wrong page could pass would be no bar."""
    asked = prompts(model.config.vocab_size)[:2]
    parity = parity_of(model)
    engine, recorder = parity.engine(frames=200)
    records = answers(engine, asked, Flags.NONE, "a")
    engine.add(asked[0], max_tokens=1, name="hit")
    engine._schedule.next_batch()
    rows = engine.pool._held.table.frames(engine.pool._held.requests["hit"].row, 0, 2)
    for buffer in (engine.pool.planes[0].k, engine.pool.planes[0].v):
        one, other = (slice(frame * PAGE, (frame + 1) * PAGE) for frame in rows.tolist())
        buffer[:, one] = buffer[:, other].clone()
    engine.run()
    engine.close()
    tokens = asked[0] + list(records["a0"].tokens)
    worst, noise = parity.worst(recorder, {"hit": tokens})
    assert worst > 20 * noise
