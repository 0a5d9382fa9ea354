"""Continuous batching of a Hugging Face decoder over `PagePool`.

Owns: the loop of steps. Must not know: HTTP, tokenizers. Neighbours: `schedule` says who computes what,
`runner` computes it, the pool keeps what was computed.

The way of a step:  next_batch ▸ bind ▸ run ▸ commit ▸ next token of those that reached their end
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.errors import InputError, MisuseError
from stepwell.base.settings import PoolSettings, Settings
from stepwell.cache.pool import Flags, PagePool
from stepwell.core.chain import as_tokens
from stepwell.core.geometry import Geometry
from stepwell.core.key import Namespace
from stepwell.engine.request import Event, Finish, Record, Request
from stepwell.engine.runner import Runner
from stepwell.engine.schedule import Schedule


class Engine:
    """Answers requests with one model, many at a time, greedily; reuses every prefix it has computed.

    A request enters with `add`, gets at most one token a step, and leaves with its record: when it
    stops, has its tokens, is cancelled, or can never fit. Steps mix prompts and generation. If the model
    raises, none of the step's tokens counts and the requests are as before it. Not thread-safe: one thread adds,
    steps and cancels.

    Args:
        model: a causal language model of transformers with plain attention in every layer; until
            `close`, its attention belongs to the engine.
        settings: sizes of pool and steps; positions are cut to what the model was made for.
        namespace: with the model's digest; by default one that no other process shares.
        clock: for the times in the records.

    Raises:
        GeometryError: a kind of layer that is not understood yet.
        InputError: a namespace with pages of another size than the pool's.
        MisuseError: another engine has the model.
    """

    def __init__(
        self,
        model: Any,
        settings: Settings | None = None,
        *,
        namespace: Namespace | None = None,
        clock: Clock | None = None,
    ) -> None:
        settings = settings or Settings()
        dtype = str(model.dtype).removeprefix("torch.")
        self.geometry = Geometry.from_hf_config(model.config, dtype)
        self.vocabulary = int(model.config.vocab_size)
        chosen = settings.pool
        positions = min(chosen.positions, int(model.config.max_position_embeddings))
        sizes = PoolSettings(
            chosen.page_tokens, chosen.capacity_bytes, chosen.requests, positions, chosen.debug
        )
        if namespace is None:
            namespace = Namespace.private(chosen.page_tokens, facts=self.geometry.facts)
        if not isinstance(namespace, Namespace):
            raise InputError(f"namespace is {namespace!r}", limit="a stepwell.Namespace")
        if namespace.page_tokens != chosen.page_tokens:
            raise InputError(
                f"the namespace has pages of {namespace.page_tokens} tokens",
                limit=f"{chosen.page_tokens}, as pool.page_tokens",
            )
        self.pool = PagePool(self.geometry, sizes, device=str(model.device))
        self.runner = Runner(model)
        self._clock = clock or SystemClock()
        self._schedule = Schedule(self.pool, namespace, settings.engine, self._clock)
        self._alive: dict[str, Request] = {}
        # What happened and nobody has been told yet, by request and not by name: a name may come back.
        self._inbox: list[tuple[Request, Event]] = []
        self._closed = False
        self._count = 0

    @property
    def idle(self) -> bool:
        """Whether no request is alive."""
        return not self._alive

    def add(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = 256,
        stop: Iterable[int] = (),
        flags: Flags = Flags.NONE,
        name: str | None = None,
    ) -> str:
        """Takes a request; it starts with a later step.

        Args:
            prompt: token ids.
            max_tokens: how many to generate at most, 1 or more.
            stop: token ids that end the answer.
            flags: what the request does not want of the pool.
            name: unique among those alive; made up by default.

        Returns:
            Its name.

        Raises:
            InputError: an empty prompt, an id that the model does not have, `max_tokens` below 1, flags
                or a name of another kind.
            MisuseError: the name is alive already, or the engine is closed.
        """
        if self._closed:
            raise MisuseError("the engine is closed", remedy="make another one over the model")
        tokens = as_tokens(prompt)
        if not len(tokens):
            raise InputError("the prompt is empty", limit="at least one token")
        if int(tokens.max()) >= self.vocabulary:
            raise InputError(
                f"token {int(tokens.argmax())} is {int(tokens.max())}",
                limit=f"0 to {self.vocabulary - 1}, the vocabulary of this model",
            )
        if type(max_tokens) is not int or max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens!r}", limit="1 or more")
        if not isinstance(flags, Flags):
            raise InputError(f"flags are {flags!r}", limit="stepwell.Flags")
        if not isinstance(name, str | None):
            raise InputError(f"name is {name!r}", limit="a text")
        made_up = name is None
        while name is None or (made_up and name in self._alive):
            self._count += 1
            name = f"request-{self._count}"
        if name in self._alive:
            raise MisuseError(f"request {name!r} is alive already", remedy="use another name")
        request = Request(
            name,
            len(tokens),
            tokens.tolist(),
            max_tokens,
            frozenset(as_tokens(stop).tolist()),
            flags,
            self._clock.now_s(),
        )
        self._alive[name] = request
        self._schedule.waiting.append(request)
        return name

    def cancel(self, name: str) -> Record:
        """Ends a request between two steps, wherever it is; what it was not told yet is dropped.

        Raises:
            MisuseError: no such request is alive.
        """
        request = self._alive.get(name)
        if request is None:
            raise MisuseError(f"request {name!r} is not alive", remedy="it may have ended already")
        if request in self._schedule.running:
            self._schedule.leave(request)
        else:
            self._schedule.waiting.remove(request)
        self._inbox = [(whose, event) for whose, event in self._inbox if whose is not request]
        return self._end(request, Finish.CANCELLED)

    def computed(self, name: str) -> int | None:
        """Tokens of a request whose KV is there, for showing progress; None when it is not alive."""
        request = self._alive.get(name)
        return None if request is None else request.computed

    def step(self) -> list[Event]:
        """Computes one step.

        Returns:
            What happened since the last call, steps of `stream` for other requests included; empty when
            there is nothing to do.
        """
        self._advance()
        inbox, self._inbox = self._inbox, []
        return [event for _, event in inbox]

    def _advance(self) -> bool:
        """Computes one step into the inbox; False when nobody could move on."""
        batch = self._schedule.next_batch()
        refused = self._schedule.take_refused()
        for request, why in refused:
            self._inbox.append((request, Event(request.name, None, self._end(request, why))))
        if not batch:
            return bool(refused)
        view = self.pool.bind({request.name: count for request, count in batch})
        tokens: list[int] = []
        keep: list[int] = []
        for request, count in batch:
            tokens += request.tokens[request.computed : request.computed + count]
            if request.computed + count == len(request.tokens):
                keep.append(len(tokens) - 1)
        logits = self.runner.run(view, tokens, keep)
        chosen = iter(torch.argmax(logits, dim=-1).tolist())
        for request, count in batch:
            end = request.computed + count
            self.pool.commit(request.name, request.tokens[request.computed : end])
            request.computed = end
            request.computed_tokens += count
        for request, _ in batch:
            if request.computed == len(request.tokens):
                self._inbox.append((request, self._accept(request, next(chosen))))
        return True

    def _accept(self, request: Request, token: int) -> Event:
        """The request's next token; perhaps its last."""
        request.tokens.append(token)
        if request.first_token_s is None:
            request.first_token_s = self._clock.now_s()
        if token in request.stop:
            finish = Finish.STOP
        elif len(request.generated) >= request.max_tokens:
            finish = Finish.LENGTH
        else:
            return Event(request.name, token)
        self._schedule.leave(request)
        return Event(request.name, token, self._end(request, finish))

    def _end(self, request: Request, finish: Finish) -> Record:
        del self._alive[request.name]
        return request.record(finish, self._clock.now_s())

    def stream(self, name: str) -> Iterator[Event]:
        """Steps until a request has ended, and yields what it gets, token by token.

        Other requests go on in the same steps, and their events wait for their own stream or the next
        `step`; streams may be read in turns. Leaving the loop early cancels the request; a request that
        ends otherwise (somebody cancels it, or takes its last event with `step`) ends its stream.

        Raises:
            MisuseError: no such request is alive, or nobody can move on.
        """
        request = self._alive.get(name)
        if request is None:
            waiting = [whose for whose, _ in self._inbox if whose.name == name]
            if not waiting:
                raise MisuseError(f"request {name!r} is not alive", remedy="add it first")
            request = waiting[0]
        return self._events(request)

    def _events(self, request: Request) -> Iterator[Event]:
        ended = False
        try:
            while not ended:
                mine = [event for whose, event in self._inbox if whose is request]
                self._inbox = [pair for pair in self._inbox if pair[0] is not request]
                for event in mine:
                    ended = event.record is not None
                    yield event
                if not mine:
                    if self._alive.get(request.name) is not request:
                        return
                    self._move_on()
        finally:
            if self._alive.get(request.name) is request:
                self.cancel(request.name)

    def run(self) -> dict[str, Record]:
        """Steps until no request is alive; the records by name, of all that ended since the last step.

        Raises:
            MisuseError: nobody can move on.
        """
        records: dict[str, Record] = {}
        while self._alive or self._inbox:
            if not self._inbox:
                self._move_on()
            inbox, self._inbox = self._inbox, []
            records |= {event.name: event.record for _, event in inbox if event.record is not None}
        return records

    def _move_on(self) -> None:
        if not self._advance():
            raise MisuseError(
                f"{len(self._schedule.waiting)} requests wait for room and none is running",
                limit=f"{self.pool.stats()['frames_free']} frames of the pool are free",
                remedy="close what else was opened in the engine's pool",
            )

    def generate(self, prompt: Iterable[int], **wishes: Any) -> Record:
        """Answers one prompt; the wishes are those of `add`."""
        name = self.add(prompt, **wishes)
        return next(event.record for event in self.stream(name) if event.record is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is alive and gives the model back as it was; a second time does nothing."""
        for name in tuple(self._alive):
            self.cancel(name)
        if not self._closed:
            self.runner.close()
        self._closed = True
