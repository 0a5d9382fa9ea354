"""What every open request has in every group, and how it gets, seals and returns it.

Owns: rows, tables and reservations. Must not know: locks, what callers may ask. Neighbours: `pool` has
checked the input and holds the lock; `core.prefixes` finds and keeps; `windows` and `states` know their groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from stepwell.base.observe import Counters
from stepwell.base.settings import PoolSettings
from stepwell.cache.pool.answer import Answer, Busy, Flags, Loading, Ready
from stepwell.cache.pool.below import Below
from stepwell.cache.pool.boundaries import Boundaries
from stepwell.cache.pool.buffers import KVBuffers, Memory
from stepwell.cache.pool.keeping import Keeping
from stepwell.cache.pool.limits import Limits
from stepwell.cache.pool.request import Accounts, OpenRequest, check
from stepwell.cache.pool.sealing import Sealing
from stepwell.cache.pool.states import StateGroup
from stepwell.cache.pool.supply import Supply
from stepwell.cache.pool.table import RequestTable, Rows
from stepwell.cache.pool.windows import WindowGroup, WindowRow
from stepwell.cache.store import TieredStore
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.prefixes import Found, Prefixes
from stepwell.core.reasons import Reason


def _shares(frames: FrameIds, parts: Sequence[int]) -> list[FrameIds]:
    """Cuts one reservation into what each group gets."""
    ends = [0, *itertools.accumulate(parts)]
    return [frames[first:last] for first, last in itertools.pairwise(ends)]


class Holdings:
    """Open requests with their frames in all groups. Not thread-safe.

    Frames come all or none: what `open` and `extend` need of all groups is one reservation. A request that
    cannot have them takes nothing.

    Args:
        limits: sizes.
        settings: of the pool.
        memory: K and V of all frames.
        counters: counts what happens.
        replay_tokens: tokens of a prompt that are always computed.
        store: the tiers below, or None.
    """

    def __init__(
        self,
        limits: Limits,
        settings: PoolSettings,
        memory: Memory,
        counters: Counters,
        replay_tokens: int,
        store: TieredStore | None,
    ) -> None:
        self.limits = limits
        self.requests: dict[Hashable, OpenRequest] = {}
        self.frames = Frames(limits.frames)
        self._counters = counters
        size = limits.page_tokens
        grid = settings.state_tokens or size
        self._boundaries = Boundaries(grid, settings.boundaries, replay_tokens)
        self._minimum = limits.pages(settings.minimum_hit_tokens)
        self.prefixes = Prefixes(self.frames, size, limits.cuts, Lru(limits.frames), counters)
        poison = memory.poison if settings.debug else None
        self.supply = Supply(self.frames, self.prefixes, poison)
        requests = limits.rows(settings.requests)

        def table() -> RequestTable:
            return RequestTable(requests, limits.positions, size)

        self.table = None if limits.full is None else table()
        self.rows = Rows(requests)
        indexes = iter(self.prefixes.walked)
        self.windows = tuple(
            WindowGroup(cut, limits, next(indexes), tuple(table() for _ in range(cut.frames)))
            for cut in limits.windows
        )
        self.states = tuple(
            StateGroup(cut, next(indexes), buffers)
            for cut, buffers in zip(limits.states, memory.states, strict=True)
        )
        tables: list[tuple[RequestTable, ...]] = [] if self.table is None else [(self.table,)]
        tables += [group.tables for group in self.windows]
        self.planes = _planes(memory, tables)
        self.below = None if store is None else Below(store, self.supply)
        keeping = Keeping(
            self._boundaries, self.windows, self.states, self.frames, self.supply, counters
        )
        self._sealing = Sealing(limits, self.supply, self.table, keeping, self.below)

    def open(
        self, request: Hashable, chain: Chain, flags: Flags, limit: int, override: Reason | None
    ) -> Answer:
        """As `PagePool.open`, of a prompt that could fit.

        Args:
            request: who asks.
            chain: the prompt, the pool's own from now on.
            flags: what it does not want.
            limit: pages that it may reuse.
            override: the reason to give instead of the lookup's.
        """
        reads = override is None
        waiting = self.below.waiting(request, chain) if reads and self.below is not None else None
        if waiting is not None:
            return waiting
        if not self.rows.free:
            return Busy(short_rows=1)
        found = self.prefixes.match(request, chain, limit, self._minimum)
        own: FrameIds | None = None
        row: int | None = None
        try:
            had: int | Loading | Busy = found.pages
            if reads and self.below is not None:
                had = self.below.look(request, chain, limit, self._minimum, found)
            if not isinstance(had, int):
                return had
            end = self.limits.positions if self.limits.contiguous else len(chain)
            parts = self._parts(found, end)
            own = self.supply.take(sum(parts))
            if own is None:
                return Busy(short_frames=self.supply.short(sum(parts)))
            row = self.rows.take()
            pieces = _shares(own, parts)
            opened = self._lay_out(row, chain, flags, found, pieces)
            cached = opened.committed
            opened.answer = Ready(
                cached,
                override or found.reason,
                opened.boundaries if self.states else (),
                max(0, cached - had * self.limits.page_tokens),
            )
            self.requests[request] = opened
        finally:
            # The one way back: a pool that is short, and whatever may raise above.
            if request not in self.requests:
                self.prefixes.let_go(found)
                if row is not None:
                    self.rows.give_back(row)
                if own is not None:
                    self.supply.give_back(own)
        if reads and self.below is not None:
            self.below.hit(chain, found)
        self._counters.add("opens_ready")
        self._counters.add("tokens_reused", cached)
        self._counters.add("tokens_missed", len(chain) - cached)
        return opened.answer

    def _parts(self, found: Found, end: int) -> list[int]:
        """Frames that each group needs so that a request goes on from a match to `end` tokens."""
        parts = [] if self.table is None else [self.limits.pages(end) - found.pages]
        for group in self.windows:
            ahead = group.target(found.pages * self.limits.page_tokens, end) - found.pages
            parts.append(max(0, ahead) * group.cut.frames)
        return parts + [group.cut.frames for group in self.states]

    def _lay_out(
        self, row: int, chain: Chain, flags: Flags, found: Found, pieces: Sequence[FrameIds]
    ) -> OpenRequest:
        """Points the row of every group at what was found, and at the frames for the rest."""
        limits, left = self.limits, list(pieces)
        pages = 0
        if self.table is not None:
            own = left.pop(0)
            pages = found.pages + len(own)
            self.table.clear(row)
            self.table.write(row, 0, found.frames)
            self.table.write(row, found.pages, own)
        records = list(found.records)
        windows: list[WindowRow] = []
        for group in self.windows:
            window = group.open(row, found.pages, records.pop(0))
            group.give(window, left.pop(0))
            windows.append(window)
        states = [group.open(found.pages, records.pop(0), left.pop(0)) for group in self.states]
        refused = limits.contiguous or chain.namespace.refusal is not None
        seals = not refused and Flags.NO_WRITE not in flags
        size = limits.page_tokens
        boundaries: tuple[int, ...] = ()
        if seals and self.prefixes.walked:
            cached, parted = found.pages * size, found.parted * size
            boundaries = self._boundaries.of_prompt(len(chain), cached, parted)
        return OpenRequest(
            chain=chain,
            row=row,
            pages=pages,
            committed=found.pages * size,
            lease=found.lease,
            windows=tuple(windows),
            states=tuple(states),
            flags=flags,
            seals=seals,
            boundaries=boundaries,
        )

    def extend(self, opened: OpenRequest, end: int) -> Answer:
        """Room up to `end` tokens in the full group, and in window groups as far ahead as they go."""
        if self.limits.contiguous:
            return opened.answer
        parts = [] if self.table is None else [max(0, self.limits.pages(end) - opened.pages)]
        parts += [
            group.missing(row, opened.committed, end)
            for group, row in zip(self.windows, opened.windows, strict=True)
        ]
        missing = sum(parts)
        if not missing:
            return opened.answer
        own = self.supply.take(missing)
        if own is None:
            return Busy(short_frames=self.supply.short(missing))
        pieces = _shares(own, parts)
        if self.table is not None:
            mine = pieces.pop(0)
            self.table.write(opened.row, opened.pages, mine)
            opened.pages += len(mine)
        for group, row, piece in zip(self.windows, opened.windows, pieces, strict=True):
            group.give(row, piece)
        return opened.answer

    def room(self, opened: OpenRequest) -> int:
        """Tokens that a request has frames and positions for in every group."""
        ends = [row.end for row in opened.windows]
        if self.table is not None:
            ends.append(opened.pages)
        return min(min(ends) * self.limits.page_tokens, self.limits.positions)

    def truncate(self, opened: OpenRequest, tokens: int) -> None:
        """Returns the frames behind the first `tokens` positions."""
        if self.limits.contiguous:
            return
        page = self.limits.pages(tokens)
        if self.table is not None and page < opened.pages:
            self.supply.give_back(self.table.frames(opened.row, page, opened.pages))
            self.table.cut(opened.row, page)
            opened.pages = page
        for group, row in zip(self.windows, opened.windows, strict=True):
            self.supply.give_back(group.cut_back(row, page))

    def seal(self, opened: OpenRequest, before: int) -> None:
        """Seals what a commit has filled, and takes room for the next part of a prompt.

        Args:
            opened: the request, with its tokens committed.
            before: tokens that were committed before.
        """
        self._sealing.commit(opened, before)
        if self.windows and opened.committed < len(opened.chain):
            # Who finds no room now asks with `extend`, and may be told to wait.
            self.extend(opened, len(opened.chain))

    def close(self, request: Hashable, opened: OpenRequest) -> None:
        """Ends a request; what it sealed stays until it is evicted."""
        if self.below is not None and opened.recent:
            self.below.save(opened, self.table, ends=True)
        del self.requests[request]
        parts: list[FrameIds] = []
        if self.table is not None and opened.lease is not None:
            parts.append(self.table.frames(opened.row, opened.lease.pages, opened.pages))
        parts += [group.close(row) for group, row in zip(self.windows, opened.windows, strict=True)]
        parts += [
            states.close(state) for states, state in zip(self.states, opened.states, strict=True)
        ]
        # At once and in the order of `open`, so that the span of a contiguous request stays one.
        self.supply.give_back(np.concatenate(parts))
        self.rows.give_back(opened.row)
        if self.prefixes.closed is not None and opened.lease is not None:
            self.prefixes.closed.release(opened.lease)

    def drop(self, chain: Chain) -> int:
        """As `PagePool.drop`."""
        gone = self.prefixes.drop(chain)
        if self.below is not None:
            self.below.drop(chain)
        if self.prefixes.closed is None:
            # No tree tells who continues it: whoever has computed it seals nothing more.
            for opened in self.requests.values():
                opened.seals &= not opened.has_computed(chain)
        return gone

    def forget_all(self) -> None:
        """Nobody finds what is sealed any more, and open requests seal nothing more."""
        self.prefixes.drop_root(None)
        if self.below is not None:
            self.below.forget()
        for opened in self.requests.values():
            opened.seals = False

    def check(self) -> None:
        """Verifies every invariant; linear in the pool.

        Raises:
            InvariantError: with all that are broken.
        """
        findings = Findings()
        self.frames.check(findings)
        self.prefixes.check(findings)
        accounts = Accounts(
            self.requests,
            self.rows,
            self.table,
            self.windows,
            self.prefixes,
            self.frames,
            self.below,
        )
        check(findings, accounts)
        findings.raise_if_any()


def _planes(
    memory: Memory, tables: Sequence[tuple[RequestTable, ...]]
) -> tuple[tuple[KVBuffers, RequestTable], ...]:
    """The buffers of each plane with its table."""
    return tuple(
        pair
        for planes, its in zip(memory.planes, tables, strict=True)
        for pair in zip(planes, its, strict=True)
    )
