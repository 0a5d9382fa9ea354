"""The life of a page: one status, one table of legal transitions.

    free ──reserve──▶ filling ──seal──▶ sealed ──evict, drop──▶ leaving ──released──▶ free
                        │ abort ▶ free
    filling, sealed, leaving ──fault──▶ quarantined ──cleared──▶ free

Neighbours: `frames` owns the status of every frame and lets nothing else change it.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Where a page is in its life."""

    FREE = 0
    FILLING = 1
    SEALED = 2
    LEAVING = 3
    QUARANTINED = 4


LEGAL: frozenset[tuple[Status, Status]] = frozenset(
    {
        (Status.FREE, Status.FILLING),
        (Status.FILLING, Status.SEALED),
        (Status.FILLING, Status.FREE),
        (Status.SEALED, Status.LEAVING),
        (Status.LEAVING, Status.FREE),
        (Status.FILLING, Status.QUARANTINED),
        (Status.SEALED, Status.QUARANTINED),
        (Status.LEAVING, Status.QUARANTINED),
        (Status.QUARANTINED, Status.FREE),
    }
)
"""Every transition that may happen; whatever is not in here raises."""
