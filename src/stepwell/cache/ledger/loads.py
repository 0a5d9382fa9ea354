"""Pages and records on their way from the host tier back into the device.

Owns: who holds what was matched, until it is loaded or given up. Must not know: bytes, movers, locks. Neighbours: `stock`
has the indexes; `ledger` sends the plans and hands over what the ranks report.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.base.errors import InputError, MisuseError
from stepwell.base.observe import Counters
from stepwell.cache.ledger.saves import Outline
from stepwell.cache.ledger.stock import Stock
from stepwell.cache.ledger.tally import Tally
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds
from stepwell.core.prefixes import Found

_NONE: FrameIds = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Waiting:
    """A match that nobody has loaded yet.

    Attributes:
        found: what it holds.
        root: of the chain.
        keys: of the pages found.
        step: in which it was made.
        dropped: what it found was dropped meanwhile, and is held no more.
    """

    found: Found
    root: bytes
    keys: list[bytes]
    step: int
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Load:
    """One load in flight.

    Attributes:
        request: for whom.
        waiting: the match, which holds the host frames until the load is clear.
        first: page with which it begins.
        told: its outcome was handed over.
        dropped: what it loads was dropped meanwhile; if before it began, nothing is moved.
        tally: what the ranks have said.
    """

    request: Hashable
    waiting: Waiting
    first: int
    told: bool = False
    dropped: bool = False
    tally: Tally | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load has ended.

    Attributes:
        request: for whom it was.
        plan: its number.
        pages: of the full group, from the first one loaded on, that are whole on every rank.
        records: for each of the other groups, which of its records are; shape [records] each.
        clear: the device frames are not touched any more; if not, `Cleared` follows.
    """

    request: Hashable
    plan: int
    pages: int
    records: tuple[tuple[bool, ...], ...]
    clear: bool


class Loads:
    """All matches that wait, and loads in flight. Not thread-safe: the ledger has the lock.

    Args:
        stock: frames and indexes.
        counters: counts what happens.
        first_group: number of the first group that is not full, as plans count groups.
    """

    def __init__(self, stock: Stock, counters: Counters, first_group: int) -> None:
        self._stock = stock
        self._counters = counters
        self._first_group = first_group
        self._names = itertools.count()
        self._waiting: dict[Hashable, Waiting] = {}
        self._flying: set[Load] = set()

    def __len__(self) -> int:
        return len(self._flying)

    def match(self, request: Hashable, chain: Chain, limit: int, minimum: int, step: int) -> Found:
        """Finds and holds what of a prompt can be restored; an earlier match of the request ends."""
        self.give_up(request)
        # A name of its own: an earlier match of this request may be in flight, and keeps its lease.
        name = (request, next(self._names))
        found = self._stock.prefixes.match(name, chain, limit, minimum)
        if not found.pages:
            self._stock.prefixes.let_go(found)
            return found
        self._waiting[request] = Waiting(found, chain.root, chain.keys(0, found.pages), step)
        return found

    def give_up(self, request: Hashable) -> None:
        """A match that was not loaded ends, if there is one."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None and not waiting.dropped:
            self._stock.prefixes.let_go(waiting.found)

    def expire(self, before: int) -> None:
        """Matches of earlier steps end."""
        old = [request for request, one in self._waiting.items() if one.step < before]
        for request in old:
            self.give_up(request)
        self._counters.add("matches_expired", len(old))

    def begin(
        self, request: Hashable, first: int, pages: FrameIds, records: Sequence[FrameIds]
    ) -> tuple[Load, Outline]:
        """A match is loaded.

        Args:
            request: who has it.
            first: page with which the load begins; those before it are on the device.
            pages: device frames; shape [pages matched - first], or [0] without a full group.
            records: device frames for each other group; shape [records matched, frames of one].

        Raises:
            MisuseError: the request has no match.
            InputError: other numbers of frames than were matched.
        """
        waiting = self._waiting.get(request)
        if waiting is None:
            raise MisuseError(
                f"request {request!r} has no match to load",
                remedy="match first; a match ends when it is loaded, and after some steps",
            )
        found = waiting.found
        each = [index.record_frames for index in self._stock.prefixes.walked]
        shapes: list[tuple[int, ...]] = [(max(0, len(found.frames) - first),)]
        shapes += [(len(its), size) for its, size in zip(found.records, each, strict=True)]
        given = [pages.shape, *(one.shape for one in records)]
        if given != shapes or not 0 <= first <= found.pages:
            raise InputError(f"frames of shapes {given} from page {first} on", limit=f"{shapes}")
        outside = np.concatenate([pages, *(one.reshape(-1) for one in records)]).astype(np.int32)
        if outside.min(initial=0) < 0 or len(np.unique(outside)) < len(outside):
            raise InputError(
                f"device frames {sorted(outside.tolist())}", limit="each once, from 0 up"
            )
        load = Load(request, waiting, first, dropped=waiting.dropped)
        outline = Outline(_NONE, _NONE, b"", np.empty(0, np.uint32))
        if not load.dropped:
            outline = self._outline(waiting, first, outside)
            self._flying.add(load)
        del self._waiting[request]
        return load, outline

    def _outline(self, waiting: Waiting, first: int, outside: FrameIds) -> Outline:
        prefixes, found = self._stock.prefixes, waiting.found
        inside = [found.frames[first:]]
        keys = waiting.keys[first:] if prefixes.closed is not None else []
        which = [np.zeros(len(inside[0]), np.uint32)]
        for number, (index, its) in enumerate(zip(prefixes.walked, found.records, strict=True)):
            each = index.record_frames
            for page in range(found.pages - len(its), found.pages):
                keys += [waiting.keys[page]] * each
            group = np.uint32((number + self._first_group) << 16)
            which.append(np.tile(group + np.arange(each, dtype=np.uint32), len(its)))
            inside.append(index.frames_of(its).reshape(-1))
        return Outline(outside, np.concatenate(inside), b"".join(keys), np.concatenate(which))

    def nothing(self, load: Load, number: int) -> Loaded:
        """The outcome of a load of what was dropped before it began: no frame is touched."""
        found = load.waiting.found
        records = tuple((False,) * len(its) for its in found.records)
        each = [index.record_frames for index in self._stock.prefixes.walked]
        asked = max(0, len(found.frames) - load.first)
        asked += sum(len(its) * size for its, size in zip(found.records, each, strict=True))
        self._counters.add("frames_failed", asked)
        return Loaded(load.request, number, 0, records, clear=True)

    def told(self, load: Load) -> Loaded | None:
        """A report was added to the tally of a load; its outcome, once."""
        tally = load.tally
        assert tally is not None, "a load that was sent"
        answer: Loaded | None = None
        if tally.ended and not load.told:
            load.told = True
            answer = self._outcome(load, tally)
        if tally.clear and load in self._flying:
            self._flying.discard(load)
            self._stock.prefixes.let_go(load.waiting.found)
        return answer

    def _outcome(self, load: Load, tally: Tally) -> Loaded:
        found, wrong = load.waiting.found, tally.wrong
        end = max(0, len(found.frames) - load.first)
        whole = 0 if load.dropped else tally.good(0, end)
        self._stock.distrust(tally.plan.inside[wrong])
        for frame in found.frames[load.first :][wrong[:end]].tolist():
            self._stock.forget_page(frame)
        records: list[tuple[bool, ...]] = []
        for number, its in enumerate(found.records):
            each = self._stock.prefixes.walked[number].record_frames
            oks: list[bool] = []
            for record in its.tolist():
                oks.append(tally.good(end, end + each) == each and not load.dropped)
                if wrong[end : end + each].any():
                    self._stock.forget_record(number, record)
                end += each
            records.append(tuple(oks))
        failed = len(tally.plan) if load.dropped else np.count_nonzero(tally.outcomes)
        self._counters.add("pages_loaded", whole)
        self._counters.add("records_loaded", sum(sum(oks) for oks in records))
        self._counters.add("frames_failed", int(failed))
        return Loaded(load.request, tally.plan.number, whole, tuple(records), tally.clear)

    def drop(self, root: bytes | None) -> None:
        """What was matched under a root, or at all, may not be used any more."""
        for one in self._waiting.values():
            if root in (None, one.root) and not one.dropped:
                one.dropped = True
                self._stock.prefixes.let_go(one.found)
        for load in self._flying:
            load.dropped |= root is None or load.waiting.root == root

    def _founds(self) -> list[Found]:
        """What all matches hold."""
        founds = [one.found for one in self._waiting.values() if not one.dropped]
        return founds + [load.waiting.found for load in self._flying]

    def check(self, findings: Findings, also: Callable[[int], list[FrameIds]]) -> None:
        """Notes every broken invariant between matches and indexes.

        Args:
            findings: gets what is broken.
            also: what others hold of a group that is not full.
        """
        founds = self._founds()
        for number, index in enumerate(self._stock.prefixes.walked):
            index.check_holds(findings, [one.records[number] for one in founds] + also(number))
        leases = [one.lease for one in founds]
        stale = [lease for lease in leases if lease is not None and lease.books.released]
        findings.expect(not stale, "a match holds nothing any more")
