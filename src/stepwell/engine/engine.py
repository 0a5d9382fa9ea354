"""Continuous batching of a Hugging Face decoder over `PagePool`.

Owns: the loop of steps. Must not know: HTTP, tokenizers beyond a function that decodes. Neighbours:
`schedule` says who computes what, `runner` computes it, `sampling` chooses, the pool keeps what was computed.

The way of a step:  next_batch ▸ (bind ▸ run)* ▸ choose ▸ save states ▸ commit ▸ next token of those at their end
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.errors import InputError, MisuseError
from stepwell.base.settings import Settings
from stepwell.cache.pool import Flags, PagePool
from stepwell.core.chain import Tokens, as_tokens
from stepwell.core.geometry import Geometry
from stepwell.core.key import Namespace
from stepwell.engine.answering import Answering
from stepwell.engine.request import (
    Event,
    Finish,
    Progress,
    QueueBusy,
    Record,
    Request,
    Wishes,
    wish,
)
from stepwell.engine.runner import Runner
from stepwell.engine.sampling import MAX_SEED, Choice
from stepwell.engine.schedule import Schedule
from stepwell.engine.text import TextStream

Decode = Callable[[list[int]], str]

_NO_TEXT = (
    "the answer could not be handed over: decode raised, or the step was interrupted; "
    "remedy: give a decode that takes every id of the model, and ask again"
)


def _check_kinds(model: Any, settings: object) -> None:
    if not isinstance(settings, Settings):
        raise InputError(
            f"settings are a {type(settings).__name__}",
            limit="stepwell.Settings",
            remedy="Settings(pool=PoolSettings(...), engine=EngineSettings(...))",
        )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise InputError(
            f"the model is a {type(model).__name__}, which has no language head",
            limit="a loaded causal language model of transformers",
            remedy="load it with AutoModelForCausalLM, or with load_model(Path(...))",
        )


def _text(decode: Decode | None, wishes: Wishes) -> TextStream | None:
    if decode is not None:
        return TextStream(decode, wishes.stop_texts)
    if wishes.stop_texts:
        raise InputError(
            "stop texts were given to an engine that cannot decode",
            remedy="make it with Engine(..., decode=tokenizer.decode), or stop at token ids",
        )
    return None


class Engine:
    """Answers requests with one model, many at a time; reuses every prefix it has computed.

    A request enters with `add`, gets at most one token a step, and leaves with its record: when it
    stops, has its tokens, is cancelled, or can never fit. Steps mix prompts and generation. If the model
    raises, none of the step's tokens counts and the requests are as before it. Not thread-safe: one thread adds,
    steps and cancels.

    Args:
        model: a causal language model of transformers that `Geometry.from_hf_config` understands; until
            `close`, its attention belongs to the engine. KV lies on its device, in its dtype.
        settings: sizes of pool and steps; positions are cut to what the model was made for.
        namespace: with the model's digest; by default one that no other process shares.
        clock: for the times in the records.
        decode: token ids to text, for stop texts and the text of answers. What it raises comes out of the
            step and ends the request with `Finish.FAULT`; for the others the step counts.

    Raises:
        GeometryError: a kind of layer that is not understood.
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
        decode: Decode | None = None,
    ) -> None:
        settings = settings or Settings()
        _check_kinds(model, settings)
        dtype = str(model.dtype).removeprefix("torch.")
        read = Geometry.from_hf_config(model.config, dtype)
        self.geometry = replace(read, replay_tokens=settings.engine.replay_tokens)
        embedded = int(model.get_input_embeddings().num_embeddings)
        self.vocabulary = min(int(model.config.vocab_size), embedded)
        chosen = settings.pool
        sizes = replace(
            chosen,
            positions=min(chosen.positions, int(model.config.max_position_embeddings)),
            ahead_tokens=settings.engine.step_tokens,
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
        self.pool = PagePool(self.geometry, sizes, str(model.device), tiers=settings.host)
        self.runner = Runner(model, self.geometry, self.pool.planes)
        self._clock = clock or SystemClock()
        self._decode = decode
        self._queue_requests = settings.engine.queue_requests
        self._schedule = Schedule(self.pool, namespace, settings.engine, self._clock)
        self._answering = Answering(self.pool, self.runner, self._schedule)
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
        wishes: Wishes | None = None,
        *,
        name: str | None = None,
        progress: Callable[[Progress], None] | None = None,
        **more: Any,
    ) -> str | QueueBusy:
        """Takes a request; it starts with a later step.

        Args:
            prompt: token ids.
            wishes: what it asks for.
            name: unique among those alive; made up by default.
            progress: called after each step that moved its prompt on, not for what is computed again after
                a preemption. What it raises comes out of the call that computed the step; the step counts.
            **more: fields of `Wishes` that differ from `wishes`.

        Returns:
            Its name, or `QueueBusy` when as many requests wait as may.

        Raises:
            InputError: an empty prompt, an id that the model does not have, a wish out of range, a name of
                another kind.
            MisuseError: the name is alive already, or the engine is closed.
        """
        answer = self._add_all(prompt, 1, wish(wishes, more), name, progress)
        return answer if isinstance(answer, QueueBusy) else answer[0]

    def add_samples(
        self, prompt: Iterable[int], n: int, wishes: Wishes | None = None, **more: Any
    ) -> tuple[str, ...] | QueueBusy:
        """Takes n requests for the same prompt, which is computed once unless their wishes forbid reuse.

        Each draws with a seed of its own: that of the wishes, if they have one, and those that follow it.

        Args:
            prompt: token ids.
            n: how many answers, 1 or more.
            wishes: what each asks for.
            **more: fields of `Wishes` that differ from `wishes`.

        Returns:
            Their names, or `QueueBusy` with nothing taken.

        Raises:
            InputError: as `add`, or n below 1.
            MisuseError: the engine is closed.
        """
        if type(n) is not int or n < 1:
            raise InputError(f"{n!r} samples were asked for", limit="1 or more")
        return self._add_all(prompt, n, wish(wishes, more))

    def _add_all(
        self,
        prompt: Iterable[int],
        n: int,
        wishes: Wishes,
        name: str | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> tuple[str, ...] | QueueBusy:
        if self._closed:
            raise MisuseError("the engine is closed", remedy="make another one over the model")
        tokens = self._checked(prompt)
        if progress is not None and not callable(progress):
            raise InputError(f"progress is {progress!r}", limit="a function of one Progress")
        if not isinstance(name, str | None):
            raise InputError(f"name is {name!r}", limit="a text")
        if name in self._alive:
            raise MisuseError(f"request {name!r} is alive already", remedy="use another name")
        waiting = len(self._schedule.waiting)
        if waiting + n > self._queue_requests:
            text = (
                f"{n} more would wait behind {waiting}; allowed: {self._queue_requests}; "
                "remedy: try again later, or raise engine.queue_requests"
            )
            return QueueBusy(waiting, text)
        # With these every one computes the prompt for itself: there is nobody to wait for.
        alone = wishes.flags != Flags.NONE or wishes.prompt_logprobs is not None
        texts = [_text(self._decode, wishes) for _ in range(n)]
        first = wishes.sampling.seed
        seed = secrets.randbits(64) if first is None else first
        made: list[Request] = []
        for number in range(n):
            request = Request(
                name=self._made_up_name() if name is None else name,
                prompt_tokens=len(tokens),
                tokens=tokens.tolist(),
                wishes=wishes,
                seed=(seed + number) & MAX_SEED,
                number=self._count,
                arrived_s=self._clock.now_s(),
                text=texts[number],
                leader=made[0] if made and not alone else None,
                progress=progress,
            )
            self._count += 1
            self._schedule.enqueue(request)
            self._alive[request.name] = request
            made.append(request)
        return tuple(request.name for request in made)

    def _checked(self, prompt: Iterable[int]) -> Tokens:
        tokens = as_tokens(prompt)
        if not len(tokens):
            raise InputError("the prompt is empty", limit="at least one token")
        if int(tokens.max()) >= self.vocabulary:
            raise InputError(
                f"token {int(tokens.argmax())} is {int(tokens.max())}",
                limit=f"0 to {self.vocabulary - 1}, the vocabulary of this model",
            )
        return tokens

    def _made_up_name(self) -> str:
        number = self._count + 1
        while f"request-{number}" in self._alive:
            number += 1
        return f"request-{number}"

    def cancel(self, name: str) -> Record:
        """Ends a request between two steps, wherever it is; what it was not told yet is dropped.

        Raises:
            MisuseError: no such request is alive.
        """
        request = self._alive.get(name)
        if request is None:
            raise MisuseError(f"request {name!r} is not alive", remedy="it may have ended already")
        request.finish_text()
        record = self._end(request, Finish.CANCELLED)
        self._schedule.take_out(request)
        self._inbox = [(whose, event) for whose, event in self._inbox if whose is not request]
        return record

    def computed(self, name: str) -> int | None:
        """Tokens of a request whose KV is there, for showing progress; None when it is not alive."""
        request = self._alive.get(name)
        return None if request is None else request.computed

    def raise_epoch(self) -> int:
        """Says that the model's weights have changed in place: nothing computed so far is reused.

        Requests that are running lose their KV, keep their tokens, and go on under the new weights.

        Returns:
            The epoch of the namespace from now on.
        """
        self._schedule.preempt_all()
        epoch = self.pool.raise_epoch()
        before = self._schedule.namespace
        self._schedule.namespace = replace(before, epoch=max(before.epoch + 1, epoch))
        return self._schedule.namespace.epoch

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
            text = request.finish_text()
            self._inbox.append((request, Event(request.name, None, text, self._end(request, why))))
        if not batch:
            return self._schedule.wait_for_tiers() or bool(refused)
        answers = self._answering.compute(batch)
        # The last goes first; if one raises, the others have their turn all the same.
        with ExitStack() as turns:
            for request, _ in reversed(batch):
                turns.callback(request.tell, request.computed)
            for answer in reversed(answers):
                turns.callback(self._hand_over, answer.request, answer.choice)
        return True

    def _hand_over(self, request: Request, choice: Choice | None) -> None:
        """Gives a request its next token, or ends it for want of one, or if its text cannot be had."""
        text = ""
        finish: Finish | None = Finish.FAULT
        try:
            if choice is None:
                text = request.finish_text()
            else:
                if request.first_token_s is None:
                    request.first_token_s = self._clock.now_s()
                text, finish = request.accept(choice)
        finally:
            record = None
            if finish is not None:
                if finish is Finish.FAULT and choice is not None:
                    request.detail = _NO_TEXT
                record = self._end(request, finish)
            self._inbox.append((request, Event(request.name, choice, text, record)))
            if record is not None:
                self._schedule.leave(request)

    def _end(self, request: Request, finish: Finish) -> Record:
        self._alive.pop(request.name, None)
        request.finish = finish
        return request.record(finish, self._clock.now_s())

    def stream(self, name: str | QueueBusy) -> Iterator[Event]:
        """Steps until a request has ended, and yields what it gets, token by token.

        Other requests go on in the same steps, and their events wait for their own stream or the next
        `step`; streams may be read in turns. Leaving the loop early cancels the request; a request that
        ends otherwise (somebody cancels it, or takes its last event with `step`) ends its stream. What a
        step raises comes out of the loop and cancels nobody: the request may be streamed again.

        Args:
            name: what `add` gave.

        Raises:
            MisuseError: no such request is alive, it was not taken, or nobody can move on.
        """
        if isinstance(name, QueueBusy):
            raise MisuseError(f"the request was not taken: {name.text}")
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
        except GeneratorExit:
            if self._alive.get(request.name) is request:
                self.cancel(request.name)
            raise

    def run(self) -> dict[str, Record]:
        """Steps until no request is alive; the records by name, of all that ended since the last step.

        Raises:
            MisuseError: nobody can move on.
        """
        # Everything stays in the inbox until the end: a step that raises loses nobody's record.
        while self._alive:
            self._move_on()
        inbox, self._inbox = self._inbox, []
        return {event.name: event.record for _, event in inbox if event.record is not None}

    def _move_on(self) -> None:
        if not self._advance():
            raise MisuseError(
                f"{len(self._schedule.waiting)} requests wait for room and none is running",
                limit=f"{self.pool.stats()['frames_free']} frames of the pool are free",
                remedy="close what else was opened in the engine's pool",
            )

    def generate(self, prompt: Iterable[int], wishes: Wishes | None = None, **more: Any) -> Record:
        """Answers one prompt; the arguments are those of `add`.

        What can never fit raises nothing: its record says `Finish.NO_ROOM`, and `detail` why.

        Raises:
            InputError: as `add`.
            MisuseError: as `add`, too much is waiting, or somebody cancelled it.
        """
        name = self.add(prompt, wishes, **more)
        try:
            records = [event.record for event in self.stream(name) if event.record is not None]
            if not records:
                raise MisuseError(f"request {name!r} was cancelled while it was generated")
            return records[0]
        finally:
            if name in self._alive:
                self.cancel(name)

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
            self.pool.end()
        self._closed = True
