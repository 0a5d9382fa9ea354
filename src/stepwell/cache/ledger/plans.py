"""The plans that are not clear: their numbers, whose they are, and until when ranks may be silent about them.

Neighbours: `ledger` has the lock, and sends what `unsent` gives.
"""

from __future__ import annotations

import heapq
from collections import deque

from stepwell.cache.ledger.flying import Save
from stepwell.cache.ledger.loads import Load
from stepwell.cache.ledger.saves import Outline
from stepwell.cache.ledger.tally import Tally
from stepwell.core.plan import Plan, Verb

Job = Save | Load | Tally
"""Whose a plan is; one that only wipes is nobody's."""


def tally_of(job: Job) -> Tally:
    """What the ranks have said of its plan."""
    tally = job if isinstance(job, Tally) else job.tally
    assert tally is not None, "a plan that was sent"
    return tally


class Plans:
    """All plans from being made until they are clear. Not thread-safe: the ledger has the lock.

    Args:
        movers: ranks.
    """

    def __init__(self, movers: int) -> None:
        self._movers = movers
        self._jobs: dict[int, Job] = {}
        self._unsent: deque[Plan] = deque()
        self._deadlines: list[
            tuple[float, int]
        ] = []  # a heap: a large plan may be late after those behind it
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def number(self) -> int:
        """A number that no plan has had."""
        self._numbers += 1
        return self._numbers

    def make(
        self,
        verb: Verb,
        place: int,
        outline: Outline,
        within_ms: int,
        now_s: float,
        job: Save | Load | None = None,
    ) -> Tally:
        """Makes a plan, which waits to be sent.

        Args:
            verb: what is moved.
            place: device memory.
            outline: its frames.
            within_ms: that the movers have.
            now_s: on the ledger's clock.
            job: whose it is.
        """
        plan = Plan(
            number=self.number(),
            verb=verb,
            place=place,
            outside=outline.outside,
            inside=outline.inside,
            keys=outline.keys,
            which=outline.which,
            within_ms=within_ms,
        )
        # The movers have this long; a rank that says nothing at all gets as much again.
        tally = Tally(plan, self._movers, now_s + 2 * within_ms / 1000)
        while self._deadlines and self._deadlines[0][1] not in self._jobs:
            heapq.heappop(self._deadlines)
        heapq.heappush(self._deadlines, (tally.deadline_s, plan.number))
        if job is not None:
            job.tally = tally
        self._jobs[plan.number] = tally if job is None else job
        self._unsent.append(plan)
        return tally

    def unsent(self) -> list[Plan]:
        """The plans since the last call, in this order."""
        plans, self._unsent = list(self._unsent), deque()
        return plans

    def find(self, number: int) -> Job | None:
        """Whose a plan is that is not clear."""
        return self._jobs.get(number)

    def jobs(self) -> list[Job]:
        """Those of all plans that are not clear, in the order of their numbers."""
        return list(self._jobs.values())

    def clear(self, number: int) -> None:
        """Nothing of a plan is touched any more."""
        del self._jobs[number]

    def late(self, now_s: float) -> list[Job]:
        """Those whose deadline has passed since the last call, and that have not ended."""
        late: list[Job] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if job is not None and not tally_of(job).ended:
                late.append(job)
        return late
