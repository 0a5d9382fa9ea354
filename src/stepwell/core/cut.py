"""How a group is cut into frames: what an index of it has to know of sizes.

Neighbours: `cache.pool.limits` chooses the sizes; `prefixes` and `walked` count in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.core.geometry import Group


@dataclass(frozen=True, slots=True)
class Cut:
    """How one group is cut into frames.

    Attributes:
        group: the group.
        frames: of one of its pages, or of one state.
        reach: pages before a boundary that are needed to go on there; for a state 1, itself; 0 for a
            full group, which needs all.
    """

    group: Group
    frames: int
    reach: int
