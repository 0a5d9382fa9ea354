"""What a ledger is told of a model, and what it answers: records without behaviour.

Neighbours: `ledger` gives them; `store`, `cache.pool` and engines read them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from stepwell.base.errors import InputError
from stepwell.cache.ledger.loads import Loaded
from stepwell.core.cut import Cut
from stepwell.core.geometry import Rule
from stepwell.core.reasons import Reason

_PLAN_PARTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt the tiers can restore, and hold for the request that asked.

    It ends when it is loaded, when its request asks again, or after `host.match_steps` steps.

    Attributes:
        request: who asked.
        pages: from the first on, restorable in every group.
        records: window pages and states that each other group needs at that boundary.
        parted: pages after which the prompt leaves what is known here, if it goes on beyond `pages`; else 0.
        reason: why not more.
    """

    request: Hashable
    pages: int
    records: tuple[int, ...]
    parted: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Released:
    """The device frames of a save may be overwritten."""

    plan: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing of a plan is touched any more."""

    plan: int


News = Released | Loaded | Cleared


@dataclass(frozen=True, slots=True)
class Shape:
    """What a ledger has to know of a model and its ranks.

    Attributes:
        page_tokens: tokens of one page.
        cuts: of all groups, the full one first.
        frames: of the host tier on every rank.
        frame_bytes: of one of them.
        movers: ranks.

    Raises:
        InputError: no such model, or no ranks.
    """

    page_tokens: int
    cuts: tuple[Cut, ...]
    frames: int
    frame_bytes: int
    movers: int = 1

    def __post_init__(self) -> None:
        rules = [cut.group.rule for cut in self.cuts]
        if not rules or Rule.FULL in rules[1:]:
            raise InputError(f"the groups are {rules}", limit="one or more, a full one first")
        if self.movers < 1:
            raise InputError(f"there are {self.movers} ranks", limit="1 or more")
        if max(cut.frames for cut in self.cuts) > _PLAN_PARTS:
            raise InputError(
                f"records of {[cut.frames for cut in self.cuts]} frames",
                limit=f"{_PLAN_PARTS}, as plans number them",
            )

    @property
    def walked(self) -> tuple[Cut, ...]:
        """The groups that are not full."""
        return tuple(cut for cut in self.cuts if cut.group.rule is not Rule.FULL)
