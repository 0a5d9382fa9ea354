"""`PagePool`: a pool of device KV and states with prefix reuse.

Owns: the lock, and what callers may ask. Must not know: models, schedulers, what a token means. Neighbours:
`holdings` has what each request has in each group, `buffers` what the model reads and writes. The device is
no tier: tiers begin below it.

The way of a request:  open ▸ (bind ▸ model writes KV ▸ commit ▸ extend)* ▸ close
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from stepwell.base.call import Call
from stepwell.base.errors import InputError, MisuseError
from stepwell.base.observe import Counters
from stepwell.base.settings import HostSettings, PoolSettings
from stepwell.cache.pool import demands
from stepwell.cache.pool.answer import Answer, Busy, Flags
from stepwell.cache.pool.buffers import Memory
from stepwell.cache.pool.holdings import Holdings
from stepwell.cache.pool.limits import Limits
from stepwell.cache.pool.prompt import Prompt, chain_of
from stepwell.cache.pool.request import OpenRequest
from stepwell.cache.pool.states import views
from stepwell.cache.pool.view import KVView, pack, send
from stepwell.cache.store import StoreModel, TieredStore
from stepwell.core.chain import as_tokens
from stepwell.core.geometry import Geometry
from stepwell.core.key import Namespace
from stepwell.memory.gpu import find_gpu
from stepwell.move.fence import PASSED, Fence
from stepwell.move.place import Place

MakeStore = Callable[[StoreModel, Sequence[Place]], TieredStore]
"""Makes the store of a pool."""


class PagePool:
    """Frames for the KV of many requests, of which equal prefixes share pages.

    A page enters when a request commits its last token (sealed, with its tokens, below its parent) and
    leaves, tail of its prefix first, when another request needs the frame: at that moment, never by a
    timer. Requests that `open` at the same time may compute the same page; the first to commit it
    keeps its frame, the row of the other is pointed there. A prompt is reused up to the deepest boundary
    that leaves `replay_tokens` to compute and from which every group can go on: the full group needs all
    pages, a window group those that the next token sees, a state group a state taken there. Pages behind
    a window are returned as the request goes on. Pages and states of all groups share the frames.
    Nothing is remembered of a request but what its tokens prove.

    Threads: one lock around every public method, held for the books and for hashing pages that are being
    sealed; prompts are hashed before it is taken, and views go to a device after it. The model reads and
    writes the buffers outside of it, in slots that are its own until it commits. Calls about one request come one after the other.

    Errors: after one of ours the pool is as it was before the call. After anything else that tears a call
    (no memory, Ctrl-C) its books are checked, and a pool that is not sound refuses every further call.

    Args:
        geometry: of the model; at most one full group.
        settings: sizes; `capacity_bytes` is cut into whole frames, the rest is `limits.remainder_bytes`.
        device: a torch device, `"numpy"` for arrays, `"none"` for an engine with buffers of its own.
        secret: of the deployment; goes into the key of every prompt that comes as token ids. A `Chain`
            has been made with its own.
        tiers: settings of a host tier below, of which a capacity of 0 means none, or what makes a store for the pool's
            model and memory; None for a pool without tiers. A pool with tiers needs an `end`.

    Raises:
        InputError: a size out of range, or a capacity below one page.
        RefusedError: there is no memory for the host tier.
    """

    def __init__(
        self,
        geometry: Geometry,
        settings: PoolSettings,
        device: str = "cpu",
        secret: bytes | None = None,
        tiers: HostSettings | MakeStore | None = None,
    ) -> None:
        if not isinstance(secret, bytes | None):
            raise InputError("the secret is no bytes", limit="bytes, or None")
        self.geometry = geometry
        self.limits = Limits.of(geometry, settings)
        self.page_tokens = self.limits.page_tokens
        self.frames = self.limits.frames
        self.epoch = 0
        self._newest_epoch = 0  # of the namespaces that were seen
        memory = Memory(self.limits, device)
        self._memory = memory
        self.planes = tuple(buffers for planes in memory.planes for buffers in planes)
        self._device = device
        self._secret = secret
        self._debug = settings.debug
        self._counters = Counters("index", "pool")
        self.store: TieredStore | None = None
        if isinstance(tiers, HostSettings):
            gpu = find_gpu(device) if device.startswith("cuda") else None
            local = partial(TieredStore.local, settings=tiers, gpu=gpu)
            tiers = local if tiers.capacity_bytes else None
        if tiers is not None:
            self.store = tiers(self.limits.model(geometry), [memory.place()])
        self._held = Holdings(
            self.limits, settings, memory, self._counters, geometry.replay_tokens, self.store
        )
        self._call = Call("pool", self._held.check)

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
            `Ready`; `Loading`, if a tier has more of the prompt than the device: then open it again, and it will be
            `Ready` or `Busy` when that has come, or failed to; or `Busy` or `NeverFits` with nothing taken.

        Raises:
            InputError: an empty prompt, ids out of range, pages of another size.
            MisuseError: the request is open already.
        """
        chain = chain_of(prompt, namespace, self.page_tokens, self._secret)
        if not isinstance(flags, Flags):
            raise InputError(f"flags are {flags!r}", limit="stepwell.Flags")
        if not len(chain):
            raise InputError("the prompt is empty", limit="at least one token")
        demands.check_epoch(chain, self.epoch)
        override = demands.override(chain, flags, contiguous=self.limits.contiguous)
        reads = override is None
        limit = max(0, len(chain) - self.geometry.replay_tokens) // self.page_tokens if reads else 0
        # A look without the lock proves nothing, but it hashes the prompt as far as the match will ask.
        self._held.prefixes.hash_ahead(chain, limit)
        with self._call.alone(), self._call:
            self._hear()
            if request in self._held.requests:
                raise MisuseError(
                    f"request {request!r} is open already", remedy="close it, or use another name"
                )
            demands.check_epoch(chain, self.epoch)
            self._newest_epoch = max(self._newest_epoch, chain.namespace.epoch)
            answer: Answer | None = self.limits.refusal(len(chain))
            if answer is None:
                answer = self._held.open(request, chain, flags, limit, override)
                self._counters.add("opens_busy", isinstance(answer, Busy))
            else:
                self._counters.add("opens_refused")
            self._after()
        return answer

    def __contains__(self, request: Hashable) -> bool:
        """Whether a request is open."""
        with self._call.alone(), self._call:
            return request in self._held.requests

    def extend(self, request: Hashable, tokens: int) -> Answer:
        """Makes sure that tokens after the prompt, or after those committed beyond it, have room.

        A prompt has its room from `open`, in window groups as far as `ahead_tokens`; commits move that on,
        and where they found no frames this call does. Room comes in whole pages; asking again adds
        nothing before more is committed.

        Args:
            request: an open request.
            tokens: how many, 0 or more; 0 asks for room for the prompt only.

        Returns:
            `Ready` as `open` said it (`cached` does not grow), or `Busy` or `NeverFits` with nothing taken.

        Raises:
            InputError: less than no tokens.
            MisuseError: the request is not open.
        """
        with self._call.alone(), self._call:
            self._hear()
            opened = self._of(request)
            if type(tokens) is not int or tokens < 0:
                raise InputError(f"room for {tokens!r} tokens was asked for", limit="0 or more")
            end = len(opened.chain) + tokens
            answer: Answer = self.limits.refusal(end) or self._held.extend(opened, end)
            self._after()
        return answer

    def room(self, request: Hashable) -> int:
        """Tokens that the next `bind` may ask for; 0 when `extend` has to come first.

        Raises:
            MisuseError: the request is not open.
        """
        with self._call.alone(), self._call:
            opened = self._of(request)
            return self._held.room(opened) - opened.committed

    def truncate(self, request: Hashable, tokens: int) -> None:
        """Takes drafted tokens back: returns the frames behind the first `tokens` positions.

        What was never committed was never sealed; this gives its room to others.

        Args:
            request: an open request.
            tokens: positions that keep their room; at least those of the prompt and of what is committed.

        Raises:
            InputError: less than the request's tokens: committed tokens cannot be taken back.
            MisuseError: the request is not open.
        """
        with self._call.alone(), self._call:
            opened = self._of(request)
            if type(tokens) is not int or tokens < len(opened.chain):
                raise InputError(
                    f"request {request!r} was cut to {tokens!r} tokens",
                    limit=f"{len(opened.chain)} or more, its prompt and what is committed",
                    remedy="commit only the tokens that are accepted",
                )
            self._held.truncate(opened, tokens)
            self._after()

    def commit(
        self,
        request: Hashable,
        tokens: Iterable[int] | npt.NDArray[Any],
        fence: Fence = PASSED,
    ) -> None:
        """Says that the KV of the next tokens is written; pages that are full now are sealed.

        The pool believes it: whether anything was written it cannot see.

        Args:
            request: an open request.
            tokens: ids of the tokens at the positions after those committed; inside the prompt they
                must be the prompt's.
            fence: what tells that a device has done the step, and all before it; nothing is copied to or from the
                tiers before.

        Raises:
            InputError: more tokens than there is room for, or others than the prompt's.
            MisuseError: the request is not open.
        """
        added = as_tokens(tokens)
        with self._call.alone(), self._call:
            self._hear()
            if self._held.below is not None:
                self._held.below.fence = fence
            opened = self._of(request)
            demands.check_commit(request, opened, added, self._held.room(opened))
            first, last = opened.committed, opened.committed + len(added)
            before, sealed = len(opened.chain), opened.sealed
            opened.chain.append(added[before - first :])
            opened.committed, bound, opened.bound = last, opened.bound, None
            done = False
            try:
                self._held.seal(opened, first)
                done = True
            finally:
                if not done and self._held.prefixes.walked:
                    # Which of its windows and states have moved on is not known any more.
                    opened.torn = True
                elif not done and opened.sealed == sealed:
                    opened.chain.truncate(before)
                    opened.committed, opened.bound = first, bound
            self._after()

    def close(self, request: Hashable) -> None:
        """Ends a request at any point of its life; its sealed pages stay until they are evicted.

        Raises:
            MisuseError: the request is not open.
        """
        with self._call.alone(), self._call:
            self._hear()
            self._held.close(request, self._of(request, whole=False))
            self._after()

    def give_up(self, request: Hashable) -> None:
        """A request that was told `Loading` will not come back; nothing, if none is loading under this name."""
        with self._call.alone(), self._call:
            self._hear()
            if self._held.below is not None:
                self._held.below.end(request)
            self._after()

    def bind(self, counts: Mapping[Any, int]) -> KVView:
        """Where a step reads and writes: valid until the next call that changes one of its requests.

        A step may be bound and computed again before it is committed, with one exception: once it has
        written states, they are those after it. Then close the request, or commit.

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
        with self._call.alone(), self._call:
            batch: list[tuple[int, int, int]] = []
            every = [self._of(request) for request in counts]
            for opened, (request, count) in zip(every, counts.items(), strict=True):
                room = self._held.room(opened) - opened.committed
                if type(count) is not int or not 1 <= count <= room:
                    raise InputError(
                        f"request {request!r} would compute {count!r} tokens",
                        limit=f"1 to {room}, its room after {opened.committed} tokens",
                        remedy="compute fewer tokens at once, or extend the request first",
                    )
                batch.append((opened.row, opened.committed, count))
            for opened, count in zip(every, counts.values(), strict=True):
                opened.bound = count
            view = pack(
                batch, self._held.planes, views(self._held.states, [one.states for one in every])
            )
        # Outside the lock: a copy to a device may wait for it. The rows read are those of this step's
        # requests, whose calls come one after the other.
        return send(view, self._device)

    def step(self) -> None:
        """A scheduling step begins: takes in what the tiers have done, and ends what has taken too long there."""
        if self.store is not None:
            self.store.step()
            with self._call.alone(), self._call:
                self._hear()
                self._after()

    def wait(self, within_s: float) -> bool:
        """Waits, without the lock, until something has come from the tiers, or nothing is on its way; whether so."""
        return self.store is None or self.store.wait(within_s)

    @property
    def moving(self) -> int:
        """Frames that only a movement from or to a tier has."""
        with self._call.alone(), self._call:
            return 0 if self._held.below is None else self._held.below.moving

    def end(self, within_s: float = 10.0) -> bool:
        """Ends what moves between the pool and the tiers below; a second time does nothing.

        Args:
            within_s: seconds to wait for what has begun.

        Returns:
            Whether nothing touches the pool's memory any more.
        """
        return self.store is None or self.store.close(within_s)

    def drop(self, prefix: Prompt, namespace: Namespace | None = None) -> int:
        """Forgets every page that begins with these tokens; open requests keep theirs to themselves.

        A model without a full group keeps no tree: there the whole namespace is forgotten.

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
        self._held.prefixes.hash_ahead(chain, chain.pages)
        with self._call.alone(), self._call:
            gone = self._held.drop(chain)
            self._after()
        return gone

    def raise_epoch(self) -> int:
        """Says that weights have changed in place: nothing sealed so far is ever reused again.

        Open requests go on with what they have, and seal nothing more. From now on namespaces need
        the new epoch, which is above that of every namespace seen so far.

        Returns:
            The new epoch.
        """
        with self._call.alone(), self._call:
            self.epoch = 1 + max(self.epoch, self._newest_epoch)
            self._held.forget_all()
            self._after()
            return self.epoch

    def stats(self) -> dict[str, int]:
        """Counts of `base.observe.METRICS`, gauges, and the bytes of the capacity that no page uses."""
        with self._call.alone(), self._call:
            frames, prefixes = self._held.frames, self._held.prefixes
            free, held, cached = frames.free, prefixes.held, prefixes.evictable
            moving = 0 if self._held.below is None else self._held.below.moving
            return self._counters.snapshot() | {
                "frames_free": free,
                "frames_filling": self.frames - free - held - cached - moving,
                "frames_moving": moving,
                "frames_held": held,
                "frames_cached": cached,
                "remainder_bytes": self.limits.remainder_bytes,
            }

    def check(self) -> None:
        """Verifies every invariant; linear in the pool.

        Raises:
            InvariantError: with all that are broken.
        """
        with self._call.alone(), self._call:
            self._held.check()

    def _hear(self) -> None:
        """Takes in what the tiers have done; a look at an empty queue if that is nothing."""
        if self._held.below is not None:
            self._held.below.hear()

    def _of(self, request: Hashable, *, whole: bool = True) -> OpenRequest:
        opened = self._held.requests.get(request)
        if opened is None:
            raise MisuseError(
                f"request {request!r} is not open",
                limit=f"{len(self._held.requests)} open requests",
                remedy="open it first; a request is closed once",
            )
        if whole and opened.torn:
            raise MisuseError(
                f"a commit of request {request!r} was torn",
                limit="close",
                remedy="close it and open it again with the tokens so far",
            )
        return opened

    def _after(self) -> None:
        """What every call ends with."""
        self._held.supply.collect()
        if self._debug:
            self._held.check()
