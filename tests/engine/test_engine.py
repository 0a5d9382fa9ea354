"""The engine's life of a request: steps, streams, cancellation, preemption, records, bad input."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch

from stepwell.base.errors import GeometryError, InputError, MisuseError
from stepwell.base.settings import EngineSettings, PoolSettings, Settings
from stepwell.cache.pool import Flags
from stepwell.core.key import Namespace
from stepwell.core.reasons import Reason
from stepwell.engine import attention
from stepwell.engine.engine import Engine
from stepwell.engine.request import Finish
from stepwell.engine.sampling import Sampling
from stepwell.testing.clock import FakeClock
from stepwell.testing.families import tiny_model

PAGE = 4


def settings(frames: int = 100, step_tokens: int = 64, **pool: Any) -> Settings:
    page_bytes = PAGE * 3 * 2 * 12 * 2 * 4
    sizes = {"requests": 8, "positions": 400, "debug": True} | pool
    return Settings(
        pool=PoolSettings(PAGE, frames * page_bytes, **sizes),
        engine=EngineSettings(step_tokens=step_tokens, batch_requests=8),
    )


@pytest.fixture
def engine(llama: Any) -> Any:
    made = Engine(llama, settings(), clock=FakeClock())
    yield made
    made.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (length,), generator=random).tolist()


def test_an_answer_streams_token_by_token_and_ends_with_its_record(engine: Engine) -> None:
    name = engine.add(prompt(9), max_tokens=5)
    events = list(engine.stream(name))
    assert [event.token for event in events] == list(events[-1].record.tokens)
    assert [event.record is None for event in events] == [True] * 4 + [False]
    assert events[-1].record.finish is Finish.LENGTH
    assert engine.idle


def test_a_stop_token_ends_the_answer_and_belongs_to_it(engine: Engine) -> None:
    whole = engine.generate(prompt(9), max_tokens=6)
    stopped = engine.generate(prompt(9), max_tokens=6, stop=[whole.tokens[2]])
    cut = whole.tokens.index(whole.tokens[2]) + 1
    assert stopped.tokens == whole.tokens[:cut]
    assert stopped.finish is Finish.STOP


def test_prompts_and_generation_share_steps_within_the_budget(llama: Any) -> None:
    engine = Engine(llama, settings(step_tokens=10))
    sizes: list[list[int]] = []
    run = engine.runner.run

    def watched(view: Any, tokens: list[int], keep: list[int]) -> torch.Tensor:
        sizes.append([count for _, _, count in view.batch])
        return run(view, tokens, keep)

    engine.runner.run = watched
    first = engine.add(prompt(6), max_tokens=8)
    engine.step()
    second = engine.add(prompt(33, 1), max_tokens=2)
    records = engine.run()
    assert all(sum(step) <= 10 for step in sizes)
    assert [1, 9] in sizes  # one generates while the other's prompt takes the rest
    assert (len(records[first].tokens), len(records[second].tokens)) == (8, 2)
    engine.close()


def test_generated_pages_are_reused_by_the_next_turn(engine: Engine) -> None:
    """F043: what was generated is registered, not only what was asked."""
    first = engine.generate(prompt(10), max_tokens=14)
    turn = prompt(10) + list(first.tokens) + prompt(3, 5)
    second = engine.generate(turn, max_tokens=1)
    assert second.reused_tokens == (10 + 14 - 1) // PAGE * PAGE


def test_a_full_hit_still_computes_the_last_token(engine: Engine) -> None:
    """F017, F018: prompts of exactly k pages, sent twice, and the shortest of all."""
    for length in (1, PAGE, 2 * PAGE, 3 * PAGE):
        cold = engine.generate(prompt(length, length), max_tokens=1)
        warm = engine.generate(prompt(length, length), max_tokens=1)
        assert warm.tokens == cold.tokens
        assert warm.reused_tokens == (length - 1) // PAGE * PAGE
        assert warm.computed_tokens == length - warm.reused_tokens >= 1


def test_equal_prompts_in_one_step_share_their_pages(engine: Engine) -> None:
    names = [engine.add(prompt(17), max_tokens=3) for _ in range(3)]
    records = engine.run()
    assert len({records[name].tokens for name in names}) == 1
    stats = engine.pool.stats()
    assert stats["pages_sealed"] == (17 + 3 - 1) // PAGE
    assert stats["pages_duplicate"] == 2 * stats["pages_sealed"]


def test_preempted_requests_answer_as_if_they_had_not_been(llama: Any) -> None:
    asked = [prompt(12, seed) for seed in range(5)]
    wide = Engine(llama, settings())
    for number, one in enumerate(asked):
        wide.add(one, max_tokens=20, name=str(number))
    expected = wide.run()
    wide.close()
    narrow = Engine(llama, settings(frames=17))
    for number, one in enumerate(asked):
        narrow.add(one, max_tokens=20, name=str(number))
    records = narrow.run()
    assert sum(record.preemptions for record in records.values()) >= 3
    for name, record in records.items():
        assert record.tokens == expected[name].tokens
    narrow.close()


def test_cancelling_at_any_step_leaks_nothing(llama: Any) -> None:
    """Before admission, in the prompt, while generating, after the end; twice; an unknown name."""
    engine = Engine(llama, settings(frames=12, step_tokens=5))
    for steps in range(12):
        names = [engine.add(prompt(18, seed), max_tokens=6) for seed in range(3)]
        for _ in range(steps):
            engine.step()
        for name in names:
            if engine.computed(name) is not None:
                assert engine.cancel(name).finish is Finish.CANCELLED
            with pytest.raises(MisuseError):
                engine.cancel(name)
        assert engine.idle
        stats = engine.pool.stats()
        assert stats["frames_filling"] == stats["frames_held"] == 0
    engine.close()


def test_leaving_a_stream_cancels_its_request(engine: Engine) -> None:
    for _ in engine.stream(engine.add(prompt(9), max_tokens=50)):
        break
    assert engine.idle
    assert engine.pool.stats()["frames_filling"] == 0


def test_what_can_never_fit_ends_with_a_record(llama: Any) -> None:
    engine = Engine(llama, settings(frames=5))
    too_long = engine.add(prompt(21), max_tokens=1)
    outgrows = engine.add(prompt(17), max_tokens=50)
    records = engine.run()
    assert records[too_long].finish is Finish.NO_ROOM
    assert records[too_long].reused_tokens is None
    assert "21 tokens need 6 pages" in records[too_long].detail
    assert records[outgrows].finish is Finish.NO_ROOM
    # 20 slots: 17 of the prompt, and the KV of the last token of the answer is never written.
    assert len(records[outgrows].tokens) == 20 - 17 + 1
    engine.close()


def test_records_add_up_to_the_counters(llama: Any) -> None:
    """F102: sums per request equal sums per pool, preemptions and refusals included."""
    engine = Engine(llama, settings(frames=20))
    for seed in range(12):
        engine.add(prompt(5 + 3 * (seed % 5), seed % 4), max_tokens=10)
    engine.add(prompt(399), max_tokens=1)
    records = engine.run().values()
    stats = engine.pool.stats()
    reused = sum((record.reused_tokens or 0) + record.resumed_tokens for record in records)
    assert stats["tokens_reused"] == reused
    admissions = sum(
        1 + record.preemptions for record in records if record.reused_tokens is not None
    )
    assert stats["opens_ready"] == admissions
    assert stats["opens_refused"] == 1
    for record in records:
        if record.finish is Finish.LENGTH and not record.preemptions:
            computed = record.prompt_tokens - record.reused_tokens + len(record.tokens) - 1
            assert record.computed_tokens == computed
    engine.close()


def test_times_come_from_the_clock(llama: Any) -> None:
    clock = FakeClock()
    engine = Engine(llama, settings(step_tokens=4), clock=clock)
    name = engine.add(prompt(8), max_tokens=2)
    record = None
    while record is None:
        clock.advance_s(1.0)
        record = next((event.record for event in engine.step() if event.record), None)
    assert (record.wait_s, record.first_token_s, record.total_s) == (1.0, 2.0, 3.0)
    assert record.name == name
    engine.close()


def test_a_step_that_raises_counts_nothing(engine: Engine) -> None:
    expected = engine.generate(prompt(30), max_tokens=4, flags=Flags.NO_WRITE).tokens
    name = engine.add(prompt(30), max_tokens=4)
    run = engine.runner.run

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    engine.runner.run = broken
    with pytest.raises(RuntimeError, match="gone"):
        engine.step()
    engine.pool.check()
    engine.runner.run = run
    assert engine.run()[name].tokens == expected


@pytest.mark.parametrize("how", ["cancel", "close", "run", "step"])
def test_a_stream_ends_when_its_request_ends_elsewhere(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its last event may be dropped or read by another: the stream must not wait for it for ever."""
    name = engine.add(prompt(9), max_tokens=4)
    stream = engine.stream(name)
    next(stream)
    if how == "cancel":
        engine.cancel(name)
    elif how == "close":
        engine.close()
    elif how == "run":
        engine.run()
    else:
        while not engine.idle:
            engine.step()
    monkeypatch.setattr(engine, "_advance", None)  # a step more would be a call of None
    assert list(stream) == []


def test_a_name_that_comes_back_gets_nothing_of_its_former_owner(engine: Engine) -> None:
    """H4 once more: events wait for a request, not for a name."""
    expected = engine.generate(prompt(9, 1), max_tokens=6).tokens
    first, other = (
        engine.add(prompt(9), max_tokens=6, name="a"),
        engine.add(prompt(5), max_tokens=9),
    )
    old = engine.stream(first)
    next(old)
    reader = engine.stream(other)
    for _ in range(3):
        next(reader)  # leaves events of "a" unread
    engine.cancel("a")
    engine.add(prompt(9, 1), max_tokens=6, name="a")
    old.close()  # the stream of the former "a" must not cancel the new one
    tokens = tuple(event.token for event in engine.stream("a"))
    assert tokens == expected
    reader.close()


def test_a_stream_may_begin_after_its_request_has_ended(engine: Engine) -> None:
    first, second = engine.add(prompt(9), max_tokens=1), engine.add(prompt(5), max_tokens=5)
    early = engine.stream(first)
    list(engine.stream(second))
    assert [event.record is not None for event in early] == [True]
    third, fourth = engine.add(prompt(9), max_tokens=2), engine.add(prompt(5), max_tokens=5)
    list(engine.stream(fourth))
    assert len(list(engine.stream(third))) == 2
    with pytest.raises(MisuseError, match="not alive"):
        engine.stream(third)


def test_made_up_names_avoid_those_that_are_alive(engine: Engine) -> None:
    engine.add(prompt(3), max_tokens=1, name="request-1")
    assert engine.add(prompt(3), max_tokens=1) == "request-2"


def test_an_engine_that_nobody_closed_gives_its_model_back(llama: Any) -> None:
    engine = Engine(llama, settings())
    engine.generate(prompt(5), max_tokens=1)
    del engine
    gc.collect()
    with Engine(llama, settings()) as other:
        other.generate(prompt(5), max_tokens=1)
    llama(torch.tensor([prompt(5)]))


def test_cancelled_requests_are_told_nothing_more(engine: Engine) -> None:
    first, other = engine.add(prompt(9), max_tokens=6), engine.add(prompt(5), max_tokens=6)
    next(engine.stream(other))
    engine.cancel(first)
    assert first not in {event.name for event in engine.step()}


def test_an_engine_whose_pool_is_held_by_others_says_so(engine: Engine) -> None:
    space = Namespace(PAGE, model="another")
    engine.pool.open("holds", prompt(390), space)
    engine.add(prompt(30), max_tokens=1)
    with pytest.raises(MisuseError, match="none is running"):
        engine.run()
    engine.pool.close("holds")
    assert len(engine.run()) == 1


def test_what_happened_before_a_step_raised_is_not_lost(engine: Engine) -> None:
    never = engine.add(prompt(399), max_tokens=1)
    engine.add(prompt(5), max_tokens=1)
    engine.pool.limits = dataclasses.replace(engine.pool.limits, positions=300)
    run = engine.runner.run

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    engine.runner.run = broken
    with pytest.raises(RuntimeError, match="gone"):
        engine.step()
    engine.runner.run = run
    assert engine.run()[never].finish is Finish.NO_ROOM


def test_streams_can_be_read_in_turns(engine: Engine) -> None:
    """A stream's steps move everybody on; nobody's events are lost to another's reader."""
    names = [engine.add(prompt(9, seed), max_tokens=6) for seed in range(3)]
    first, second = engine.stream(names[0]), engine.stream(names[1])
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for event in first:
        tokens[event.name].append(event.token)
        other = next(second)
        tokens[other.name].append(other.token)
    records = engine.run()
    assert [len(tokens[name]) for name in names] == [6, 6, 0]
    assert len(records[names[2]].tokens) == 6


def test_a_request_that_just_fits_is_finished_even_after_preemption(llama: Any) -> None:
    """Twenty slots; the last token's KV is never written, so the twenty-first token still comes."""
    for preempted in (False, True):
        engine = Engine(llama, settings(frames=5, positions=20))
        name = engine.add(prompt(16), max_tokens=5)
        while len(engine._alive[name].tokens) < 20:
            engine.step()
        if preempted:
            engine._schedule.preempt(engine._alive[name])
        record = engine.run()[name]
        assert (record.finish, len(record.tokens)) == (Finish.LENGTH, 5)
        assert record.preemptions == preempted
        engine.close()


def test_a_closed_engine_takes_nothing(llama: Any) -> None:
    engine = Engine(llama, settings())
    engine.add(prompt(9), max_tokens=5)
    engine.close()
    engine.close()
    assert engine.idle
    with pytest.raises(MisuseError, match="closed"):
        engine.add(prompt(9))


def test_a_namespace_keeps_models_apart(llama: Any) -> None:
    space = Namespace(PAGE, model="digest of the weights")
    engine = Engine(llama, settings(), namespace=space)
    engine.generate(prompt(12), max_tokens=1)
    ready = engine.pool.open("same", prompt(12), space)
    other = engine.pool.open("other", prompt(12), Namespace(PAGE, model="another digest"))
    assert (ready.cached, other.cached) == (8, 0)
    assert other.reason is Reason.NOT_SEALED
    engine.pool.close("same")
    engine.pool.close("other")
    engine.close()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [5, 199]}, "199"),
        ({"prompt": [5, -1]}, "-1"),
        ({"prompt": [2**70]}, str(2**70)),
        ({"prompt": [1.5]}, "float64"),
        ({"prompt": [3], "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": None}, "no flat list"),
        ({"prompt": [3], "flags": "no"}, "flags are 'no'"),
        ({"prompt": [3], "name": 7}, "name is 7"),
        ({"prompt": [3], "stop": ["a"]}, "tokens have"),
    ],
)
def test_bad_requests_are_refused_with_the_value(
    engine: Engine, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        engine.add(**wrong)
    assert engine.idle


def test_a_name_can_be_alive_once_and_used_again(engine: Engine) -> None:
    engine.add(prompt(5), max_tokens=2, name="a")
    with pytest.raises(MisuseError, match="alive already"):
        engine.add(prompt(5), max_tokens=2, name="a")
    first = engine.run()["a"]
    assert engine.generate(prompt(5), max_tokens=2, name="a").tokens == first.tokens


def test_the_model_is_given_back(llama: Any) -> None:
    ids = torch.tensor([prompt(7)])
    before = llama(ids).logits
    engine = Engine(llama, settings())
    engine.generate(prompt(7), max_tokens=1)
    engine.close()
    assert torch.equal(llama(ids).logits, before)


def test_a_model_belongs_to_one_engine(llama: Any) -> None:
    llama.train()
    engine = Engine(llama, settings())
    with pytest.raises(MisuseError, match="another engine"):
        Engine(llama, settings())
    assert not llama.training
    engine.close()
    assert llama.training
    Engine(llama, settings()).close()


def test_a_namespace_of_another_page_size_is_refused(llama: Any) -> None:
    with pytest.raises(InputError, match="pages of 8"):
        Engine(llama, settings(), namespace=Namespace(8, model="m"))


def test_a_model_that_looks_ahead_is_refused(llama: Any) -> None:
    llama.config.is_causal = False
    with pytest.raises(GeometryError, match="is_causal"):
        Engine(llama, settings())


@pytest.mark.parametrize(
    "keyword",
    [
        {"position_bias": 1},
        {"sliding_window": 8},
        {"is_causal": False},
        {"output_attentions": True},
    ],
)
def test_the_hook_raises_on_keywords_that_it_does_not_implement(
    engine: Engine, keyword: dict[str, Any]
) -> None:
    layer = engine.runner.model.model.layers[1].self_attn
    forward = layer.forward

    def with_keyword(*given: Any, **more: Any) -> Any:
        return forward(*given, **more, **keyword)

    layer.forward = with_keyword
    engine.add(prompt(5), max_tokens=1)
    with pytest.raises(GeometryError, match=next(iter(keyword))):
        engine.step()
    layer.forward = forward


def test_a_layer_that_goes_around_the_hook_is_noticed(engine: Engine) -> None:
    """A model with attention of its own would otherwise answer from its own, unshared context."""
    layer = engine.runner.model.model.layers[2].self_attn
    forward = layer.forward
    layer.forward = lambda hidden_states, **_: (hidden_states, None)
    engine.add(prompt(5), max_tokens=1)
    with pytest.raises(GeometryError, match=r"layers \[2\]"):
        engine.step()
    layer.forward = forward


def test_the_model_cannot_be_called_beside_its_engine(engine: Engine) -> None:
    with pytest.raises(MisuseError, match="close the engine"):
        engine.runner.model(torch.tensor([prompt(5)]))


def test_a_mask_is_refused() -> None:
    with pytest.raises(GeometryError, match="mask"):
        attention._refuse(torch.ones(1), None, {})


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "lfm2"])
def test_the_engine_on_a_gpu_equals_itself_on_the_cpu(family: str) -> None:
    """Packed, joined and unpacked, hits and states on the device, greedy and drawn."""
    answers = []
    for device in ("cpu", "cuda"):
        engine = Engine(tiny_model(family).to(device), settings())
        for seed in (1, 4):
            engine.generate(prompt(23) + prompt(9, seed), max_tokens=8)
        for number in range(4):
            engine.add(prompt(23) + prompt(5 + number, 2), max_tokens=12, name=str(number))
        engine.add(prompt(40), max_tokens=8, sampling=Sampling(1.0, seed=3), name="drawn")
        records = engine.run()
        engine.close()
        assert records["0"].reused_tokens > 0
        answers.append({name: record.tokens for name, record in records.items()})
    assert answers[0] == answers[1]
