"""The joined reading of a GPU, on the CPU: all requests that compute one token in one padded call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stepwell.base.settings import EngineSettings, PoolSettings, Settings
from stepwell.cache.pool.limits import Limits
from stepwell.core.geometry import Geometry
from stepwell.engine.attention import StepPlan
from stepwell.engine.engine import Engine
from stepwell.testing.families import VOCABULARY, WINDOW, tiny_model

PAGE = 4
LENGTHS = (1, 3, 4, 11, WINDOW - 1, WINDOW, WINDOW + 2, 70)


def engine_over(model: Any) -> Engine:
    geometry = Geometry.from_hf_config(model.config, "float32")
    one = PoolSettings(PAGE, 1 << 32, requests=16, positions=500)
    frame_bytes = Limits.of(geometry, one).frame_bytes
    pool = dataclasses.replace(one, capacity_bytes=300 * frame_bytes)
    return Engine(model, Settings(pool=pool, engine=EngineSettings(40, 16)))


def prompt(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=random).tolist()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forces the joined reading; how many requests it read for, call by call."""
    of = StepPlan.of.__func__
    sizes: list[int] = []

    def forced(cls: Any, view: Any, places: Any, *, together: bool = False) -> StepPlan:
        plan = of(cls, view, places, together=True)
        if len(view.batch) > 1 and all(count == 1 for _, _, count in view.batch):
            assert all(len(readers) == 1 for readers in plan.readers)
            sizes.append(len(view.batch))
        return plan

    monkeypatch.setattr(StepPlan, "of", classmethod(forced))
    return sizes


def steps_of(model: Any, answer: int) -> list[torch.Tensor]:
    """The logits of every call of the model, for requests of several lengths."""
    seen: list[torch.Tensor] = []
    with engine_over(model) as engine:
        # Somebody else has the first frame, with a NaN in it.
        held = engine.pool._held
        frames = []
        while 0 not in frames:
            name = f"other-{len(frames)}"
            engine.pool.open(name, [1], engine._schedule.namespace)
            frames += held.planes[0][1].frames(held.requests[name].row, 0, 1).tolist()
        for plane in engine.pool.planes:
            plane.k[:, :PAGE] = plane.v[:, :PAGE] = float("nan")
        run = engine.runner.run

        def watched(*given: Any) -> Any:
            computed = run(*given)
            seen.append(computed.logits.clone())
            return computed

        engine.runner.run = watched
        for number, length in enumerate(LENGTHS):
            engine.add(prompt(length, number), max_tokens=answer)
        records = engine.run()
        assert all(len(record.tokens) == answer for record in records.values())
        for number in range(len(frames)):
            engine.pool.close(f"other-{number}")
    return seen


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt_oss", "qwen2", "mistral", "deepseek_v3", "lfm2"]
)
def test_the_joined_reading_gives_the_same_logits(
    family: str, joined: list[int], monkeypatch: pytest.MonkeyPatch, parity_of: Any
) -> None:
    model = tiny_model(family)
    _, noise = parity_of(model).truth(prompt(max(LENGTHS) + 16, 0))
    together = steps_of(model, 16)
    assert joined.count(len(LENGTHS)) >= 8
    count = len(joined)
    monkeypatch.undo()
    apart = steps_of(model, 16)
    assert len(joined) == count
    assert [one.shape for one in together] == [one.shape for one in apart]
    worst = max(float((a - b).abs().max()) for a, b in zip(together, apart, strict=True))
    assert worst <= 5 * noise
