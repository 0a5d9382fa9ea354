"""What is in the frames of the host tier: frames, indexes, and what may leave them.

Owns: the status of every host frame, and whose bytes may be in it. Must not know: bytes, movers' threads, requests.
Neighbours: `ledger` has the lock; `saves` brings pages in, `loads` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.base.observe import Counters
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.cut import Cut
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.page import Status
from stepwell.core.plan import Outcome
from stepwell.core.prefixes import Prefixes

_NONE: FrameIds = np.empty(0, np.int32)
_NOBODY = 0
_SEVERAL = 2**64 - 1


def _mark(root: bytes) -> int:
    """What stands for a root in the column of owners; roots of which the first bytes are equal are wiped together."""
    return min(max(int.from_bytes(root[:8], "little"), _NOBODY + 1), _SEVERAL - 1)


class Stock:
    """Frames of one tier, the same on every rank. Not thread-safe: the ledger has the lock.

    A frame is of use once every rank has memory for it. It is FREE only if nobody touches it, no rank has found wrong
    bytes in it, and nothing in it has to be overwritten; until then it is QUARANTINED, or LEAVING. After a drop that is
    every frame that may have bytes of what was dropped: also those that were free again, or on their way.

    Args:
        count: the most frames.
        movers: ranks.
        page_tokens: tokens of one page.
        cuts: of all groups.
        counters: counts what happens.
    """

    def __init__(
        self, count: int, movers: int, page_tokens: int, cuts: Sequence[Cut], counters: Counters
    ) -> None:
        self.frames = Frames(count, present=0)
        self.prefixes = Prefixes(self.frames, page_tokens, cuts, Lru(count), counters)
        self._counters = counters
        self._movers = movers
        self._present: npt.NDArray[np.bool_] = np.zeros((movers, count), np.bool_)
        # The ledger is not told which rank has found wrong bytes, so each is distrusted until its memory is new.
        self._wrong: npt.NDArray[np.bool_] = np.zeros((movers, count), np.bool_)
        self._busy: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)  # a late movement has it
        self._hidden: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)  # held, but found no more
        self._doomed: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)  # to be overwritten first
        self._owner: npt.NDArray[np.uint64] = np.full(count, _NOBODY, np.uint64)
        self._to_wipe: list[int] = []
        self._unwiped: list[int] = []

    def grown(self, mover: int, frames: FrameIds) -> None:
        """A rank has memory for these frames.

        Raises:
            InputError: a frame or rank that does not exist, or a frame that it had.
        """
        if not 0 <= mover < self._movers:
            raise InputError(f"rank {mover} has grown", limit=f"0 to {self._movers - 1}")
        if len(frames) and not 0 <= int(frames.min()) <= int(frames.max()) < self.frames.count:
            raise InputError(
                f"frames {frames.min()} to {frames.max()}", limit=f"0 to {self.frames.count - 1}"
            )
        if self._present[mover, frames].any() or len(np.unique(frames)) < len(frames):
            raise InputError("frames became ready twice", limit="once")
        self._present[mover, frames] = True
        idle = (self.frames.status[frames] == Status.QUARANTINED) & self._usable(frames)
        idle &= ~self._busy[frames] & ~self._doomed[frames]
        self.frames.move(frames[idle], Status.FREE)

    def _usable(self, frames: FrameIds) -> npt.NDArray[np.bool_]:
        """Which of these every rank has memory for that is not distrusted."""
        usable = self._present[:, frames] & ~self._wrong[:, frames]
        return np.asarray(usable.all(axis=0))

    @property
    def present(self) -> int:
        """Frames that exist; linear in all frames."""
        return int(self._present.all(axis=0).sum())

    @property
    def available(self) -> int:
        """Frames that `take` could give."""
        return self.frames.free + self.prefixes.evictable

    def take(self, n: int, root: bytes) -> FrameIds | None:
        """Takes n FILLING frames, evicting as much as that takes; all of them, or none.

        Args:
            n: frames.
            root: whose bytes will be in them.
        """
        missing = n - self.frames.free
        if missing > 0 and not self.prefixes.evict(missing):
            return None
        self.collect()
        frames = self.frames.reserve(n)
        if frames is not None:
            mine, before = _mark(root), self._owner[frames]
            same = (before == _NOBODY) | (before == mine)
            self._owner[frames] = np.where(same, np.uint64(mine), np.uint64(_SEVERAL))
        return frames

    def sealed(self, frames: FrameIds, root: bytes) -> None:
        """These have been filled, and are in an index now: nothing is left in them of what was there before."""
        self._owner[frames] = np.uint64(_mark(root))
        self._doomed[frames] = False

    def free(self, frames: FrameIds) -> None:
        """Nobody has or touches these frames any more, which are FILLING, LEAVING or QUARANTINED."""
        self._busy[frames] = self._hidden[frames] = False
        doomed = self._doomed[frames]
        if doomed.any():
            wipe = frames[doomed]
            filling = wipe[self.frames.status[wipe] == Status.FILLING]
            self.frames.move(filling, Status.QUARANTINED)
            self._to_wipe += wipe.tolist()
            frames = frames[~doomed]
        self._back(frames)

    def _back(self, frames: FrameIds) -> None:
        usable = self._usable(frames)
        self.frames.move(frames[usable], Status.FREE)
        out = frames[~usable]
        self.frames.move(out[self.frames.status[out] != Status.QUARANTINED], Status.QUARANTINED)

    def retire(self, frames: FrameIds) -> None:
        """Frames that a late movement may still touch: nobody gets them before `free`."""
        self.frames.move(frames, Status.QUARANTINED)
        self._busy[frames] = True

    def distrust(self, frames: FrameIds) -> None:
        """Frames whose bytes were found wrong are out of use as soon as nobody holds them."""
        fresh = frames[~self._wrong[:, frames].any(axis=0)]
        self._wrong[:, fresh] = True
        self._counters.add("frames_distrusted", len(fresh))

    def forget_page(self, frame: int) -> None:
        """Nobody finds a page any more, nor what continues it.

        Args:
            frame: of a page that a load holds; one that was forgotten before stays so.
        """
        closed = self.prefixes.closed
        assert closed is not None, "a full group"
        if closed.found(frame):
            frames, keys = closed.below(frame)
            self._hidden[frames] = True
            for index in self.prefixes.walked:
                self._hidden[index.frames_of(index.with_keys(keys))] = True
            closed.drop(frame)

    def forget_record(self, group: int, record: int) -> None:
        """Nobody finds a window page or state any more."""
        index = self.prefixes.walked[group]
        if index.found(record):
            self._hidden[index.frames_of(np.array([record], np.int32))] = True
            index.forget_record(record)

    def forget(self) -> None:
        """Nobody finds anything any more."""
        self._hidden[self.prefixes.below_root(None)] = True
        self.prefixes.drop_root(None)

    def drop(self, prefix: Chain) -> int:
        """Forgets every page that begins with these; they are overwritten once nobody holds them."""
        below = self.prefixes.below(prefix)
        unfound = (self.frames.status != Status.SEALED) | self._hidden
        self._hidden[below] = True
        self._doom(np.union1d(self._owned(prefix.root, unfound), below))
        return self.prefixes.drop(prefix)

    def drop_root(self, root: bytes | None) -> int:
        """Forgets all of one namespace, or everything; it is overwritten once nobody holds it."""
        self._hidden[self.prefixes.below_root(root)] = True
        self._doom(self._owned(root, np.ones(self.frames.count, np.bool_)))
        return self.prefixes.drop_root(root)

    def _owned(self, root: bytes | None, among: npt.NDArray[np.bool_]) -> FrameIds:
        """Frames that may have bytes of a root, or of any; linear in all frames."""
        mine = self._owner != _NOBODY
        if root is not None:
            mine = (self._owner == _mark(root)) | (self._owner == _SEVERAL)
        return np.flatnonzero(mine & among).astype(np.int32)

    def _doom(self, frames: FrameIds) -> None:
        """Their bytes are overwritten before anybody gets them."""
        fresh = frames[~self._doomed[frames]]
        self._doomed[fresh] = True
        status = self.frames.status[fresh]
        free, out = fresh[status == Status.FREE], fresh[status == Status.QUARANTINED]
        self.frames.take(free)
        self.frames.move(free, Status.QUARANTINED)
        self._to_wipe += [*free.tolist(), *out[~self._busy[out]].tolist()]

    def collect(self) -> None:
        """Frees what has left the indexes."""
        left = self.prefixes.collect()
        if len(left):
            self.free(left)

    def to_wipe(self) -> FrameIds:
        """Frames that have to be overwritten, since the last call, as soon as every rank has them; shape [n]."""
        if not self._to_wipe:
            return _NONE
        frames = np.array(self._to_wipe, np.int32)
        there = self._present[:, frames].all(axis=0)
        self._to_wipe = frames[~there].tolist()
        return frames[there]

    def wiped(self, frames: FrameIds, outcomes: npt.NDArray[np.uint8]) -> None:
        """Frames of `to_wipe` were overwritten, or not."""
        done = (outcomes == Outcome.OK) | ~self._doomed[frames]
        self._unwiped += frames[~done].tolist()
        self._clean(frames[done])

    def _clean(self, frames: FrameIds) -> None:
        """Nobody's bytes are in these frames."""
        self._owner[frames] = np.uint64(_NOBODY)
        self._doomed[frames] = False
        self._back(frames)

    @property
    def unwiped(self) -> bool:
        """Whether there are frames that could not be overwritten, and that every rank has."""
        return bool(self._unwiped) and bool(self._present[:, self._unwiped].all(axis=0).any())

    def wipe_again(self) -> None:
        """What could not be overwritten is in `to_wipe` once more."""
        self._to_wipe += self._unwiped
        self._unwiped = []

    @property
    def wiping(self) -> bool:
        """Whether there are frames to be overwritten of which nobody takes care yet."""
        return bool(self._to_wipe or self._unwiped)

    def lose(self, mover: int) -> None:
        """A rank is gone with its memory: no frame is of use before it has new memory."""
        free = np.flatnonzero(self.frames.status == Status.FREE).astype(np.int32)
        self.frames.take(free)
        self.frames.move(free, Status.QUARANTINED)
        self._present[mover] = self._wrong[mover] = False
        waiting = np.array(self._to_wipe + self._unwiped, np.int32)
        gone = ~self._present[:, waiting].any(axis=0)
        self._to_wipe, self._unwiped = waiting[~gone].tolist(), []
        self._clean(waiting[gone])
        nowhere = ~self._present.any(axis=0)
        self._owner[nowhere], self._doomed[nowhere] = np.uint64(_NOBODY), False

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of frames and indexes; linear."""
        self.frames.check(findings)
        self.prefixes.check(findings)
        status, everything = self.frames.status, np.arange(self.frames.count, dtype=np.int32)
        usable, kept = self._usable(everything), self._busy | self._doomed
        free = status == Status.FREE
        findings.expect((usable & ~kept & ~self._hidden)[free].all(), "a FREE frame is of no use")
        found = np.union1d(self.prefixes.below_root(None), _NONE)
        shown = found[~self._hidden[found]]
        findings.expect((usable & ~kept)[shown].all(), "a frame can be found that is of no use")
        findings.expect((status[self._hidden] == Status.SEALED).all(), "a frame is hidden unheld")
        out = status == Status.QUARANTINED
        findings.expect(out[self._busy].all(), "a frame that is touched late is not QUARANTINED")
        findings.expect((kept | ~usable)[out].all(), "a frame is QUARANTINED for no reason")
        findings.expect(self._doomed[status == Status.LEAVING].all(), "a frame does not leave")
        waiting = self._to_wipe + self._unwiped
        findings.expect(len(set(waiting)) == len(waiting), "a frame is to be overwritten twice")
        findings.expect(self._doomed[waiting].all(), "a frame is to be overwritten for no reason")
