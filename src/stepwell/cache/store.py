"""`TieredStore`: the tiers below the device, for every engine.

Owns: nothing but the joining of one ledger with one mover for each rank. Neighbours: `ledger` decides, `move.mover`
acts; `cache.pool` is one user of it, an engine with memory of its own another.

The way of a prompt:  match ▸ load ▸ (poll: Loaded) ▸ compute the rest ▸ save ▸ (poll: Released)
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.errors import InputError, MisuseError
from stepwell.base.settings import HostSettings
from stepwell.base.threads import Health
from stepwell.cache.joint import CallJoint, Joint
from stepwell.cache.ledger.ledger import Ledger
from stepwell.cache.ledger.records import Match, News, Shape
from stepwell.cache.ledger.saves import Offer
from stepwell.core.chain import Chain
from stepwell.core.cut import Cut
from stepwell.core.frames import FrameIds
from stepwell.core.geometry import Rule
from stepwell.core.key import Namespace
from stepwell.memory.gpu import Gpu
from stepwell.move.carrier import Rank
from stepwell.move.fence import PASSED, Fence
from stepwell.move.mover import Mover
from stepwell.move.place import Place
from stepwell.tiers.host import HostSize, HostTier

_LOOK_S = 0.02
"""How often a drain looks whether what has ended has led to more."""


@dataclass(frozen=True, slots=True)
class StoreModel:
    """What a store has to know of a model.

    Attributes:
        page_tokens: tokens of one page.
        cuts: of all groups, the full one first.
        parts: digest of the part of each group, in the order of `cuts` (`core.part.Part.digest`).
    """

    page_tokens: int
    cuts: tuple[Cut, ...]
    parts: tuple[bytes, ...]

    def __post_init__(self) -> None:
        rules = [cut.group.rule for cut in self.cuts]
        if not rules or Rule.FULL in rules[1:]:
            raise InputError(f"the groups are {rules}", limit="one or more, a full one first")
        if [len(part) for part in self.parts] != [32] * len(rules):
            raise InputError(
                f"{len(self.parts)} parts for {len(rules)} groups", limit="32 bytes for each group"
            )


class TieredStore:
    """Prefixes of prompts in memory below the device.

    Nothing here waits but `wait`, `drain` and `close`: a movement is planned in the call, made by the movers' threads,
    and its end is news for `poll`. A fault of a mover is a miss. Calls may come from any thread, those about one
    request one after the other. Errors: after one of ours all is as it was before the call. Once it is closed, what
    begins something raises; what ends or tells something does not.

    Args:
        ledger: decides.
        joints: the way to the mover of each rank.
        health: of the movers' threads in this process.
    """

    def __init__(self, ledger: Ledger, joints: Sequence[Joint], health: Health) -> None:
        self.ledger = ledger
        self.health = health
        self._joints = tuple(joints)
        self._fences: dict[int, Fence] = {}
        # From a plan's number to its being sent: nobody else may send it without its fence.
        self._sending = threading.Lock()
        self._closed = False

    @classmethod
    def local(
        cls,
        model: StoreModel,
        places: Sequence[Place],
        settings: HostSettings,
        *,
        gpu: Gpu | None = None,
        clock: Clock | None = None,
        threads: bool = True,
    ) -> Self:
        """A store with one mover in this process.

        Args:
            model: its groups.
            places: device memory, with frames of one size; the first is place 0.
            settings: of the host tier; `capacity_bytes` must hold at least one frame.
            gpu: registers the host memory, if it is to be pinned.
            clock: for deadlines.
            threads: whether movers run by themselves; without, their `work` and `look` have to be called.

        Raises:
            InputError: a size out of range.
            RefusedError: there is no such memory.
        """
        if not places:
            raise InputError("a store without device memory", limit="1 or more places")
        clock = SystemClock() if clock is None else clock
        health = Health()
        size = HostSize.within(
            settings.capacity_bytes,
            places[0].frame_bytes,
            tuple(places[0].bounds),
            pinned=settings.pinned,
        )
        shape = Shape(model.page_tokens, model.cuts, size.frames, size.frame_bytes)
        ledger = Ledger(shape, settings, clock)
        with ExitStack() as undo:
            host = HostTier(size, gpu=gpu, clock=clock, health=health)
            undo.callback(host.close)
            rank = Rank(host, tuple(places), model.parts)
            undo.pop_all()
        mover = Mover(rank, ledger.report, settings, clock=clock, health=health)
        if threads:
            mover.start()
        return cls(ledger, [CallJoint(mover)], health)

    def match(self, request: Hashable, chain: Chain, limit: int, minimum: int = 1) -> Match:
        """Finds what of a prompt can be restored, and holds it; see `Ledger.match`."""
        self._require_open()
        return self.ledger.match(request, chain, limit, minimum)

    def give_up(self, request: Hashable) -> None:
        """A match ends without being loaded."""
        self.ledger.give_up(request)

    def load(
        self,
        match: Match,
        first: int,
        pages: FrameIds,
        records: Sequence[FrameIds] = (),
        fence: Fence = PASSED,
        place: int = 0,
    ) -> int:
        """Brings what was matched into device frames; see `Ledger.load`.

        Args:
            match: what `match` gave.
            first: page with which the load begins.
            pages: device frames of the full group.
            records: device frames of each other group.
            fence: after which these frames may be overwritten.
            place: device memory that has them.
        """
        self._require_open()
        with self._sending:
            number = self.ledger.load(match.request, first, pages, records, place)
            self._fences[number] = fence
            self._send()
        return number

    def save(self, offer: Offer, fence: Fence = PASSED, place: int = 0) -> int | None:
        """Takes what of a prompt is neither here nor on its way; see `Ledger.save`.

        Args:
            offer: what is on the device.
            fence: after which its bytes are ready.
            place: device memory that has it.
        """
        self._require_open()
        with self._sending:
            number = self.ledger.save(offer, place)
            if number is not None:
                self._fences[number] = fence
            self._send()
        return number

    def _send(self) -> bool:
        """Hands over what the ledger has planned; whether there was something. With `_sending`."""
        plans = self.ledger.plans()
        for plan in plans:
            fence = self._fences.pop(plan.number, PASSED)
            for joint in self._joints:
                joint.send(plan, fence)
        self._fences.clear()  # numbers without a plan: a load of what was dropped, or of a rank that is lost
        return bool(plans)

    def keep(self, name: str, prefix: Chain, within_s: float | None = None) -> int:
        """Retains the pages of a prefix that are here; see `Ledger.keep`."""
        self._require_open()
        return self.ledger.keep(name, prefix, within_s)

    def unkeep(self, name: str) -> None:
        """Ends what `keep` began."""
        self.ledger.unkeep(name)

    def drop(self, what: Chain | Namespace, secret: bytes | None = None) -> int:
        """Forgets and overwrites a prefix with all that continues it, or all of a namespace.

        What is being loaded meanwhile comes back as a miss, what is being saved is not sealed. `drain` waits until
        everything is overwritten that no match holds.

        Args:
            what: the prefix, or the namespace.
            secret: of the deployment, with a namespace.

        Returns:
            Pages that nobody finds any more.
        """
        self._require_open()
        with self._sending:
            if isinstance(what, Chain):
                gone = self.ledger.drop(what)
            else:
                gone = self.ledger.drop_root(what.root(secret))
            self._send()
        return gone

    def step(self) -> None:
        """A scheduling step begins: old matches end, and what is too late has failed."""
        self.ledger.step()
        with self._sending:
            self._send()

    def poll(self) -> list[News]:
        """What has happened since the last call; never waits."""
        return self.ledger.poll()

    def wait(self, within_s: float) -> bool:
        """Waits until `poll` has something, or nothing is under way; whether it did not take too long."""
        return self.ledger.wait(within_s)

    def ready(self, within_s: float) -> bool:
        """Waits until all memory of the tiers is there; whether it is so.

        Nobody has to: memory comes in the background, and until then less of it is used.
        """
        return self.ledger.ready(within_s)

    def drain(self, within_s: float) -> bool:
        """Waits until nothing is under way; whether it is so.

        What ends meanwhile may have more done: a page that was dropped is overwritten when its last load has ended.
        """
        clock = SystemClock()
        until_s = clock.now_s() + within_s
        while True:
            idle = self.ledger.settled(0)  # before: the ledger may be about to plan what follows
            with self._sending:
                sent = self._send()
            left_s = until_s - clock.now_s()
            if idle and not sent:
                return True
            if left_s <= 0:
                return False
            self.ledger.settled(min(left_s, _LOOK_S))

    def stats(self) -> dict[str, int]:
        """Counts and gauges of the tiers."""
        return self.ledger.stats()

    def check(self) -> None:
        """Raises `InvariantError` with every broken invariant of the ledger."""
        self.ledger.check()

    def _require_open(self) -> None:
        if self._closed:
            raise MisuseError("the store is closed", remedy="make another one")

    def close(self, within_s: float = 10.0) -> bool:
        """Ends all movements; what was not begun is given up.

        Args:
            within_s: seconds to wait for what was begun.

        Returns:
            Whether nothing touches device memory any more. If not, a later call looks again.
        """
        self._closed = True
        closed = [joint.close(within_s) for joint in self._joints]
        with self._sending:
            self._send()  # what was planned meanwhile ends, too
        return all(closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
