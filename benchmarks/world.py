"""What the groups of one run share: its size, and the pools that were churned for it."""

from __future__ import annotations

from benchmarks.churn import Churned

SIZES = {10_000: "10k", 100_000: "100k", 1_000_000: "1m"}
"""Frames of the pools, and how rows spell them."""


class World:
    """Shared by all groups of a run.

    Args:
        quick: fewer rounds and no pool above 100k frames; for trying a change, not for figures.
    """

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.sizes = {n: name for n, name in SIZES.items() if not quick or n <= 100_000}
        self._pools: dict[int, Churned] = {}

    @property
    def largest(self) -> int:
        """Frames of the largest pool of this run."""
        return max(self.sizes)

    @property
    def smallest(self) -> int:
        """Frames of the smallest pool of this run."""
        return min(self.sizes)

    def churned(self, frames: int) -> Churned:
        """The churned pool of this size; made at the first call, up to a minute."""
        if frames not in self._pools:
            self._pools[frames] = Churned(frames)
        return self._pools[frames]

    def all_churned(self) -> dict[str, Churned]:
        """The churned pools of all sizes, by how rows spell the size, smallest first."""
        return {name: self.churned(frames) for frames, name in self.sizes.items()}

    def forget(self) -> None:
        """Gives the memory of the pools back."""
        self._pools.clear()
