"""Pages and records on their way from the device into the host tier.

Owns: which keys are in flight, and what has to be sealed before what. Must not know: bytes, movers, locks. Neighbours:
`stock` has the frames and indexes; `ledger` sends the plans and hands over what the ranks report.

A page is in no index before every rank has reported it whole. The page before it must be there by then: a save holds
that page, or waits for the save that brings it. So the index of the full group stays closed, and two requests with one
beginning send it once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.base.errors import InputError
from stepwell.base.observe import Counters
from stepwell.cache.ledger.flying import Flying, Record, Save
from stepwell.cache.ledger.stock import Stock
from stepwell.core.chain import Pages
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds
from stepwell.core.page import Status
from stepwell.core.plan import Which
from stepwell.core.walked import WalkedIndex

_NONE: FrameIds = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Carried:
    """One window page or state that belongs to a kept boundary.

    Attributes:
        group: number of the group among those that are not full.
        page: of the prompt.
        frames: of the device; shape [frames of one record].
    """

    group: int
    page: int
    frames: FrameIds


@dataclass(frozen=True, slots=True)
class Offer:
    """What of a prompt is on the device.

    Attributes:
        chain: the tokens, from the first page on.
        last: pages of the full group; 0 without one.
        frames: device frames of pages `[first, last)`; asked once, for what is missing below.
        records: of the other groups.
    """

    chain: Pages
    last: int
    frames: Callable[[int, int], FrameIds]
    records: Sequence[Carried] = ()


@dataclass(frozen=True, slots=True)
class Outline:
    """The frames of a save, for its plan; the n-th of each belong together.

    Attributes:
        outside: device frames; shape [n].
        inside: host frames; shape [n].
        keys: one after the other.
        which: shape [n].
    """

    outside: FrameIds
    inside: FrameIds
    keys: bytes
    which: Which


class Saves:
    """All saves in flight. Not thread-safe: the ledger has the lock.

    Args:
        stock: frames and indexes.
        counters: counts what happens.
        first_group: number of the first group that is not full, as plans count groups.
    """

    def __init__(self, stock: Stock, counters: Counters, first_group: int) -> None:
        self._stock = stock
        self._counters = counters
        self._first_group = first_group
        self._coming = Flying()
        self._flying: set[Save] = set()
        self._late: dict[Save, FrameIds] = {}  # ended, but not clear: what it may still touch

    def __len__(self) -> int:
        return len(self._flying) + len(self._late)

    def begin(self, offer: Offer) -> tuple[Save, Outline] | None:
        """Takes host frames for what is neither there nor in flight; all of it, or as much as there is room for.

        Returns:
            The save and its frames, or None when there is nothing to move.

        Raises:
            InputError: frames or records that are none of this model or device.
        """
        first = self._coming.missing(self._stock.prefixes.closed, offer.chain, offer.last)
        absent, there = self._sort_records(offer)
        if first == offer.last and not absent:
            return None
        save = Save(offer.chain.root, None, _NONE, [])
        kept: list[tuple[WalkedIndex, FrameIds]] = []
        outline: Outline | None = None
        try:
            # Held before room is made, so that room is not made out of what the new ones hang on.
            if self._hang(save, offer, first, absent):
                wanted = offer.last - first + sum(len(one.frames) for one in absent)
                if wanted > self._stock.frames.free:
                    kept = self._keep_records(offer.chain, there)
                if wanted > self._stock.available and self._stock.prefixes.closed is not None:
                    # Not all of it fits: else its end, which nobody could go on from, would drive out the boundary
                    # that its beginning is used from.
                    kept += self._stock.prefixes.hold_boundary(offer.chain, first)
                outside = self._take_pages(save, offer, first)
                outside += self._take_records(save, absent, offer.chain, first)
                outline = self._outline(save, np.concatenate(outside))
        finally:
            for index, records in kept:
                index.release(records)
            if outline is None or not len(outline.inside):
                self._give_up(save)
        if outline is None or not len(outline.inside):
            return None
        self._flying.add(save)
        self._coming.add(save)
        return save, outline

    def _sort_records(self, offer: Offer) -> tuple[list[Carried], list[Carried]]:
        """The records of an offer that are neither here nor in flight, and those that are here."""
        prefixes, chain = self._stock.prefixes, offer.chain
        absent: dict[tuple[int, bytes], Carried] = {}
        there: list[Carried] = []
        for record in offer.records:
            known = 0 <= record.group < len(prefixes.walked)
            if not known or record.frames.shape != (prefixes.walked[record.group].record_frames,):
                raise InputError(
                    f"a record of group {record.group} with frames of shape {record.frames.shape}",
                    limit=f"{[index.record_frames for index in prefixes.walked]} frames by group",
                )
            key = chain.key(record.page)
            if prefixes.walked[record.group].has(key):
                there.append(record)
            elif not self._coming.has(record.group, key):
                # Neighbouring boundaries have window pages in common: each is sent once.
                absent.setdefault((record.group, key), record)
        return list(absent.values()), there

    def _hang(self, save: Save, offer: Offer, first: int, absent: Sequence[Carried]) -> bool:
        """Makes sure that the page will be there on which all of a save hangs; whether it will."""
        closed, end = self._stock.prefixes.closed, first
        if closed is None:
            return True
        if first == offer.last:
            end = max((one.page + 1 for one in absent if one.page < offer.last), default=0)
            if not end:
                return False
        save.lease = closed.hold(save, offer.chain, end)
        if save.lease is None:
            save.parent = self._coming.of(offer.chain.key(end - 1))
            if save.parent is not None:
                save.parent.children.append(save)
        return save.lease is not None or save.parent is not None

    def _keep_records(
        self, chain: Pages, there: Sequence[Carried]
    ) -> list[tuple[WalkedIndex, FrameIds]]:
        """Holds records that are here, while room is made for the others of their boundary."""
        kept: list[tuple[WalkedIndex, FrameIds]] = []
        places = sorted({(record.group, record.page) for record in there})
        for _, run in itertools.groupby(
            enumerate(places), key=lambda one: (one[1][0], one[1][1] - one[0])
        ):
            (group, begin), *rest = (place for _, place in run)
            index = self._stock.prefixes.walked[group]
            its = index.hold(chain, begin, begin + len(rest) + 1)
            kept.append((index, its))
        return kept

    def _take_pages(self, save: Save, offer: Offer, first: int) -> list[FrameIds]:
        """Takes frames for pages of the full group, as far as there is room; their device frames."""
        wanted = offer.last - first
        fitting = min(wanted, self._stock.available)
        self._counters.add("frames_without_room", wanted - fitting)
        if not fitting:
            return [_NONE]
        frames = self._stock.take(fitting, save.root)
        assert frames is not None, "as many as are available"
        save.frames = frames
        save.pages = offer.chain.excerpt(first, first + fitting)
        return [offer.frames(first, first + fitting)]

    def _take_records(
        self, save: Save, absent: Sequence[Carried], chain: Pages, first: int
    ) -> list[FrameIds]:
        """Takes frames for records, as far as there is room; their device frames."""
        last = first + len(save.frames)
        outside: list[FrameIds] = []
        for record in absent:
            if self._stock.prefixes.closed is not None and record.page >= last:
                continue  # its page is not coming, and it would be found by nobody
            frames = self._stock.take(len(record.frames), save.root)
            if frames is None:
                self._counters.add("frames_without_room", len(record.frames))
                continue
            pages = chain.excerpt(record.page, record.page + 1)
            save.records.append(Record(record.group, pages, frames))
            outside.append(record.frames)
        return outside

    def _outline(self, save: Save, outside: FrameIds) -> Outline:
        keys = [] if save.pages is None else [*save.pages.own]
        which = [np.zeros(len(save.frames), np.uint32)]
        for record in save.records:
            keys += record.pages.own * len(record.frames)
            group = np.uint32((record.group + self._first_group) << 16)
            which.append(group + np.arange(len(record.frames), dtype=np.uint32))
        inside = save.inside
        if outside.shape != inside.shape or (outside < 0).any():
            raise InputError(
                f"device frames of shape {outside.shape}, the least {outside.min(initial=0)}",
                limit=f"{inside.shape}, from 0 up",
            )
        return Outline(outside.astype(np.int32), inside, b"".join(keys), np.concatenate(which))

    def _give_up(self, save: Save) -> None:
        """Takes back what a save has that never began."""
        self._stock.free(save.inside)
        self._let_go(save)

    def _let_go(self, save: Save) -> None:
        closed = self._stock.prefixes.closed
        if save.lease is not None and closed is not None:
            closed.release(save.lease)
            save.lease = None
        if save.parent is not None:
            save.parent.children.remove(save)
            save.parent = None

    def told(self, save: Save) -> None:
        """A report was added to the tally of a save."""
        # A list and not a recursion: thousands of pages of one answer may hang on each other.
        ready = [save]
        while ready:
            one = ready.pop()
            assert one.tally is not None, "a save that was sent"
            if one in self._flying and one.tally.ended and one.parent is None:
                ready += self._settle(one)
            if one in self._late and one.tally.clear:
                self._stock.free(self._late.pop(one))

    def _settle(self, save: Save) -> list[Save]:
        """Seals what came whole; the rest is free, or out of use as long as it is touched; returns the children."""
        self._flying.discard(save)
        self._seal_pages(save)
        self._seal_records(save)
        if not save.lost:
            self._coming.forget(save)
        children = self._pass_on(save)
        self._let_go(save)
        inside = save.inside
        left = inside[self._stock.frames.status[inside] == Status.FILLING]
        assert save.tally is not None, "a save that was sent"
        if save.tally.clear:
            self._stock.free(left)
        elif len(left):
            self._stock.retire(left)
            self._late[save] = left
        return children

    def _seal_pages(self, save: Save) -> None:
        closed, tally = self._stock.prefixes.closed, save.tally
        if save.pages is None or closed is None or tally is None:
            return
        good = tally.good(0, len(save.frames))
        sealed = 0
        if good and save.lease is not None and not save.lost:
            kept = closed.seal(save.lease, save.pages, save.frames[:good])
            sealed = len(kept.kept)
            self._stock.sealed(kept.kept, save.root)
            self._counters.add("pages_saved", sealed - len(kept.spare))
        self._counters.add("pages_unsaved", len(save.frames) - sealed)

    def _seal_records(self, save: Save) -> None:
        prefixes, tally = self._stock.prefixes, save.tally
        assert tally is not None, "a save that was sent"
        begin = len(save.frames)
        for record in save.records:
            end = begin + len(record.frames)
            key, page = record.pages.own[0], record.pages.first
            whole = tally.good(begin, end) == end - begin and not save.lost
            begin = end
            if not whole or (prefixes.closed is not None and prefixes.closed.frame_of(key) is None):
                continue
            index = prefixes.walked[record.group]
            sealed = index.seal(record.pages, page, record.frames[None])
            if len(sealed.kept) > len(sealed.spare):
                index.want(sealed.kept)
                self._stock.sealed(record.frames, save.root)
                self._counters.add("records_saved")
            index.release(sealed.kept)

    def _pass_on(self, save: Save) -> list[Save]:
        """Children hold the page that they hang on now, or are lost with their parent."""
        closed = self._stock.prefixes.closed
        children, save.children = save.children, []
        for child in children:
            assert closed is not None, "only pages have children"
            child.parent = None
            if child.lost:
                continue
            if child.pages is not None:
                child.lease = closed.hold(child, child.pages, child.pages.first)
            for record in sorted(child.records, key=lambda one: -one.pages.first):
                if child.lease is None and child.pages is None:
                    child.lease = closed.hold(child, record.pages, record.pages.pages)
            if child.lease is None:
                self._lose(child)
        return children

    def _lose(self, save: Save) -> None:
        """Nothing of a save is sealed, nor of what hangs on it; its keys may be sent again."""
        # At once and all of it: else a page would be in flight of which the one before is not.
        going = [save]
        while going:
            one = going.pop()
            if not one.lost:
                self._coming.forget(one)
                one.lost = True
                going += one.children

    def lose(self, root: bytes | None) -> None:
        """Nothing that is in flight under a root, or at all, is sealed any more."""
        for save in self._flying:
            if root is None or save.root == root:
                self._lose(save)

    def lose_cut_off(self) -> None:
        """After pages were forgotten: what hangs on one of them is not sealed any more."""
        for save in self._flying:
            if save.lease is not None and not save.lease.grows:
                self._lose(save)

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of what is in flight."""
        frames = [save.inside for save in self._flying]
        mine = np.sort(np.concatenate([_NONE, *frames]))
        filling = np.flatnonzero(self._stock.frames.status == Status.FILLING)
        findings.expect(
            np.array_equal(mine, filling), "a FILLING host frame is of no save, or of two"
        )
        late = np.sort(np.concatenate([_NONE, *self._late.values()]))
        findings.expect(
            np.array_equal(late, np.unique(late))
            and (self._stock.frames.status[late] == Status.QUARANTINED).all(),
            "a frame of a late save is in use",
        )
        alive = [save for save in self._flying if not save.lost]
        closed = self._stock.prefixes.closed
        for save in alive:
            parent = save.parent
            whole = closed is None or (save.lease is None) != (parent is None)
            findings.expect(whole, "a save hangs on nothing, or on two")
            findings.expect(parent is None or not parent.lost, "a save hangs on what is lost")
            findings.expect(save.lease is None or save.lease.grows, "a save hangs on nothing found")
        self._coming.check(findings, alive)
