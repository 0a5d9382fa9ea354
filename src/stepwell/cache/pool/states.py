"""What each request has of one state group: the state it goes on from, and frames for the next one.

Owns: which frames those are. Must not know: what a state is. A step reads one set of frames and writes
another or the same; so a state is kept without copying it: its frames are sealed, the next
step reads them, and writes into new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.cache.pool.buffers import StateBuffers
from stepwell.cache.pool.view import StateView
from stepwell.core.chain import Chain
from stepwell.core.cut import Cut
from stepwell.core.frames import FrameIds
from stepwell.core.walked import WalkedIndex


@dataclass(slots=True)
class StateRow:
    """What one request has of one state group.

    Attributes:
        own: FILLING frames that the next step writes; shape [frames of a state].
        held: the sealed state that the next step reads; shape [1], or [0] when it reads `own`.
        fresh: nothing was computed yet: the next step begins with zeros.
    """

    own: FrameIds
    held: FrameIds
    fresh: bool


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The states of one group.

    Attributes:
        cut: frames of a state.
        index: of what is sealed.
        buffers: the memory as bytes of states.
    """

    cut: Cut
    index: WalkedIndex
    buffers: StateBuffers

    @staticmethod
    def open(boundary: int, records: FrameIds, own: FrameIds) -> StateRow:
        """A row that goes on from a boundary, whose state is held."""
        return StateRow(own, records, fresh=boundary == 0)

    def view(self, opened: Sequence[StateRow]) -> StateView:
        """Where a step of these requests reads and writes."""
        sealed = [self.index.frames_of(row.held)[0] if len(row.held) else row.own for row in opened]
        return StateView(
            self.buffers,
            reads=np.array(sealed, np.int64),
            fresh=np.array([row.fresh for row in opened]),
            writes=np.array([row.own for row in opened], np.int64),
        )

    def written(self, opened: StateRow) -> None:
        """The step has written the next state: what it read is needed no more."""
        # First out of the books: a hold that is ended twice would be somebody else's.
        held, opened.held, opened.fresh = opened.held, opened.held[:0], False
        self.index.release(held)

    def seal(self, opened: StateRow, chain: Chain, boundary: int, spare: FrameIds) -> None:
        """Keeps the state at a boundary where none is yet.

        Args:
            opened: a row whose state is that of the boundary.
            chain: the request's tokens.
            boundary: in pages.
            spare: FILLING frames for the state after the next step.
        """
        sealed = self.index.seal(chain, boundary - 1, opened.own[None])
        assert len(sealed.kept), "nobody has this key"
        opened.held, opened.own = sealed.kept, spare

    def close(self, opened: StateRow) -> FrameIds:
        """Ends a row; returns its FILLING frames, the caller's to free."""
        self.index.release(opened.held)
        return opened.own


def views(
    groups: Sequence[StateGroup], opened: Sequence[Sequence[StateRow]]
) -> tuple[StateView, ...]:
    """Where a step reads and writes in each group; `opened` has the rows of each request."""
    return tuple(
        group.view([rows[number] for rows in opened]) for number, group in enumerate(groups)
    )
