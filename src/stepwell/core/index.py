"""The closed index: content keys to the frames of one place.

Owns: what enters and leaves, and leases. Must not know: requests beyond their id, tensors, tiers. Neighbours:
`lookup` answers what changes nothing, `frames` has the statuses, `paths` the tree, `evict` the order.

*Closed* means that the parent of every indexed page is indexed too. So the longest match is found by
galloping over keys, a lease holds the deepest page only (its ancestors have a child), and only
childless pages that no lease holds may leave. A record's id is its frame (docs/adr/0002-index-records.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from stepwell.base.errors import InputError, MisuseError
from stepwell.base.observe import Counters
from stepwell.core.chain import Chain, Pages
from stepwell.core.check import Findings
from stepwell.core.evict.policy import Policy
from stepwell.core.frames import FrameIds, Frames, joined
from stepwell.core.invariants import check_groups, check_index
from stepwell.core.lease import Books, Lease, Leases, caller
from stepwell.core.lookup import Lookup
from stepwell.core.match import Agree, Held, Sealed, whole
from stepwell.core.page import Status
from stepwell.core.paths import NO_FRAME
from stepwell.core.walked import WalkedIndex

_NONE: FrameIds = np.empty(0, np.int32)


class ClosedIndex(Lookup):
    """Content keys to the frames of one place, closed under parents. Not thread-safe.

    A page enters sealed, with its tokens, below its parent (`seal`); it leaves tail first when the
    policy says so (`evict`), or with everything below it when it is forgotten (`drop`). What leaves
    is LEAVING, and its frame is the caller's to free. A match compares the token ids of every page on
    the path, so a collision of keys is a miss. When a call raises, nothing has changed.

    Args:
        frames: the place; the index moves sealed pages of it.
        page_tokens: tokens of one page.
        policy: chooses what `evict` takes.
        counters: counts what happens.
        companions: indexes of other groups whose pages are worth nothing without the page of the same
            key here, and are forgotten with it.
    """

    def __init__(
        self,
        frames: Frames,
        page_tokens: int,
        policy: Policy,
        counters: Counters,
        companions: Sequence[WalkedIndex] = (),
    ) -> None:
        super().__init__(frames, page_tokens, counters)
        self._policy = policy
        self._leases = Leases()
        self._companions = companions
        self._going: list[FrameIds] = []  # left the tree in this call
        self._left: list[FrameIds] = []  # LEAVING, for the next `collect`
        # Called with the deepest page of a path from which pages are evicted, while all of it is still here.
        self.evicting: Callable[[int], None] | None = None

    @property
    def evictable(self) -> int:
        """Pages that `evict` could take now, one after the other."""
        return self._paths.size - self._paths.guarded

    @property
    def held(self) -> int:
        """Pages that leases keep."""
        return self._paths.guarded

    def path(self, lease: Lease, pages: int | None = None) -> FrameIds:
        """The frames of the last `pages` pages that a lease keeps, all by default; shape [pages]."""
        books = self._leases.own(lease)
        return _NONE if books.deepest == NO_FRAME else self._paths.path(books.deepest, pages)

    def match(self, request: Hashable, chain: Chain, limit: int, agree: Agree = whole) -> Held:
        """Finds the longest sealed prefix and holds it, in one step.

        Asking again with the same request replaces its earlier lease, which is then stale: nothing
        is remembered of a request that its tokens do not prove.

        Args:
            request: who asks; one lease each.
            chain: the prompt.
            limit: pages that may be reused.
            agree: told how many pages were found, says how many of them to hold; all by default.
        """
        self._reap()
        path, reason = self._longest_path(chain, limit)
        known = len(path)
        path = path[: agree(known)]
        deepest = int(path[-1]) if len(path) else NO_FRAME
        return Held(self._take(request, deepest, len(path)), path, reason, known)

    def _take(self, request: Hashable, deepest: int, pages: int) -> Lease:
        generation = int(self._frames.generation[deepest]) if pages else 0
        books = Books(request, deepest, generation, pages, True, caller(2))
        if deepest != NO_FRAME:
            self._paths.hold(deepest)
            self._policy.withdraw(deepest)
        earlier = self._leases.of(request)
        if earlier is not None:
            self._end(earlier)
        return self._leases.take(books)

    def hold(self, request: Hashable, pages: Pages, end: int) -> Lease | None:
        """Holds the path of the last of some pages, found by its key alone, so that others can be sealed below it.

        What was sealed there may be other tokens, if two keys collide: a match, which compares them, says so.

        Args:
            request: who asks; as for `match`.
            pages: that end there, or begin.
            end: pages of the path; 0 holds nothing, and gives a lease under which a chain can begin.

        Returns:
            The lease, or None when that page is not here.
        """
        self._reap()
        if not end:
            return self._take(request, NO_FRAME, 0)
        deepest = self._contents.find(pages.key(end - 1))
        if (
            deepest is None
            or self._paths.depth[deepest] != end - 1
            or self._paths.root(deepest) != pages.root
        ):
            return None
        return self._take(request, deepest, end)

    def seal(self, lease: Lease, chain: Pages, frames: FrameIds, *, twins: bool = True) -> Sealed:
        """Indexes the pages that follow a lease's prefix, and moves its hold to the deepest.

        A page whose key is here already keeps its first frame. A page that cannot be indexed (its
        parent has left, or its key belongs to other tokens) ends the call: it and all after it stay
        the caller's, FILLING, and the lease grows no further.

        Args:
            lease: a lease of this index.
            chain: the request's tokens; pages `[lease.pages, lease.pages + len(frames))` must be full.
            frames: FILLING frames that hold those pages, in order.
            twins: whether the request may go on with first copies of others; without, a page that is
                here already ends the call like one that cannot be indexed.

        Raises:
            StaleError: the lease was released or is another index's.
            InputError: the pages are not full, or the chain has another root.
            MisuseError: a frame is not FILLING.
        """
        self._reap()
        books = self._leases.own(lease)
        chain.require(self.page_tokens)
        if not books.grows or not len(frames):
            return Sealed(_NONE, _NONE)
        self._frames.require(frames, Status.SEALED)
        first, parent = books.pages, books.deepest
        keys = chain.keys(first, first + len(frames))
        if parent != NO_FRAME and self._contents.find(chain.key(first - 1)) != parent:
            raise InputError(
                f"page {first - 1} of the chain is not the last page of the lease",
                limit="a chain that begins with the prefix that the lease keeps",
            )
        known = self._contents.gallop(keys.__getitem__, len(keys))
        same = self._twins(chain, books, keys[:known]) if twins else _NONE
        new = _NONE
        if len(same) == known:
            above = int(same[-1]) if known else parent
            new = self._insert(above, chain, keys[known:], frames[known:])
        kept = np.concatenate((same, new))
        books.grows = len(kept) == len(keys)
        self._advance(books, kept)
        if twins and not books.grows:
            self._counters.add("key_collisions")
        self._counters.add("pages_sealed", len(new))
        self._counters.add("pages_duplicate", len(same))
        return Sealed(kept, frames[: len(same)])

    def _twins(self, chain: Pages, books: Books, keys: list[bytes]) -> FrameIds:
        """Frames of leading pages whose keys are all here, as far as parent and tokens prove them."""
        deepest = self._contents.find(keys[-1]) if keys else None
        if deepest is None:
            return _NONE
        if self._paths.depth[deepest] != books.pages + len(keys) - 1:
            return _NONE
        twins = self._paths.path(deepest, len(keys))
        if self._paths.parent[twins[0]] != books.deepest:
            return _NONE
        if self._paths.root(deepest) != chain.root:
            return _NONE
        return twins[: self._contents.equal(twins, chain, books.pages)]

    def _insert(self, above: int, chain: Pages, keys: list[bytes], frames: FrameIds) -> FrameIds:
        """Seals new pages below `above`; ends at the first key that other tokens have."""
        frames = frames[: self._contents.claim(keys, frames)]
        if not len(frames):
            return frames
        done = False
        try:
            first = 0 if above == NO_FRAME else int(self._paths.depth[above]) + 1
            self._contents.write(frames, chain, first)
            self._paths.append(above, frames, chain.root)
            self._policy.reset(frames)
            self._frames.move(frames, Status.SEALED)
            done = True
        finally:
            if not done:
                if int(frames[0]) in self._paths:
                    self._paths.cut(frames[::-1])
                self._contents.forget_all(frames)
        if above != NO_FRAME:
            self._policy.withdraw(above)
        return frames

    def _advance(self, books: Books, kept: FrameIds) -> None:
        """Moves a lease's hold to the last of the pages that follow its prefix."""
        if not len(kept):
            return
        earlier, books.deepest = books.deepest, int(kept[-1])
        books.generation = int(self._frames.generation[books.deepest])
        books.pages += len(kept)
        self._paths.hold(books.deepest)
        self._policy.withdraw(books.deepest)
        if earlier != NO_FRAME:
            # Never loosens anything: the page is an ancestor of the one that is held now.
            self._paths.let_go(earlier)

    def release(self, lease: Lease) -> None:
        """Ends a lease; its pages may leave from now on, the last used last.

        Raises:
            StaleError: the lease was released already, or is another index's.
        """
        self._reap()
        self._end(self._leases.own(lease))

    def _end(self, books: Books) -> None:
        self._leases.end(books)
        if books.deepest == NO_FRAME:
            return
        self._policy.touch(books.deepest)
        for last in self._paths.let_go(books.deepest):
            self._settle(last)
        self._mark_going()

    def _settle(self, frame: int) -> None:
        """Offers the last page of a run if it may leave; unindexed ones leave at once, upwards."""
        # A run above may have been emptied already, when the pages below it left.
        while frame in self._paths and self._paths.loose(frame):
            if self._contents.has(frame):
                self._policy.offer(frame)
                return
            frame = self._leave(np.array([frame], np.int32))

    def _leave(self, frames: FrameIds) -> int:
        """Takes pages of one run out, tail first; returns the parent of the last."""
        parent = self._paths.cut(frames)
        self._policy.withdraw(int(frames[0]))
        if parent != NO_FRAME:
            self._policy.inherit(frames, parent)
        self._forget(frames)
        self._going.append(frames)
        return parent

    def _forget(self, frames: FrameIds) -> int:
        """Nobody finds these pages any more, nor what other groups have at their ends."""
        keys = self._contents.forget_all(frames)
        for companion in self._companions:
            companion.forget(keys)
        return len(keys)

    def _mark_going(self) -> None:
        """Marks what left in this call as LEAVING, in one move however many runs it came from."""
        if self._going:
            gone = joined(self._going)
            self._going.clear()
            self._frames.move(gone, Status.LEAVING)
            self._left.append(gone)

    def evict(self, n: int) -> bool:
        """Takes n pages out, in the order of the policy, tails first: all n or none.

        Cost grows with n and with the runs that the pages belong to, never with the index.

        Returns:
            Whether it did; False when fewer than n pages may leave. `collect` has the frames.
        """
        self._reap()
        if n > self.evictable:
            return False
        taken = 0
        while taken < n:
            victim = self._policy.victim()
            assert victim is not None, "pages that may leave are offered"
            taken += self.take_out(victim, n - taken)
        self._mark_going()
        return True

    def take_out(self, victim: int, limit: int) -> int:
        """Evicts the policy's victim, and of its parents up to `limit` in all as the policy would.

        Returns:
            How many pages; `collect` has their frames.
        """
        tail = self._paths.tail(victim, limit)
        going = tail[: self._policy.in_a_row(tail)]
        if self.evicting is not None:
            self.evicting(victim)
        self._settle(self._leave(going))
        self._counters.add("pages_evicted", len(going))
        return len(going)

    def drop(self, frame: int) -> int:
        """Forgets a page and everything that continues it, in this call.

        Pages that leases keep live on for them, found by nobody else, and leave with the last lease;
        nothing more can be sealed below them.

        Args:
            frame: an indexed page.

        Returns:
            How many pages are found no more.

        Raises:
            MisuseError: the frame holds no indexed page.
        """
        self._reap()
        if frame not in self._paths or not self._contents.has(frame):
            raise MisuseError(
                f"frame {frame} holds no indexed page", remedy="drop what `match` gave"
            )
        runs = self._paths.below(frame)
        gone = 0
        for frames in runs:
            gone += self._forget(frames)
            for below in frames.tolist():
                self._policy.withdraw(below)
        for books in self._leases:
            if not self._contents.has(books.deepest):
                books.grows = False
        for frames in reversed(runs):
            self._settle(int(frames[-1]))
        self._mark_going()
        self._counters.add("pages_dropped", gone)
        return gone

    def collect(self) -> FrameIds:
        """The LEAVING frames since the last call, which are the caller's to free; shape [n]."""
        self._reap()
        self._mark_going()
        left, self._left = self._left, []
        return joined(left) if left else _NONE

    def _reap(self) -> None:
        """Releases leases that their holders lost; here, because the collector may only queue."""
        lost = self._leases.lost()
        for books in lost:
            self._end(books)
            self._counters.add("leases_lost")
        for books in lost:
            self._leases.report(books)

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of keys, tree, leases, order and statuses."""
        check_index(findings, self._frames, self._paths, self._contents, self._leases)
        check_groups(findings, self._frames, self, self._companions, self._policy)
        leaving = np.concatenate(self._left) if self._left else _NONE
        findings.expect(
            (self._frames.status[leaving] == Status.LEAVING).all(), "a frame left untold"
        )
        findings.expect(not self._going, "frames left the tree and were not marked")
