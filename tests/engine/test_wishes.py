"""What a request may wish for: draws, ends, log-probabilities, samples, priorities, progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepwell.base.errors import InputError, MisuseError
from stepwell.base.settings import EngineSettings, PoolSettings, Settings
from stepwell.cache.pool import Flags
from stepwell.cache.pool.limits import Limits
from stepwell.cli.demo_model import model_folder
from stepwell.core.geometry import Geometry
from stepwell.core.reasons import Reason
from stepwell.engine.engine import Engine
from stepwell.engine.request import Finish, Progress, QueueBusy, Wishes
from stepwell.engine.sampling import Sampling
from stepwell.testing.clock import FakeClock
from stepwell.testing.families import VOCABULARY, tiny_model

PAGE = 4


def engine_over(model: Any, frames: int = 200, **changes: Any) -> Engine:
    geometry = Geometry.from_hf_config(model.config, str(model.dtype).removeprefix("torch."))
    decode = changes.pop("decode", None)
    debug = changes.pop("debug", False)
    one = PoolSettings(PAGE, 1 << 32, requests=16, positions=500, debug=debug)
    frame_bytes = Limits.of(geometry, one).frame_bytes
    pool = dataclasses.replace(one, capacity_bytes=frames * frame_bytes)
    limits = EngineSettings(**({"step_tokens": 64, "batch_requests": 8} | changes))
    return Engine(model, Settings(pool=pool, engine=limits), clock=FakeClock(), decode=decode)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=random).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with engine_over(model) as made:
        yield made


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """What transformers itself says; the engine must be closed."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


# Draws

SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.3, top_k=20),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=0.7, repetition_penalty=1.4, top_p=0.95, top_k=50),
    Sampling(repetition_penalty=1.3),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_seed_gives_the_same_answer_whatever_happens_around_it(
    model: Any, sampling: Sampling
) -> None:
    wishes = Wishes(20, sampling=dataclasses.replace(sampling, seed=11))
    with engine_over(model) as engine:
        alone = engine.generate(prompt(13), wishes)
        hit = engine.generate(prompt(13), wishes)
        assert hit.reused_tokens == 12
        for seed in range(1, 6):
            engine.add(prompt(9, seed), wishes)
        crowd = engine.generate(prompt(13), wishes)
        engine.run()
    with engine_over(model, frames=17) as narrow:
        for seed in range(1, 3):
            narrow.add(prompt(12, seed), wishes)
        name = narrow.add(prompt(13), wishes)
        preempted = narrow.run()[name]
    assert preempted.preemptions > 0
    assert len(alone.tokens) == 20
    assert alone.tokens == hit.tokens == crowd.tokens == preempted.tokens


def test_other_seeds_give_other_answers(engine: Engine) -> None:
    answers = {
        engine.generate(
            prompt(9), sampling=Sampling(temperature=1.0, seed=seed), max_tokens=8
        ).tokens
        for seed in range(6)
    }
    assert len(answers) == 6


def test_a_made_up_seed_is_told_and_gives_the_answer_again(engine: Engine) -> None:
    records = [
        engine.generate(prompt(9), sampling=Sampling(temperature=1.0), max_tokens=12)
        for _ in range(3)
    ]
    assert len({record.seed for record in records}) == 3
    for record in records:
        wish = Sampling(temperature=1.0, seed=record.seed)
        again = engine.generate(prompt(9), sampling=wish, max_tokens=12)
        assert (again.tokens, again.seed) == (record.tokens, record.seed)


def test_a_wish_can_be_changed_for_one_request(engine: Engine) -> None:
    wishes = Wishes(max_tokens=7, priority=3)
    assert len(engine.generate(prompt(5), wishes, max_tokens=2).tokens) == 2
    assert len(engine.generate(prompt(5), wishes).tokens) == 7


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": True}, "max_tokens is True"),
        ({"priority": 0.5}, "priority is 0.5"),
        ({"sampling": 3}, "sampling is 3"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"flags": 0}, "flags are 0"),
    ],
)
def test_wishes_out_of_range_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Wishes(**wrong)


# Ends


def test_a_stop_id_ends_a_drawn_answer_and_its_text_is_without_it(model: Any) -> None:
    with engine_over(model, decode=spelled) as engine:
        wish = Sampling(temperature=1.0, seed=3)
        whole = engine.generate(prompt(9), sampling=wish, max_tokens=9)
        token = whole.tokens[4]
        cut = whole.tokens.index(token)
        events = list(
            engine.stream(engine.add(prompt(9), sampling=wish, max_tokens=9, stop=[token]))
        )
        record = events[-1].record
    assert record.finish is Finish.STOP
    assert record.stopped is None
    assert record.tokens == whole.tokens[: cut + 1]
    assert record.text == "".join(event.text for event in events) == spelled(whole.tokens[:cut])


def spelled(tokens: Any) -> str:
    """Three characters a token."""
    return "".join(f"{token:03}" for token in tokens)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 3), (1, 8), (4, 6), (5, 13), (29, 30)])
def test_a_stop_text_ends_the_answer_wherever_the_borders_of_tokens_are(
    model: Any, first: int, last: int
) -> None:
    with engine_over(model, decode=spelled) as engine:
        whole = engine.generate(prompt(9), max_tokens=10)
        assert whole.text == spelled(whole.tokens)
        stop = whole.text[first:last]
        place = whole.text.find(stop)
        wishes = Wishes(max_tokens=10, stop_texts=("never", stop))
        events = list(engine.stream(engine.add(prompt(9), wishes)))
        record = events[-1].record
    assert record.finish is Finish.STOP
    assert record.stopped == stop
    assert record.text == whole.text[:place]
    assert "".join(event.text for event in events) == record.text
    # The token that completes the stop text is the last one.
    assert len(record.tokens) == -(-(place + len(stop)) // 3)


def test_what_could_have_become_a_stop_text_comes_at_the_end(model: Any) -> None:
    with engine_over(model, decode=spelled) as engine:
        whole = engine.generate(prompt(9), max_tokens=5)
        wishes = Wishes(max_tokens=5, stop_texts=(whole.text[-4:] + "no",))
        events = list(engine.stream(engine.add(prompt(9), wishes)))
    assert events[-1].text.endswith(whole.text[-4:])
    assert "".join(event.text for event in events) == events[-1].record.text == whole.text
    assert events[-1].record.finish is Finish.LENGTH


def test_the_texts_of_a_real_tokenizer_never_contain_the_stop_text(smollm2: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder(Settings())))

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    asked = tokenizer("The capital of France is Paris. The capital of Japan is").input_ids
    with engine_over(smollm2, decode=decode) as engine:
        whole = engine.generate(asked, max_tokens=20).text
        assert len(whole) > 30
        stops = [whole[at : at + size] for at, size in ((1, 1), (3, 5), (9, 2), (14, 7), (25, 4))]
        streamed: dict[str, str] = {}
        records = {}
        for number, stop in enumerate(stops):
            engine.add(asked, max_tokens=20, stop_texts=(stop,), name=str(number))
        while not engine.idle:
            for event in engine.step():
                streamed[event.name] = streamed.get(event.name, "") + event.text
                if event.record is not None:
                    records[event.name] = event.record
    for number, stop in enumerate(stops):
        record = records[str(number)]
        assert record.text == streamed[str(number)] == whole[: whole.find(stop)]
        assert stop not in record.text
        assert (record.stopped, record.finish) == (stop, Finish.STOP)


def test_stop_texts_without_a_decoder_are_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="cannot decode"):
        engine.add(prompt(5), stop_texts=("a",))
    assert engine.idle
    assert engine.generate(prompt(5), max_tokens=2).text is None


def test_a_wrong_stop_text_is_refused_and_nothing_taken(model: Any) -> None:
    with engine_over(model, decode=spelled) as engine:
        for wrong in (("",), "abc", (3,)):
            with pytest.raises(InputError, match="stop texts"):
                engine.add_samples(prompt(5), 2, stop_texts=wrong)
        assert engine.idle


def test_max_tokens_is_exact(engine: Engine) -> None:
    for count in (1, 2, 7):
        record = engine.generate(prompt(5), max_tokens=count)
        assert (len(record.tokens), record.finish) == (count, Finish.LENGTH)


# Log-probabilities


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=5, seed=4)])
def test_logprobs_are_those_of_transformers(model: Any, sampling: Sampling) -> None:
    wish = dataclasses.replace(sampling, logprobs=3)
    with engine_over(model) as engine:
        events = list(engine.stream(engine.add(prompt(11), sampling=wish, max_tokens=9)))
    record = events[-1].record
    truth = logits_of(model, prompt(11) + list(record.tokens)).log_softmax(-1)
    for number, event in enumerate(events):
        row = truth[10 + number]
        assert event.choice.logprob == pytest.approx(float(row[event.token]), abs=1e-4)
        best = row.topk(3)
        assert [token for token, _ in event.choice.top] == best.indices.tolist()
        assert [one for _, one in event.choice.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def check_prompt_logprobs(model: Any, asked: list[int], record: Any, top: int) -> None:
    truth = logits_of(model, asked).log_softmax(-1)
    assert [choice.token for choice in record.prompt_logprobs] == asked[1:]
    for place, choice in enumerate(record.prompt_logprobs):
        row = truth[place]
        assert choice.logprob == pytest.approx(float(row[choice.token]), abs=2e-4)
        assert len(choice.top) == top
        if top:
            assert choice.top[0][0] == int(row.argmax())


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
@pytest.mark.parametrize("length", [1, 2, 43, 300])
def test_prompt_logprobs_are_those_of_transformers(family: str, length: int) -> None:
    """Longer than the 256 tokens whose logits fit into one step, and although the prompt is cached."""
    model = tiny_model(family)
    with engine_over(model, frames=400, step_tokens=400) as engine:
        engine.generate(prompt(length), max_tokens=1)
        expected = engine.generate(prompt(length), max_tokens=6)
        record = engine.generate(prompt(length), max_tokens=6, prompt_logprobs=2)
    assert record.tokens == expected.tokens
    assert record.reused_tokens == 0
    if length > 1:
        assert expected.reused_tokens > 0 or length < PAGE
        assert record.reason is Reason.NEEDS_LOGITS
    check_prompt_logprobs(model, prompt(length), record, 2)


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
def test_prompt_logprobs_survive_a_preemption_in_the_middle(family: str) -> None:
    model = tiny_model(family)
    with engine_over(model, frames=300, step_tokens=10) as engine:
        name = engine.add(prompt(43), max_tokens=6, prompt_logprobs=0)
        request = engine._alive[name]
        for steps in (2, 3, 6, 3):
            for _ in range(steps):
                engine.step()
            assert request in engine._schedule.running
            engine._schedule.preempt(request)
        record = engine.run()[name]
    assert record.preemptions == 4
    check_prompt_logprobs(model, prompt(43), record, 0)


def test_several_wish_for_prompt_logprobs_in_one_step(model: Any) -> None:
    with engine_over(model, step_tokens=30) as engine:
        asked = [prompt(5 + 9 * number, number % 3) for number in range(5)]
        for number, one in enumerate(asked):
            wishes = {} if number == 2 else {"prompt_logprobs": number}
            engine.add(one, max_tokens=4, name=str(number), **wishes)
        records = engine.run()
    assert records["2"].prompt_logprobs == ()
    for number in (0, 1, 3, 4):
        check_prompt_logprobs(model, asked[number], records[str(number)], number)


# Samples


def test_samples_compute_their_prompt_once(engine: Engine) -> None:
    names = engine.add_samples(
        prompt(42), 4, max_tokens=6, sampling=Sampling(temperature=1.0, seed=8)
    )
    first_pages = set()
    events = []
    while not engine.idle:
        events += engine.step()
        held = engine.pool._held
        if len(held.requests) == 4:
            rows = [held.requests[name].row for name in names]
            first_pages |= {tuple(held.table.frames(row, 0, 10).tolist()) for row in rows}
    records = {event.name: event.record for event in events if event.record}
    assert len(first_pages) == 1
    # All but the last token of 42 is reused by three of them, up to a page.
    assert sum(one.computed_tokens for one in records.values()) == 42 + 3 * 2 + 4 * 5
    assert [records[name].reused_tokens for name in names] == [0, 40, 40, 40]
    assert [records[name].seed for name in names] == [8, 9, 10, 11]
    assert len({record.tokens for record in records.values()}) == 4
    for name in names:
        wish = Sampling(temperature=1.0, seed=records[name].seed)
        again = engine.generate(prompt(42), max_tokens=6, sampling=wish)
        assert again.tokens == records[name].tokens


def test_made_up_seeds_of_samples_differ_and_wrap_around(engine: Engine) -> None:
    engine.add_samples(prompt(9), 3, max_tokens=1, sampling=Sampling(temperature=1.0))
    assert len({record.seed for record in engine.run().values()}) == 3
    last = Sampling(temperature=1.0, seed=2**64 - 1)
    engine.add_samples(prompt(9), 2, max_tokens=1, sampling=last)
    assert {record.seed for record in engine.run().values()} == {2**64 - 1, 0}


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "2"])
def test_a_wrong_number_of_samples_is_refused(engine: Engine, wrong: Any) -> None:
    with pytest.raises(InputError, match="samples were asked for"):
        engine.add_samples(prompt(5), wrong)


def test_a_full_queue_takes_nothing(model: Any) -> None:
    with engine_over(model, queue_requests=3) as engine:
        busy = engine.add_samples(prompt(9), 4)
        assert isinstance(busy, QueueBusy)
        assert busy.waiting == 0
        assert engine.idle
        names = engine.add_samples(prompt(9), 3, max_tokens=2)
        busy = engine.add(prompt(5), max_tokens=1)
        assert isinstance(busy, QueueBusy)
        assert "1 more would wait behind 3; allowed: 3" in busy.text
        assert set(engine._alive) == set(names)
        with pytest.raises(MisuseError, match="was not taken"):
            engine.stream(busy)
        with pytest.raises(MisuseError, match="was not taken"):
            engine.generate(prompt(5))
        engine.step()
        assert isinstance(engine.add(prompt(5), max_tokens=1), str)  # the leader has left the queue
        assert len(engine.run()) == 4


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_cancelling_the_leader_lets_the_others_go_on(model: Any, steps: int) -> None:
    with engine_over(model, step_tokens=16) as engine:
        expected = engine.generate(prompt(40), max_tokens=5, flags=Flags.NO_WRITE).tokens
        names = engine.add_samples(prompt(40), 4, max_tokens=5)
        for _ in range(steps):
            engine.step()
        engine.cancel(names[0])
        records = engine.run()
    assert [records[name].tokens for name in names[1:]] == [expected] * 3
    # Whatever the leader had not done was done once.
    assert sum(records[name].computed_tokens for name in names[1:]) <= 40 + 2 * 4 + 3 * 4


def test_samples_whose_prompt_can_never_fit_all_end(model: Any) -> None:
    with engine_over(model, frames=5) as engine:
        names = engine.add_samples(prompt(30), 3, max_tokens=5)
        records = engine.run()
        assert [records[name].finish for name in names] == [Finish.NO_ROOM] * 3


def test_samples_with_a_leader_that_loses_its_frames(model: Any) -> None:
    with engine_over(model, frames=16, step_tokens=8) as engine:
        important = engine.add(prompt(20, 1), max_tokens=30, priority=1)
        names = engine.add_samples(prompt(30), 3, max_tokens=8)
        records = engine.run()
    assert records[important].finish is Finish.LENGTH
    assert records[names[0]].preemptions > 0
    assert len({records[name].tokens for name in names}) == 1
    assert all(records[name].finish is Finish.LENGTH for name in names)


# Priorities


def test_an_important_request_overtakes_those_that_wait(model: Any) -> None:
    with engine_over(model, batch_requests=1) as engine:
        for name, priority in (("a", 0), ("b", 0), ("c", 5)):
            engine.add(prompt(9), max_tokens=3, name=name, priority=priority)
        order = [event.name for _ in range(9) for event in engine.step()]
    assert order == [*"ccc", *"aaa", *"bbb"]


# Progress


def test_progress_rises_to_the_length_of_the_prompt(model: Any) -> None:
    heard: list[Progress] = []
    with engine_over(model, step_tokens=10) as engine:
        engine.add(prompt(37), max_tokens=3, name="a", progress=heard.append)
        engine.run()
        assert [one.computed for one in heard] == [10, 20, 30, 37]
        assert {(one.name, one.tokens) for one in heard} == {("a", 37)}
        heard.clear()
        engine.add(prompt(37), max_tokens=3, name="a", progress=heard.append)
        engine.run()
        assert [one.computed for one in heard] == [37]


def test_progress_comes_to_its_end_although_the_answer_is_one_token(model: Any) -> None:
    heard: list[Progress] = []
    with engine_over(model, step_tokens=30) as engine:
        engine.add(prompt(37), max_tokens=1, progress=heard.append)
        engine.run()
    assert [one.computed for one in heard] == [30, 37]


def test_progress_never_falls_back(model: Any) -> None:
    """What is computed again after a preemption is no progress."""
    heard: list[int] = []
    with engine_over(model, step_tokens=10) as engine:
        name = engine.add(
            prompt(37),
            max_tokens=6,
            flags=Flags.NO_READ,
            progress=lambda one: heard.append(one.computed),
        )
        for steps in (2, 6, 3):
            for _ in range(steps):
                engine.step()
            engine._schedule.preempt(engine._alive[name])
        engine.run()
    assert heard == [10, 20, 30, 37]


def test_a_progress_callback_that_raises_harms_nobody(model: Any) -> None:
    heard: list[int] = []

    def broken(one: Progress) -> None:
        raise RuntimeError(f"the line is closed at {one.computed}")

    with engine_over(model, step_tokens=100) as engine:
        expected = engine.generate(prompt(20), max_tokens=4).tokens
        engine.pool.drop(prompt(4), engine._schedule.namespace)
        engine.add(prompt(20), max_tokens=4, name="a", progress=broken)
        engine.add(
            prompt(20), max_tokens=1, name="b", progress=lambda one: heard.append(one.computed)
        )
        with pytest.raises(RuntimeError, match="closed at 20"):
            engine.step()
        assert heard == [20]  # the next in line was told
        engine.pool.check()
        first = engine.step()  # the step counted: its events are here
        assert [event.name for event in first] == ["a", "b", "a"]
        records = engine.run() | {event.name: event.record for event in first if event.record}
    assert records["a"].tokens == expected
    assert records["b"].tokens == expected[:1]
    assert records["a"].computed_tokens == 20 + 3


def test_a_wish_that_there_is_not_names_the_nearest() -> None:
    with engine_over(tiny_model("llama")) as engine:
        for more, named in (
            ({"max_token": 3}, "max_tokens"),
            ({"temperature": 0.5}, r"sampling=Sampling\(temperature=...\)"),
        ):
            with pytest.raises(InputError, match=named):
                engine.add(prompt(3), **more)
        with pytest.raises(InputError, match="wishes are 5"):
            engine.add(prompt(3), 5)


def test_the_record_has_the_logprobs_of_the_answer() -> None:
    with engine_over(tiny_model("llama")) as engine:
        record = engine.generate(prompt(9), max_tokens=5, sampling=Sampling(1.0, logprobs=2))
        plain = engine.generate(prompt(9), max_tokens=5)
    assert tuple(choice.token for choice in record.logprobs) == record.tokens
    assert all(choice.logprob <= 0 and len(choice.top) == 2 for choice in record.logprobs)
    assert plain.logprobs == ()


def test_what_is_no_engine_is_refused_with_a_sentence() -> None:
    model = tiny_model("llama")
    for wrong, settings, named in (
        (model, PoolSettings(), "settings are a PoolSettings"),
        (model.model, None, "LlamaModel, which has no language head"),
        ("gpt2", None, "a str, which has no language head"),
    ):
        with pytest.raises(InputError, match=named):
            Engine(wrong, settings)
