"""Choosing tokens: against transformers' processors, and what a draw depends on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stepwell.base.errors import InputError
from stepwell.engine import sampling as module
from stepwell.engine.sampling import (
    MAX_SEED,
    Choice,
    Draw,
    Sampling,
    choose,
    prompt_logprobs,
)

INF = math.inf
# Few different values, so that equals are common; impossible tokens; and numbers no filter may overflow on.
VALUES = st.one_of(
    st.sampled_from([-INF, -1.0, 0.0, 0.5, 1.0, 3.0]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@st.composite
def rows(draw: Any) -> list[float]:
    row = draw(st.lists(VALUES, min_size=1, max_size=24))
    row[draw(st.integers(0, len(row) - 1))] = draw(st.floats(-1e3, 1e3, width=32))
    return row


@st.composite
def samplings(draw: Any) -> Sampling:
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2, 100.0])),
        top_p=draw(st.sampled_from([0.0, 1e-9, 0.5, 0.9, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.1, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.01, 0.5, 1.0, 1.3, 100.0])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


DRAWS = st.builds(
    Draw,
    samplings(),
    st.integers(0, MAX_SEED),
    st.integers(0, 10_000),
    st.lists(st.integers(0, 30), max_size=6),
)


def one(row: list[float] | torch.Tensor, draw: Draw) -> Choice:
    return choose(torch.as_tensor(row, dtype=torch.float32)[None], [draw])[0]


def noise(n: int, vocabulary: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(n, vocabulary, generator=made) * 4


def reference(row: torch.Tensor, sampling: Sampling, seen: list[int]) -> torch.Tensor:
    """Probabilities that `generate` would draw from."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(torch.tensor([seen]), row[None].clone())[0].softmax(dim=-1)


def probabilities(row: torch.Tensor, sampling: Sampling, seen: list[int]) -> torch.Tensor:
    scores = row
    if sampling.repetition_penalty != 1:
        scores = module._penalised(row, seen, sampling.repetition_penalty)
    ids, weights = module._candidates(scores, sampling)
    assert ids.tolist() == sorted(set(ids.tolist()))
    found = torch.zeros(len(row), dtype=torch.float64)
    found[ids] = weights.double() / int(weights.sum())
    return found


WISHES = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(3.0, top_k=1),
    Sampling(1.3, top_k=40),
    Sampling(1.0, top_p=0.9),
    Sampling(8.0, top_p=0.95),
    Sampling(1.0, top_p=1e-6),
    Sampling(2.0, min_p=0.05),
    Sampling(1.0, repetition_penalty=1.5),
    Sampling(1.0, repetition_penalty=0.6),
    Sampling(2.5, top_p=0.8, top_k=100, min_p=0.02, repetition_penalty=1.2),
]


@pytest.mark.parametrize("sampling", WISHES, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 3000])
def test_candidates_and_probabilities_equal_transformers(
    sampling: Sampling, vocabulary: int
) -> None:
    seen = [3, 1, 3, 5, 0, 6]
    for row in noise(5, vocabulary, seed=vocabulary):
        expected = reference(row, sampling, seen)
        found = probabilities(row, sampling, seen)
        # Whole numbers and float32 lose different ones of what is far too improbable to be drawn.
        least = 0 if sampling.top_k or sampling.top_p < 1 or sampling.min_p else 1e-12
        assert torch.equal(found > least, expected > least)
        torch.testing.assert_close(found, expected.double(), rtol=1e-4, atol=1e-9)


def test_greedy_with_a_penalty_equals_transformers() -> None:
    changed = 0
    for row in noise(20, 50, seed=3):
        seen = row.topk(3).indices.tolist()
        expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([seen]), row[None].clone())
        token = one(row, Draw(Sampling(repetition_penalty=2.0), 0, 0, seen)).token
        assert token == int(expected.argmax())
        changed += token != seen[0]
    assert changed > 5


def test_seen_ids_without_a_logit_are_ignored() -> None:
    draw = Draw(Sampling(repetition_penalty=2.0), 0, 0, [2, 99, -1])
    assert one([1.0, 1.5, 2.0, 1.7], draw).token == 3


def test_equals_are_decided_by_id() -> None:
    level = torch.zeros(10)
    assert one(level, Draw(Sampling(), 0, 0)).token == 0
    ids, weights = module._candidates(level, Sampling(1.0, top_k=4))
    assert ids.tolist() == [0, 1, 2, 3]
    assert len(set(weights.tolist())) == 1
    assert module._candidates(level, Sampling(1.0, top_p=0.5))[0].tolist() == [0, 1, 2, 3, 4]
    scored = one(level, Draw(Sampling(logprobs=3), 0, 0))
    assert [token for token, _ in scored.top] == [0, 1, 2]


@settings(deadline=None)
@given(rows(), st.integers(0, MAX_SEED), st.integers(0, 99))
def test_one_candidate_is_the_greedy_one(row: list[float], seed: int, index: int) -> None:
    greedy = one(row, Draw(Sampling(), 0, 0)).token
    assert greedy == row.index(max(row))
    for narrow in (Sampling(1.0, top_k=1), Sampling(2.0, top_p=0.0), Sampling(1e-300, top_k=1)):
        assert one(row, Draw(narrow, seed, index)).token == greedy


@settings(deadline=None)
@given(rows(), DRAWS)
def test_the_choice_is_a_possible_token_that_passed_the_filters(
    row: list[float], draw: Draw
) -> None:
    token = one(row, draw).token
    assert row[token] > -INF
    sampling = draw.sampling
    if not sampling.greedy:
        found = probabilities(torch.tensor(row), sampling, list(draw.seen))
        assert found[token] > 0
        assert found.sum().item() == pytest.approx(1)
        if sampling.top_k:
            assert int((found > 0).sum()) <= sampling.top_k


@settings(deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 40))
def test_a_row_does_not_feel_the_others(data: Any, count: int, vocabulary: int) -> None:
    """Alone, in a batch, in another order: the same tokens and bits."""
    row = st.lists(VALUES, min_size=vocabulary, max_size=vocabulary)
    logits = torch.tensor(data.draw(st.lists(row, min_size=count, max_size=count)))
    logits[:, -1] = 0.25
    draws = data.draw(st.lists(DRAWS, min_size=count, max_size=count))
    together = choose(logits, draws)
    assert together == [choose(logits[n : n + 1], draws[n : n + 1])[0] for n in range(count)]
    order = data.draw(st.permutations(range(count)))
    shuffled = choose(logits[list(order)], [draws[n] for n in order])
    assert shuffled == [together[n] for n in order]


def test_a_row_does_not_feel_the_others_in_a_wide_batch() -> None:
    logits = noise(12, 4099, seed=8)
    wishes = [*WISHES, Sampling()]
    draws = [Draw(wish, 7 + n, n, range(50)) for n, wish in enumerate(wishes)]
    wanted = [Sampling(**{**_fields(draw.sampling), "logprobs": 20}) for draw in draws]
    draws += [Draw(wish, 7 + n, n, range(50)) for n, wish in enumerate(wanted)]
    logits = torch.cat((logits, logits))
    together = choose(logits, draws)
    assert together == [one(row, draw) for row, draw in zip(logits, draws, strict=True)]
    half = len(wishes)
    assert [c.token for c in together[:half]] == [c.token for c in together[half:]]


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__slots__}


def test_a_draw_is_repeated_by_seed_and_index_alone() -> None:
    row = torch.zeros(1000)

    def tokens(seed: int, first: int = 0, last: int = 40) -> list[int]:
        return [one(row, Draw(Sampling(1.0), seed, n)).token for n in range(first, last)]

    for seed in (0, 1, 2**63, MAX_SEED):
        assert tokens(seed) == tokens(seed)
        # A request that goes on after a restart draws what it would have drawn.
        assert tokens(seed)[17:] == tokens(seed, 17)
        assert len(set(tokens(seed))) > 30
    assert len({tuple(tokens(seed)) for seed in range(50)}) == 50
    # Neighbours have nothing in common: a seed's second draw is not the next seed's first.
    assert all(tokens(seed)[1:9] != tokens(seed + 1)[:8] for seed in range(20))


def test_numbers_of_draws_never_change() -> None:
    """Answers of old seeds come back after an update; the numbers are from the program `sha256sum`."""
    assert module._uniform(0, 0) == int.from_bytes(bytes.fromhex("9cf9b8aeca471dea"), "little")
    assert module._uniform(MAX_SEED, 12) == int.from_bytes(
        bytes.fromhex("14bfa17241da57b1"), "little"
    )


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -INF, -1.0, -2.0])
    n = 3000
    for sampling in (
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.5, top_k=4),
        Sampling(1.0, min_p=0.1),
    ):
        expected = n * reference(logits, sampling, [0]).double()
        draws = [Draw(sampling, seed, index) for seed in range(60) for index in range(n // 60)]
        tokens = [choice.token for choice in choose(logits.expand(n, -1), draws)]
        counts = torch.bincount(torch.tensor(tokens), minlength=len(logits)).double()
        possible = expected > 0
        assert int(counts[~possible].sum()) == 0
        distance = float(((counts - expected) ** 2 / expected)[possible].sum())
        # Chi-square with at most 4 degrees of freedom is beyond 18.5 once in a thousand times.
        assert distance < 18.5, sampling


def test_the_whole_range_of_a_number_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    row = [0.0, -INF, 0.0, -INF]
    for number, token in ((0, 0), (2**63 - 1, 0), (2**63, 2), (2**64 - 1, 2)):
        monkeypatch.setattr(module, "_uniform", lambda *_, number=number: number)
        assert one(row, Draw(Sampling(1.0), 0, 0)).token == token


def test_logprobs_are_those_of_the_model_whatever_is_drawn() -> None:
    logits = noise(6, 300, seed=4)
    expected = torch.log_softmax(logits, dim=-1)
    harsh = Sampling(5.0, top_k=9, repetition_penalty=3.0, logprobs=4)
    for sampling in (Sampling(logprobs=4), harsh):
        choices = choose(logits, [Draw(sampling, 5, n, range(300)) for n in range(6)])
        for row, choice in zip(expected, choices, strict=True):
            assert choice.logprob == pytest.approx(float(row[choice.token]), rel=1e-5)
            values, ids = row.topk(4)
            assert [token for token, _ in choice.top] == ids.tolist()
            assert [logprob for _, logprob in choice.top] == pytest.approx(values.tolist())
    bare = one(logits[0], Draw(Sampling(logprobs=0), 0, 0))
    assert bare.top == ()
    assert bare.logprob is not None
    assert one(logits[0], Draw(Sampling(), 0, 0)) == Choice(int(logits[0].argmax()))


def test_impossible_tokens_are_not_named() -> None:
    choice = one([-INF, 1.0, -INF, 0.0], Draw(Sampling(logprobs=20), 0, 0))
    assert [token for token, _ in choice.top] == [1, 3]
    assert sum(math.exp(logprob) for _, logprob in choice.top) == pytest.approx(1)


def test_prompt_logprobs() -> None:
    logits = noise(5, 40, seed=6)
    logits[2, 7] = -INF
    tokens = [0, 39, 7, 7, 1]
    scored = prompt_logprobs(logits, tokens, 2)
    expected = torch.log_softmax(logits, dim=-1)
    assert [choice.token for choice in scored] == tokens
    assert scored[2].logprob == -INF
    for row, choice in zip(expected, scored, strict=True):
        assert choice.logprob == pytest.approx(float(row[choice.token]), rel=1e-5)
        assert [token for token, _ in choice.top] == row.topk(2).indices.tolist()
    assert prompt_logprobs(logits, tokens, 0)[1] == Choice(39, scored[1].logprob)
    assert prompt_logprobs(logits[:0], [], 3) == []
    for bad in ([0, 1, 2, 3, 40], [0, 1, 2, 3, -1], [0, 1, 2, 3, True]):
        with pytest.raises(InputError, match="0 to 39"):
            prompt_logprobs(logits, bad, 2)
    with pytest.raises(InputError, match="0 to 20"):
        prompt_logprobs(logits, tokens, 21)
    with pytest.raises(InputError, match="not numbers"):
        prompt_logprobs(torch.full((1, 4), math.nan), [0], 1)


@pytest.mark.parametrize("wrong", [math.nan, INF])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.5)])
def test_logits_that_are_not_numbers_name_their_rows(sampling: Sampling, wrong: float) -> None:
    logits = torch.zeros(4, 9)
    logits[1, 5] = wrong
    logits[3] = -INF
    with pytest.raises(InputError, match=r"not numbers in rows \[1, 3\].*remedy"):
        choose(logits, [Draw(sampling, 0, 0)] * 4)


def test_shapes_that_do_not_fit() -> None:
    draw = Draw(Sampling(), 0, 0)
    assert choose(torch.zeros(0, 5), []) == []
    for logits in (torch.zeros(5), torch.zeros(2, 5), torch.zeros(1, 0), torch.zeros(1, 5).half()):
        with pytest.raises(InputError, match=r"for 1 draws; allowed: torch\.float32 of shape \(1,"):
            choose(logits, [draw])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 100.1, math.nan, INF, True, "1", None, 10**400]),
        ("top_p", [-0.1, 1.1, math.nan, INF, True, "1", None]),
        ("min_p", [-0.1, 1.1, math.nan, -INF, False, "1", None]),
        ("repetition_penalty", [0, -1.0, 100.1, math.nan, INF, True, "1", None]),
        ("top_k", [-1, 2**32, 1.0, True, "1", None]),
        ("seed", [-1, 2**64, 1.0, True, "1"]),
        ("logprobs", [-1, 21, 1.0, True, "1"]),
    ],
)
def test_bad_wishes(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InputError, match=rf"^{name} is .*; allowed: .*; remedy: "):
            Sampling(**{name: value})


def test_good_wishes() -> None:
    assert Sampling().greedy
    assert Sampling(0).greedy
    assert not Sampling(1e-9).greedy
    assert Sampling(1, 1, 0, 0, 2, MAX_SEED, 20).seed == MAX_SEED
    for seed, index in ((-1, 0), (2**64, 0), (True, 0), (0, -1), (0, 1.0)):
        with pytest.raises(InputError):
            Draw(Sampling(), seed, index)
