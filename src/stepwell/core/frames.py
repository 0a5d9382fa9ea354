"""Physical places for pages: who is free, and the one status of each.

Owns: status and generation of every frame, and the stack of free frames. Must not know: keys,
tokens, requests. Neighbours: `index` and the owner of a reservation move frames through `page.LEGAL`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError, MisuseError
from stepwell.core.check import Findings
from stepwell.core.page import LEGAL, Status

FrameIds = npt.NDArray[np.int32]
"""Frame numbers; shape [n]."""

MAX_FRAMES = 2**31 - 1

_MOVES = LEGAL - {(Status.FREE, Status.FILLING)}
"""What `move` may do: only a reservation takes a frame off the stack."""

_ALLOWED = np.zeros((len(Status), len(Status)), np.bool_)
for _before, _after in _MOVES:
    _ALLOWED[_after, _before] = True
_ALLOWED_ONE = [row.tolist() for row in _ALLOWED]
_FILLING = int(Status.FILLING)
_GENERATIONS = 2**32 - 1


def joined(pieces: Sequence[FrameIds]) -> FrameIds:
    """One array of several, at least one; of one without a copy."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class Frames:
    """A fixed number of frames, each with one status.

    Free frames lie on a stack of integers: reserving or returning n of them is one slice, whatever
    the number of frames. A generation counts how often a frame was freed, so that whoever kept a
    frame number from an earlier life can be found out. Not thread-safe: the owner has the lock.

    Args:
        count: frames, 1 to 2**31 - 1.
        present: how many of them are there from the start; the others begin QUARANTINED, and whoever
            brings their place moves them to FREE. All by default.
    """

    def __init__(self, count: int, present: int | None = None) -> None:
        if type(count) is not int or not 1 <= count <= MAX_FRAMES:
            raise InputError(
                f"the number of frames is {count!r}",
                limit=f"1 to {MAX_FRAMES}",
                remedy="give a capacity of at least one page",
            )
        present = count if present is None else present
        if type(present) is not int or not 0 <= present <= count:
            raise InputError(f"{present!r} frames are present", limit=f"0 to {count}")
        self.count = count
        self.status: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.generation: npt.NDArray[np.uint32] = np.zeros(count, np.uint32)
        # Descending, so that the first frames handed out are 0, 1, 2, ...: neighbours stay neighbours.
        self._stack: FrameIds = np.zeros(count, np.int32)
        self._stack[:present] = np.arange(present - 1, -1, -1, dtype=np.int32)
        self._free = present
        self.status[present:] = Status.QUARANTINED
        # Windows on the columns: one element at a time is read four times faster through them.
        self._status_of = self.status.data
        self._generation_of = self.generation.data
        self._stack_of = self._stack.data
        self._seen: FrameIds = np.empty(count, np.int32)  # scratch of _distinct

    @property
    def free(self) -> int:
        """How many frames can be reserved now."""
        return self._free

    def reserve(self, n: int) -> FrameIds | None:
        """Takes n free frames for filling: all of them, or none.

        Returns:
            n frame numbers, or None when fewer than n are free.

        Raises:
            InputError: n is negative.
        """
        if n > self._free:
            return None
        if n < 0:
            raise InputError(f"{n} frames were asked for", limit="0 or more")
        if n == 1:
            self._free -= 1
            taken = self._stack[self._free : self._free + 1].copy()
            self._status_of[self._stack_of[self._free]] = _FILLING
            return taken
        top = self._free - n
        taken = self._stack[top : self._free][::-1].copy()
        self._free = top
        self.status[taken] = _FILLING
        return taken

    def take(self, frames: FrameIds) -> None:
        """Takes these free frames for filling, wherever they lie on the stack.

        Linear in the free frames, so not for a request's path: `reserve` takes any.

        Args:
            frames: distinct frame numbers; all are taken or none is.

        Raises:
            MisuseError: a frame does not exist, comes twice, or is not free.
        """
        if len(frames) == 0:
            return
        if int(frames.min()) < 0 or int(frames.max()) >= self.count:
            raise MisuseError(f"frames {frames} do not all exist", limit=f"0 to {self.count - 1}")
        busy = self.status[frames] != Status.FREE
        if not self._distinct(frames) or busy.any():
            raise MisuseError(
                f"frames {frames[busy].tolist() or frames.tolist()} are not free, or come twice",
                limit="free frames, each once",
                remedy="choose them by their status",
            )
        going = np.zeros(self.count, np.bool_)
        going[frames] = True
        stack = self._stack[: self._free]
        left = stack[~going[stack]]
        self._free = len(left)
        self._stack[: self._free] = left
        self.status[frames] = _FILLING

    def move(self, frames: FrameIds, after: Status) -> None:
        """Moves frames to another status; to `FREE` also puts them back on the stack.

        Args:
            frames: distinct frame numbers, in any order; all move or none does.
            after: the new status.

        Raises:
            MisuseError: a frame does not exist, comes twice, or may not make this step; names it.
        """
        self.require(frames, after)
        n = len(frames)
        if n == 1:
            one = int(frames[0])
            self._status_of[one] = after
            if after is Status.FREE:
                self._generation_of[one] = (self._generation_of[one] + 1) & _GENERATIONS
                self._stack_of[self._free] = one
                self._free += 1
            return
        self.status[frames] = int(after)
        if after is Status.FREE:
            self.generation[frames] += 1
            # Reversed: the first frame given is the next one taken, which keeps runs ascending.
            self._stack[self._free : self._free + n] = frames[::-1]
            self._free += n

    def require(self, frames: FrameIds, after: Status) -> None:
        """Raises what `move` would raise, and moves nothing."""
        n = len(frames)
        if n == 1:
            one = int(frames[0])
            if not (0 <= one < self.count and _ALLOWED_ONE[after][self._status_of[one]]):
                raise self._illegal(frames, after)
        elif n:
            # Read as unsigned, a negative number is too large: one pass for both ends.
            highest = int(np.maximum.reduce(frames.view(np.uint32)))
            if highest >= self.count or not self._distinct(frames):
                raise self._illegal(frames, after)
            if np.count_nonzero(_ALLOWED[int(after)].take(self.status.take(frames))) < n:
                raise self._illegal(frames, after)

    def _distinct(self, frames: FrameIds) -> bool:
        """Whether no frame comes twice; linear in the frames asked about."""
        order = np.arange(len(frames), dtype=np.int32)
        self._seen[frames] = order
        return not np.count_nonzero(self._seen.take(frames) != order)

    def _illegal(self, frames: FrameIds, after: Status) -> MisuseError:
        seen: set[int] = set()
        for frame in map(int, frames):
            if not 0 <= frame < self.count:
                return MisuseError(f"frame {frame} does not exist", limit=f"0 to {self.count - 1}")
            if frame in seen:
                return MisuseError(f"frame {frame} comes twice in one call", limit="once")
            seen.add(frame)
            before = Status(int(self.status[frame]))
            if (before, after) not in _MOVES:
                to = ", ".join(b.name for a, b in sorted(_MOVES) if a is before) or "nowhere"
                return MisuseError(
                    f"frame {frame} would go from {before.name} to {after.name}",
                    limit=f"from {before.name} to {to}",
                    remedy="a frame is returned once, by the owner of its status",
                )
        raise AssertionError("every frame may make this step")  # only called when one may not

    def census(self) -> dict[Status, int]:
        """How many frames have each status; linear in all frames, so not for a request's path."""
        counts = np.bincount(self.status, minlength=len(Status))
        return {status: int(counts[status]) for status in Status}

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of the stack and the statuses."""
        stack = self._stack[: self._free]
        findings.expect(len(np.unique(stack)) == self._free, "a frame lies on the free stack twice")
        findings.expect(
            (self.status[stack] == Status.FREE).all(), "a frame on the free stack is not FREE"
        )
        free = self.census()[Status.FREE]
        findings.expect(
            free == self._free, f"{free} frames are FREE but {self._free} lie on the stack"
        )
