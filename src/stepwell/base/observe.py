"""The one table of metric names, and the counters that may only use names out of it.

Counts are of outcomes: a count moves when something has happened, never when it is tried. A value
that is not known is `None`, never 0. Neighbours: `cache` and `engine` count; the server exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stepwell.base.errors import MisuseError


class Kind(StrEnum):
    """How a metric moves."""

    COUNT = "count"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: of the metric.
        kind: how it moves.
        unit: of its value.
        text: what it counts.
        owner: what has it: `pool`, `tiers`, or `index`, which both have.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    owner: str = "index"


_ROWS = (
    Metric("pages_sealed", Kind.COUNT, "pages", "pages whose KV became reusable"),
    Metric("pages_duplicate", Kind.COUNT, "pages", "pages computed twice; the first copy was kept"),
    Metric("pages_evicted", Kind.COUNT, "pages", "pages taken back by the policy"),
    Metric("pages_dropped", Kind.COUNT, "pages", "pages forgotten on purpose or found corrupt"),
    Metric("records_sealed", Kind.COUNT, "records", "window pages and states that became reusable"),
    Metric("records_evicted", Kind.COUNT, "records", "window pages and states taken back"),
    Metric(
        "records_duplicate", Kind.COUNT, "records", "records computed twice; the first was kept"
    ),
    Metric(
        "records_dropped", Kind.COUNT, "records", "records forgotten with their page or by wish"
    ),
    Metric(
        "states_skipped",
        Kind.COUNT,
        "states",
        "states not kept: the pool had no frames for them",
        "pool",
    ),
    Metric("key_collisions", Kind.COUNT, "pages", "equal keys with unequal tokens, refused"),
    Metric("leases_lost", Kind.COUNT, "leases", "leases that were never released by their holder"),
    Metric("pages_saved", Kind.COUNT, "pages", "pages that came whole into a tier", "tiers"),
    Metric(
        "pages_unsaved",
        Kind.COUNT,
        "pages",
        "pages that set out for a tier and did not arrive",
        "tiers",
    ),
    Metric(
        "records_saved",
        Kind.COUNT,
        "records",
        "window pages and states that came into a tier",
        "tiers",
    ),
    Metric(
        "frames_without_room",
        Kind.COUNT,
        "frames",
        "not saved: all frames of the tier are held",
        "tiers",
    ),
    Metric(
        "pages_loaded",
        Kind.COUNT,
        "pages",
        "pages that came back from a tier, and were right",
        "tiers",
    ),
    Metric(
        "records_loaded", Kind.COUNT, "records", "window pages and states that came back", "tiers"
    ),
    Metric(
        "frames_failed",
        Kind.COUNT,
        "frames",
        "frames that a load asked for and did not get",
        "tiers",
    ),
    Metric(
        "frames_distrusted",
        Kind.COUNT,
        "frames",
        "frames out of use: their bytes were found wrong",
        "tiers",
    ),
    Metric(
        "matches_expired", Kind.COUNT, "matches", "matches in a tier that nobody loaded", "tiers"
    ),
    Metric(
        "saves_refused", Kind.COUNT, "saves", "saves not begun: the tier is left alone", "tiers"
    ),
    Metric("breaker_opened", Kind.COUNT, "times", "a tier that failed was left alone", "tiers"),
    Metric("opens_ready", Kind.COUNT, "requests", "requests that got their pages", "pool"),
    Metric(
        "opens_busy", Kind.COUNT, "answers", "times that a request was told to come back", "pool"
    ),
    Metric("opens_refused", Kind.COUNT, "requests", "requests that can never fit", "pool"),
    Metric(
        "tokens_reused", Kind.COUNT, "tokens", "prompt tokens that did not need computing", "pool"
    ),
    Metric("tokens_missed", Kind.COUNT, "tokens", "prompt tokens that had to be computed", "pool"),
    Metric("frames_free", Kind.GAUGE, "frames", "frames with nothing in them"),
    Metric("frames_filling", Kind.GAUGE, "frames", "frames that one request writes", "pool"),
    Metric("frames_held", Kind.GAUGE, "frames", "sealed pages that a request or transfer needs"),
    Metric("frames_cached", Kind.GAUGE, "frames", "sealed pages that may be evicted, now or later"),
    Metric(
        "frames_moving",
        Kind.GAUGE,
        "frames",
        "frames that only a movement from or to a tier has",
        "pool",
    ),
    Metric("plans_open", Kind.GAUGE, "plans", "movements that are not over", "tiers"),
    Metric("breaker_open", Kind.GAUGE, "tiers", "tiers that are left alone now", "tiers"),
    Metric(
        "remainder_bytes", Kind.GAUGE, "bytes", "of the capacity, what makes no whole page", "pool"
    ),
)
METRICS: Mapping[str, Metric] = {row.name: row for row in _ROWS}


class Counters:
    """Counts of outcomes under names from `METRICS`.

    Not thread-safe: the owner counts under its own lock, as part of the outcome that it counts.

    Args:
        owners: whose metrics it has; all by default.
    """

    def __init__(self, *owners: str) -> None:
        mine = (row for row in _ROWS if not owners or row.owner in owners)
        self._counts: dict[str, int] = {row.name: 0 for row in mine if row.kind is Kind.COUNT}

    def add(self, name: str, count: int = 1) -> None:
        """Adds an outcome that has happened.

        Raises:
            MisuseError: the name is not a count of the table, or the count is negative.
        """
        if name not in self._counts:
            raise MisuseError(f"{name!r} is not a count of the metric table")
        if count < 0:
            raise MisuseError(f"{name} would move by {count}", limit="0 or more")
        self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counts so far, zeros included."""
        return dict(self._counts)
