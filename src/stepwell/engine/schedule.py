"""Who computes what in the next step.

Owns: the queue, who runs, and the order among them. Must not know: models, tensors. Neighbours: `engine` runs
what comes out, `PagePool` says who has room. The rules are in docs/internals/scheduling.md.
"""

from __future__ import annotations

from stepwell.base.clock import Clock
from stepwell.base.settings import EngineSettings
from stepwell.cache.pool import Answer, Flags, Loading, NeverFits, PagePool, Ready
from stepwell.core.chain import Chain
from stepwell.core.key import Namespace
from stepwell.engine.request import Finish, Request

_AGING_STEPS = 256
"""Steps in the queue after which a request counts as one priority higher: nobody waits for ever."""

_SCORED_TOKENS = 256
"""Tokens of a request in a step while all their logits are wanted: each is a row as long as the
vocabulary."""

_PROMPT_SHARE = 4
"""Of a step's tokens, one in so many is kept for prompts when there are any."""


_LOOK_S = 0.1
"""How long to wait for news of a tier, before deadlines are looked at again."""


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
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.namespace = namespace
        # Somebody was told in this step to wait for a tier; what it waits for may have come since.
        self._on_the_way = False
        self._refused: list[tuple[Request, Finish]] = []
        self._served = 0
        self._turn_of_prompts = False
        self._pool = pool
        self._settings = settings
        self._clock = clock
        self._windows = bool(pool.limits.windows)

    def next_batch(self) -> list[tuple[Request, int]]:
        """The requests of the next step with how many tokens each computes; at least 1 each.

        Requests that can never go on are for `take_refused` instead.
        """
        self._pool.step()
        self._reconcile()
        self._on_the_way = False
        lost = self._make_room()
        if not (lost and self.running):
            self._admit()
        for request in self.waiting:
            request.queued += 1
        answering = [request for request in self.running if not request.in_prompt]
        prompts = [request for request in self.running if request.in_prompt]
        budget = self._settings.step_tokens
        kept_back = -(-budget // _PROMPT_SHARE) if prompts else 0
        # With a step of one token, answers and prompts take turns.
        if kept_back == budget and answering:
            self._turn_of_prompts = not self._turn_of_prompts
            kept_back = budget if self._turn_of_prompts else 0
        answering.sort(key=lambda request: request.served)
        batch = [(request, 1) for request in answering[: budget - kept_back]]
        batch += self._share(prompts, budget - len(batch))
        for request, _ in batch:
            self._served += 1
            request.served = self._served
        return batch

    def wait_for_tiers(self) -> bool:
        """Waits a little, when nobody has anything to compute, for what somebody was told to wait for.

        Returns:
            Whether somebody was: the next step may have who computes.
        """
        if self._on_the_way:
            self._pool.wait(_LOOK_S)
        return self._on_the_way

    def _reconcile(self) -> None:
        """Puts right what Ctrl-C may have torn: who is where, in the lists and in the pool.

        Every change of lists is made so that nobody is in none of them, and may leave somebody in two.
        """
        for request in tuple(self.running):
            if request.finish is not None:
                self.leave(request)
            elif request.name not in self._pool:
                self.running.remove(request)
                request.computed = 0
                self.waiting.append(request)
        running = set(self.running)
        seen = dict.fromkeys(self.waiting)
        self.waiting = [one for one in seen if one.finish is None and one not in running]

    def _share(self, prompts: list[Request], budget: int) -> list[tuple[Request, int]]:
        """Shares what is left of a step: half for the first in order, the rest to the shortest first.

        So a long prompt always moves on, and short ones do not wait for its end.
        """
        prompts.sort(key=self._order)
        counts: dict[Request, int] = {}

        def give(request: Request, most: int) -> None:
            nonlocal budget
            count = min(self._step_of(request) - counts.get(request, 0), most, budget)
            if count > 0:
                counts[request] = counts.get(request, 0) + count
                budget -= count

        for request in prompts[:1]:
            give(request, -(-budget // 2))
        for request in sorted(prompts[1:], key=lambda one: (-self._priority(one), one.left)):
            give(request, budget)
        for request in prompts[:1]:
            give(request, budget)
        return [(request, counts[request]) for request in prompts if request in counts]

    def _step_of(self, request: Request) -> int:
        """Tokens that a request may compute at once: up to where a state is kept, and where it has room."""
        count = request.left
        stop = next((at for at in request.checkpoints if at > request.computed), None)
        if stop is not None:
            count = min(count, stop - request.computed)
        if request.scores_left():
            count = min(count, _SCORED_TOKENS)
        if self._windows:
            count = min(count, self._pool.room(request.name))
        return count

    def take_refused(self) -> list[tuple[Request, Finish]]:
        """Requests that can never go on since the last call, with the reason."""
        refused, self._refused = self._refused, []
        return refused

    def _make_room(self) -> bool:
        """Room for the next token of everyone who runs, oldest and most important first.

        Returns:
            Whether somebody lost its frames. Nobody gets in in such a step while another runs: it could be
            the one that lost them, for models with windows or states need fewer where they begin.
        """
        lost = False
        for request in sorted(self.running, key=self._order):
            if not request.left:
                # A step was torn between its commit and its token: the last token is computed again.
                self.preempt(request)
            while request in self.running:
                answer = self._room_for(request)
                if isinstance(answer, Ready):
                    request.room = len(request.tokens)
                    break
                if isinstance(answer, NeverFits):
                    request.detail = answer.text
                    self.leave(request)
                    self._refused.append((request, Finish.NO_ROOM))
                elif answer is None:
                    break
                else:
                    self.preempt(max(self.running, key=self._order))
                    lost = True
        return lost

    def _room_for(self, request: Request) -> Answer | None:
        """Asks for room if some is missing; None when all is there."""
        if request.room < len(request.tokens):
            return self._pool.extend(request.name, 1)
        if self._windows and self._pool.room(request.name) < 1:
            return self._pool.extend(request.name, 0)
        return None

    def preempt(self, request: Request) -> None:
        """A request loses its frames, keeps its tokens, and waits."""
        self.enqueue(request)
        self.leave(request)
        request.preemptions += 1

    def preempt_all(self) -> None:
        """Everyone who runs loses its frames and waits: tokens kept, scores of half a prompt not."""
        for request in tuple(self.running):
            self.preempt(request)
        for request in self.waiting:
            if request.scores_left():
                request.prompt_scores.clear()

    def leave(self, request: Request) -> None:
        """Takes a running request out and returns its frames."""
        if request.name in self._pool:
            self._pool.close(request.name)
        self.running.remove(request)
        request.computed = 0
        request.queued = 0

    def take_out(self, request: Request) -> None:
        """A request is no longer served, wherever it is."""
        if request in self.running:
            self.leave(request)
        if request in self.waiting:
            self.waiting.remove(request)
            self._pool.give_up(request.name)

    def enqueue(self, request: Request) -> None:
        """A request waits."""
        self.waiting.append(request)

    def _priority(self, request: Request) -> int:
        return request.wishes.priority + request.queued // _AGING_STEPS

    def _order(self, request: Request) -> tuple[int, int]:
        return -self._priority(request), request.number

    def _admit(self) -> None:
        """Lets waiting requests in, in order, until one has to wait for room."""
        places = self._settings.batch_requests - len(self.running)
        if not places:
            return  # with nobody to let in there is nothing to sort
        for request in sorted(self.waiting, key=self._order):
            if not places:
                break
            if self._follows(request):
                continue
            flags = request.wishes.flags
            if request.scores_left():
                flags |= Flags.NEEDS_LOGITS
            if request.name in self._pool:
                # Its last admission was torn between the pool and the lists.
                self._pool.close(request.name)
            answer = self._pool.open(request.name, self._chain(request), flags=flags)
            if isinstance(answer, NeverFits):
                request.detail = answer.text
                self.waiting.remove(request)
                self._refused.append((request, Finish.NO_ROOM))
                continue
            if isinstance(answer, Loading):
                # Those behind it need not wait: what it needs most of is taken already.
                places -= 1
                self._on_the_way = True
                continue
            if not isinstance(answer, Ready):
                self._on_the_way |= self._pool.moving > 0
                break
            self._start(request, answer)
            self.waiting.remove(request)
            places -= 1

    def _chain(self, request: Request) -> Chain:
        """Its tokens with the keys found so far: whoever waits is not hashed anew in every step."""
        if request.chain is None or request.chain.namespace is not self.namespace:
            request.chain = Chain(self.namespace)
        request.chain.append(request.tokens[len(request.chain) :])
        return request.chain

    def _start(self, request: Request, answer: Ready) -> None:
        request.computed = answer.cached
        request.checkpoints = answer.checkpoints
        request.room = len(request.tokens)
        if request.reused_tokens is None:
            request.reused_tokens = answer.cached
            request.loaded_tokens = answer.loaded
            request.reason = answer.reason
            request.admitted_s = self._clock.now_s()
        else:
            request.resumed_tokens += answer.cached
        self.running.append(request)

    def _follows(self, request: Request) -> bool:
        """Whether another is to compute its prompt first, and has not yet."""
        leader = request.leader
        if leader is None:
            return False
        if leader.first_token_s is None:
            if leader.finish is None:
                return True
            # It has left nothing to find: the first of the others computes the prompt in its place.
            for other in self.waiting:
                if other.leader is leader:
                    other.leader = request
        request.leader = None
        return False
