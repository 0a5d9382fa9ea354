"""The pool's side of the tiers: what is on its way down or up, and the device frames that are touched by it.

Owns: arrivals, and which device frames a save still reads. Must not know: bytes, what is evicted below. Neighbours:
`holdings` has the frames and indexes and says when; `cache.store` moves.

    commit ▸ sealed ▸ save ............ Released: frames that have left meanwhile are free
    open ▸ more is below ▸ Loading .... Loaded: sealed here, and held until the request opens again
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stepwell.cache.ledger.loads import Loaded
from stepwell.cache.ledger.records import Cleared, Match, Released
from stepwell.cache.ledger.saves import Carried, Offer
from stepwell.cache.pool.answer import Busy, Loading
from stepwell.cache.pool.request import Kept, OpenRequest
from stepwell.cache.pool.supply import Supply
from stepwell.cache.pool.table import RequestTable
from stepwell.cache.store import TieredStore
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds
from stepwell.core.lease import Lease
from stepwell.core.page import Status
from stepwell.core.prefixes import Found
from stepwell.move.fence import PASSED, Fence

_NONE: FrameIds = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Arrival:
    """What is being loaded for a request that is not open yet.

    Attributes:
        chain: its prompt.
        boundary: in pages, up to which it is loaded.
        first: page of the full group with which the load begins.
        pages: FILLING frames of those pages; shape [n].
        records: FILLING frames of each other group; shape [records, frames of one] each.
        lease: keeps the pages before `first`, later also those that came.
        held: records that came, by group; held.
        plan: of the load, until it has ended.
        seals: whether what comes may be found here.
        had: pages of the prompt that could be reused without it.
        came: something of it did.
    """

    chain: Chain
    boundary: int
    first: int
    pages: FrameIds
    records: list[FrameIds]
    lease: Lease | None
    held: list[tuple[int, FrameIds]] = field(default_factory=list)
    plan: int | None = None
    seals: bool = True
    had: int = 0
    came: bool = False

    @property
    def frames(self) -> FrameIds:
        """All its device frames; shape [n]."""
        return np.concatenate([self.pages, *(one.reshape(-1) for one in self.records)])


class Below:
    """Saves and loads of one pool. Not thread-safe: the pool has the lock.

    A device frame that a save reads is not free before the save is released, whatever has become of its page. Frames
    of a load belong to nobody else before they are sealed here; those of one that ended too early are QUARANTINED
    until nothing touches them.

    Args:
        store: the tiers.
        supply: the frames of the device.
    """

    def __init__(self, store: TieredStore, supply: Supply) -> None:
        self.store = store
        settings = store.ledger.settings
        self._on_seal = settings.save == "sealed"
        self._on_hit = settings.save == "second_use"
        self._least = settings.least_pages
        self._supply = supply
        self._prefixes = supply.prefixes
        self._frames = supply.frames
        # After which all that was ever read or written for a commit is over: for bytes that go down, and for frames
        # that are overwritten, whose former pages a step may still read.
        self.fence: Fence = PASSED
        self._arrivals: dict[Hashable, Arrival] = {}
        self._by_plan: dict[int, Arrival] = {}
        self._saving: dict[int, FrameIds] = {}
        self._late: dict[int, FrameIds] = {}
        supply.let_go = self._let_all_go
        if settings.save == "evicted":
            self._watch_evictions()

    @property
    def moving(self) -> int:
        """Frames that nobody has but what is on its way."""
        arriving = sum(len(one.frames) for one in self._by_plan.values())
        return self._supply.parked + arriving + sum(len(frames) for frames in self._late.values())

    # Up

    def look(
        self, request: Hashable, chain: Chain, limit: int, minimum: int, found: Found
    ) -> int | Loading | Busy:
        """Whether a request can go on with what is on the device, or has to wait for what comes.

        Args:
            request: not open.
            chain: its prompt, the pool's own.
            limit: pages that it may reuse.
            minimum: pages below which a hit is not worth having.
            found: on the device.

        Returns:
            Pages that the device had before a load for this request, or has now without one; else why it waits.
        """
        if request not in self._arrivals:
            answer = self._begin(request, chain, limit, minimum, found)
            return found.pages if answer is None else answer
        had = self.end(request)
        return found.pages if had is None else had

    def _begin(
        self, request: Hashable, chain: Chain, limit: int, minimum: int, found: Found
    ) -> Loading | Busy | None:
        """Starts to load what the tiers have beyond what was found on the device; see `look`.

        Returns:
            `Loading`; `Busy` when there are no frames for it; None when the device has all that there is.
        """
        least = max(minimum, found.pages + self._least)
        if least > limit:
            return None
        match = self.store.match(request, chain, limit, least)
        if match.pages <= found.pages:
            self.store.give_up(request)
            return None
        arrival = self._lay_out(chain, match)
        started = False
        try:
            short = self._fill(arrival, match)
            if short:
                return Busy(short_frames=short)
            number = self.store.load(
                match, arrival.first, arrival.pages, arrival.records, self.fence
            )
            started = True
        finally:
            if not started:
                self.store.give_up(request)
                self._supply.give_back(arrival.frames)
                self._let_go(arrival)
        arrival.plan, arrival.had = number, found.pages
        self._arrivals[request] = self._by_plan[number] = arrival
        return self._loading(arrival)

    def _lay_out(self, chain: Chain, match: Match) -> Arrival:
        """An arrival without frames; the pages of the full group that are here already are held."""
        lease: Lease | None = None
        first = 0
        if self._prefixes.closed is not None:
            held = self._prefixes.closed.match(("load", match.request), chain, match.pages)
            lease, first = held.lease, len(held.frames)
        return Arrival(chain, match.pages, first, _NONE, [], lease)

    def _fill(self, arrival: Arrival, match: Match) -> int:
        """Takes frames for an arrival; by how many it falls short."""
        pages = 0 if self._prefixes.closed is None else arrival.boundary - arrival.first
        each = [index.record_frames for index in self._prefixes.walked]
        counts = [n * size for n, size in zip(match.records, each, strict=True)]
        own = self._supply.take(pages + sum(counts), waiters=False)
        if own is None:
            # None may be missing: some come back when what reads them has ended.
            return max(1, self._supply.short(pages + sum(counts)))
        arrival.pages, rest = own[:pages], own[pages:]
        for count, size in zip(counts, each, strict=True):
            arrival.records.append(rest[:count].reshape(-1, size))
            rest = rest[count:]
        return 0

    def waiting(self, request: Hashable, chain: Chain) -> Loading | None:
        """The answer to a request whose load has not ended; a load for another prompt is given up."""
        arrival = self._arrivals.get(request)
        if arrival is None:
            return None
        last = arrival.boundary - 1
        if chain.pages <= last or chain.key(last) != arrival.chain.key(last):
            self.end(request)
            return None
        return None if arrival.plan is None else self._loading(arrival)

    def _loading(self, arrival: Arrival) -> Loading:
        return Loading(arrival.boundary * arrival.chain.namespace.page_tokens)

    def end(self, request: Hashable) -> int | None:
        """A request needs what was loaded for it no more.

        Returns:
            Pages that the device had before, if something came; else None.
        """
        arrival = self._arrivals.pop(request, None)
        if arrival is None:
            return None
        if arrival.plan is not None:
            # Still on its way: nothing of it is sealed, and its frames are freed when it has come.
            arrival.seals = False
        self._let_go(arrival)
        return arrival.had if arrival.came else None

    def _let_all_go(self) -> None:
        """What has come for requests that have not opened yet may leave like everything else."""
        for request, arrival in list(self._arrivals.items()):
            if arrival.plan is None and arrival.came:
                del self._arrivals[request]  # when it opens, it may load again
                self._let_go(arrival)

    def _let_go(self, arrival: Arrival) -> None:
        for group, records in arrival.held:
            self._prefixes.walked[group].release(records)
        arrival.held.clear()
        lease, arrival.lease = arrival.lease, None
        if lease is not None and self._prefixes.closed is not None:
            self._prefixes.closed.release(lease)

    def drop(self, prefix: Chain) -> None:
        """Forgets below what begins with these pages; what is on its way up under their root may not be found here."""
        for arrival in self._by_plan.values():
            if arrival.chain.root == prefix.root:
                arrival.seals = False
        self.store.drop(prefix)

    def forget(self) -> None:
        """What is on its way up may not be found here."""
        for arrival in self._by_plan.values():
            arrival.seals = False

    # News

    def hear(self) -> None:
        """Takes in what has happened below since the last call."""
        for news in self.store.poll():
            if isinstance(news, Released):
                self._supply.released(self._saving.pop(news.plan))
            elif isinstance(news, Loaded):
                self._loaded(self._by_plan.pop(news.plan), news)
            elif isinstance(news, Cleared):
                late = self._late.pop(news.plan, _NONE)
                self._supply.give_back(late)

    def _loaded(self, arrival: Arrival, loaded: Loaded) -> None:
        closed = self._prefixes.closed
        arrival.plan = None
        if arrival.seals:
            arrival.came = bool(loaded.pages) or any(any(oks) for oks in loaded.records)
            if closed is not None and arrival.lease is not None and loaded.pages:
                closed.seal(arrival.lease, arrival.chain, arrival.pages[: loaded.pages])
            self._seal_records(arrival, loaded)
        frames = arrival.frames
        left = frames[self._frames.status[frames] == Status.FILLING]
        if loaded.clear:
            self._supply.give_back(left)
        elif len(left):
            self._frames.move(left, Status.QUARANTINED)
            self._late[loaded.plan] = left
        arrival.pages, arrival.records = _NONE, []

    def _seal_records(self, arrival: Arrival, loaded: Loaded) -> None:
        prefixes = self._prefixes
        for group, (frames, oks) in enumerate(zip(arrival.records, loaded.records, strict=True)):
            index = prefixes.walked[group]
            for at, (own, fine) in enumerate(zip(frames, oks, strict=True)):
                page = arrival.boundary - len(frames) + at
                key = arrival.chain.key(page)
                if not fine or (
                    prefixes.closed is not None and prefixes.closed.frame_of(key) is None
                ):
                    continue
                sealed = index.seal(arrival.chain, page, own[None])
                if len(sealed.kept) > len(sealed.spare):
                    index.want(sealed.kept)
                arrival.held.append((group, sealed.kept))

    # Down

    def save(self, opened: OpenRequest, table: RequestTable | None, *, ends: bool = False) -> None:
        """Sends down what a request has sealed, and the boundaries that it keeps.

        Args:
            opened: the request.
            table: of the full group, if there is one.
            ends: whether the last boundaries of its answer go too: before that, there are later ones.
        """
        kept, opened.unsaved = opened.unsaved, []
        if ends:
            kept += opened.recent
        if not self._on_seal or (opened.sealed == opened.offered and not kept):
            return
        opened.offered = opened.sealed

        def pages(first: int, last: int) -> FrameIds:
            assert table is not None, "a full group"
            return table.frames(opened.row, first, last)

        self._offer(Offer(opened.chain, opened.sealed, pages, self._carried(kept)))

    def _carried(self, kept: Sequence[tuple[int, Kept]]) -> list[Carried]:
        carried: list[Carried] = []
        for boundary, wishes in kept:
            for index, records, generations in wishes:
                # Some may have left since: freed, or still LEAVING because a save reads them.
                here = (self._frames.generation[records] == generations).tolist()
                if not all(here) or not all(map(index.found, records.tolist())):
                    continue
                group, first = self._prefixes.walked.index(index), boundary - len(records)
                for at, frames in enumerate(index.frames_of(records)):
                    carried.append(Carried(group, first + at, frames))
        return carried

    def hit(self, chain: Chain, found: Found) -> None:
        """Something on the device is used a second time."""
        if not self._on_hit or not found.pages:
            return
        carried = [
            Carried(group, found.pages - len(records) + at, frames)
            for group, records in enumerate(found.records)
            for at, frames in enumerate(self._prefixes.walked[group].frames_of(records))
        ]
        pages = found.frames
        self._offer(Offer(chain, len(pages), lambda first, last: pages[first:last], carried))

    def _offer(self, offer: Offer) -> None:
        read: list[FrameIds] = [record.frames for record in offer.records]

        def frames(first: int, last: int) -> FrameIds:
            mine = offer.frames(first, last)
            read.append(mine)
            return mine

        number = self.store.save(Offer(offer.chain, offer.last, frames, offer.records), self.fence)
        if number is not None:
            touched = np.concatenate(read)
            # One save may read a frame for two records: counted once, so that it is given back once.
            self._saving[number] = np.unique(touched)
            self._supply.read(self._saving[number])

    def _watch_evictions(self) -> None:
        closed = self._prefixes.closed
        if closed is not None:
            closed.evicting = self._page_leaves
        for group, index in enumerate(self._prefixes.walked):
            index.evicting = lambda record, group=group: self._record_leaves(group, record)

    def _page_leaves(self, frame: int) -> None:
        closed = self._prefixes.closed
        assert closed is not None, "a full group"
        pages, path = closed.spelled(frame)
        self._offer(Offer(pages, len(path), lambda first, last: path[first:last]))

    def _record_leaves(self, group: int, record: int) -> None:
        index, closed = self._prefixes.walked[group], self._prefixes.closed
        pages = index.spelled(record)
        carried = Carried(group, pages.first, index.frames_of(np.array([record], np.int32))[0])
        if closed is None:
            self._offer(Offer(pages, 0, lambda _first, _last: _NONE, [carried]))
            return
        frame = closed.frame_of(pages.own[0])
        if frame is not None:
            path_pages, path = closed.spelled(frame)
            self._offer(
                Offer(path_pages, len(path), lambda first, last: path[first:last], [carried])
            )

    def check(self, findings: Findings) -> list[int]:
        """Notes what is broken between frames and what is on its way; the FILLING frames of arrivals."""
        reads = np.zeros(self._frames.count, np.int64)
        for frames in self._saving.values():
            reads[frames] += 1
        self._supply.check(findings, reads)
        late = sorted(frame for frames in self._late.values() for frame in frames.tolist())
        out = np.flatnonzero(self._frames.status == Status.QUARANTINED).tolist()
        findings.expect(late == out, "a QUARANTINED frame waits for no load")
        return [frame for one in self._by_plan.values() for frame in one.frames.tolist()]

    def held(self, group: int) -> list[FrameIds]:
        """What arrivals hold of one group that is not full."""
        return [
            records for one in self._arrivals.values() for its, records in one.held if its == group
        ]
