"""What goes wrong in a step harms nobody else: numbers that are none, callbacks that raise, cancellation
anywhere, weights that change, models that raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepwell.base.errors import GeometryError, InputError, MisuseError
from stepwell.base.settings import EngineSettings, PoolSettings, Settings
from stepwell.cache.pool import Flags
from stepwell.cache.pool.limits import Limits
from stepwell.core.geometry import Geometry
from stepwell.core.reasons import Reason
from stepwell.engine.engine import Engine
from stepwell.engine.request import Finish, Wishes
from stepwell.testing.clock import FakeClock
from stepwell.testing.families import VOCABULARY, tiny_model

PAGE = 4
POISON = VOCABULARY - 1


def engine_over(model: Any, frames: int = 200, **changes: Any) -> Engine:
    geometry = Geometry.from_hf_config(model.config, "float32")
    decode = changes.pop("decode", None)
    one = PoolSettings(PAGE, 1 << 32, requests=16, positions=500, debug=True)
    frame_bytes = Limits.of(geometry, one).frame_bytes
    pool = dataclasses.replace(one, capacity_bytes=frames * frame_bytes)
    limits = EngineSettings(**({"step_tokens": 64, "batch_requests": 8} | changes))
    return Engine(model, Settings(pool=pool, engine=limits), clock=FakeClock(), decode=decode)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, POISON, (length,), generator=random).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with engine_over(model) as made:
        yield made


@pytest.fixture
def poisonous(model: Any) -> Iterator[Any]:
    """A model that gives NaN from the token POISON on."""
    row = model.model.embed_tokens.weight.data[POISON]
    before = row.clone()
    row.fill_(float("nan"))
    yield model
    row.copy_(before)


def is_clean(engine: Engine) -> bool:
    stats = engine.pool.stats()
    engine.pool.check()
    rows = engine.pool._held.rows
    return (
        engine.idle
        and stats["frames_filling"] == stats["frames_held"] == 0
        and rows.free == rows.count
    )


def found(engine: Engine, tokens: list[int]) -> int:
    """How many tokens of a prompt the pool has."""
    ready = engine.pool.open("looks", [*tokens, 0], engine._schedule.namespace)
    engine.pool.close("looks")
    return ready.cached


# Logits that are no numbers


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
def test_nan_ends_one_request_and_the_others_go_on(family: str) -> None:
    model = tiny_model(family)
    with engine_over(model) as engine:
        for seed in range(3):
            engine.add(prompt(19, seed), max_tokens=6, name=str(seed))
        expected = engine.run()
    model.model.embed_tokens.weight.data[POISON] = float("nan")
    with engine_over(model, step_tokens=200) as engine:
        for seed in range(3):
            engine.add(prompt(19, seed), max_tokens=6, name=str(seed))
        bad = [*prompt(9, 7), POISON, *prompt(9, 8)]
        engine.add(bad, max_tokens=6, name="bad")
        records = engine.run()
        assert found(engine, bad[:8]) == 0
        assert is_clean(engine)
    assert records["bad"].finish is Finish.FAULT
    assert "not numbers" in records["bad"].detail
    assert records["bad"].computed_tokens == 0
    for seed in range(3):
        assert records[str(seed)].tokens == expected[str(seed)].tokens


@pytest.mark.parametrize("scored", [None, 0])
def test_nan_in_the_middle_of_a_long_prompt_is_not_sealed(
    poisonous: Any, scored: int | None
) -> None:
    """Its KV would be found by everyone who begins with these tokens."""
    bad = [*prompt(20), POISON, *prompt(60, 1)]
    with engine_over(poisonous, step_tokens=8) as engine:
        good = engine.add(prompt(5, 2), max_tokens=20)
        engine.step()
        record = engine.generate(bad, prompt_logprobs=scored, max_tokens=4)
        assert record.finish is Finish.FAULT
        assert found(engine, bad[:20]) == record.computed_tokens // PAGE * PAGE >= 12
        assert found(engine, bad) == found(engine, bad[:20])
        assert engine.run()[good].finish is Finish.LENGTH
        assert is_clean(engine)


def test_kv_that_turns_into_nan_ends_its_request_alone(engine: Engine) -> None:
    names = [engine.add(prompt(11, seed), max_tokens=8) for seed in range(3)]
    for _ in range(5):
        engine.step()
    sealed = engine.pool.stats()["pages_sealed"]
    held = engine.pool._held
    slot = int(held.table.slots[held.requests[names[1]].row, 12])
    engine.pool.planes[0].k[:, slot] = float("nan")
    events = engine.step()
    records = {event.name: event.record for event in events if event.record}
    assert records[names[1]].finish is Finish.FAULT
    assert list(records) == [names[1]]
    assert len(records[names[1]].tokens) == 5
    # 15 tokens had their KV; the step would have filled the fourth page of each.
    assert engine.pool.stats()["pages_sealed"] == sealed + 2
    rest = engine.run()
    assert {record.finish for record in rest.values()} == {Finish.LENGTH}
    assert is_clean(engine)


def test_all_requests_of_a_step_may_be_at_fault(poisonous: Any) -> None:
    with engine_over(poisonous) as engine:
        names = [engine.add([*prompt(5, seed), POISON], max_tokens=3) for seed in range(4)]
        names += engine.add_samples([*prompt(9), POISON], 3, max_tokens=3)
        events = []
        while not engine.idle:
            events += engine.step()
        assert [event.name for event in events] == names
        assert {event.record.finish for event in events} == {Finish.FAULT}
        assert {event.choice for event in events} == {None}
        assert engine.pool.stats()["pages_sealed"] == 0
        assert is_clean(engine)
        assert engine.generate(prompt(9), max_tokens=2).finish is Finish.LENGTH


# Functions of the caller that raise


def test_a_decoder_that_raises_ends_its_request_alone(model: Any) -> None:
    with engine_over(model) as engine:
        asked = [prompt(9, seed) for seed in range(3)]
        expected = [engine.generate(one, max_tokens=6).tokens for one in asked]
    bad = next(token for token in expected[1][2:] if token not in expected[0] + expected[2])
    place = expected[1].index(bad)

    def decode(tokens: list[int]) -> str:
        if bad in tokens:
            raise IndexError(f"no piece {bad}")
        return "".join(f"{token:03}" for token in tokens)

    with engine_over(model, decode=decode) as engine:
        names = [engine.add(one, max_tokens=6) for one in asked]
        records = {}
        raised = 0
        while not engine.idle:
            try:
                events = engine.step()
            except IndexError:
                raised += 1
                continue
            records |= {event.name: event.record for event in events if event.record}
        assert is_clean(engine)
    assert raised == 1
    assert records[names[1]].finish is Finish.FAULT
    assert "decode raised" in records[names[1]].detail
    assert records[names[1]].tokens == expected[1][: place + 1]
    for number in (0, 2):
        assert records[names[number]].tokens == expected[number]
        assert records[names[number]].text == "".join(f"{one:03}" for one in expected[number])


def test_a_step_that_raises_in_a_stream_cancels_nobody(engine: Engine) -> None:
    """The class promises that all requests are as before; that of the stream too."""
    expected = engine.generate(prompt(9), max_tokens=6, flags=Flags.NO_WRITE).tokens
    name = engine.add(prompt(9), max_tokens=6)
    tokens = []
    run = engine.runner.run

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    stream = engine.stream(name)
    tokens += [next(stream).token, next(stream).token]
    engine.runner.run = broken
    with pytest.raises(RuntimeError, match="gone"):
        next(stream)
    assert name in engine._alive
    engine.runner.run = run
    tokens += [event.token for event in engine.stream(name)]
    assert tuple(tokens) == expected


def test_a_step_that_raises_in_generate_leaves_nothing_behind(engine: Engine) -> None:
    """Nobody knows the name of its request, so nobody could cancel it."""
    run = engine.runner.run

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    engine.runner.run = broken
    with pytest.raises(RuntimeError, match="gone"):
        engine.generate(prompt(9))
    engine.runner.run = run
    assert is_clean(engine)


# Cancellation


def test_cancelling_at_any_point_of_a_life(model: Any) -> None:
    """In the queue, as a follower, in the prompt, answering, after a preemption, scoring, drafting text."""
    ends = set()
    for steps in range(0, 30, 2):
        with engine_over(model, frames=14, step_tokens=9, batch_requests=5) as engine:
            names = list(engine.add_samples(prompt(22), 3, max_tokens=8))
            names += [
                engine.add(prompt(16, 1), max_tokens=12, priority=1),
                engine.add(prompt(12, 2), max_tokens=9, prompt_logprobs=1),
                engine.add(prompt(7, 3), max_tokens=3),
            ]
            for _ in range(steps):
                engine.step()
            for name in names:
                if name in engine._alive:
                    record = engine.cancel(name)
                    ends.add(
                        (
                            record.reused_tokens is None,
                            record.preemptions > 0,
                            bool(record.tokens),
                            bool(record.computed_tokens),
                        )
                    )
                    engine.pool.check()
            assert is_clean(engine)
            assert engine.step() == []
    never = (True, False, False, False)
    prompts, answering = (False, False, False, True), (False, False, True, True)
    preempted = (False, True, True, True)
    assert ends >= {never, prompts, answering, preempted}


def test_cancelling_inside_a_stream_loop(engine: Engine) -> None:
    mine, other = engine.add(prompt(9), max_tokens=9), engine.add(prompt(9, 1), max_tokens=9)
    got = 0
    for _ in engine.stream(mine):
        got += 1
        if got == 3:
            engine.cancel(other)
        if got == 5:
            engine.cancel(mine)
    assert got == 5
    assert is_clean(engine)


def test_cancelling_inside_a_progress_callback(model: Any) -> None:
    with engine_over(model, step_tokens=60) as engine:
        heard: list[str] = []

        def stop_all(progress: Any) -> None:
            heard.append(progress.name)
            for name in ("a", "b", "c"):
                engine.cancel(name)

        for name in ("a", "b", "c"):
            engine.add(prompt(9, ord(name)), max_tokens=9, name=name, progress=stop_all)
        engine.add(prompt(9), max_tokens=4, name="d")
        assert {event.name for event in engine.step()} == {"d"}
        assert heard == ["a"]
        engine.run()
        assert is_clean(engine)


def test_cancelling_itself_inside_a_progress_callback_ends_its_stream(model: Any) -> None:
    with engine_over(model, step_tokens=10) as engine:
        name = engine.add(prompt(50), name="a", progress=lambda one: engine.cancel(one.name))
        assert list(engine.stream(name)) == []
        assert is_clean(engine)


def test_a_name_that_comes_back_in_a_progress_callback_is_another_request(model: Any) -> None:
    with engine_over(model, step_tokens=10) as engine:
        expected = engine.generate(prompt(9, 1), max_tokens=3).tokens

        def again(progress: Any) -> None:
            engine.cancel("a")
            engine.add(prompt(9, 1), max_tokens=3, name="a")

        stream = engine.stream(engine.add(prompt(50), name="a", progress=again))
        assert list(stream) == []
        assert engine.run()["a"].tokens == expected


# Weights that change in place


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
def test_after_the_epoch_rises_nothing_old_is_reused(family: str) -> None:
    model = tiny_model(family)
    asked = [prompt(18, seed) for seed in range(3)]
    with engine_over(model, batch_requests=5) as engine:
        names = [engine.add(one, max_tokens=14) for one in asked]
        names += engine.add_samples(asked[0], 2, max_tokens=14)
        for _ in range(6):
            engine.step()
        waiting = engine.add(prompt(5), priority=-1, max_tokens=3)
        so_far = [list(engine._alive[name].generated) for name in names]
        assert all(3 <= len(one) <= 6 for one in so_far)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(5, 0))
            model.model.embed_tokens.weight.mul_(-1.0)
        assert engine.raise_epoch() == 1
        records = engine.run()
        later = engine.generate(asked[0], max_tokens=1)
        assert all(records[name].resumed_tokens == 0 for name in names)
        assert records[waiting].finish is Finish.LENGTH
        assert later.reused_tokens == 16  # of the new epoch
        assert is_clean(engine)
    with engine_over(model) as fresh:
        for name, one, done in zip(names, [*asked, asked[0], asked[0]], so_far, strict=True):
            rest = fresh.generate(one + done, max_tokens=14 - len(done), flags=Flags.NO_READ)
            assert records[name].tokens == (*done, *rest.tokens)


def test_scores_of_half_a_prompt_are_not_kept_over_an_epoch() -> None:
    model = tiny_model("llama")
    with engine_over(model, step_tokens=10) as engine:
        name = engine.add(prompt(43), max_tokens=1, prompt_logprobs=0)
        for _ in range(2):
            engine.step()
        assert engine._alive[name].prompt_scores
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(5, 0))
        engine.raise_epoch()
        torn = engine.run()[name].prompt_logprobs
        whole = engine.generate(prompt(43), max_tokens=1, prompt_logprobs=0).prompt_logprobs
    assert [one.logprob for one in torn] == [one.logprob for one in whole]


def test_an_epoch_may_rise_with_nobody_there(engine: Engine) -> None:
    engine.generate(prompt(18), max_tokens=1)
    assert [engine.raise_epoch(), engine.raise_epoch()] == [1, 2]
    record = engine.generate(prompt(18), max_tokens=1)
    assert (record.reused_tokens, record.reason) == (0, Reason.NOT_SEALED)
    assert engine.generate(prompt(18), max_tokens=1).reused_tokens == 16


# Models that raise in the middle of an unpacked step


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "qwen3_next"])
def test_a_model_that_raises_in_the_middle_of_a_step_changes_no_state(family: str) -> None:
    """A step of an unpacked model is several calls: the first of them must not count when the last fails."""
    model = tiny_model(family)
    asked = [prompt(30, 0), prompt(21, 1), prompt(10, 2)]
    wishes = Wishes(max_tokens=8)
    with engine_over(model, step_tokens=24) as engine:
        names = [engine.add(one, wishes) for one in asked]
        expected = engine.run()
        computed = [expected[name].computed_tokens for name in names]
    with engine_over(model, step_tokens=24) as engine:
        names = [engine.add(one, wishes) for one in asked]
        run, calls = engine.runner.run, [0, 0]

        def torn(*given: Any) -> Any:
            done = run(*given)
            calls[0] += 1
            if calls[0] % 2 == 0:
                calls[1] += 1
                raise RuntimeError("the device is gone")
            return done

        records = {}
        while not engine.idle:
            engine.runner.run, calls[0] = torn, 0
            try:
                events = engine.step()
            except RuntimeError:
                engine.pool.check()
                engine.runner.run = run
                events = engine.step()
            records |= {event.name: event.record for event in events if event.record}
        assert is_clean(engine)
    assert calls[1] >= 3
    for name, count in zip(names, computed, strict=True):
        assert records[name].tokens == expected[name].tokens
        assert records[name].computed_tokens == count
    assert len(set(expected[names[0]].tokens)) > 3


def test_a_hybrid_model_gets_along_with_the_smallest_pool(model: Any) -> None:
    """Alone and with all frames it must go on: what a kept state holds must not stand in its own way."""
    hybrid = tiny_model("lfm2")
    with engine_over(hybrid) as engine:
        expected = engine.generate(prompt(16), max_tokens=9).tokens
    limits = Limits.of(
        Geometry.from_hf_config(hybrid.config, "float32"), PoolSettings(PAGE, 1 << 32)
    )
    with engine_over(hybrid, frames=limits.request_frames(24)) as engine:
        for _ in range(2):
            record = engine.generate(prompt(16), max_tokens=9)
            assert (record.tokens, record.finish) == (expected, Finish.LENGTH)


@pytest.mark.parametrize("replay", [1, 6, 30])
def test_so_many_tokens_of_a_prompt_are_always_computed(model: Any, replay: int) -> None:
    with engine_over(model, replay_tokens=replay) as engine:
        first = engine.generate(prompt(24), max_tokens=4)
        again = engine.generate(prompt(24), max_tokens=4)
    assert again.tokens == first.tokens
    assert again.reused_tokens == max(0, 24 - replay) // PAGE * PAGE


def test_an_empty_name_is_a_name(engine: Engine) -> None:
    assert engine.add(prompt(5), max_tokens=2, name="") == ""
    assert list(engine.run()) == [""]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize("torn", range(1, 7))
def test_a_step_torn_between_its_commits_is_computed_again(family: str, torn: int) -> None:
    """Ctrl-C after some states are written and some tokens committed: nobody hangs, nothing is wrong."""
    model = tiny_model(family)
    asked = [prompt(9 + 4 * seed, seed) for seed in range(3)]
    with engine_over(model) as engine:
        expected = [engine.generate(one, max_tokens=5, flags=Flags.NO_READ).tokens for one in asked]
    with engine_over(model) as engine:
        names = [engine.add(one, max_tokens=5) for one in asked]
        commit, calls = engine.pool.commit, [0]

        def tearing(*given: Any) -> None:
            calls[0] += 1
            if calls[0] == torn:
                raise KeyboardInterrupt
            commit(*given)

        engine.pool.commit = tearing
        records: dict[str, Any] = {}
        interrupts = 0
        while not engine.idle:
            try:
                records |= engine.run()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
        assert [records[name].tokens for name in names] == expected
        assert is_clean(engine)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("_schedule", "_start"),
        ("_schedule", "leave"),
        ("_schedule", "enqueue"),
        ("pool", "open"),
        ("pool", "close"),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_between_the_lists_and_the_pool_loses_nobody(
    family: str, home: str, name: str, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Ctrl-C before or after each thing that moves a request: all end, answers are right, nothing leaks."""
    model = tiny_model(family)
    asked = [prompt(9 + 4 * seed, seed) for seed in range(3)]
    with engine_over(model) as engine:
        expected = [engine.generate(one, max_tokens=5, flags=Flags.NO_READ).tokens for one in asked]
    with engine_over(model) as engine:
        names = [engine.add(one, max_tokens=5) for one in asked]
        owner = getattr(engine, home)
        real, left = getattr(owner, name), [1 if name == "enqueue" else 2]

        def interrupted(*given: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                raise KeyboardInterrupt
            answer = real(*given, **more)
            if left[0] == 0:
                raise KeyboardInterrupt
            return answer

        monkeypatch.setattr(owner, name, interrupted)
        records: dict[str, Any] = {}
        interrupts = steps = 0
        while not engine.idle:
            try:
                records |= {event.name: event.record for event in engine.step() if event.record}
                steps += 1
                if steps == 2:
                    engine._schedule.preempt(engine._schedule.running[-1])
            except KeyboardInterrupt:
                interrupts += 1
            assert steps < 200
        assert interrupts == 1
        records |= {event.name: event.record for event in engine.step() if event.record}
        for number, one in enumerate(names):
            if records[one].finish is Finish.LENGTH:
                assert records[one].tokens == expected[number]
        assert is_clean(engine)


def test_a_raising_step_loses_nobodys_record(engine: Engine) -> None:
    engine.add(prompt(5), max_tokens=1, name="done")
    engine.add(prompt(9), max_tokens=30, name="long")
    compute, calls = engine._answering.compute, [0]

    def raising(batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("the device is gone")
        return compute(batch)

    engine._answering.compute = raising
    with pytest.raises(RuntimeError, match="gone"):
        engine.run()
    engine._answering.compute = compute
    assert set(engine.run()) == {"done", "long"}


def test_generate_says_that_somebody_cancelled_it(engine: Engine) -> None:
    with pytest.raises(MisuseError, match="cancelled"):
        engine.generate(prompt(40), name="a", progress=lambda _: engine.cancel("a"))
    assert is_clean(engine)


def test_an_id_that_has_no_embedding_is_refused_although_the_configuration_has_it() -> None:
    """Else every step would raise, and nobody would get on."""
    model = tiny_model("llama")
    model.config.vocab_size = 500
    with engine_over(model) as engine, pytest.raises(InputError, match="0 to 198"):
        engine.add([300])


def test_a_window_that_the_geometry_does_not_know_is_refused() -> None:
    model = tiny_model("mistral")
    with engine_over(model) as engine:
        model.model.layers[1].self_attn.config.sliding_window = None
        engine.add(prompt(5))
        with pytest.raises(GeometryError, match="sliding_window=None"):
            engine.step()
        model.config.sliding_window = 24


def test_samples_that_may_not_reuse_wait_for_nobody() -> None:
    with engine_over(tiny_model("llama")) as engine:
        names = engine.add_samples(prompt(9), 3, max_tokens=2, prompt_logprobs=0)
        engine.step()
        assert len(engine._schedule.running) == 3
        records = engine.run()
    assert all(len(records[name].prompt_logprobs) == 8 for name in names)
