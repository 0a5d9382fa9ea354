"""Prefixes that an operator wants retained, within a share of the tier.

Neighbours: `ledger` has the lock; `stock` has the indexes.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.errors import InputError
from stepwell.cache.ledger.stock import Stock
from stepwell.core.chain import Chain
from stepwell.core.frames import FrameIds
from stepwell.core.prefixes import Found


@dataclass(slots=True, eq=False)
class _Keep:
    """One prefix that is kept."""

    prefix: Chain
    found: Found
    frames: int
    until_s: float | None


class Keeps:
    """All keeps. Not thread-safe: the ledger has the lock.

    A keep holds what is there of its prefix when it is asked for. It is no pin: a drop takes its pages like others.

    Args:
        stock: frames and indexes.
        percent: of the frames that keeps may have in all.
    """

    def __init__(self, stock: Stock, percent: int) -> None:
        self._stock = stock
        self._most = stock.frames.count * percent // 100
        self._keeps: dict[str, _Keep] = {}

    def keep(self, name: str, prefix: Chain, until_s: float | None) -> int:
        """Holds the pages of a prefix that are here; what the share has no room for, from the end, is not kept.

        Raises:
            InputError: the name is no text.
        """
        if not isinstance(name, str):
            raise InputError(f"a keep is named {name!r}", limit="a text")
        self._stock.prefixes.hash_ahead(prefix, prefix.pages)
        self.end(name)
        room = self._most - sum(one.frames for one in self._keeps.values())
        prefixes = self._stock.prefixes
        limit = min(prefix.pages, room)
        while True:
            found = prefixes.match(("keep", name), prefix, limit)
            frames = found.pages if prefixes.closed is not None else 0
            for index, its in zip(prefixes.walked, found.records, strict=True):
                frames += len(its) * index.record_frames
            if frames <= room or not found.pages:
                break
            # Windows and states came on top of the pages: fewer pages, until all of it fits.
            prefixes.let_go(found)
            limit = found.pages - 1
        self._keeps[name] = _Keep(prefix.fork(), found, frames, until_s)
        return found.pages

    def end(self, name: str) -> None:
        """Ends a keep, if there is one."""
        kept = self._keeps.pop(name, None)
        if kept is not None:
            self._stock.prefixes.let_go(kept.found)

    def expire(self, now_s: float) -> None:
        """Ends what has lapsed."""
        for name in [
            name
            for name, one in self._keeps.items()
            if one.until_s is not None and one.until_s <= now_s
        ]:
            self.end(name)

    def drop(self, root: bytes | None) -> None:
        """Ends all keeps of one namespace, or all."""
        for name in [name for name, one in self._keeps.items() if root in (None, one.prefix.root)]:
            self.end(name)

    def renew(self, root: bytes) -> None:
        """After a drop under a root: keeps hold what is still found of their prefixes."""
        for name, one in list(self._keeps.items()):
            if one.prefix.root == root:
                self.keep(name, one.prefix, one.until_s)

    def held(self, group: int) -> list[FrameIds]:
        """What keeps hold of one group that is not full."""
        return [one.found.records[group] for one in self._keeps.values()]
