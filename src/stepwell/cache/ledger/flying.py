"""Saves in flight, and which page or record each of them brings.

Neighbours: `saves` decides what is sent, and what is sealed before what.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from stepwell.cache.ledger.tally import Tally
from stepwell.core.chain import Pages
from stepwell.core.check import Findings
from stepwell.core.excerpt import Excerpt
from stepwell.core.frames import FrameIds
from stepwell.core.index import ClosedIndex
from stepwell.core.lease import Lease


@dataclass(slots=True, eq=False)
class Record:
    """A window page or state in flight: its group, excerpt and frames of the host tier."""

    group: int
    pages: Excerpt
    frames: FrameIds

    @property
    def name(self) -> tuple[int, bytes]:
        """What no other record has."""
        return self.group, self.pages.own[0]


@dataclass(slots=True, eq=False)
class Save:
    """One save in flight.

    Attributes:
        root: of its chain.
        pages: of the full group.
        frames: host frames of those; shape [pages].
        records: of the other groups.
        lease: of the page that it hangs on: the one before its first, or without pages that of its last record; None
            while `parent` brings it.
        parent: the save that brings that page.
        children: saves that hang on pages of this one.
        lost: nothing of it may be sealed.
        tally: what the ranks have said.
    """

    root: bytes
    pages: Excerpt | None
    frames: FrameIds
    records: list[Record]
    lease: Lease | None = None
    parent: Save | None = None
    children: list[Save] = field(default_factory=list)
    lost: bool = False
    tally: Tally | None = None

    @property
    def own(self) -> tuple[bytes, ...]:
        """Keys of its pages."""
        return () if self.pages is None else self.pages.own

    @property
    def inside(self) -> FrameIds:
        """All host frames, in the order of the plan; shape [n]."""
        return np.concatenate([self.frames, *(record.frames for record in self.records)])


class Flying:
    """Who brings what. Not thread-safe: the ledger has the lock.

    A page is only in flight if the one before it is in the index, or in flight too: what hangs on a lost save is lost
    with it, at once. So the pages of a prompt that are here or in flight are the leading ones.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, Save] = {}
        self._records: set[tuple[int, bytes]] = set()

    def add(self, save: Save) -> None:
        """A save begins."""
        self._page_of.update(dict.fromkeys(save.own, save))
        self._records.update(record.name for record in save.records)

    def forget(self, save: Save) -> None:
        """What a save brings is in flight no more."""
        for key in save.own:
            del self._page_of[key]
        self._records.difference_update(record.name for record in save.records)

    def of(self, key: bytes) -> Save | None:
        """The save that brings a page."""
        return self._page_of.get(key)

    def has(self, group: int, key: bytes) -> bool:
        """Whether a record is in flight."""
        return (group, key) in self._records

    def missing(self, closed: ClosedIndex | None, chain: Pages, last: int) -> int:
        """The first page before `last` that is neither in the index nor in flight."""
        if closed is None or last < 1:
            return last
        first = closed.longest(chain, last)
        pages = range(first, last)
        return first + bisect.bisect_left(
            pages, True, key=lambda page: chain.key(page) not in self._page_of
        )

    def check(self, findings: Findings, alive: Iterable[Save]) -> None:
        """Notes every difference from the saves that are not lost."""
        alive = list(alive)
        pages = [(key, save) for save in alive for key in save.own]
        records = [record.name for save in alive for record in save.records]
        findings.expect(len(dict(pages)) == len(pages), "a page is in flight twice")
        findings.expect(dict(pages) == self._page_of, "pages in flight and saves disagree")
        findings.expect(
            sorted(records) == sorted(self._records), "records in flight and saves disagree"
        )
