"""The books of one open request, and what must hold between all of them.

Neighbours: `pool` opens, extends and closes them under its lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from stepwell.cache.pool.answer import Flags, Ready
from stepwell.cache.pool.table import RequestTable
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.frames import Frames
from stepwell.core.index import ClosedIndex
from stepwell.core.lease import Lease
from stepwell.core.page import Status


@dataclass(slots=True)
class OpenRequest:
    """One open request.

    Attributes:
        chain: the prompt and all tokens committed since; the pool's own.
        row: of the request table.
        pages: pages of the row that have frames.
        committed: tokens whose KV is written, reused ones included.
        lease: keeps the sealed pages; the rest of the frames are this request's alone.
        flags: what it does not want.
        seals: whether full pages become reusable.
        answer: what `open` said.
    """

    chain: Chain
    row: int
    pages: int
    committed: int
    lease: Lease
    flags: Flags
    seals: bool
    answer: Ready


def check(
    findings: Findings,
    requests: Mapping[Hashable, OpenRequest],
    table: RequestTable,
    index: ClosedIndex,
    frames: Frames,
) -> None:
    """Notes every broken invariant between requests, rows, leases and frames."""
    filling: list[int] = []
    for name, opened in requests.items():
        findings.expect(opened.committed <= len(opened.chain), f"{name!r}: committed too much")
        room = opened.pages * table.page_tokens
        findings.expect(len(opened.chain) <= room, f"{name!r}: no room for its tokens")
        findings.expect(
            opened.lease.pages * table.page_tokens <= opened.committed,
            f"{name!r}: would write into pages that are sealed",
        )
        slots = table.slots[opened.row, : opened.pages * table.page_tokens]
        straight = bool((np.diff(slots) == 1).all())
        findings.expect(
            (table.span(opened.row, len(slots)) is not None) == straight,
            f"{name!r}: its row is {'' if straight else 'not '}straight, which the table denies",
        )
        filling += table.frames(opened.row, opened.lease.pages, opened.pages).tolist()
        findings.expect(
            np.array_equal(
                table.frames(opened.row, 0, opened.lease.pages), index.path(opened.lease)
            ),
            f"{name!r}: its row does not follow its lease",
        )
    status = np.flatnonzero(frames.status == Status.FILLING).tolist()
    findings.expect(sorted(filling) == status, "a FILLING frame has no request, or two")
    rows = {opened.row for opened in requests.values()}
    findings.expect(
        len(rows) == len(requests) == len(table.slots) - table.free,
        "rows and open requests disagree",
    )
