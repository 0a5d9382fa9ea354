"""Interleaved rounds: every candidate of a row runs in every round, in one process.

A busy machine slows neighbours in time alike, so a figure counts only as the ratio to another of the
same round; what is reported is the median of these ratios, and medians of the seconds beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from stepwell.base.clock import SystemClock

_CLOCK = SystemClock()


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the things that take turns.

    Attributes:
        run: what is timed; gets what `prepare` returned.
        prepare: runs before each turn, not timed.
        clean: runs after each turn, not timed.
        calls: how many operations one turn does; seconds are divided by it.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = _nothing
    clean: Callable[[], object] = _nothing
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds for one operation, by candidate, in the order of the rounds."""

    seconds: Mapping[str, list[float]]

    def median_s(self, name: str) -> float:
        """Median over the rounds, in seconds."""
        return median(self.seconds[name])

    def ratio(self, over: str, under: str) -> float:
        """Median over the rounds of one candidate's time divided by another's of the same round."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        return median(a / b for a, b in pairs)


@contextmanager
def collector_off() -> Iterator[None]:
    """Garbage is collected before, and not inside."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def once(candidate: Candidate) -> float:
    """One turn of one candidate; seconds for one operation."""
    given = candidate.prepare()
    start_s = _CLOCK.now_s()
    candidate.run(given)
    took_s = _CLOCK.now_s() - start_s
    del given
    candidate.clean()
    return took_s / candidate.calls


def interleaved(candidates: Mapping[str, Candidate], rounds: int, warmups: int = 1) -> Samples:
    """Lets all candidates take turns.

    Args:
        candidates: by name; each round begins with another one, so that none is always first.
        rounds: turns of each that count.
        warmups: turns of each before, that do not.
    """
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with collector_off():
        for number in range(-warmups, rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                took_s = once(candidates[name])
                if number >= 0:
                    seconds[name].append(took_s)
    return Samples(seconds)
