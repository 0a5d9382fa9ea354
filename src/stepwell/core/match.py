"""What an index answers: records without behaviour.

Neighbours: `index` and `walked` give them, the owner of a page table reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepwell.core.frames import FrameIds
from stepwell.core.lease import Lease
from stepwell.core.reasons import Reason

Agree = Callable[[int], int]
"""Of so many pages that were found, how many are of use."""


def whole(known: int) -> int:
    """All of them: there is nobody else to ask."""
    return known


@dataclass(frozen=True, slots=True)
class Held:
    """What a lookup found and holds.

    Attributes:
        lease: keeps the pages until released.
        frames: of the pages that it keeps, first page first; shape [pages].
        reason: why not more was found.
        known: pages that were found; more than `frames` where others could not agree.
    """

    lease: Lease
    frames: FrameIds
    reason: Reason
    known: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """What became of pages that were given to `seal`.

    Attributes:
        kept: frame of each page that is indexed now; shorter than what was given when a page was
            refused; shape [pages].
        spare: the caller's frames of pages that were here already: still FILLING, and the caller's to
            return once its page table points at `kept`.
    """

    kept: FrameIds
    spare: FrameIds
