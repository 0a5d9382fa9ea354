"""Every family of decoders, exact: cold, from every boundary of a long prompt, mixed, preempted.

The bar is that of test_parity.py: five times the noise of transformers re-chunked in the same run. The models
have random weights, small windows and both kinds of layer where their family mixes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stepwell.base.errors import GeometryError
from stepwell.cache.pool import Flags
from stepwell.core.geometry import Geometry, Rule
from stepwell.core.reasons import Reason
from stepwell.engine.engine import Engine
from stepwell.testing.families import FAMILIES, VOCABULARY, tiny_model

PAGE = 4
ANSWER = 12
LONG = 300

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def check(parity: Any, recorder: Any, whole: dict[str, list[int]]) -> None:
    worst, noise = parity.worst(recorder, whole)
    assert noise > 0
    assert worst <= 5 * noise


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_transformers(family: str, parity_of: Any) -> None:
    """Cold, all hits and preempted; prompts and answers of unequal lengths in the same steps."""
    parity = parity_of(tiny_model(family))
    shared = random_tokens(1, 27)
    asked = [shared + random_tokens(number, 3 + 7 * number) for number in range(2, 7)]
    engine, recorder = parity.engine(frames=900)
    whole: dict[str, list[int]] = {}
    for run, flags in (("c", Flags.NO_READ | Flags.NO_WRITE), ("m", Flags.NONE), ("h", Flags.NONE)):
        for number, prompt in enumerate(asked):
            engine.add(prompt, max_tokens=ANSWER, flags=flags, name=f"{run}{number}")
        for name, record in engine.run().items():
            whole[name] = asked[int(name[1:])] + list(record.tokens)
            if run == "h":
                assert record.reused_tokens == (record.prompt_tokens - 1) // PAGE * PAGE
            elif run == "c":
                assert record.reused_tokens == 0
    engine.close()
    for name, tokens in whole.items():
        first = len(tokens) - ANSWER
        assert tokens[first:] == parity.truth(tokens)[0][first - 1 : -1].argmax(-1).tolist(), name
    check(parity, recorder, whole)

    needed = engine.pool.limits.request_frames(len(asked[-1]) + ANSWER)
    preempted(parity, asked, whole, needed + needed // 8)


def preempted(
    parity: Any, asked: list[list[int]], whole: dict[str, list[int]], frames: int
) -> None:
    """The same answers when requests lose their frames: to others in a small pool, and at every third step."""
    engine, recorder = parity.engine(frames=frames, debug=True)
    for number, prompt in enumerate(asked):
        engine.add(prompt, max_tokens=ANSWER, name=f"p{number}")
    records: dict[str, Any] = {}
    steps = 0
    while not engine.idle:
        records |= {event.name: event.record for event in engine.step() if event.record}
        steps += 1
        if steps % 3 == 0 and engine._schedule.running:
            engine._schedule.preempt(engine._schedule.running[-1])
    engine.close()
    assert sum(record.preemptions for record in records.values()) > len(asked)
    for name, record in records.items():
        assert list(record.tokens) == whole[f"c{name[1:]}"][-ANSWER:]
    check(parity, recorder, {name: whole[f"c{name[1:]}"] for name in records})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_boundary_of_a_long_prompt_can_be_gone_on_from(family: str, parity_of: Any) -> None:
    parity = parity_of(tiny_model(family))
    tokens = random_tokens(11, LONG)
    engine, recorder = parity.engine(frames=4000, boundaries=LONG // PAGE)
    engine.add(tokens, max_tokens=1, name="cold")
    engine.run()
    names = {}
    for boundary in range(PAGE, LONG, PAGE):
        record = engine.generate(tokens[: boundary + 1], max_tokens=1, name=f"at {boundary}")
        assert record.reused_tokens == boundary
        names[record.name] = tokens
    # And on from there over several pages, so that what is restored is read by more than one query.
    for boundary in range(PAGE, LONG - 64, 64):
        engine.raise_epoch()
        engine.generate(tokens[:boundary], max_tokens=1, name="seals")
        record = engine.generate(tokens, max_tokens=1, name=f"after {boundary}")
        assert record.reused_tokens == boundary
        names[record.name] = tokens
    engine.pool.check()
    engine.close()
    assert len(recorder.logits["cold"]) == LONG
    check(parity, recorder, {"cold": tokens} | names)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2_moe", "falcon_h1"])
def test_a_contiguous_pool_answers_alike_and_shares_nothing(family: str, parity_of: Any) -> None:
    parity = parity_of(tiny_model(family))
    asked = [random_tokens(31, 40), random_tokens(31, 40), random_tokens(32, 23)]
    engine, _ = parity.engine(frames=900)
    shared = [engine.generate(prompt, max_tokens=ANSWER).tokens for prompt in asked]
    engine.close()
    engine, recorder = parity.engine(frames=900, positions=64, contiguous=True, debug=True)
    for number, prompt in enumerate(asked):
        engine.add(prompt, max_tokens=ANSWER, name=str(number))
    records = engine.run()
    engine.close()
    assert [records[str(number)].tokens for number in range(3)] == shared
    assert {record.reused_tokens for record in records.values()} == {0}
    assert {record.reason for record in records.values()} == {Reason.CONTIGUOUS}
    whole = {str(n): prompt + list(records[str(n)].tokens) for n, prompt in enumerate(asked)}
    check(parity, recorder, whole)


@pytest.mark.parametrize("family", ["gemma2", "mistral", "deepseek_v3", "lfm2", "falcon_h1"])
def test_a_foreign_page_or_state_is_seen(family: str, parity_of: Any) -> None:
    """The control: a bar that wrong bytes could pass would be no bar."""
    parity = parity_of(tiny_model(family))
    tokens, other = random_tokens(21, 50), random_tokens(22, 50)
    geometry = Geometry.from_hf_config(parity.model.config, "float32")
    for rule in [group.rule for group in geometry.groups]:
        engine, recorder = parity.engine(frames=900)
        engine.generate(other, max_tokens=1)
        engine.generate(tokens, max_tokens=1)
        engine.add(other, max_tokens=1, name="other")
        engine.add(tokens, max_tokens=1, name="hit")
        engine._schedule.next_batch()
        held = engine.pool._held
        mine, foreign = held.requests["hit"], held.requests["other"]
        if rule is Rule.STATE:
            (group,) = held.states
            frames = [group.index.frames_of(one.states[0].held)[0] for one in (mine, foreign)]
        elif rule is Rule.WINDOW:
            (window,) = held.windows
            frames = [
                window.index.frames_of(one.windows[0].records[-1:])[0] for one in (mine, foreign)
            ]
        else:
            frames = [held.table.frames(one.row, 11, 12) for one in (mine, foreign)]
        for buffer in engine.pool._memory._both:
            paged = buffer.view(buffer.shape[0], -1, PAGE, buffer.shape[2])
            paged[:, torch.from_numpy(frames[0]).long()] = paged[
                :, torch.from_numpy(frames[1]).long()
            ]
        engine.run()
        engine.close()
        worst, noise = parity.worst(recorder, {"hit": tokens})
        assert worst > 20 * noise, rule


def test_a_model_that_the_geometry_does_not_understand_is_refused_with_a_sentence() -> None:
    from transformers import BambaConfig, BambaForCausalLM, MambaConfig, MambaForCausalLM

    small = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
    bamba = {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    for model, name in (
        (MambaForCausalLM(MambaConfig(**small)), "mamba"),
        (BambaForCausalLM(BambaConfig(**small, **bamba)), "bamba"),
    ):
        with pytest.raises(GeometryError, match=name) as caught:
            Engine(model)
        assert "allowed" in str(caught.value)
