"""One request of the engine: what it wishes, how far it is, and the record of what became of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from stepwell.base.errors import InputError
from stepwell.cache.pool.answer import Flags
from stepwell.core.chain import Chain, as_tokens
from stepwell.core.reasons import Reason
from stepwell.engine.sampling import MAX_LOGPROBS, Choice, Draw, Sampling
from stepwell.engine.text import TextStream


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """The model gave a stop token, or the answer came to a stop text."""
    LENGTH = "length"
    """It has all the tokens that it asked for."""
    NO_ROOM = "no_room"
    """The prompt or its next token does not fit even into an empty pool, or past the last position."""
    CANCELLED = "cancelled"
    """Somebody cancelled it."""
    FAULT = "fault"
    """The model gave logits that are no numbers, or the answer could not be decoded."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks for besides its prompt.

    Attributes:
        max_tokens: how many to generate at most, 1 or more.
        stop: token ids that end the answer; the one that does is part of it.
        stop_texts: texts that end the answer; they are not part of its text. The engine needs `decode`.
        sampling: how tokens are chosen.
        prompt_logprobs: None for none; else the log-probability of every token of the prompt after the
            first, with so many of the most probable ones. The whole prompt is computed for it.
        priority: higher ones get in first and lose their frames last.
        flags: what it does not want of the pool.

    Raises:
        InputError: a value out of range or of another kind.
    """

    max_tokens: int = 256
    stop: Collection[int] = ()
    stop_texts: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    prompt_logprobs: int | None = None
    priority: int = 0
    flags: Flags = Flags.NONE

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens!r}", limit="1 or more")
        if type(self.priority) is not int:
            raise InputError(f"priority is {self.priority!r}", limit="a whole number")
        if not isinstance(self.flags, Flags):
            raise InputError(f"flags are {self.flags!r}", limit="stepwell.Flags")
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling is {self.sampling!r}", limit="a stepwell.Sampling")
        if not isinstance(self.stop_texts, tuple | list):
            raise InputError(f"the stop texts are {self.stop_texts!r}", limit="a tuple of texts")
        top = self.prompt_logprobs
        if top is not None and (type(top) is not int or not 0 <= top <= MAX_LOGPROBS):
            raise InputError(f"prompt_logprobs is {top!r}", limit=f"0 to {MAX_LOGPROBS}, or None")
        object.__setattr__(self, "stop", frozenset(as_tokens(self.stop).tolist()))


def wish(wishes: Wishes | None, more: Mapping[str, Any]) -> Wishes:
    """Wishes with some fields changed.

    Raises:
        InputError: no wishes, or a field that there is not; names the nearest.
    """
    if not isinstance(wishes, Wishes | None):
        raise InputError(f"wishes are {wishes!r}", limit="stepwell.Wishes, or fields by name")
    known = [one.name for one in fields(Wishes)]
    for name in more:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, 1, 0.5)
        inside = name in (one.name for one in fields(Sampling))
        remedy = f"did you mean {near[0]!r}?" if near else "leave it out"
        remedy = f"sampling=Sampling({name}=...)" if inside else remedy
        raise InputError(f"{name!r} is no wish", limit=", ".join(known), remedy=remedy)
    return replace(wishes or Wishes(), **more)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is.

    Attributes:
        name: of the request.
        computed: tokens whose KV is there, reused ones included.
        tokens: of the prompt.
    """

    name: str
    computed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class QueueBusy:
    """No: too much is waiting. Nothing was taken; try again later.

    Attributes:
        waiting: requests in the queue.
        text: what was asked for, the limit, and the setting that raises it.
    """

    waiting: int
    text: str


@dataclass(slots=True, eq=False)
class Request:
    """A request while it lives.

    Attributes:
        name: unique among those alive.
        prompt_tokens: how many of `tokens` are the prompt.
        tokens: the prompt and what was generated.
        wishes: what it asks for.
        seed: of its draws.
        number: rises with every request: the order of arrival.
        arrived_s: when it was added.
        text: the answer as text, if the engine can decode.
        leader: the request with the same prompt that is to compute it first.
        progress: told how far the prompt is, after each step that moved it.
        computed: of `tokens`, how many have their KV in the pool.
        room: of `tokens`, how many the pool has frames for.
        checkpoints: positions at which to end a step, ascending.
        detail: what the pool said when it refused, or what is wrong with the logits.
        served: rises with every turn in a step; the lowest was served longest ago.
        queued: steps that it has waited since it last got in.
        prompt_scores: log-probabilities of the prompt's tokens so far, the first of which has none.
        scores: log-probabilities of the answer's tokens, if it wants them.
        told: of its prompt, how many tokens `progress` was told of.
        chain: its tokens under the namespace that it was last opened with.
        finish: why it ended, once it has its record.
    """

    name: str
    prompt_tokens: int
    tokens: list[int]
    wishes: Wishes
    seed: int
    number: int
    arrived_s: float
    text: TextStream | None = None
    leader: Request | None = None
    progress: Callable[[Progress], None] | None = None
    computed: int = 0
    room: int = 0
    checkpoints: tuple[int, ...] = ()
    detail: str | None = None
    served: int = 0
    queued: int = 0
    reused_tokens: int | None = None
    loaded_tokens: int | None = None
    resumed_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    reason: Reason | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    prompt_scores: list[Choice] = field(default_factory=list)
    scores: list[Choice] = field(default_factory=list)
    told: int = 0
    chain: Chain | None = None
    finish: Finish | None = None

    @property
    def generated(self) -> list[int]:
        """What the model has answered so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def left(self) -> int:
        """Tokens whose KV is missing: 1 for a request that is generating."""
        return len(self.tokens) - self.computed

    @property
    def in_prompt(self) -> bool:
        """Whether more than the token that was generated last is missing."""
        return self.left > 1 or not len(self.tokens) > self.prompt_tokens

    def scores_left(self) -> bool:
        """Whether logits of prompt tokens are still wanted."""
        wanted = self.wishes.prompt_logprobs is not None
        return wanted and len(self.prompt_scores) < self.prompt_tokens - 1

    def draw(self) -> Draw:
        """What its next token depends on."""
        index = len(self.tokens) - self.prompt_tokens
        return Draw(self.wishes.sampling, self.seed, index, self.tokens)

    def accept(self, choice: Choice) -> tuple[str, Finish | None]:
        """Takes its next token.

        Returns:
            The text that can be handed out now, and why this was the last token, if it was.
        """
        self.tokens.append(choice.token)
        if self.wishes.sampling.logprobs is not None:
            self.scores.append(choice)
        if choice.token in self.wishes.stop:
            return self.finish_text(), Finish.STOP
        new = "" if self.text is None else self.text.push(choice.token)
        if self.text is not None and self.text.stopped is not None:
            return new, Finish.STOP
        if len(self.tokens) - self.prompt_tokens >= self.wishes.max_tokens:
            return new + self.finish_text(), Finish.LENGTH
        return new, None

    def tell(self, computed: int) -> None:
        """Says how far its prompt is, if somebody wants to know and it is further than before."""
        done = min(computed, self.prompt_tokens)
        gone = self.finish in (Finish.CANCELLED, Finish.FAULT)
        if self.progress is not None and done > self.told and not gone:
            self.told = done
            self.progress(Progress(self.name, done, self.prompt_tokens))

    def finish_text(self) -> str:
        """The rest of the text, when the answer ends."""
        return "" if self.text is None else self.text.finish()

    def record(self, finish: Finish, now_s: float) -> Record:
        """The record of a request that ends now."""

        def since(moment_s: float | None) -> float | None:
            return None if moment_s is None else moment_s - self.arrived_s

        return Record(
            name=self.name,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            loaded_tokens=self.loaded_tokens,
            resumed_tokens=self.resumed_tokens,
            computed_tokens=self.computed_tokens,
            preemptions=self.preemptions,
            reason=self.reason,
            tokens=tuple(self.generated),
            text=None if self.text is None else self.text.text,
            stopped=None if self.text is None else self.text.stopped,
            logprobs=tuple(self.scores),
            prompt_logprobs=tuple(self.prompt_scores),
            seed=self.seed,
            finish=finish,
            detail=self.detail,
            wait_s=since(self.admitted_s),
            first_token_s=since(self.first_token_s),
            total_s=now_s - self.arrived_s,
        )


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a request; unknown is None, never 0.

    Attributes:
        name: of the request.
        prompt_tokens: length of the prompt.
        reused_tokens: prompt tokens that the pool had when the request first got in.
        loaded_tokens: of those, the ones that came from a tier for this request.
        resumed_tokens: tokens that the pool still had when it got in again after preemptions.
        computed_tokens: tokens that the model computed for it, repeats included.
        preemptions: how often it lost its frames.
        reason: why not more was reused at first.
        tokens: the answer.
        text: the answer as text, without a stop text; None if the engine cannot decode.
        stopped: the stop text that ended it.
        logprobs: if asked for with `Sampling.logprobs`, of the answer's tokens.
        prompt_logprobs: if asked for, of the prompt's tokens from the second on.
        seed: of its draws; with the same wishes and the same logits it gives the same answer.
        finish: why it ended.
        detail: with `Finish.NO_ROOM` and `Finish.FAULT`, what was wrong, the limit and the remedy.
        wait_s: from arrival until it first had its frames.
        first_token_s: from arrival until the first token of the answer.
        total_s: from arrival to the end.
    """

    name: str
    prompt_tokens: int
    reused_tokens: int | None
    loaded_tokens: int | None
    resumed_tokens: int
    computed_tokens: int
    preemptions: int
    reason: Reason | None
    tokens: tuple[int, ...]
    text: str | None
    stopped: str | None
    logprobs: tuple[Choice, ...]
    prompt_logprobs: tuple[Choice, ...]
    seed: int
    finish: Finish
    detail: str | None
    wait_s: float | None
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did for one request.

    Attributes:
        name: of the request.
        choice: its next token, with log-probabilities if asked for; None if it got none.
        text: what of the answer's text can be handed out now.
        record: set when this is its end.
    """

    name: str
    choice: Choice | None
    text: str = ""
    record: Record | None = None

    @property
    def token(self) -> int | None:
        """Its next token, if it got one."""
        return None if self.choice is None else self.choice.token
