"""The protocol between an index and the policy that chooses which page leaves next.

A policy sees frames, never keys or requests. The index tells it what may leave (*offered*) and what
may not any more (*withdrawn*); the policy keeps the order, it never rebuilds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds


class Policy(Protocol):
    """Which of the pages that may leave goes next.

    No method may block or scan all frames. The index guarantees: a frame is offered only while no child
    and no hold keeps it, it is withdrawn when that changes or when its page leaves, and `reset` comes
    before anything else of a new page.
    """

    def reset(self, frames: FrameIds) -> None:
        """New pages live in these frames: their records start empty."""
        ...

    def touch(self, frame: int) -> None:
        """A request used the prefix that ends in this frame."""
        ...

    def offer(self, frame: int, *, first: bool = False) -> None:
        """This frame may leave from now on.

        With `first` before all that were offered without, in the order of these calls: nothing is
        expected of it.
        """
        ...

    def withdraw(self, frame: int) -> None:
        """This frame may not leave any more; nothing happens if it was not offered."""
        ...

    def victim(self) -> int | None:
        """The offered frame that goes next, or None; it stays offered."""
        ...

    def in_a_row(self, frames: FrameIds) -> int:
        """How many of these the policy would choose one after the other, 1 or more.

        Args:
            frames: the victim first, then its parent, that one's parent, and so on, each of which
                becomes evictable when the one before has left.
        """
        ...

    def inherit(self, frames: FrameIds, parent: int) -> None:
        """These pages leave, tail first: their records are merged into that of the last one's parent."""
        ...

    def check(self, findings: Findings, offered: Callable[[int], bool]) -> None:
        """Notes broken invariants; `offered` tells what the index says of a frame."""
        ...
