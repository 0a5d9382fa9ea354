"""What a commit does to what is full now: pages are sealed, boundaries kept, and both offered to the tiers.

Owns: nothing; it works on the books of one request. Neighbours: `holdings` has the requests; `keeping` the boundaries,
`below` the tiers.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.cache.pool.answer import Flags
from stepwell.cache.pool.below import Below
from stepwell.cache.pool.keeping import Keeping
from stepwell.cache.pool.limits import Limits
from stepwell.cache.pool.request import OpenRequest
from stepwell.cache.pool.supply import Supply
from stepwell.cache.pool.table import RequestTable


@dataclass(frozen=True, slots=True)
class Sealing:
    """Seals in all groups of a pool.

    Attributes:
        limits: sizes.
        supply: frames and indexes.
        table: of the full group, if there is one.
        keeping: keeps boundaries, and has the other groups.
        below: the tiers, if there are some.
    """

    limits: Limits
    supply: Supply
    table: RequestTable | None
    keeping: Keeping
    below: Below | None

    def commit(self, opened: OpenRequest, before: int) -> None:
        """Seals what a commit has filled, keeps boundaries, and returns what is behind the windows.

        Args:
            opened: the request, with its tokens committed.
            before: tokens that were committed before.
        """
        size, chain = self.limits.page_tokens, opened.chain
        if opened.committed > before:
            for states, state in zip(self.keeping.states, opened.states, strict=True):
                states.written(state)
        last = opened.committed // size if opened.seals else 0
        twins = Flags.NO_READ not in opened.flags
        if self.supply.prefixes.closed is not None:
            self._seal_full(opened, last, twins=twins)
            last = opened.sealed if opened.lease is not None and opened.lease.grows else 0
        for group, row in zip(self.keeping.windows, opened.windows, strict=True):
            self.supply.give_back(group.seal(row, chain, last, twins=twins))
            if row.sealed < last:
                # A page of others under this key, or of somebody whom it may not follow: what comes after it
                # would be found as the continuation of theirs.
                opened.seals = False
        if last:
            self.keeping.passed(opened, before, last * size)
            if self.below is not None:
                self.below.save(opened, self.table)
        if not self.limits.contiguous:
            for group, row in zip(self.keeping.windows, opened.windows, strict=True):
                self.supply.give_back(group.pass_by(row, opened.committed))

    def _seal_full(self, opened: OpenRequest, last: int, *, twins: bool) -> None:
        closed, lease, table = self.supply.prefixes.closed, opened.lease, self.table
        assert closed is not None, "a full group"
        assert lease is not None, "a full group"
        assert table is not None, "a full group"
        first = lease.pages
        if not lease.grows or first >= last:
            return
        try:
            frames = table.frames(opened.row, first, last)
            closed.seal(lease, opened.chain, frames, twins=twins)
        finally:
            # Also when that was torn: pages that can be found already must be those of the row.
            mine = table.frames(opened.row, first, lease.pages)
            kept = closed.path(lease, len(mine))
            spare = mine[mine != kept]
            if len(spare):
                table.write(opened.row, first, kept)
                self.supply.give_back(spare)
