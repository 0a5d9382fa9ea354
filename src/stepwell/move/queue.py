"""Which piece is moved next: reads before writes, with a floor for writes.

Must not know: bytes, threads. Neighbours: `mover` has the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from stepwell.core.plan import Verb
from stepwell.move.job import Job, Piece

_FLOOR = 4
"""Of so many pieces in a row that are read, the next one is written, if there is one."""


class Queue:
    """Pieces that nobody has begun. Not thread-safe: the mover has the lock.

    Somebody waits for what is read; but device frames that wait to be written cannot be used again, so reads never
    keep writes out altogether. A write whose source is not ready yet lets those behind it go first.
    """

    def __init__(self) -> None:
        self._reads: deque[Piece] = deque()
        self._writes: deque[Piece] = deque()
        self._row = 0

    def __len__(self) -> int:
        return len(self._reads) + len(self._writes)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Puts the pieces of one job at the end."""
        for piece in pieces:
            reads = piece.job.plan.verb is Verb.LOAD
            (self._reads if reads else self._writes).append(piece)

    def take(self, ready: Callable[[Job], bool]) -> Piece | None:
        """The next piece that can be begun.

        Args:
            ready: whether a job can.
        """
        turn = self._row >= _FLOOR
        for reads in (False, True) if turn else (True, False):
            piece = _first(self._reads if reads else self._writes, ready)
            if piece is not None:
                self._row = self._row + 1 if reads and self._writes else 0
                return piece
        return None

    def discard(self, gone: Callable[[Job], bool]) -> list[Piece]:
        """Takes out the pieces of some jobs."""
        out: list[Piece] = []
        for pieces in (self._reads, self._writes):
            out += [piece for piece in pieces if gone(piece.job)]
            left = [piece for piece in pieces if not gone(piece.job)]
            pieces.clear()
            pieces.extend(left)
        return out


def _first(pieces: deque[Piece], ready: Callable[[Job], bool]) -> Piece | None:
    """Takes out the first piece whose job is ready."""
    job: Job | None = None
    for at, piece in enumerate(pieces):
        if piece.job is job:
            continue  # as the piece before
        job = piece.job
        if ready(job):
            del pieces[at]
            return piece
    return None
