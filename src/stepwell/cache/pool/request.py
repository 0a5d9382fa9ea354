"""The books of one open request, and what must hold between all of them.

Neighbours: `pool` opens, extends and closes them under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stepwell.cache.pool.answer import Flags, Ready
from stepwell.cache.pool.states import StateRow
from stepwell.cache.pool.table import RequestTable, Rows
from stepwell.cache.pool.windows import WindowGroup, WindowRow
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.lease import Lease
from stepwell.core.page import Status
from stepwell.core.prefixes import Prefixes
from stepwell.core.walked import WalkedIndex

if TYPE_CHECKING:
    from stepwell.cache.pool.below import Below

Wish = tuple[WalkedIndex, FrameIds, npt.NDArray[np.uint32]]
"""Records that one kept boundary wants in one group, with the generations of their frames."""

Kept = list[Wish]
"""What one kept boundary wants."""


@dataclass(slots=True)
class OpenRequest:
    """One open request.

    Attributes:
        chain: the prompt and all tokens committed since; the pool's own.
        prompt_tokens: length of the prompt.
        row: of the request tables.
        pages: up to which the full group has frames; 0 without one.
        committed: tokens whose KV is written, reused ones included.
        lease: of the full group, keeps the sealed pages; None without one.
        windows: what it has of each window group.
        states: what it has of each state group.
        flags: what it does not want.
        seals: whether full pages become reusable.
        boundaries: positions in the prompt that are to be kept.
        answer: what `open` said.
        bound: tokens of the last `bind` that were not committed yet; None when there are none.
        torn: a commit was interrupted half way: it can only be closed.
        recent: the last boundaries of the answer that are kept, oldest first, in pages.
        offered: pages up to which the tiers were offered the full group.
        unsaved: boundaries that no tier was offered yet, in pages, with what they want.
    """

    chain: Chain
    row: int
    pages: int
    committed: int
    lease: Lease | None
    windows: tuple[WindowRow, ...]
    states: tuple[StateRow, ...]
    flags: Flags
    seals: bool
    boundaries: tuple[int, ...]
    answer: Ready = field(init=False)
    prompt_tokens: int = field(init=False)
    bound: int | None = None
    torn: bool = False
    recent: deque[tuple[int, Kept]] = field(default_factory=deque)
    offered: int = 0
    unsaved: list[tuple[int, Kept]] = field(default_factory=list)

    def has_computed(self, chain: Chain) -> bool:
        """Whether it has the KV of all pages of a chain."""
        last = chain.pages - 1
        return self.committed >= len(chain) and self.chain.key(last) == chain.key(last)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.chain)

    @property
    def sealed(self) -> int:
        """Pages of the full group that its lease keeps."""
        return 0 if self.lease is None else self.lease.pages


@dataclass(frozen=True, slots=True)
class Accounts:
    """Everything that `check` lays side by side."""

    requests: Mapping[Hashable, OpenRequest]
    rows: Rows
    table: RequestTable | None
    windows: Sequence[WindowGroup]
    prefixes: Prefixes
    frames: Frames
    below: Below | None


def check(findings: Findings, accounts: Accounts) -> None:
    """Notes every broken invariant between requests, rows, leases and frames."""
    below = accounts.below
    filling: list[int] = [] if below is None else below.check(findings)
    for name, opened in accounts.requests.items():
        findings.expect(opened.committed <= len(opened.chain), f"{name!r}: committed too much")
        if accounts.table is not None and accounts.prefixes.closed is not None:
            filling += _check_full(findings, name, opened, accounts)
        for group, row in zip(accounts.windows, opened.windows, strict=True):
            filling += group.check(findings, row, repr(name)).tolist()
        for state in opened.states:
            filling += state.own.tolist()
    for number, index in enumerate(accounts.prefixes.walked):
        held = [] if below is None else below.held(number)
        held += [_held(opened, number) for opened in accounts.requests.values()]
        index.check_holds(findings, held)
    status = np.flatnonzero(accounts.frames.status == Status.FILLING).tolist()
    findings.expect(sorted(filling) == status, "a FILLING frame has no request, or two")
    rows = {opened.row for opened in accounts.requests.values()}
    findings.expect(
        len(rows) == len(accounts.requests) == accounts.rows.count - accounts.rows.free,
        "rows and open requests disagree",
    )


def _held(opened: OpenRequest, number: int) -> FrameIds:
    """What a request holds of one walked group: the window groups come before the state groups."""
    if number < len(opened.windows):
        return opened.windows[number].records
    return opened.states[number - len(opened.windows)].held


def _check_full(
    findings: Findings, name: Hashable, opened: OpenRequest, accounts: Accounts
) -> list[int]:
    table, closed, lease = accounts.table, accounts.prefixes.closed, opened.lease
    assert table is not None, "a full group"
    assert closed is not None, "a full group"
    assert lease is not None, "a full group"
    size = table.page_tokens
    findings.expect(len(opened.chain) <= opened.pages * size, f"{name!r}: no room for its tokens")
    findings.expect(
        lease.pages * size <= opened.committed, f"{name!r}: would write into pages that are sealed"
    )
    slots = table.slots[opened.row, : opened.pages * size]
    straight = bool((np.diff(slots) == 1).all())
    findings.expect(
        (table.span(opened.row, 0, len(slots)) is not None) == straight,
        f"{name!r}: its row is {'' if straight else 'not '}straight, which the table denies",
    )
    findings.expect(
        np.array_equal(table.frames(opened.row, 0, lease.pages), closed.path(lease)),
        f"{name!r}: its row does not follow its lease",
    )
    own: list[int] = table.frames(opened.row, lease.pages, opened.pages).tolist()
    return own
