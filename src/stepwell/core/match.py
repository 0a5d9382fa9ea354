"""What an index answers: records without behaviour.

Neighbours: `index` and `walked` give them, the owner of a page table reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.core.frames import FrameIds
from stepwell.core.lease import Lease
from stepwell.core.reasons import Reason


@dataclass(frozen=True, slots=True)
class Look:
    """What a lookup found and does not hold.

    Attributes:
        path: frames of the matched pages, first page first; shape [pages].
        reason: why the match ends where it ends.
    """

    path: FrameIds
    reason: Reason


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup found and holds.

    Attributes:
        lease: keeps the pages until released.
        frames: of the matched pages, first page first; shape [pages].
        reason: why the match ends where it ends.
    """

    lease: Lease
    frames: FrameIds
    reason: Reason


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
