"""`PagePool`: a paged pool of device KV with prefix reuse.

Owns: open requests, their rows and frames. Must not know: models, schedulers, what a token means.
Neighbours: `core.index` finds and keeps prefixes, `core.frames` has the statuses, `table` and `buffers`
hold what the model reads and writes. The device is no tier: tiers begin below it.

The way of a request:  open ▸ (bind ▸ model writes KV ▸ commit ▸ extend)* ▸ close
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError, MisuseError
from stepwell.base.observe import Counters
from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import buffers as storage
from stepwell.cache.pool.answer import Answer, Busy, Flags, Ready
from stepwell.cache.pool.call import Call
from stepwell.cache.pool.limits import Limits
from stepwell.cache.pool.prompt import Prompt, chain_of
from stepwell.cache.pool.request import OpenRequest, check
from stepwell.cache.pool.table import RequestTable
from stepwell.cache.pool.view import KVView, pack, send
from stepwell.core.chain import Chain, as_tokens
from stepwell.core.check import Findings
from stepwell.core.evict.lru import Lru
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.geometry import Geometry
from stepwell.core.index import ClosedIndex
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.reasons import Reason


class PagePool:
    """Frames for the KV of many requests, of which equal prefixes share pages.

    A page enters when a request commits its last token (sealed, with its tokens, below its parent) and
    leaves, tail of its prefix first, when another request needs the frame: at that moment, never by a
    timer. Requests that `open` at the same time may compute the same page; the first to commit it
    keeps its frame, the row of the other is pointed there. A prompt is reused up to its last full page
    that leaves `replay_tokens` to compute. Nothing is remembered of a request but what its tokens prove.

    Threads: one lock around every public method, held for the books and for hashing pages that are being
    sealed; prompts are hashed before it is taken, and views go to a device after it. The model reads and writes the buffers outside of it, in
    slots that are its own until it commits. Calls about one request come one after the other.

    Errors: after one of ours the pool is as it was before the call. After anything else that tears a call
    (no memory, Ctrl-C) its books are checked, and a pool that is not sound refuses every further call.

    Args:
        geometry: of the model; full groups only so far.
        settings: sizes; `capacity_bytes` is cut into whole pages, the rest is `limits.remainder_bytes`.
        device: a torch device, `"numpy"` for arrays, `"none"` for an engine with buffers of its own.
        secret: of the deployment; goes into the key of every prompt that comes as token ids. A `Chain`
            has been made with its own.

    Raises:
        InputError: a size out of range, or a capacity below one page.
    """

    def __init__(
        self,
        geometry: Geometry,
        settings: PoolSettings,
        device: str = "cpu",
        secret: bytes | None = None,
    ) -> None:
        if not isinstance(secret, bytes | None):
            raise InputError("the secret is no bytes", limit="bytes, or None")
        self.geometry = geometry
        self.limits = Limits.of(geometry, settings)
        self.page_tokens = self.limits.page_tokens
        self.frames = self.limits.frames
        self.buffers = storage.make(geometry, self.frames * self.page_tokens, device)
        self._device = device
        self._secret = secret
        self._debug = settings.debug
        self._counters = Counters()
        self._frames = Frames(self.frames)
        self._index = ClosedIndex(self._frames, self.page_tokens, Lru(self.frames), self._counters)
        self._table = RequestTable(settings.requests, settings.positions, self.page_tokens)
        self._requests: dict[Hashable, OpenRequest] = {}
        self._call = Call(self._check)

    def open(
        self,
        request: Hashable,
        prompt: Prompt,
        namespace: Namespace | None = None,
        flags: Flags = Flags.NONE,
    ) -> Answer:
        """Finds the longest reusable prefix of a prompt and takes frames for the rest of it.

        Args:
            request: a name that is not open; it may have been before.
            prompt: token ids, or a `Chain` of them, which is not changed.
            namespace: required with token ids; a chain has its own.
            flags: what the request does not want.

        Returns:
            `Ready`, or `Busy` or `NeverFits` with nothing taken.

        Raises:
            InputError: an empty prompt, ids out of range, pages of another size.
            MisuseError: the request is open already.
        """
        chain = chain_of(prompt, namespace, self.page_tokens, self._secret)
        if not isinstance(flags, Flags):
            raise InputError(f"flags are {flags!r}", limit="stepwell.Flags")
        if not len(chain):
            raise InputError("the prompt is empty", limit="at least one token")
        refusal = chain.namespace.refusal
        reads = refusal is None and Flags.NO_READ not in flags
        limit = max(0, len(chain) - self.geometry.replay_tokens) // self.page_tokens if reads else 0
        # A look without the lock proves nothing, but it hashes the prompt as far as the match will ask.
        self._index.longest(chain, limit)
        with self._call:
            if request in self._requests:
                raise MisuseError(
                    f"request {request!r} is open already", remedy="close it, or use another name"
                )
            answer = self._open(request, chain, flags, limit)
            self._after()
        return answer

    def _open(self, request: Hashable, chain: Chain, flags: Flags, limit: int) -> Answer:
        tokens = len(chain)
        refused = self.limits.refusal(tokens)
        if refused is not None:
            self._counters.add("opens_refused")
            return refused
        if not self._table.free:
            self._counters.add("opens_busy")
            return Busy(short_rows=1)
        match = self._index.match(request, chain, limit)
        own: FrameIds | None = None
        row: int | None = None
        try:
            pages = self.limits.pages(tokens)
            own = self._take_frames(pages - match.lease.pages)
            if own is None:
                self._counters.add("opens_busy")
                available = self._frames.free + self._index.evictable
                return Busy(short_frames=pages - match.lease.pages - available)
            row = self._table.take()
            self._table.write(row, 0, match.frames)
            self._table.write(row, match.lease.pages, own)
            cached = match.lease.pages * self.page_tokens
            refusal = chain.namespace.refusal
            reason = refusal or (Reason.NO_READ if Flags.NO_READ in flags else match.reason)
            ready = Ready(cached, reason)
            seals = refusal is None and Flags.NO_WRITE not in flags
            self._requests[request] = OpenRequest(
                chain, row, pages, cached, match.lease, flags, seals, ready
            )
        finally:
            # The one way back: a pool that is short, and whatever may raise above.
            if request not in self._requests:
                self._index.release(match.lease)
                if row is not None:
                    self._table.give_back(row)
                if own is not None:
                    self._return(own)
        self._counters.add("opens_ready")
        self._counters.add("tokens_reused", cached)
        self._counters.add("tokens_missed", tokens - cached)
        return ready

    def _take_frames(self, n: int) -> FrameIds | None:
        """Takes n FILLING frames, evicting as many pages as that takes; all of them, or none."""
        missing = n - self._frames.free
        if missing > 0 and not self._index.evict(missing):
            return None
        self._free_what_left()
        return self._frames.reserve(n)

    def extend(self, request: Hashable, tokens: int) -> Answer:
        """Makes sure that tokens after the prompt, or after those committed beyond it, have room.

        A prompt has its room from `open`. Room comes in whole pages; asking again adds nothing before
        more is committed.

        Args:
            request: an open request.
            tokens: how many, 1 or more.

        Returns:
            `Ready` as `open` said it (`cached` does not grow), or `Busy` or `NeverFits` with nothing taken.

        Raises:
            InputError: less than one token.
            MisuseError: the request is not open.
        """
        with self._call:
            opened = self._of(request)
            if type(tokens) is not int or tokens < 1:
                raise InputError(f"room for {tokens!r} tokens was asked for", limit="1 or more")
            answer = self._extend(opened, len(opened.chain) + tokens)
            self._after()
        return answer

    def _extend(self, opened: OpenRequest, end: int) -> Answer:
        refused = self.limits.refusal(end)
        if refused is not None:
            return refused
        more = self.limits.pages(end) - opened.pages
        if more > 0:
            own = self._take_frames(more)
            if own is None:
                return Busy(short_frames=more - self._frames.free - self._index.evictable)
            self._table.write(opened.row, opened.pages, own)
            opened.pages += more
        return opened.answer

    def commit(self, request: Hashable, tokens: Iterable[int] | npt.NDArray[Any]) -> None:
        """Says that the KV of the next tokens is written; pages that are full now are sealed.

        Args:
            request: an open request.
            tokens: ids of the tokens at the positions after those committed; inside the prompt they
                must be the prompt's.

        Raises:
            InputError: more tokens than there is room for, or others than the prompt's.
            MisuseError: the request is not open.
        """
        added = as_tokens(tokens)
        with self._call:
            opened = self._of(request)
            first, last = opened.committed, opened.committed + len(added)
            room = self._room(opened)
            if last > room:
                raise InputError(
                    f"{len(added)} tokens were committed after {first}",
                    limit=f"{room - first}: request {request!r} has room for {room}",
                    remedy="extend the request before the step that writes them",
                )
            known = opened.chain.tokens[first:last]
            if len(known) and not np.array_equal(known, added[: len(known)]):
                at = int(np.argmax(known != added[: len(known)]))
                raise InputError(
                    f"token {first + at} was committed as {added[at]}",
                    limit=f"{known[at]}, which the prompt of request {request!r} has there",
                )
            before, sealed = len(opened.chain), opened.lease.pages
            opened.chain.append(added[len(known) :])
            opened.committed = last
            done = False
            try:
                self._seal(opened)
                self._follow(opened, sealed)
                done = True
            finally:
                if not done and opened.lease.pages == sealed:
                    opened.chain.truncate(before)
                    opened.committed = first
                elif not done:
                    # The pages can be found already: there is only the way forward.
                    self._follow(opened, sealed)
            self._after()

    def _seal(self, opened: OpenRequest) -> None:
        """Seals the pages that are full now."""
        first, last = opened.lease.pages, opened.committed // self.page_tokens
        if not opened.seals or not opened.lease.grows or first >= last:
            return
        frames = self._table.frames(opened.row, first, last)
        # A request that reads nothing must not go on with another's copy either.
        twins = Flags.NO_READ not in opened.flags
        self._index.seal(opened.lease, opened.chain, frames, twins=twins)

    def _follow(self, opened: OpenRequest, first: int) -> None:
        """Points the row at the pages of the lease from `first` on; frees copies that were not kept."""
        mine = self._table.frames(opened.row, first, opened.lease.pages)
        kept = self._index.path(opened.lease, len(mine))
        spare = mine[mine != kept]
        if len(spare):
            self._table.write(opened.row, first, kept)
            self._return(spare)

    def _room(self, opened: OpenRequest) -> int:
        """Tokens that a request has frames and positions for."""
        return min(opened.pages * self.page_tokens, self.limits.positions)

    def close(self, request: Hashable) -> None:
        """Ends a request at any point of its life; its sealed pages stay until they are evicted.

        Raises:
            MisuseError: the request is not open.
        """
        with self._call:
            opened = self._of(request)
            del self._requests[request]
            self._return(self._table.frames(opened.row, opened.lease.pages, opened.pages))
            self._table.give_back(opened.row)
            self._index.release(opened.lease)
            self._after()

    def bind(self, counts: Mapping[Hashable, int]) -> KVView:
        """Where a step reads and writes: valid until the next call that changes one of its requests.

        Args:
            counts: tokens that the step computes, for each request, in the order of the batch.

        Raises:
            InputError: no request, a count below 1, or more tokens than a request has room for.
            MisuseError: a request is not open.
        """
        if not isinstance(counts, Mapping) or not counts:
            raise InputError(
                "a step of no requests was asked for",
                limit="at least one, as {request: tokens}",
            )
        with self._call:
            batch: list[tuple[int, int, int]] = []
            for request, count in counts.items():
                opened = self._of(request)
                room = self._room(opened) - opened.committed
                if type(count) is not int or not 1 <= count <= room:
                    raise InputError(
                        f"request {request!r} would compute {count!r} tokens",
                        limit=f"1 to {room}, its room after {opened.committed} tokens",
                        remedy="extend the request first",
                    )
                batch.append((opened.row, opened.committed, count))
            view = pack(self.buffers, self._table, batch)
        # Outside the lock: a copy to a device may wait for it. The rows were copied inside.
        return send(view, self._device)

    def drop(self, prefix: Prompt, namespace: Namespace | None = None) -> int:
        """Forgets every page that begins with these tokens; open requests keep theirs to themselves.

        Args:
            prefix: whole pages of token ids, at least one; or a chain.
            namespace: required with token ids.

        Returns:
            Pages that nobody finds any more.
        """
        chain = chain_of(prefix, namespace, self.page_tokens, self._secret)
        if not chain.pages or len(chain) % self.page_tokens:
            raise InputError(
                f"the prefix has {len(chain)} tokens",
                limit=f"whole pages of {self.page_tokens}, at least one",
            )
        self._index.longest(chain, chain.pages)
        with self._call:
            frame = self._index.find(chain)
            gone = 0 if frame is None else self._index.drop(frame)
            self._after()
        return gone

    def stats(self) -> dict[str, int]:
        """Counts of `base.observe.METRICS`, gauges, and the bytes of the capacity that no page uses."""
        with self._call:
            free, held = self._frames.free, self._index.held
            cached = self._index.evictable
            return self._counters.snapshot() | {
                "frames_free": free,
                "frames_filling": self.frames - free - held - cached,
                "frames_held": held,
                "frames_cached": cached,
                "remainder_bytes": self.limits.remainder_bytes,
            }

    def check(self) -> None:
        """Verifies every invariant; linear in the pool.

        Raises:
            InvariantError: with all that are broken.
        """
        with self._call:
            self._check()

    def _of(self, request: Hashable) -> OpenRequest:
        opened = self._requests.get(request)
        if opened is None:
            raise MisuseError(
                f"request {request!r} is not open",
                limit=f"{len(self._requests)} open requests",
                remedy="open it first; a request is closed once",
            )
        return opened

    def _return(self, frames: FrameIds) -> None:
        if self._debug:
            storage.poison(self.buffers, frames, self.page_tokens)
        self._frames.move(frames, Status.FREE)

    def _free_what_left(self) -> None:
        left = self._index.collect()
        if len(left):
            self._return(left)

    def _after(self) -> None:
        """What every call ends with."""
        self._free_what_left()
        if self._debug:
            self._check()

    def _check(self) -> None:
        findings = Findings()
        self._frames.check(findings)
        self._index.check(findings)
        check(findings, self._requests, self._table, self._index, self._frames)
        findings.raise_if_any()
