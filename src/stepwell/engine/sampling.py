"""The next token of each row of logits: greedy or drawn, with log-probabilities.

Owns: what a request may wish of its draws, and the draws. Must not know: requests, the pool, text. Neighbours:
`engine` resolves the seeds and says how far a request is.

    repetition penalty ▸ temperature ▸ top-k ▸ top-p ▸ min-p ▸ draw        as `generate` of transformers

Sources: top-p is "The Curious Case of Neural Text Degeneration" (Holtzman et al., 2019), the repetition penalty
CTRL (Keskar et al., 2019), min-p "Turning Up the Heat" (Nguyen et al., 2024).

Nothing is remembered between calls. A draw is a function of its row of logits, its seed and its index, so a
request with the same logits gets the same tokens in whatever batch it is, after a preemption and a restart. Weights are
whole numbers: their sums are exact in any order, and a parallel sum on a GPU draws the same token every time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stepwell.base.errors import InputError

MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 100.0
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0

_DRAW = b"stepwell draw 1"
_WEIGHT_BITS = 62


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen.

    Attributes:
        temperature: 0 takes the most probable token; the higher, the more even the draw.
        top_p: draws from the fewest most probable tokens that have this much probability together; 1 is off.
        top_k: draws from so many most probable tokens; 0 is off.
        min_p: draws from tokens that are at least this many times as probable as the best one; 0 is off.
        repetition_penalty: divides the positive logits of tokens that were there before, and multiplies the
            negative ones; 1 is off.
        seed: of its draws; None lets the engine take one.
        logprobs: None for no log-probabilities; else that of the chosen token, and so many of the most
            probable tokens.

    Raises:
        InputError: a value out of range, not finite or of another kind.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, (0, MAX_TEMPERATURE), "0 is greedy, 1 is plain")
        _number("top_p", self.top_p, (0, 1), "1 turns it off")
        _whole("top_k", self.top_k, 2**32 - 1, "0 turns it off")
        _number("min_p", self.min_p, (0, 1), "0 turns it off")
        penalty = (MIN_PENALTY, MAX_PENALTY)
        _number("repetition_penalty", self.repetition_penalty, penalty, "1 turns it off")
        if self.seed is not None:
            _whole("seed", self.seed, MAX_SEED, "leave it out, and the engine takes one")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, MAX_LOGPROBS, "leave it out for none")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without a draw."""
        return self.temperature == 0


def _number(name: str, value: object, bounds: tuple[float, float], remedy: str) -> None:
    low, high = bounds
    real = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not real:
        raise InputError(
            f"{name} is {value!r}", limit=f"a number from {low:g} to {high:g}", remedy=remedy
        )


def _whole(name: str, value: object, high: int, remedy: str) -> None:
    if type(value) is not int or not 0 <= value <= high:
        raise InputError(
            f"{name} is {value!r}", limit=f"a whole number from 0 to {high}", remedy=remedy
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and what the model thought of it.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability before penalty, temperature and filters; None unless
            asked for.
        top: ids and log-probabilities of the most probable tokens, falling, ties by id; fewer than asked for
            where fewer have a probability above 0.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draw:
    """What the next token of one row depends on, besides its logits.

    Attributes:
        sampling: the request's wish.
        seed: of the request, resolved: `sampling.seed` is not looked at.
        index: how many tokens the request was given before.
        seen: ids of prompt and answer so far, in any order; only read with a repetition penalty. Ids that
            have no logit are ignored.

    Raises:
        InputError: a seed or an index that is not a whole number from 0 to 2**64 - 1.
    """

    sampling: Sampling
    seed: int
    index: int
    seen: Sequence[int] = ()

    def __post_init__(self) -> None:
        _whole("seed", self.seed, MAX_SEED, "resolve it before the first draw")
        _whole("index", self.index, 2**64 - 1, "count the tokens of the answer")


def survey(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """The most probable token of each row, the first of equals, and whether the row can be chosen from.

    One reduction for both: NaN and +inf win every maximum, and only a row without any possible token has
    -inf for one.

    Args:
        logits: [rows, vocabulary], float32.
    """
    peaks, best = logits.max(dim=-1)
    return best.tolist(), peaks.isfinite().tolist()


def choose(
    logits: torch.Tensor, draws: Sequence[Draw], best: Sequence[int] | None = None
) -> list[Choice]:
    """Chooses the next token of every row.

    A row's choice depends on nothing of the other rows, to the last bit. Order and meaning of the filters are
    those of transformers 5, except among equals: where it keeps all tokens that are as good as the last
    one of top-k, the lower ids are kept here, and exactly `top_k`. The best token always survives.

    Args:
        logits: [rows, vocabulary], float32; -inf where a token is impossible.
        draws: one for each row.
        best: what `survey` said of these rows, if all can be chosen from; by default it is asked.

    Raises:
        InputError: shapes that do not fit, or a row with NaN, with +inf, or without any possible token.
    """
    _check_shape(logits, len(draws), "draws")
    if not draws:
        return []
    if best is None:
        best = _best_of_each(logits)
    return [
        Choice(token) if _is_plain(draw.sampling) else _choose_one(row, draw, token)
        for row, draw, token in zip(logits, draws, best, strict=True)
    ]


def prompt_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Choice]:
    """Log-probabilities of tokens that are given, as for scoring a prompt.

    Args:
        logits: [rows, vocabulary], float32: row n is what the model expected in the place of token n.
        tokens: one id for each row.
        top: how many of the most probable tokens to name with each.

    Returns:
        The tokens in order; the log-probability of an impossible one is -inf.

    Raises:
        InputError: as for `choose`, an id that has no logit, or a `top` out of range.
    """
    _check_shape(logits, len(tokens), "tokens")
    _whole("top", top, MAX_LOGPROBS, "0 names none")
    for token in tokens:
        _whole("token", token, logits.shape[1] - 1, "give ids of this model's vocabulary")
    if not len(tokens):
        return []
    _best_of_each(logits)
    return [_scored(row, token, top) for row, token in zip(logits, tokens, strict=True)]


def _check_shape(logits: torch.Tensor, rows: int, what: str) -> None:
    shape = tuple(logits.shape)
    if len(shape) != 2 or shape[0] != rows or not shape[1] or logits.dtype != torch.float32:
        raise InputError(
            f"logits are {logits.dtype} of shape {shape} for {rows} {what}",
            limit=f"torch.float32 of shape ({rows}, vocabulary)",
            remedy="give one row for each, and convert with float()",
        )


def _best_of_each(logits: torch.Tensor) -> list[int]:
    best, usable = survey(logits)
    if not all(usable):
        rows = [row for row, its in enumerate(usable) if not its]
        raise InputError(
            f"the model gave logits that are not numbers in rows {rows}",
            limit="finite numbers, and -inf for some of a row",
            remedy="check the weights and the dtype of the model",
        )
    return best


def _is_plain(sampling: Sampling) -> bool:
    return sampling.greedy and sampling.logprobs is None and sampling.repetition_penalty == 1


def _choose_one(row: torch.Tensor, draw: Draw, best: int) -> Choice:
    sampling = draw.sampling
    scores = row
    if sampling.repetition_penalty != 1:
        scores = _penalised(row, draw.seen, sampling.repetition_penalty)
    if not sampling.greedy:
        ids, weights = _candidates(scores, sampling)
        token = _drawn(ids, weights, draw)
    else:
        token = best if scores is row else int(scores.argmax())
    return Choice(token) if sampling.logprobs is None else _scored(row, token, sampling.logprobs)


def _penalised(row: torch.Tensor, seen: Sequence[int], penalty: float) -> torch.Tensor:
    """The row in float64, where no penalty overflows."""
    scores = row.double()
    ids = torch.tensor(sorted(set(seen)), dtype=torch.int64, device=row.device)
    ids = ids[(ids >= 0) & (ids < len(row))]
    met = scores[ids]
    scores[ids] = torch.where(met < 0, met * penalty, met / penalty)
    return scores


def _candidates(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that may be drawn, rising, and their weights: probabilities as whole numbers."""
    scores = scores.double()
    if 0 < sampling.top_k < len(scores):
        ids = _greatest(scores, sampling.top_k).sort().values
        scores = scores[ids]
    else:
        ids = torch.arange(len(scores), device=scores.device)
    # So many bits that the sum of all weights fits into int64, were they all as great as the best.
    scale = 2 ** (_WEIGHT_BITS - len(scores).bit_length())
    # The best becomes 0 before it is divided: no temperature overflows, and it weighs exactly `scale`.
    weights = ((scores - scores.max()) / sampling.temperature).exp().mul(scale).long()
    if sampling.top_p < 1:
        kept = _nucleus(scores, weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    if sampling.min_p > 0:
        kept = weights >= math.ceil(sampling.min_p * scale)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _nucleus(scores: torch.Tensor, weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Rising places of the fewest best tokens that have `top_p` of all weight together; at least one."""
    total = int(weights.sum())
    # Whatever weighs less than an equal share of the rest is in the rest: few are left to sort. Half of it,
    # so that rounding takes none too many.
    share = int((1 - top_p) * total / (2 * len(weights)))
    likely = (weights >= share).nonzero().flatten()
    order = likely[scores[likely].argsort(descending=True, stable=True)]
    sorted_weights = weights[order]
    before = sorted_weights.cumsum(0) - sorted_weights
    return order[before < max(1, math.ceil(top_p * total))].sort().values


def _greatest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the greatest values, falling; of equals the first ones."""
    count = min(count, len(values))
    least = values.topk(count).values[-1]
    above = (values > least).nonzero().flatten()
    equal = (values == least).nonzero().flatten()[: count - len(above)]
    places = torch.cat((above, equal))
    return places[values[places].argsort(descending=True, stable=True)]


def _drawn(ids: torch.Tensor, weights: torch.Tensor, draw: Draw) -> int:
    """The token in whose part of the whole weight the draw's number falls."""
    ends = weights.cumsum(0)
    target = _uniform(draw.seed, draw.index) * int(ends[-1]) >> 64
    place = torch.searchsorted(ends, torch.tensor(target, device=ends.device), right=True)
    return int(ids[place])


def _uniform(seed: int, index: int) -> int:
    """A whole number from 0 to 2**64 - 1 for each seed and index.

    From SHA-256, which needs no state and gives neighbouring seeds and indices nothing in common.
    """
    material = _DRAW + seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(material).digest()[:8], "little")


def _scored(row: torch.Tensor, token: int, top: int) -> Choice:
    logprobs = row.log_softmax(dim=-1)
    named: list[tuple[int, float]] = []
    if top:
        ids = _greatest(row, top)
        pairs = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
        named = [(one, logprob) for one, logprob in pairs if logprob > -math.inf]
    return Choice(token, float(logprobs[token]), tuple(named))
