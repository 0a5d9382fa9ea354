"""What each request has of one window group: the pages that its next tokens see, and room ahead.

Owns: the group's tables. Must not know: chains of other groups, the schedule. Neighbours: `core.walked` keeps
what is sealed, `request` and `pool` say when.

    pages:   0 ... first ──────── sealed ──────── end
             returned │ held records │ FILLING, ours │ no frames yet
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stepwell.cache.pool.limits import Limits
from stepwell.cache.pool.table import RequestTable
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.cut import Cut
from stepwell.core.frames import FrameIds
from stepwell.core.walked import WalkedIndex


@dataclass(slots=True)
class WindowRow:
    """What one request has of one window group.

    Attributes:
        row: in the tables.
        first: the first page that still has frames.
        records: held, of pages `[first, first + len(records))`; shape [n].
        end: one past the last page that has frames.
    """

    row: int
    first: int
    records: FrameIds
    end: int

    @property
    def sealed(self) -> int:
        """One past the last page that is a held record."""
        return self.first + len(self.records)


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The rows of one window group.

    Attributes:
        cut: frames of a page and reach.
        limits: of the pool.
        index: of what is sealed.
        tables: one for each frame of a page.
    """

    cut: Cut
    limits: Limits
    index: WalkedIndex
    tables: tuple[RequestTable, ...] = field(repr=False)

    def target(self, committed: int, end: int) -> int:
        """Pages up to which a request wants room: `end` tokens, if that is not too far ahead."""
        limits = self.limits
        ahead = end if limits.contiguous else min(end, committed + limits.ahead_tokens)
        return limits.pages(ahead)

    def missing(self, opened: WindowRow, committed: int, end: int) -> int:
        """Frames that are missing for room up to there."""
        return max(0, self.target(committed, end) - opened.end) * self.cut.frames

    def open(self, row: int, boundary: int, records: FrameIds) -> WindowRow:
        """A row that goes on from a boundary, before which these records are held."""
        first = boundary - len(records)
        opened = WindowRow(row, first, records, boundary)
        for table in self.tables:
            table.begin(row, first)
        if len(records):
            self._write(row, first, self.index.frames_of(records))
        return opened

    def _write(self, row: int, first: int, frames: FrameIds) -> None:
        for number, table in enumerate(self.tables):
            table.write(row, first, np.ascontiguousarray(frames[:, number]))

    def give(self, opened: WindowRow, frames: FrameIds) -> None:
        """Adds room: frames of the next pages, as many as `missing` said."""
        # Each table gets neighbours.
        pages = frames.reshape(self.cut.frames, -1).T
        if len(pages):
            self._write(opened.row, opened.end, pages)
            opened.end += len(pages)

    def own(self, opened: WindowRow, first: int, last: int) -> FrameIds:
        """Frames of pages `[first, last)` of a row; shape [pages, frames of a page]."""
        columns = [table.frames(opened.row, first, last) for table in self.tables]
        return np.stack(columns, axis=1)

    def seal(self, opened: WindowRow, chain: Chain, last: int, *, twins: bool) -> FrameIds:
        """Seals pages up to `last`, and points the row at first copies of others.

        Returns:
            Frames that the row needs no more: the caller's to free.
        """
        first = opened.sealed
        if first >= last:
            return np.empty(0, np.int32)
        sealed = self.index.seal(chain, first, self.own(opened, first, last), twins=twins)
        if len(sealed.spare):
            self._write(opened.row, first, self.index.frames_of(sealed.kept))
        opened.records = np.concatenate((opened.records, sealed.kept))
        return sealed.spare

    def before(self, opened: WindowRow, boundary: int) -> FrameIds | None:
        """The held records that going on from a boundary needs, or None if some are not there."""
        first = max(0, boundary - self.cut.reach)
        if first < opened.first or boundary > opened.sealed:
            return None
        return opened.records[first - opened.first : boundary - opened.first]

    def pass_by(self, opened: WindowRow, committed: int) -> FrameIds:
        """Returns the pages that no later token sees.

        Returns:
            Frames that were never sealed: the caller's to free.
        """
        assert self.cut.group.window is not None, "a window group has a window"
        behind = max(0, committed - self.cut.group.window + 1) // self.limits.page_tokens
        if behind <= opened.first:
            return np.empty(0, np.int32)
        count = min(behind, opened.sealed) - opened.first
        unsealed = self.own(opened, max(opened.sealed, opened.first), max(behind, opened.sealed))
        gone, opened.records = opened.records[:count], opened.records[count:]
        for table in self.tables:
            table.forget(opened.row, behind)
        opened.first = behind
        self.index.release(gone)
        return unsealed.T.reshape(-1)

    def cut_back(self, opened: WindowRow, page: int) -> FrameIds:
        """Takes the room from a page on back; returns its frames, the caller's to free."""
        page = max(page, opened.sealed)
        if page >= opened.end:
            return np.empty(0, np.int32)
        frames = self.own(opened, page, opened.end).T.reshape(-1)
        for table in self.tables:
            table.cut(opened.row, page)
        opened.end = page
        return frames

    def close(self, opened: WindowRow) -> FrameIds:
        """Ends a row; returns what was never sealed, the caller's to free."""
        frames = self.own(opened, opened.sealed, opened.end).T.reshape(-1)
        for table in self.tables:
            table.clear(opened.row)
        self.index.release(opened.records)
        return frames

    def check(self, findings: Findings, opened: WindowRow, name: str) -> FrameIds:
        """Notes what is broken in a row; returns its FILLING frames."""
        held = self.own(opened, opened.first, opened.sealed)
        findings.expect(
            np.array_equal(held, self.index.frames_of(opened.records)),
            f"{name}: its row of {self.cut.group.name!r} does not follow its records",
        )
        findings.expect(opened.sealed <= opened.end, f"{name}: more sealed than it has")
        for table in self.tables:
            frames = table.frames(opened.row, opened.first, opened.end)
            straight = bool((np.diff(frames) == 1).all())
            first, last = (page * table.page_tokens for page in (opened.first, opened.end))
            said = first == last or table.span(opened.row, first, last) is not None
            findings.expect(said == straight, f"{name}: its row is straight, or not, and denies it")
        return self.own(opened, opened.sealed, opened.end).reshape(-1)
