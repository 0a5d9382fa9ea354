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
    """One row of the table."""

    name: str
    kind: Kind
    unit: str
    text: str


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
        "states_skipped", Kind.COUNT, "states", "states not kept: the pool had no frames for them"
    ),
    Metric("key_collisions", Kind.COUNT, "pages", "equal keys with unequal tokens, refused"),
    Metric("leases_lost", Kind.COUNT, "leases", "leases that were never released by their holder"),
    Metric("opens_ready", Kind.COUNT, "requests", "requests that got their pages"),
    Metric("opens_busy", Kind.COUNT, "answers", "times that a request was told to come back"),
    Metric("opens_refused", Kind.COUNT, "requests", "requests that can never fit"),
    Metric("tokens_reused", Kind.COUNT, "tokens", "prompt tokens that did not need computing"),
    Metric("tokens_missed", Kind.COUNT, "tokens", "prompt tokens that had to be computed"),
    Metric("frames_free", Kind.GAUGE, "frames", "frames with nothing in them"),
    Metric("frames_filling", Kind.GAUGE, "frames", "frames that one request writes"),
    Metric("frames_held", Kind.GAUGE, "frames", "sealed pages that a request or transfer needs"),
    Metric("frames_cached", Kind.GAUGE, "frames", "sealed pages that may be evicted, now or later"),
    Metric("remainder_bytes", Kind.GAUGE, "bytes", "of the capacity, what makes no whole page"),
)
METRICS: Mapping[str, Metric] = {row.name: row for row in _ROWS}


class Counters:
    """Counts of outcomes under names from `METRICS`.

    Not thread-safe: the owner counts under its own lock, as part of the outcome that it counts.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {row.name: 0 for row in _ROWS if row.kind is Kind.COUNT}

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
