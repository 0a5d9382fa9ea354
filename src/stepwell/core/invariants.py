"""What must hold between the tree, the contents, the statuses, the order and the leases of an index.

Each of them checks itself; here is what only shows when they are laid beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stepwell.core.check import Findings
from stepwell.core.contents import Contents
from stepwell.core.evict.policy import Policy
from stepwell.core.frames import Frames
from stepwell.core.lease import Leases
from stepwell.core.page import Status
from stepwell.core.paths import NO_FRAME, Paths

if TYPE_CHECKING:
    from stepwell.core.index import ClosedIndex
    from stepwell.core.walked import WalkedIndex


def check_index(
    findings: Findings,
    frames: Frames,
    paths: Paths,
    contents: Contents,
    leases: Leases,
) -> None:
    """Notes every broken invariant of a closed index by itself; linear in its frames."""
    paths.check(findings)
    contents.check(findings)
    inside = {frame for frame in range(frames.count) if frame in paths}
    indexed = {frame for frame in range(frames.count) if contents.has(frame)}
    findings.expect(indexed <= inside, "a frame outside the tree can be found")
    for frame in inside:
        above = int(paths.parent[frame])
        findings.expect(
            frame not in indexed or above == NO_FRAME or above in indexed,
            f"frame {frame} is indexed but its parent {above} is not: not closed",
        )
        findings.expect(
            frame in indexed or not paths.loose(frame),
            f"frame {frame} is neither indexed nor held, but has not left",
        )
    covered: set[int] = set()
    for books in leases:
        path = paths.path(books.deepest)
        covered.update(path.tolist())
        findings.expect(len(path) == books.pages, f"lease of {books.request!r}: wrong length")
        findings.expect(
            books.generation == frames.generation[books.deepest],
            f"lease of {books.request!r}: its frame was freed under it",
        )
    findings.expect(
        len(covered) == paths.guarded,
        f"leases cover {len(covered)} pages, {paths.guarded} are protected",
    )


def check_groups(
    findings: Findings,
    frames: Frames,
    closed: ClosedIndex | None,
    walked: Sequence[WalkedIndex],
    policy: Policy,
) -> None:
    """Notes every broken invariant between the indexes of one set of frames; linear in the frames."""
    pages = [] if closed is None else closed.pages()
    records = [one.frames_of(np.array(one.records(), np.int32)).reshape(-1) for one in walked]
    mine = sorted(np.concatenate([np.array(pages, np.int32), *records]).tolist())
    sealed = np.flatnonzero(frames.status == Status.SEALED).tolist()
    findings.expect(mine == sealed, "sealed frames and the indexes disagree")
    for one in walked:
        one.check(findings)
        lonely = (
            []
            if closed is None
            else [key for key in one.found_keys() if closed.frame_of(key) is None]
        )
        findings.expect(not lonely, f"{len(lonely)} records are found whose page is not")

    def offered(frame: int) -> bool:
        if closed is not None and closed.offered(frame):
            return True
        return any(one.offered(frame) for one in walked)

    policy.check(findings, offered)
