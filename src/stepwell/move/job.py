"""One plan while a mover works at it: its pieces, and what is known of its frames.

Neighbours: `queue` says which piece is next, `mover` does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stepwell.core.frames import FrameIds
from stepwell.core.plan import Outcome, Plan
from stepwell.move.fence import Fence
from stepwell.tiers.host import NAME_BYTES

Outcomes = npt.NDArray[np.uint8]
"""An `Outcome` for each frame; shape [n]."""

_NEVER = 255


@dataclass(slots=True, eq=False)
class Job:
    """One plan.

    Attributes:
        plan: what to do.
        parts: digest of the part of each group, by the group's number.
        fence: after which the source is ready.
        deadline_s: on the mover's clock.
        outcomes: of the frames so far; shape [n].
        left: pieces that are not done.
        uncopied: pieces of which the source is still needed.
        ended: its outcomes are final.
        broken: what its fence raised.
    """

    plan: Plan
    parts: tuple[bytes, ...]
    fence: Fence
    deadline_s: float
    outcomes: Outcomes = field(init=False)
    left: int = 0
    uncopied: int = 0
    ended: bool = False
    broken: Exception | None = None

    def __post_init__(self) -> None:
        self.outcomes = np.full(len(self.plan), _NEVER, np.uint8)

    def name(self, index: int) -> bytes:
        """The name of one frame: content key, part, and number of the frame in its record."""
        which = int(self.plan.which[index])
        name = (
            self.plan.key(index) + self.parts[which >> 16] + (which & 0xFFFF).to_bytes(2, "little")
        )
        assert len(name) == NAME_BYTES, "digests of 32 bytes"
        return name

    def end(self, otherwise: Outcome) -> Outcomes:
        """Its outcomes are final; those that are not known are this."""
        self.ended = True
        self.outcomes[self.outcomes == _NEVER] = otherwise
        return self.outcomes.copy()


@dataclass(slots=True, eq=False)
class Piece:
    """Some frames of a job that one thread moves at once.

    Attributes:
        job: whose they are.
        first: of the job's frames.
        last: one behind them.
        outcomes: so far; shape [last - first].
        fence: the end of its copy, once that was begun.
    """

    job: Job
    first: int
    last: int
    outcomes: Outcomes = field(init=False)
    fence: Fence | None = None

    def __post_init__(self) -> None:
        self.outcomes = np.zeros(self.last - self.first, np.uint8)

    @property
    def inside(self) -> FrameIds:
        """Frames of the host tier; shape [n]."""
        return self.job.plan.inside[self.first : self.last]

    @property
    def outside(self) -> FrameIds:
        """Frames of the device; shape [n], or [0]."""
        return self.job.plan.outside[self.first : self.last]

    def name(self, index: int) -> bytes:
        """The name of one of its frames."""
        return self.job.name(self.first + index)


def cut(job: Job, frames: int) -> list[Piece]:
    """Cuts a job into pieces of at most so many frames."""
    size = len(job.plan)
    pieces = [Piece(job, at, min(at + frames, size)) for at in range(0, size, frames)]
    job.left = job.uncopied = len(pieces)
    return pieces
