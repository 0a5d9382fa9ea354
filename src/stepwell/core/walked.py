"""The walked index: pages of a window group, or states, found by key without their parents.

Owns: which key is where, who holds it, which boundaries want it. Must not know: the tree of the full group,
requests, tensors. Neighbours: `frames` has the statuses, `evict` the order, `prefixes` asks all groups.

A boundary can be gone on from when the `reach` records before it are here: for a window of w tokens those of
the last w - 1, for a state the one at the boundary itself, which is a reach of 1. There is no child rule, so
a hold covers each record, and a match walks from right to left, looking up each key once at most.

Source: going on from the last pages of a window alone, right to left, is vLLM's sliding window manager (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import MisuseError
from stepwell.base.observe import Counters
from stepwell.core.chain import Pages
from stepwell.core.check import Findings
from stepwell.core.contents import Contents
from stepwell.core.cut import Cut
from stepwell.core.evict.policy import Policy
from stepwell.core.excerpt import Excerpt
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.match import Sealed
from stepwell.core.page import Status

_NONE: FrameIds = np.empty(0, np.int32)


class WalkedIndex:
    """Content keys to records of one group. Not thread-safe.

    A record is one page of a window group, or one state: `record_frames` frames, named by the first. It
    enters sealed and held by who sealed it (`seal`); it may leave when nobody holds it: before all others
    if no kept boundary wants it, else in the order of its last use. What leaves is LEAVING, and its frames
    are the caller's to free. A match compares the token ids and the place of every record that it needs. A record that is
    forgotten while held lives on, found by nobody, and leaves with its last hold. When a call raises,
    nothing has changed.

    Args:
        frames: the place, shared with the other groups.
        page_tokens: tokens of one page.
        cut: frames of one record, and records before a boundary that are needed to go on there.
        policy: chooses what leaves, shared with the other groups.
        counters: counts what happens.
    """

    def __init__(
        self,
        frames: Frames,
        page_tokens: int,
        cut: Cut,
        policy: Policy,
        counters: Counters,
    ) -> None:
        self.page_tokens = page_tokens
        self.record_frames, self.reach = cut.frames, cut.reach
        self._frames = frames
        self._policy = policy
        self._counters = counters
        self._contents = Contents(frames.count, self.page_tokens)
        self._holds: npt.NDArray[np.int32] = np.zeros(frames.count, np.int32)
        self._wanted: npt.NDArray[np.int32] = np.zeros(frames.count, np.int32)  # by kept boundaries
        self._rest: dict[int, FrameIds] = {}  # further frames of a record that has some
        self._roots: dict[int, bytes] = {}
        self._places: npt.NDArray[np.int32] = np.zeros(frames.count, np.int32)  # pages before it
        self._count = 0
        self._held = 0
        self._left: list[FrameIds] = []
        # Called with a record that is about to be evicted, while it is still here.
        self.evicting: Callable[[int], None] | None = None

    @property
    def evictable(self) -> int:
        """Frames of the records that may leave."""
        return (self._count - self._held) * self.record_frames

    @property
    def held(self) -> int:
        """Frames of the records that somebody holds."""
        return self._held * self.record_frames

    def boundary(self, chain: Pages, limit: int) -> int:
        """The deepest boundary, in pages, from which this group can go on; changes nothing.

        Args:
            chain: the prompt.
            limit: pages to look at; all of them full.
        """
        end = limit
        while end:
            first = max(0, end - self.reach)
            there = self._found(chain, first, end)
            if len(there) < end - first:
                end -= len(there) + 1
                continue
            proved = self._proved(there, chain, first)
            if proved == len(there):
                return end
            # Every boundary up to this one needs the page that was not proved.
            end = first + proved
        return 0

    def _found(self, chain: Pages, first: int, last: int) -> FrameIds:
        """The records at the last pages of `[first, last)` up to the first gap from the right; shape [n]."""
        records: list[int] = []
        for page in range(last - 1, first - 1, -1):
            record = self._contents.find(chain.key(page))
            if record is None:
                break
            records.append(record)
        return np.array(records[::-1], np.int32)

    def _proved(self, records: FrameIds, chain: Pages, first: int) -> int:
        """How many leading records are those of the chain's pages from `first` on."""
        roots = [self._roots[record] == chain.root for record in records.tolist()]
        right = np.array(roots, np.bool_)
        right &= self._places[records] == np.arange(first, first + len(records))
        count = len(records) if right.all() else int(np.argmin(right))
        return self._contents.equal(records[:count], chain, first)

    def has(self, key: bytes) -> bool:
        """Whether a record with this key can be found."""
        return self._contents.find(key) is not None

    def hold(self, chain: Pages, first: int, last: int) -> FrameIds:
        """Holds the records at pages `[first, last)`, which `boundary` has proved in the same step.

        Returns:
            The records; shape [last - first]. `release` each once.
        """
        records = self._found(chain, first, last)
        assert len(records) == last - first, "records that were just proved"
        self._hold(records)
        return records

    def _hold(self, records: FrameIds) -> None:
        self._held += int((self._holds[records] == 0).sum())
        self._holds[records] += 1
        for record in records.tolist():
            self._policy.withdraw(record)

    def seal(self, chain: Pages, first: int, frames: FrameIds, *, twins: bool = True) -> Sealed:
        """Indexes and holds the records at pages `[first, first + n)`.

        A record that is here already is held instead, and its new copy is handed back. One whose key
        belongs to other tokens ends the call: it and all after it stay the caller's, FILLING.

        Args:
            chain: the request's tokens; those pages must be full.
            first: page of the first record.
            frames: FILLING frames; shape [n, record_frames].
            twins: whether to take first copies of others; without, one that is here ends the call.

        Raises:
            MisuseError: a frame is not FILLING.
        """
        self._frames.require(frames.reshape(-1), Status.SEALED)
        kept: list[int] = []
        spare: list[FrameIds] = []
        fresh: list[FrameIds] = []
        done = False
        try:
            for page, own in enumerate(frames, first):
                here = self._contents.find(chain.key(page))
                if here is None:
                    fresh.append(own)
                    self._enter(own, chain, page)
                    kept.append(int(own[0]))
                elif twins and self._proved(np.array([here], np.int32), chain, page):
                    kept.append(here)
                    spare.append(own)
                else:
                    break
            new = np.concatenate(fresh) if fresh else _NONE
            self._policy.reset(new)
            self._frames.move(new, Status.SEALED)
            done = True
        finally:
            if not done:
                for own in fresh:
                    self._contents.forget_all(own[:1])
                    self._roots.pop(int(own[0]), None)
                    self._rest.pop(int(own[0]), None)
        records = np.array(kept, np.int32)
        self._count += len(fresh)
        self._hold(records)
        self._counters.add("records_sealed", len(fresh))
        self._counters.add("records_duplicate", len(spare))
        if twins and len(kept) < len(frames):
            self._counters.add("key_collisions")
        return Sealed(records, np.concatenate(spare) if spare else _NONE)

    def _enter(self, own: FrameIds, chain: Pages, page: int) -> None:
        """Notes a new record under its key."""
        record = int(own[0])
        self._contents.claim([chain.key(page)], own[:1])
        self._contents.write(own[:1], chain, page)
        self._places[record] = page
        if self.record_frames > 1:
            self._rest[record] = own[1:].copy()
        self._roots[record] = chain.root

    def frames_of(self, records: FrameIds) -> FrameIds:
        """All frames of records; shape [n, record_frames]."""
        if self.record_frames == 1:
            return records[:, None]
        rows = [np.concatenate(([record], self._rest[record])) for record in records.tolist()]
        return np.array(rows, np.int32).reshape(-1, self.record_frames)

    def want(self, records: FrameIds) -> None:
        """A kept boundary needs these records, which the caller holds."""
        self._wanted[records] += 1

    def unwant(self, records: FrameIds, generations: npt.NDArray[np.uint32]) -> None:
        """A boundary is kept no more.

        Args:
            records: what was given to `want`; some may have left since.
            generations: of their frames at that time, by which it shows.
        """
        for record in records[self._frames.generation[records] == generations].tolist():
            if record not in self._roots:
                continue  # it has left in this call, and its frame is not free yet
            self._wanted[record] -= 1
            if not self._wanted[record] and self.offered(record):
                self._policy.offer(record, first=True)

    def release(self, records: FrameIds) -> None:
        """Ends one hold of each record."""
        if len(records) and self._holds[records].min() < 1:
            raise MisuseError("a record was released that nobody holds", remedy="release once")
        self._holds[records] -= 1
        for record in records[self._holds[records] == 0].tolist():
            self._held -= 1
            if not self._contents.has(record):
                self._leave(record)
            elif self._wanted[record]:
                self._policy.touch(record)
                self._policy.offer(record)
            else:
                self._policy.offer(record, first=True)

    def _leave(self, record: int) -> None:
        """Takes out a record that nobody holds."""
        self._policy.withdraw(record)
        self._contents.forget_all(np.array([record], np.int32))
        self._wanted[record] = 0
        del self._roots[record]
        rest = self._rest.pop(record, _NONE)
        gone = np.concatenate((np.array([record], np.int32), rest))
        self._count -= 1
        self._frames.move(gone, Status.LEAVING)
        self._left.append(gone)

    def take_out(self, victim: int) -> None:
        """Evicts the policy's victim; `collect` has its frames."""
        if self.evicting is not None:
            self.evicting(victim)
        self._leave(victim)
        self._counters.add("records_evicted")

    def forget(self, keys: list[bytes]) -> int:
        """Nobody finds these records any more; unheld ones leave, held ones with their last hold.

        Returns:
            How many of the keys were here.
        """
        found = 0
        for key in keys:
            record = self._contents.find(key)
            if record is None:
                continue
            found += 1
            if self._holds[record]:
                self._contents.forget_all(np.array([record], np.int32))
            else:
                self._leave(record)
        self._counters.add("records_dropped", found)
        return found

    def found(self, record: int) -> bool:
        """Whether a record is one that can be found."""
        return self._contents.has(record)

    def forget_record(self, record: int) -> None:
        """Nobody finds a record any more; it leaves now, or with its last hold."""
        self.forget(self._contents.keys_of([record]))

    def forget_root(self, root: bytes | None) -> int:
        """Forgets all records of one namespace, or of all; linear in the records.

        Without parents it cannot be told which records continue a prefix, so this is what a drop can do.
        """
        return self.forget(self._contents.keys_of(self.of_root(root).tolist()))

    def of_root(self, root: bytes | None) -> FrameIds:
        """All records of one namespace, or of all, found or held; linear in the records."""
        mine = [record for record, its in self._roots.items() if root is None or its == root]
        return np.array(mine, np.int32)

    def with_keys(self, keys: list[bytes]) -> FrameIds:
        """The records that have one of these keys; shape [at most as many]."""
        found = (self._contents.find(key) for key in keys)
        return np.array([record for record in found if record is not None], np.int32)

    def collect(self) -> FrameIds:
        """The LEAVING frames since the last call, which are the caller's to free; shape [n]."""
        left, self._left = self._left, []
        return np.concatenate(left) if left else _NONE

    def spelled(self, record: int) -> Excerpt:
        """Tokens and key of a record that can be found."""
        page = int(self._places[record])
        return self._contents.excerpt(np.array([record], np.int32), self._roots[record], page)

    def records(self) -> list[int]:
        """All records, found or held; linear."""
        return list(self._roots)

    def offered(self, record: int) -> bool:
        """Whether a record may leave."""
        return self._contents.has(record) and not self._holds[record]

    def found_keys(self) -> list[bytes]:
        """The keys of all records that can be found; linear."""
        return self._contents.keys_of(self.records())

    def check_holds(self, findings: Findings, held: Sequence[FrameIds]) -> None:
        """Notes holds that nobody has; `held` are the records of all holders, one entry for each hold."""
        records = np.concatenate([_NONE, *held])
        count = np.bincount(records, minlength=self._frames.count)
        findings.expect(np.array_equal(count, self._holds), "a hold is nobody's, or one is missing")

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of keys, holds and frames."""
        self._contents.check(findings)
        records = set(self._roots)
        held = {record for record in records if self._holds[record] > 0}
        findings.expect(len(records) == self._count, "the count of records is wrong")
        findings.expect(len(held) == self._held, "the count of held records is wrong")
        findings.expect(
            int((self._holds != 0).sum()) == len(held) and (self._holds >= 0).all(),
            "holds of what is no record",
        )
        findings.expect(
            set(np.flatnonzero(self._wanted).tolist()) <= records, "no record is wanted here"
        )
        for record in records:
            findings.expect(
                record in held or self._contents.has(record),
                f"record {record} is neither indexed nor held, but has not left",
            )
        mine = self.frames_of(np.array(sorted(records), np.int32)).reshape(-1)
        findings.expect(len(np.unique(mine)) == len(mine), "a frame is in two records")
        findings.expect(
            (self._frames.status[mine] == Status.SEALED).all(), "a record's frame is not SEALED"
        )
