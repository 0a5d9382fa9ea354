"""The indexes of all groups of one model, over one set of frames: what of a prompt can be reused.

Owns: which index has which frame, and the one order in which they leave. Must not know: request tables,
tensors. Neighbours: `index` for the full group, `walked` for window groups and states.

A boundary is restorable when every group can go on from it. The full group, if there is one, says how far
the pages go, and everything else lives only as long as the page of its key; the other groups step back
from there, each in turn, until all agree. Pages and states share the frames, and one policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.base.observe import Counters
from stepwell.core.chain import Chain, Pages
from stepwell.core.check import Findings
from stepwell.core.cut import Cut
from stepwell.core.evict.policy import Policy
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.geometry import Rule
from stepwell.core.index import ClosedIndex
from stepwell.core.invariants import check_groups
from stepwell.core.lease import Lease
from stepwell.core.reasons import Reason
from stepwell.core.walked import WalkedIndex


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup found and holds.

    Attributes:
        pages: of the prompt, restorable in every group.
        lease: of the full group; None without one.
        frames: of the full group; shape [pages], or [0] without one.
        records: what each walked group needs before the boundary, held; shape [at most its reach].
        parted: pages after which the prompt leaves what is known, if it goes on beyond `pages`; else 0.
        reason: why not more.
    """

    pages: int
    lease: Lease | None
    frames: FrameIds
    records: tuple[FrameIds, ...]
    parted: int
    reason: Reason


class Prefixes:
    """One lookup, one eviction and one check over the groups of a model. Not thread-safe.

    Args:
        frames: of all groups.
        page_tokens: tokens of one page.
        cuts: of all groups; at most one is full.
        policy: which page or state leaves next.
        counters: counts what happens.
    """

    def __init__(
        self,
        frames: Frames,
        page_tokens: int,
        cuts: Sequence[Cut],
        policy: Policy,
        counters: Counters,
    ) -> None:
        self._frames = frames
        self._policy = policy
        self.walked = tuple(
            WalkedIndex(frames, page_tokens, cut, policy, counters)
            for cut in cuts
            if cut.group.rule is not Rule.FULL
        )
        self.closed = (
            ClosedIndex(frames, page_tokens, policy, counters, self.walked)
            if len(self.walked) < len(cuts)
            else None
        )

    @property
    def evictable(self) -> int:
        """Frames that `evict` could take now."""
        pages = 0 if self.closed is None else self.closed.evictable
        return pages + sum(index.evictable for index in self.walked)

    @property
    def held(self) -> int:
        """Frames of what requests hold."""
        pages = 0 if self.closed is None else self.closed.held
        return pages + sum(index.held for index in self.walked)

    def hash_ahead(self, chain: Chain, limit: int) -> None:
        """Computes the keys that `match` will ask for; a hint, so no lock is needed."""
        if self.closed is not None:
            self.closed.longest(chain, limit)
        elif limit:
            chain.key(limit - 1)

    def match(self, request: Hashable, chain: Chain, limit: int, minimum: int = 0) -> Found:
        """Finds the deepest boundary at which every group can go on, and holds what it needs, in one step.

        Args:
            request: who asks.
            chain: the prompt.
            limit: pages that may be reused.
            minimum: pages below which a hit is not worth having.
        """
        agreed = 0

        def agree(known: int) -> int:
            nonlocal agreed
            agreed = self._agree(chain, known)
            return agreed if agreed >= minimum else 0

        lease: Lease | None = None
        frames: FrameIds = np.empty(0, np.int32)
        if self.closed is None:
            known = min(limit, chain.pages)
            pages = agree(known)
            reason = Reason.WHOLE_PREFIX if known else Reason.BELOW_A_PAGE
        else:
            match = self.closed.match(request, chain, limit, agree)
            lease, frames, reason, known = match.lease, match.frames, match.reason, match.known
            pages = len(frames)
        if pages < agreed:
            reason = Reason.BELOW_MINIMUM
        elif pages < known:
            reason = Reason.NOT_SEALED if self.closed is None else Reason.NO_BOUNDARY
        parted = 0
        if pages < known:
            # Without a full group the first of the others says how far the prompt is known.
            parted = known if self.closed is not None else self.walked[0].boundary(chain, known)
            parted = parted if parted > pages else 0
        records: list[FrameIds] = []
        try:
            records.extend(
                index.hold(chain, max(0, pages - index.reach), pages) for index in self.walked
            )
        finally:
            if len(records) < len(self.walked):
                self._release(lease, records)
        return Found(pages, lease, frames, tuple(records), parted, reason)

    def hold_boundary(self, chain: Pages, known: int) -> list[tuple[WalkedIndex, FrameIds]]:
        """Holds what the other groups have at the deepest boundary up to so many pages that are here.

        Returns:
            For each of them the records, to be released there.
        """
        pages = self._agree(chain, known)
        return [
            (index, index.hold(chain, max(0, pages - index.reach), pages)) for index in self.walked
        ]

    def _agree(self, chain: Pages, known: int) -> int:
        """The deepest boundary up to `known` that every walked group has; only ever steps back."""
        pages = known
        agreed = False
        while pages and not agreed:
            before = pages
            for index in self.walked:
                pages = index.boundary(chain, pages)
            agreed = pages == before
        return pages

    def let_go(self, found: Found) -> None:
        """Gives a match back unused."""
        self._release(found.lease, found.records)

    def _release(self, lease: Lease | None, records: Sequence[FrameIds]) -> None:
        for index, its in zip(self.walked, records, strict=False):
            index.release(its)
        # Last, so that pages were used later than what hangs on them, and leave after it.
        if lease is not None and self.closed is not None:
            self.closed.release(lease)

    def evict(self, n: int) -> bool:
        """Takes at least n frames back, in the order of the policy: as many as it takes, or none.

        Returns:
            Whether it did; False when fewer than n may leave. `collect` has the frames.
        """
        if not self.walked:
            assert self.closed is not None, "at least one group"
            return self.closed.evict(n)
        # Counted by what is left: a page may take along what hangs on it.
        least = self.evictable - n
        if least < 0:
            return False
        while (more := self.evictable - least) > 0:
            victim = self._policy.victim()
            assert victim is not None, "what may leave is offered"
            for index in self.walked:
                if index.offered(victim):
                    index.take_out(victim)
                    break
            else:
                assert self.closed is not None, "a page of no group"
                self.closed.take_out(victim, more)
        return True

    def collect(self) -> FrameIds:
        """The LEAVING frames since the last call, which are the caller's to free; shape [n]."""
        pages = np.empty(0, np.int32) if self.closed is None else self.closed.collect()
        if not self.walked:
            return pages
        return np.concatenate([pages, *(index.collect() for index in self.walked)])

    def below(self, chain: Chain) -> FrameIds:
        """The frames of all that `drop` would forget, in every group; shape [n]."""
        if self.closed is None:
            return self._all_frames(index.of_root(chain.root) for index in self.walked)
        frame = self.closed.find(chain)
        return np.empty(0, np.int32) if frame is None else self._with_companions([frame])

    def below_root(self, root: bytes | None) -> FrameIds:
        """The frames of all that `drop_root` would forget, in every group; shape [n]."""
        if self.closed is None:
            return self._all_frames(index.of_root(root) for index in self.walked)
        return self._with_companions(self.closed.tops(root))

    def _with_companions(self, tops: list[int]) -> FrameIds:
        assert self.closed is not None, "a full group"
        pages = [np.empty(0, np.int32)]
        keys: list[bytes] = []
        for top in tops:
            frames, its = self.closed.below(top)
            pages.append(frames)
            keys += its
        theirs = self._all_frames(index.with_keys(keys) for index in self.walked)
        return np.concatenate([*pages, theirs])

    def _all_frames(self, records: Iterable[FrameIds]) -> FrameIds:
        """All frames of records of each walked group."""
        frames = [
            index.frames_of(its).reshape(-1)
            for index, its in zip(self.walked, records, strict=True)
        ]
        return np.concatenate([np.empty(0, np.int32), *frames])

    def drop(self, chain: Chain) -> int:
        """Forgets every page that begins with a chain of full pages, and all that hangs on them.

        Without a full group nobody knows what continues a prefix, so the whole namespace is forgotten.

        Returns:
            Pages, or records without a full group, that nobody finds any more.
        """
        if self.closed is None:
            return sum(index.forget_root(chain.root) for index in self.walked)
        frame = self.closed.find(chain)
        return 0 if frame is None else self.closed.drop(frame)

    def drop_root(self, root: bytes | None) -> int:
        """Forgets all of one namespace, given by the root of its chains, or everything; linear in what is known."""
        if self.closed is None:
            return sum(index.forget_root(root) for index in self.walked)
        return sum(self.closed.drop(frame) for frame in self.closed.tops(root))

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of all indexes and between them."""
        if self.closed is not None:
            self.closed.check(findings)
        else:
            check_groups(findings, self._frames, None, self.walked, self._policy)
