"""What all ranks have said of one plan.

Neighbours: `saves` and `loads` have one for each of their plans; `ledger` feeds it with reports.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.core.plan import Outcome, Plan, Report

_WRONG = (Outcome.MISS, Outcome.CORRUPT)
"""These say that other bytes are there than the index believes; all else says nothing about the bytes."""
_FAULTS = (Outcome.TIMEOUT, Outcome.UNAVAILABLE)
"""These say that the tier has failed."""


class Tally:
    """Adds up the reports of one plan: it is as far as the last rank is. Not thread-safe.

    A rank may say a thing twice, and in any order; what it says after the plan has `ended` for it changes no outcome.

    Args:
        plan: what was sent.
        movers: ranks.
        deadline_s: on the ledger's clock.

    Attributes:
        outcomes: of each frame, what the rank says that fared worst; shape [n].
        wrong: of each frame, whether any rank has found other bytes than it should have; shape [n].
        failed: whether the tier has failed on any rank.
    """

    def __init__(self, plan: Plan, movers: int, deadline_s: float) -> None:
        self.plan = plan
        self.deadline_s = deadline_s
        self.outcomes: npt.NDArray[np.uint8] = np.zeros(len(plan), np.uint8)
        # Apart from the outcomes: of two ranks one may be late, and the other still have found wrong bytes.
        self.wrong: npt.NDArray[np.bool_] = np.zeros(len(plan), np.bool_)
        self.failed = False
        self._movers = movers
        self._released: set[int] = set()
        self._ended: set[int] = set()
        self._clear: set[int] = set()

    @property
    def released(self) -> bool:
        """Whether the source may be overwritten."""
        return len(self._released) == self._movers

    @property
    def ended(self) -> bool:
        """Whether the outcomes are final."""
        return len(self._ended) == self._movers

    @property
    def clear(self) -> bool:
        """Whether it has ended, and no rank touches anything of it any more."""
        return self.ended and len(self._clear) == self._movers

    def note(self, report: Report) -> None:
        """Adds a report.

        Raises:
            InputError: a rank that does not exist, or another number of outcomes.
        """
        mover, outcomes = report.mover, report.outcomes
        if not 0 <= mover < self._movers:
            raise InputError(f"rank {mover} reports", limit=f"0 to {self._movers - 1}")
        if outcomes is not None:
            if outcomes.shape != (len(self.plan),) or outcomes.dtype != np.uint8:
                raise InputError(
                    f"plan {report.plan} has {outcomes.shape} outcomes of {outcomes.dtype}",
                    limit=f"{len(self.plan)}, one for each frame",
                )
            self._end(mover, outcomes)
        if report.released or outcomes is not None:
            # What has ended in any way is never sealed from bytes that come later.
            self._released.add(mover)
        if report.clear:
            self._clear.add(mover)

    def _end(self, mover: int, outcomes: npt.NDArray[np.uint8]) -> None:
        if mover not in self._ended:
            self._ended.add(mover)
            np.maximum(self.outcomes, outcomes, out=self.outcomes)
            self.wrong |= np.isin(outcomes, _WRONG)
            self.failed |= bool(np.isin(outcomes, _FAULTS).any())

    def expire(self) -> None:
        """Ranks that have said nothing are too late; they may still be at it."""
        late = np.full(len(self.plan), Outcome.TIMEOUT, np.uint8)
        for mover in range(self._movers):
            if mover not in self._ended:
                self._end(mover, late)
                self._released.add(mover)

    def lose(self, mover: int) -> None:
        """A rank is gone, and touches nothing any more."""
        self._end(mover, np.full(len(self.plan), Outcome.UNAVAILABLE, np.uint8))
        self._released.add(mover)
        self._clear.add(mover)

    def good(self, first: int, last: int) -> int:
        """How many frames of `[first, last)` are OK before the first that is not."""
        bad = np.flatnonzero(self.outcomes[first:last])
        return int(bad[0]) if len(bad) else last - first
