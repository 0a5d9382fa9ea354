"""One request of the engine, and the record of what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stepwell.cache.pool.answer import Flags
from stepwell.core.reasons import Reason


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """The model gave a stop token."""
    LENGTH = "length"
    """It has all the tokens that it asked for."""
    NO_ROOM = "no_room"
    """The prompt or its next token does not fit even into an empty pool, or past the last position."""
    CANCELLED = "cancelled"
    """Somebody cancelled it."""


@dataclass(slots=True)
class Request:
    """A request while it lives.

    Attributes:
        name: unique among those alive.
        prompt_tokens: how many of `tokens` are the prompt.
        tokens: the prompt and what was generated.
        max_tokens: how many to generate at most.
        stop: ids that end it; they are part of the answer.
        flags: what it does not want of the pool.
        arrived_s: when it was added.
        computed: of `tokens`, how many have their KV in the pool.
        room: of `tokens`, how many the pool has frames for.
        detail: what the pool said when it refused.
        served: rises with every turn in a step; the lowest was served longest ago.
    """

    name: str
    prompt_tokens: int
    tokens: list[int]
    max_tokens: int
    stop: frozenset[int]
    flags: Flags
    arrived_s: float
    computed: int = 0
    room: int = 0
    detail: str | None = None
    served: int = 0
    reused_tokens: int | None = None
    resumed_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    reason: Reason | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def generated(self) -> list[int]:
        """What the model has answered so far."""
        return self.tokens[self.prompt_tokens :]

    def record(self, finish: Finish, now_s: float) -> Record:
        """The record of a request that ends now."""

        def since(moment_s: float | None) -> float | None:
            return None if moment_s is None else moment_s - self.arrived_s

        return Record(
            self.name,
            self.prompt_tokens,
            self.reused_tokens,
            self.resumed_tokens,
            self.computed_tokens,
            self.preemptions,
            self.reason,
            tuple(self.generated),
            finish,
            self.detail,
            since(self.admitted_s),
            since(self.first_token_s),
            now_s - self.arrived_s,
        )


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a request; unknown is None, never 0.

    Attributes:
        name: of the request.
        prompt_tokens: length of the prompt.
        reused_tokens: prompt tokens that the pool had when the request first got in.
        resumed_tokens: tokens that the pool still had when it got in again after preemptions.
        computed_tokens: tokens that the model computed for it, repeats included.
        preemptions: how often it lost its frames.
        reason: why not more was reused at first.
        tokens: the answer.
        finish: why it ended.
        detail: with `Finish.NO_ROOM`, what was asked for, the limit and the remedy.
        wait_s: from arrival until it first had its frames.
        first_token_s: from arrival until the first token of the answer.
        total_s: from arrival to the end.
    """

    name: str
    prompt_tokens: int
    reused_tokens: int | None
    resumed_tokens: int
    computed_tokens: int
    preemptions: int
    reason: Reason | None
    tokens: tuple[int, ...]
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
        token: its next token, if it got one.
        record: set when this is its end.
    """

    name: str
    token: int | None
    record: Record | None = field(default=None)
