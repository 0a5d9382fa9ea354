"""Who computes what in the next step.

Owns: the two queues and the order in them. Must not know: models, tensors. Neighbours: `engine` runs what
comes out, `PagePool` says who has room.

Rules: requests that are generating go first, one token each, so that a long prompt never stops them; where
a step has fewer tokens than there are of them, those go first that were served longest ago. What is left of
the step's tokens goes to prompts in order of arrival, cut where the step is full. New requests get in in
order of arrival while a step has room for them, and nobody overtakes one that waits. When a generating
request needs a frame and there is none, the youngest request loses all of its frames (it keeps its tokens,
and its sealed pages stay in the pool until they are evicted) and waits at the front of the queue. The
oldest request is never the one that loses while another runs, so it always goes on: no livelock.
"""

from __future__ import annotations

from collections import deque

from stepwell.base.clock import Clock
from stepwell.base.settings import EngineSettings
from stepwell.cache.pool import NeverFits, PagePool, Ready
from stepwell.core.key import Namespace
from stepwell.engine.request import Finish, Request


class Schedule:
    """The requests of an engine, waiting and running.

    Args:
        pool: where they get frames.
        namespace: of the model that they ask.
        settings: limits of a step.
        clock: for the records.
    """

    def __init__(
        self, pool: PagePool, namespace: Namespace, settings: EngineSettings, clock: Clock
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._refused: list[tuple[Request, Finish]] = []
        self._served = 0
        self._pool = pool
        self._namespace = namespace
        self._settings = settings
        self._clock = clock

    def next_batch(self) -> list[tuple[Request, int]]:
        """The requests of the next step with how many tokens each computes; at least 1 each.

        Requests that can never go on are for `take_refused` instead.
        """
        self._make_room()
        self._admit()
        batch: list[tuple[Request, int]] = []
        budget = self._settings.step_tokens
        for request in sorted(self.running, key=self._turn):
            if budget == 0:
                break
            count = min(self._left(request), budget)
            batch.append((request, count))
            self._served += 1
            request.served = self._served
            budget -= count
        return batch

    def _turn(self, request: Request) -> tuple[bool, int]:
        """Sorts running requests into the order of a step; equals stay in order of arrival."""
        prompt = self._left(request) > 1
        return prompt, 0 if prompt else request.served

    def take_refused(self) -> list[tuple[Request, Finish]]:
        """Requests that can never go on since the last call, with the reason."""
        refused, self._refused = self._refused, []
        return refused

    @staticmethod
    def _left(request: Request) -> int:
        """Tokens whose KV is missing: 1 for a request that is generating."""
        return len(request.tokens) - request.computed

    def _make_room(self) -> None:
        """Room for the next token of everyone who generates.

        Whoever loses frames here cannot get in again in the same step: it needs all that it had, and one
        of them is gone.
        """
        for request in tuple(self.running):
            while request in self.running and request.room < len(request.tokens):
                answer = self._pool.extend(request.name, 1)
                if isinstance(answer, Ready):
                    request.room = len(request.tokens)
                elif isinstance(answer, NeverFits):
                    request.detail = answer.text
                    self.leave(request)
                    self._refused.append((request, Finish.NO_ROOM))
                else:
                    self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self.leave(request)
        request.computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def leave(self, request: Request) -> None:
        """Takes a running request out and returns its frames."""
        self.running.remove(request)
        self._pool.close(request.name)

    def _admit(self) -> None:
        """Lets waiting requests in, in order, until one has to wait."""
        while self.waiting and len(self.running) < self._settings.batch_requests:
            request = self.waiting[0]
            answer = self._pool.open(request.name, request.tokens, self._namespace, request.flags)
            if isinstance(answer, NeverFits):
                request.detail = answer.text
                self.waiting.popleft()
                self._refused.append((request, Finish.NO_ROOM))
                continue
            if not isinstance(answer, Ready):
                return
            self.waiting.popleft()
            request.computed = answer.cached
            request.room = len(request.tokens)
            if request.reused_tokens is None:
                request.reused_tokens = answer.cached
                request.reason = answer.reason
                request.admitted_s = self._clock.now_s()
            else:
                request.resumed_tokens += answer.cached
            self.running.append(request)
