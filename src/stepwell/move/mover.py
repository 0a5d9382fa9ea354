"""The mover of one rank: does what plans say, and reports.

Owns: queues, threads, deadlines, and all bytes on their way. Must not know: policies, prefixes, requests. Neighbours:
`tiers.host` has the frames, `place` the device memory; a ledger sends plans and is told reports.

One of the two files with a broad `except`: a copy, a tier, a fence or whoever is told may raise whatever it likes, and
it costs a miss.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.settings import HostSettings
from stepwell.base.threads import Fault, Health, start
from stepwell.core.plan import Grown, Outcome, Plan, Report, Verb
from stepwell.move.carrier import Carrier, Rank
from stepwell.move.fence import PASSED, Fence
from stepwell.move.job import Job, Outcomes, Piece, cut
from stepwell.move.queue import Queue
from stepwell.tiers.tier import Row

PIECE_BYTES = 4 << 20
"""What one thread moves at once: it fits into caches, so that bytes are summed up where they were just copied."""

_LOOK_S = 0.02
"""How often somebody looks whether memory has become ready, or a late copy has ended."""

_READY_S = 0.002
"""How often somebody looks whether a source has become ready, while pieces wait."""

Told = Callable[[Report | Grown], None]


class Mover:
    """Moves frames between one host tier and the device memory of one rank.

    A plan enters with `take`, is cut into pieces, and has ended when all are done or its deadline has passed; it is
    clear when nothing touches anything of it. What is told of one plan is told in order: released, if its source is
    free before its end; its outcomes, once; that it is clear, once and last. Nothing of a plan begins after its end,
    and what arrives after it is never sealed. Reads go before writes, with a floor for writes. Different frames are
    moved by several threads at once; that no frame is in two plans is the ledger's promise. Whatever a copy raises
    makes its frames `UNAVAILABLE`. The threads move and wait for nothing but copies in time; the one with the clock
    waits for everything else. Without `start` there are no threads: whoever calls `work` and `look` moves the bytes.

    Args:
        rank: what it moves between; its host tier is closed by `close`.
        told: is given every report, from any thread but one at a time, with no lock held.
        settings: of the host tier.
        clock: for deadlines.
        health: told when a thread dies, or `told` raises.
    """

    def __init__(
        self,
        rank: Rank,
        told: Told,
        settings: HostSettings,
        *,
        clock: Clock | None = None,
        health: Health | None = None,
    ) -> None:
        self.host = rank.host
        self._rank = rank
        self.health = Health() if health is None else health
        self.fault = ""
        self._carrier = Carrier(rank, settings.verify)
        self._told = told
        self._settings = settings
        self._clock = SystemClock() if clock is None else clock
        self._frames_at_once = max(1, PIECE_BYTES // rank.host.size.frame_bytes)
        self._more = threading.Condition()
        self._queue = Queue()
        self._jobs: dict[int, Job] = {}
        self._begun: list[Piece] = []  # no thread waits for the end of their copies
        self._news: deque[Report | Grown] = deque()  # in the order in which it happened
        self._telling = False
        self._threads: list[threading.Thread] = []
        self._growing = True
        self._closing = False
        self._ending = threading.Lock()

    def start(self) -> None:
        """Starts the threads that move, and the one that looks at the clock."""
        for number in range(self._settings.threads):
            name = f"mover-{self._rank.number}-{number}"
            self._threads.append(start(name, self._move, self.health))
        self._threads.append(start(f"timer-{self._rank.number}", self._watch, self.health))

    def take(self, plan: Plan, fence: Fence = PASSED) -> None:
        """Accepts a plan; its reports follow. One that is not clear yet is done once, however often it comes.

        Args:
            plan: with a number that no other has.
            fence: after which its source is ready.
        """
        refused = self._rank.refusal(plan)
        job = Job(plan, self._rank.parts, fence, self._clock.now_s() + plan.within_ms / 1000)
        pieces = [] if refused else cut(job, self._frames_at_once)
        with self._more:
            if plan.number in self._jobs:
                self.fault = f"plan {plan.number} came twice"
                return  # nothing is told: it would be taken for what became of the first
            self.fault = refused or self.fault
            if pieces and not self._closing:
                self._jobs[plan.number] = job
                self._queue.add(pieces)
                self._more.notify_all()
                return
            self._report(job, job.end(Outcome.REFUSED if refused else Outcome.UNAVAILABLE))
        self._tell()

    def work(self) -> bool:
        """Moves one piece on, or begins one; whether there was something to do. Never waits."""
        if self._settle():
            return True
        with self._more:
            piece = self._queue.take(self._ready)
        if piece is None:
            return False
        self._begin(piece)
        if self._over(piece):
            self._finish(piece)
        else:
            self._leave(piece)
        return True

    def _settle(self) -> bool:
        """Finishes one of the copies that nobody waits for, if one is over; whether there was one."""
        with self._more:
            piece = next((one for one in self._begun if self._over(one)), None)
            if piece is None:
                return False
            self._begun.remove(piece)
        self._finish(piece)
        return True

    def _leave(self, piece: Piece) -> None:
        with self._more:
            self._begun.append(piece)

    def _ready(self, job: Job) -> bool:
        """Whether a job may begin. One that is late may not; `look` ends it."""
        if self._clock.now_s() >= job.deadline_s:
            return False
        try:
            return job.fence.done()
        except Exception as error:  # noqa: BLE001 - a fence may raise anything
            job.broken = error
            return True

    def _begin(self, piece: Piece) -> None:
        """Starts the copy of a piece."""
        if piece.job.broken is not None:
            self._failed(piece, piece.job.broken)
            return
        rows: list[Row] = []
        for index, frame in enumerate(piece.inside.tolist()):
            try:
                row = self._carrier.prepare(piece, index, frame)
            except Exception as error:  # noqa: BLE001 - a tier may raise anything
                self._failed(piece, error, index)
                continue
            if row is not None:
                rows.append(row)
        if not rows:
            return
        try:
            piece.fence = self._carrier.copy(piece, rows)
        except Exception as error:  # noqa: BLE001 - a copy may raise anything
            self._failed(piece, error)

    def _failed(self, piece: Piece, error: Exception, index: int | None = None) -> None:
        """A frame of a piece cannot be moved, or all of it."""
        self.fault = f"{piece.job.plan.verb.name} of plan {piece.job.plan.number}: {error!r}"
        piece.outcomes[slice(None) if index is None else index] = Outcome.UNAVAILABLE

    def _over(self, piece: Piece, within_s: float = 0.0) -> bool:
        """Whether the copy of a piece is over; waits so long for it. If the fence raises, nobody knows: it is not."""
        fence = piece.fence
        try:
            return fence is None or (fence.wait(within_s) if within_s else fence.done())
        except Exception as error:  # noqa: BLE001 - a fence may raise anything
            self._failed(piece, error)
            return False

    def _finish(self, piece: Piece) -> None:
        """The copy of a piece has ended."""
        job = piece.job
        if job.plan.verb is Verb.SAVE:
            with self._more:
                job.uncopied -= 1
                # Once it has ended, the source may have changed under the copy.
                whole = not job.ended
                if whole and not job.uncopied:
                    self._report(job, None, clear=False)
            self._tell()
            if whole:
                self._seal(piece)
        with self._more:
            self._done([piece])
        self._tell()

    def _seal(self, piece: Piece) -> None:
        for index, frame in enumerate(piece.inside.tolist()):
            try:
                self._carrier.seal(piece, index, frame)
            except Exception as error:  # noqa: BLE001 - a tier may raise anything
                self._failed(piece, error, index)

    def _done(self, pieces: Sequence[Piece]) -> None:
        """Pieces are over, moved or not; a job whose last one it was has ended, and is clear. Under the lock."""
        for piece in pieces:
            job = piece.job
            job.left -= 1
            if job.ended:
                self._carrier.withdraw(piece)
            else:
                job.outcomes[piece.first : piece.last] = piece.outcomes
            if not job.left:
                del self._jobs[job.plan.number]
                self._report(job, None if job.ended else job.end(Outcome.UNAVAILABLE))
        self._more.notify_all()

    def _report(self, job: Job, outcomes: Outcomes | None, *, clear: bool = True) -> None:
        """Adds to what will be told; under the lock. The source is not needed any more in any case."""
        number = job.plan.number
        self._news.append(Report(number, self._rank.number, outcomes, released=True, clear=clear))

    def _tell(self) -> None:
        """Tells what has happened, in order: a thread that finds another one at it leaves it to that one."""
        while True:
            with self._more:
                if self._telling or not self._news:
                    return
                self._telling = True
                record = self._news.popleft()
            try:
                self._told(record)
            except Exception as error:  # noqa: BLE001 - whoever is told may raise anything
                self._wrong("told", error)
            finally:
                with self._more:
                    self._telling = False

    def _wrong(self, what: str, error: Exception) -> None:
        """Something failed that concerns no one plan; health hears of the first, not of thousands."""
        self.fault = f"{what}: {error!r}"
        if not self.health.degraded:
            name = f"mover-{self._rank.number}-{what}"
            self.health.report(Fault(name, error, traceback.format_exc()))

    def look(self) -> None:
        """Tells of plans whose deadline has passed, and of frames that have become ready."""
        now_s = self._clock.now_s()
        with self._more:
            late = [job for job in self._jobs.values() if not job.ended and now_s >= job.deadline_s]
            for job in late:
                self._report(job, job.end(Outcome.TIMEOUT), clear=False)
            if late:
                self._done(self._queue.discard(lambda job: job.ended))
        if self._growing and not self._closing:
            self._grow()
        self._tell()

    def _grow(self) -> None:
        try:
            # First whether it is over, then what there is: nothing can come in between unseen.
            self._growing = not self.host.grew
            frames = np.asarray(self.host.grown(), np.int32)
        except Exception as error:  # noqa: BLE001 - a tier may raise anything
            self._growing = False
            self._wrong("grown", error)
            return
        if len(frames):
            with self._more:
                self._news.append(Grown(self._rank.number, frames))

    def _move(self) -> None:
        """The life of a thread that moves."""
        while True:
            piece: Piece | None = None
            with self._more:
                while not self._closing and (piece := self._queue.take(self._ready)) is None:
                    self._more.wait()
            if piece is None:
                return
            self._begin(piece)
            # A copy that is late, or whose end nobody knows, must not keep a thread from the others.
            while not (over := self._over(piece, _LOOK_S)):
                if piece.job.ended or self._closing or piece.outcomes.all():
                    break
            if over:
                self._finish(piece)
            else:
                self._leave(piece)

    def _watch(self) -> None:
        """The life of the thread that looks at the clock."""
        while not self._closing:
            self.look()
            while self._settle():
                pass
            with self._more:
                waits = [job.deadline_s for job in self._jobs.values() if not job.ended]
                within_s: list[float] = []
                if waits:
                    within_s.append(max(0.0, min(waits) - self._clock.now_s()))
                if self._growing or self._begun:
                    within_s.append(_LOOK_S)
                if len(self._queue):
                    within_s.append(_READY_S)
                    self._more.notify_all()
                if not self._closing:
                    self._more.wait(min(within_s, default=None))

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do and touches nothing."""
        with self._more:
            return not self._jobs

    def close(self, within_s: float = 10.0) -> bool:
        """Ends all: what was not begun is `UNAVAILABLE`, what was begun may end.

        Args:
            within_s: seconds to wait for what was begun; then it is `UNAVAILABLE`, too.

        Returns:
            Whether nothing is touched any more. If not, the tier's memory stays, since a copy may still use it;
            a later call looks again.
        """
        with self._ending:
            with self._more:
                self._closing = True
                unbegun = self._queue.discard(lambda _: True)
                for piece in unbegun:
                    piece.outcomes[:] = Outcome.UNAVAILABLE
                self._done(unbegun)
            self._tell()
            until_s = self._clock.now_s() + within_s
            for thread in self._threads:
                thread.join(max(0.0, until_s - self._clock.now_s()))
            for piece in list(self._begun):
                self._over(piece, max(0.0, until_s - self._clock.now_s()))
            while self._settle():
                pass
            with self._more:
                for job in self._jobs.values():
                    if not job.ended:
                        self._report(job, job.end(Outcome.UNAVAILABLE), clear=False)
                clear = not self._jobs
            self._tell()
            if not clear or any(thread.is_alive() for thread in self._threads):
                return False
            self.host.close()
            return True
