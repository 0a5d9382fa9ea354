"""The engine over a host tier: prefixes that the device has forgotten come back exact, in both lanes.

Tiny models answer greedily in float32, so an answer after a load must be that of a request that reuses nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stepwell.base.settings import EngineSettings, HostSettings, PoolSettings, Settings
from stepwell.cache.pool import Flags
from stepwell.cache.pool.limits import Limits
from stepwell.core.geometry import Geometry
from stepwell.engine.engine import Engine
from stepwell.engine.request import Finish
from stepwell.testing.families import FAMILIES, VOCABULARY, tiny_model

PAGE, ANSWER = 4, 6
ALONE = Flags.NO_READ | Flags.NO_WRITE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def engine_of(model: Any, tokens: int, requests: int = 1, **host: Any) -> Engine:
    """An engine whose pool holds a few requests of so many tokens, and a host tier that holds many."""
    geometry = Geometry.from_hf_config(model.config, "float32")
    limits = Limits.of(geometry, PoolSettings(PAGE, 1 << 32, 1, 512))
    frames = requests * (limits.request_frames(tokens) + 1)
    settings = Settings(
        pool=PoolSettings(PAGE, frames * limits.frame_bytes, 16, 512, debug=True),
        engine=EngineSettings(step_tokens=23),
        host=HostSettings(capacity_bytes=4 << 20, **host),
    )
    engine = Engine(model, settings)
    assert engine.pool.store.ready(20)
    return engine


def drain(engine: Engine) -> None:
    """Everything that was sealed has arrived below."""
    assert engine.pool.store.drain(20)
    engine.pool.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_f007_f024_what_the_device_forgot_comes_back_from_host_memory(family: str) -> None:
    """Full, windowed, latent and recurrent layers; the prompt is driven out by others, and asked again, and gone on with."""
    model = tiny_model(family)
    prompt, others = tokens_of(1, 61), [tokens_of(seed, 61) for seed in (2, 3)]
    with engine_of(model, 61 + 20 + ANSWER) as engine:
        alone = engine.generate(prompt, max_tokens=ANSWER, flags=ALONE)
        longer = [*prompt, *alone.tokens, *tokens_of(4, 13)]
        alone_longer = engine.generate(longer, max_tokens=ANSWER, flags=ALONE)
        first = engine.generate(prompt, max_tokens=ANSWER)
        for other in others:
            drain(engine)
            engine.generate(other, max_tokens=ANSWER)
        drain(engine)
        again = engine.generate(prompt, max_tokens=ANSWER)
        assert (first.tokens, again.tokens) == (alone.tokens, alone.tokens)
        assert again.loaded_tokens > 0
        assert again.reused_tokens == 60
        for other in others:
            drain(engine)
            engine.generate(other, max_tokens=ANSWER)
        drain(engine)
        more = engine.generate(longer, max_tokens=ANSWER)
        assert more.tokens == alone_longer.tokens
        assert more.reused_tokens >= 60
        drain(engine)
        stats = engine.pool.store.stats()
        assert (stats["frames_failed"], stats["frames_held"], stats["plans_open"]) == (0, 0, 0)


@pytest.mark.parametrize("save", ["sealed", "second_use", "evicted"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "falcon_h1"])
def test_a_crowd_in_a_pool_that_is_too_small_gets_the_answers_of_those_who_are_alone(
    family: str, save: str
) -> None:
    """Twenty requests with few beginnings, preempted by each other, loads and saves among them."""
    model = tiny_model(family)
    beginnings = [tokens_of(seed, 40) for seed in range(3)]
    asked = [beginnings[n % 3] + tokens_of(50 + n % 7, 3 + n % 7) for n in range(20)]
    with engine_of(model, 50 + ANSWER, save=save) as engine:
        alone = {}
        for prompt in asked:
            if tuple(prompt) not in alone:
                record = engine.generate(prompt, max_tokens=ANSWER, flags=ALONE)
                alone[tuple(prompt)] = record.tokens
        loaded = 0
        for _ in range(3):
            names = {engine.add(prompt, max_tokens=ANSWER): prompt for prompt in asked}
            for name, record in engine.run().items():
                assert record.tokens == alone[tuple(names[name])], name
                loaded += record.loaded_tokens
        assert (
            loaded > 0 or save == "second_use"
        )  # a pool for one rarely has what it could use again
        drain(engine)
        stats, below = engine.pool.stats(), engine.pool.store.stats()
        assert (stats["frames_held"], stats["frames_moving"], stats["frames_filling"]) == (0, 0, 0)
        assert (below["frames_held"], below["plans_open"], below["frames_failed"]) == (0, 0, 0)


def test_cancelling_while_loading_leaves_nothing(llama: Any) -> None:
    prompt = tokens_of(1, 60)
    with engine_of(llama, 80) as engine:
        engine.generate(prompt, max_tokens=1)
        drain(engine)
        engine.generate(tokens_of(2, 79), max_tokens=1)
        drain(engine)
        for _ in range(5):
            name = engine.add(prompt, max_tokens=2)
            engine.step()
            engine.cancel(name)
        drain(engine)
        assert engine.pool.stats()["frames_moving"] == 0
        assert engine.generate(prompt, max_tokens=1).finish is Finish.LENGTH


def test_f028_a_raised_epoch_finds_nothing_in_host_memory_either(llama: Any) -> None:
    prompt = tokens_of(1, 60)
    with engine_of(llama, 80) as engine:
        engine.generate(prompt, max_tokens=1)
        drain(engine)
        engine.raise_epoch()
        assert engine.generate(prompt, max_tokens=1).reused_tokens == 0
        drain(engine)
        assert engine.generate(prompt, max_tokens=1).reused_tokens == 56


def test_wrong_bytes_in_host_memory_are_computed_again(llama: Any) -> None:
    prompt = tokens_of(1, 60)
    with engine_of(llama, 80) as engine:
        right = engine.generate(prompt, max_tokens=8)
        drain(engine)
        engine.generate(tokens_of(2, 79), max_tokens=1)
        drain(engine)
        host = engine.pool.store._joints[0].mover.host
        for entry in host.scan():
            host.row(entry.slot)[::7] ^= 1
        again = engine.generate(prompt, max_tokens=8)
        assert again.tokens == right.tokens
        assert again.loaded_tokens == 0
        assert engine.pool.store.stats()["frames_failed"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "falcon_h1"])
def test_what_a_gpu_forgot_comes_back(family: str) -> None:
    model = tiny_model(family).to("cuda")
    prompt = tokens_of(1, 61)
    with engine_of(model, 61 + ANSWER, pinned=True) as engine, torch.cuda.device(0):
        alone = engine.generate(prompt, max_tokens=ANSWER, flags=ALONE)
        engine.generate(prompt, max_tokens=ANSWER)
        drain(engine)
        engine.generate(tokens_of(2, 61), max_tokens=ANSWER)
        drain(engine)
        again = engine.generate(prompt, max_tokens=ANSWER)
        assert again.tokens == alone.tokens
        assert again.loaded_tokens > 0
