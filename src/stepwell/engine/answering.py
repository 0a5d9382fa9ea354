"""One step of the engine: from a batch to what each request got.

Owns: the order in which a step's results begin to count. Must not know: queues, streams, times. Neighbours:
`engine` loops, `runner` computes, `sampling` chooses, the pool keeps.

Until every token of the step is chosen nothing counts: the model may raise, or give logits that are no
numbers. Then states are written and tokens committed, request by request.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from stepwell.cache.pool import PagePool
from stepwell.engine.request import Request
from stepwell.engine.runner import Computed, Runner
from stepwell.engine.sampling import Choice, choose, prompt_logprobs, survey
from stepwell.engine.schedule import Schedule

_BROKEN = "the model gave logits that are not numbers; remedy: check the weights and the dtype of the model"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step gave one request.

    Attributes:
        request: who got it.
        choice: its next token, or None if there is none: it ends with `Finish.FAULT`.
    """

    request: Request
    choice: Choice | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """Logits of a request in a step.

    Attributes:
        logits: of all its tokens, if its prompt is scored, else of the last; shape [rows, vocabulary].
        best: the most probable token after the last.
        usable: all of them are numbers.
    """

    logits: torch.Tensor
    best: int
    usable: bool


class Answering:
    """Computes steps for the requests of a schedule.

    Args:
        pool: keeps KV and states.
        runner: has the model.
        schedule: whose requests they are.
    """

    def __init__(self, pool: PagePool, runner: Runner, schedule: Schedule) -> None:
        self._pool = pool
        self._runner = runner
        self._schedule = schedule

    def compute(self, batch: list[tuple[Request, int]]) -> list[Answer]:
        """Computes one step.

        Args:
            batch: requests with the tokens that each computes.

        Returns:
            Something for every request that got a token or is at fault; all of it counts already.
        """
        by_name = {request.name: request for request, _ in batch}
        counts = {request.name: count for request, count in batch}
        kept: dict[str, _Kept] = {}
        calls = [self._run(by_name, call, kept) for call in self._runner.calls(counts)]
        broken = {name for name, its in kept.items() if not its.usable}
        ends = [
            request
            for request, count in batch
            if count == request.left and request.name not in broken
        ]
        chosen: list[Choice] = []
        if ends:
            last = [kept[request.name] for request in ends]
            logits = torch.stack([its.logits[-1] for its in last])
            draws = [request.draw() for request in ends]
            chosen = choose(logits, draws, [its.best for its in last])
        for name, its in kept.items():
            if name not in broken:
                self._score(by_name[name], its.logits, counts[name])
        self._count(calls, [pair for pair in batch if pair[0].name not in broken])
        answers = [Answer(request, choice) for request, choice in zip(ends, chosen, strict=True)]
        for request, _ in batch:
            if request.name in broken:
                request.detail = _BROKEN
                answers.append(Answer(request, None))
        return answers

    def _count(self, calls: list[Computed], batch: list[tuple[Request, int]]) -> None:
        """Makes the step count: states are written, then tokens committed, request by request."""
        left = deque(batch)
        try:
            for computed in calls:
                computed.save()
            fence = self._runner.fence()
            while left:
                request, count = left[0]
                end = request.computed + count
                self._pool.commit(request.name, request.tokens[request.computed : end], fence)
                request.computed = end
                request.computed_tokens += count
                left.popleft()
        finally:
            # Torn by Ctrl-C: a state may be ahead of its tokens, so whoever is left begins again.
            with ExitStack() as turns:
                for request, _ in left:
                    turns.callback(self._schedule.preempt, request)

    def _run(
        self, by_name: dict[str, Request], call: dict[str, int], all_kept: dict[str, _Kept]
    ) -> Computed:
        """Runs the model once; adds the logits that each request wants to `all_kept`."""
        view = self._pool.bind(call)
        tokens: list[int] = []
        keep: list[int] = []
        wanted: list[tuple[str, int]] = []
        for name, count in call.items():
            request = by_name[name]
            tokens += request.tokens[request.computed : request.computed + count]
            # The last also inside a prompt: KV that is no number shows there, and is not sealed.
            kept = count if request.scores_left() else 1
            keep += range(len(tokens) - kept, len(tokens))
            wanted.append((name, kept))
        computed = self._runner.run(view, tokens, keep)
        best, usable = survey(computed.logits)
        first = 0
        for name, kept in wanted:
            last = first + kept
            fine = all(usable[first:last])
            all_kept[name] = _Kept(computed.logits[first:last], best[last - 1], fine)
            first = last
        return computed

    @staticmethod
    def _score(request: Request, logits: torch.Tensor, count: int) -> None:
        """Notes the log-probabilities of the prompt's tokens that this step has logits for."""
        top = request.wishes.prompt_logprobs
        if top is None or not request.scores_left():
            return
        # The logits after token n are about token n + 1; some may be known from before a preemption.
        first = len(request.prompt_scores) + 1
        begin = request.computed + 1
        last = min(begin + count, request.prompt_tokens)
        if first < last:
            about = request.tokens[first:last]
            scores = prompt_logprobs(logits[first - begin : last - begin], about, top)
            request.prompt_scores += scores
