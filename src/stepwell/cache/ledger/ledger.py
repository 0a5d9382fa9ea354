"""The ledger: who decides what lives in the host tier, what comes back, and what leaves.

Owns: the lock, the breaker, what every call ends with. Must not know: bytes, threads, devices; frames are integers to it.
Neighbours: `saves` and `loads` have what is in flight, `plans` their numbers and deadlines, `stock` what is there; `store`
joins a ledger with movers, which may be in this process or in others.

    save ▸ Plan to every rank ▸ Report from every rank ▸ sealed
    match ▸ load ▸ Plan to every rank ▸ Report from every rank ▸ Loaded
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np

from stepwell.base.call import Call
from stepwell.base.clock import Clock, SystemClock
from stepwell.base.errors import InputError
from stepwell.base.observe import Counters
from stepwell.base.settings import HostSettings
from stepwell.cache.ledger.breaker import Breaker
from stepwell.cache.ledger.flying import Save
from stepwell.cache.ledger.keeps import Keeps
from stepwell.cache.ledger.loads import Load, Loads
from stepwell.cache.ledger.plans import Job, Plans, tally_of
from stepwell.cache.ledger.records import Cleared, Match, News, Released, Shape
from stepwell.cache.ledger.saves import Offer, Outline, Saves
from stepwell.cache.ledger.stock import Stock
from stepwell.cache.ledger.tally import Tally
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds
from stepwell.core.plan import KEY_BYTES, Grown, Plan, Report, Verb
from stepwell.core.reasons import Reason

_PLACES = 1 << 16


def _require_place(place: int) -> None:
    if not 0 <= place < _PLACES:
        raise InputError(f"device memory {place}", limit=f"0 to {_PLACES - 1}")


class Ledger:
    """Index, status, holds and budget of the host tier, for any number of ranks.

    An entry is a page, a window page or a state. It enters when every rank has reported it whole, and leaves, tail of
    its prefix first, when a save needs its frame: then, never by a timer. A lookup holds what it finds. One lock around
    every method; nothing is moved, waited for or told under it, and reports may come from any thread. Counts are exact.
    What fails is forgotten or never sealed: a fault costs a miss. After errors that tear a call the books are checked,
    and a ledger that is not sound refuses every further call.

    Args:
        shape: of the model.
        settings: of the host tier.
        clock: for deadlines.
    """

    def __init__(
        self,
        shape: Shape,
        settings: HostSettings,
        clock: Clock | None = None,
    ) -> None:
        self.shape = shape
        self.settings = settings
        self._clock = SystemClock() if clock is None else clock
        self._debug = settings.debug
        self._counters = Counters("index", "tiers")
        first_group = len(shape.cuts) - len(shape.walked)
        self._stock = Stock(
            shape.frames, shape.movers, shape.page_tokens, shape.cuts, self._counters
        )
        self._saves = Saves(self._stock, self._counters, first_group)
        self._loads = Loads(self._stock, self._counters, first_group)
        self._keeps = Keeps(self._stock, settings.keep_percent)
        self._breaker = Breaker(settings.breaker_faults, settings.breaker_rest_ms / 1000)
        self._plans = Plans(shape.movers)
        self._news: deque[News] = deque()
        self._steps = 0
        self._arrived = threading.Condition()
        self._call = Call("ledger", self._check)

    def match(self, request: Hashable, chain: Chain, limit: int, minimum: int = 1) -> Match:
        """Finds the longest prefix that can be restored, and holds it; an earlier match of the request ends.

        Args:
            request: who asks.
            chain: the prompt.
            limit: pages that may be reused.
            minimum: a shorter one is none.
        """
        chain.require(self.shape.page_tokens)
        limit = max(0, min(limit, chain.pages))
        self._stock.prefixes.hash_ahead(chain, limit)
        with self._call.alone(), self._call:
            none = tuple(0 for _ in self.shape.walked)
            if not self._breaker.passes(self._clock.now_s()):
                self._loads.give_up(request)
                self._after()
                return Match(request, 0, none, 0, Reason.TIER_DOWN)
            self._breaker.unused()
            found = self._loads.match(request, chain, limit, minimum, self._steps)
            self._after()
            records = tuple(len(its) for its in found.records) if found.pages else none
            return Match(request, found.pages, records, found.parted, found.reason)

    def give_up(self, request: Hashable) -> None:
        """A match ends without being loaded; nothing, if the request has none."""
        with self._call.alone(), self._call:
            self._loads.give_up(request)
            self._after()

    def load(
        self,
        request: Hashable,
        first: int,
        pages: FrameIds,
        records: Sequence[FrameIds] = (),
        place: int = 0,
    ) -> int:
        """Brings what a request has matched into device frames that nobody uses until it is clear.

        Args:
            request: with a match.
            first: page with which it begins; those before it are on the device.
            pages: device frames; shape [pages matched - first], or [0] without a full group.
            records: device frames for each other group; shape [records matched, frames of one].
            place: device memory, as the movers number it.

        Returns:
            The number of the plan; `poll` says how it ends: at once with nothing, if what was matched was dropped.

        Raises:
            MisuseError: the request has no match.
            InputError: other numbers of frames than were matched, or one twice, or no such place.
        """
        _require_place(place)
        with self._call.alone(), self._call:
            load, outline = self._loads.begin(request, first, pages, records)
            if load.dropped:
                number = self._plans.number()
                self._news += [self._loads.nothing(load, number), Cleared(number)]
            else:
                self._breaker.passes(self._clock.now_s())
                number = self._send(Verb.LOAD, place, outline, load)
            self._after()
        self._announce()
        return number

    def save(self, offer: Offer, place: int = 0) -> int | None:
        """Takes what of a prompt is neither here nor on its way.

        The device frames must not change until the save is released.

        Args:
            offer: what is on the device.
            place: device memory, as the movers number it.

        Returns:
            The number of the plan, or None when there is nothing to move, or no room, or the tier is down.

        Raises:
            InputError: other pages or frames than this model has, or no such place.
        """
        _require_place(place)
        offer.chain.require(self.shape.page_tokens)
        with self._call.alone(), self._call:
            if not self._breaker.passes(self._clock.now_s()):
                self._counters.add("saves_refused")
                return None
            number: int | None = None
            try:
                begun = self._saves.begin(offer)
                if begun is not None:
                    save, outline = begun
                    number = self._send(Verb.SAVE, place, outline, save)
            finally:
                if number is None:
                    self._breaker.unused()
            self._after()
            return number

    def _send(self, verb: Verb, place: int, outline: Outline, job: Save | Load | None) -> int:
        moved_bytes = len(outline.inside) * self.shape.frame_bytes
        within_ms = self.settings.within_ms + 1000 * moved_bytes // self.settings.slowest_bytes
        now_s = self._clock.now_s()
        return self._plans.make(verb, place, outline, within_ms, now_s, job).plan.number

    def plans(self) -> list[Plan]:
        """The plans since the last call, for every rank and in this order."""
        with self._call.alone(), self._call:
            return self._plans.unsent()

    def report(self, report: Report | Grown) -> None:
        """What a rank says; from any thread.

        Raises:
            InputError: it is about no plan, or does not fit the one that it names.
        """
        with self._call.alone(), self._call:
            if isinstance(report, Grown):
                self._stock.grown(report.mover, report.frames)
            else:
                job = self._plans.find(report.plan)
                if job is None:
                    raise InputError(
                        f"rank {report.mover} reports on plan {report.plan}",
                        limit=f"{len(self._plans)} plans that are not clear",
                    )
                self._tell(job, lambda tally: tally.note(report))
            self._after()
        self._announce()

    def _tell(self, job: Job, change: Callable[[Tally], None]) -> None:
        """Changes the tally of a plan, and what follows from it."""
        tally = tally_of(job)
        was_released, was_ended = tally.released, tally.ended
        change(tally)
        number = tally.plan.number
        if isinstance(job, Save):
            self._saves.told(job)
            if tally.released and not was_released:
                self._news.append(Released(number))
        elif isinstance(job, Load):
            loaded = self._loads.told(job)
            if loaded is not None:
                self._news.append(loaded)
                if tally.wrong.any():
                    self._saves.lose_cut_off()
                    self._keeps.renew(job.waiting.root)
        elif tally.clear:
            self._stock.wiped(tally.plan.inside, tally.outcomes)
        if tally.ended and not was_ended:
            opened = self._breaker.note(well=not tally.failed, now_s=self._clock.now_s())
            self._counters.add("breaker_opened", opened)
        if tally.clear:
            self._plans.clear(number)
            if isinstance(job, Load):
                self._news.append(Cleared(number))

    def step(self) -> None:
        """A scheduling step begins: old matches end, and plans that no rank speaks of are too late."""
        now_s = self._clock.now_s()
        with self._call.alone(), self._call:
            self._steps += 1
            self._loads.expire(self._steps - self.settings.match_steps)
            self._keeps.expire(now_s)
            for job in self._plans.late(now_s):
                self._tell(job, Tally.expire)
            if self._stock.unwiped and self._breaker.passes(now_s):
                self._stock.wipe_again()
            self._after()
        self._announce()

    def poll(self) -> list[News]:
        """What has happened since the last call; never waits."""
        if not self._news:
            return []
        with self._call.alone(), self._call:
            news, self._news = list(self._news), deque()
            return news

    def wait(self, within_s: float) -> bool:
        """Waits until there is news; whether there is. Not for the engine's thread while it has work."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._news) or not self._plans, within_s)

    def ready(self, within_s: float) -> bool:
        """Waits until every rank has all its frames; whether it is so."""
        with self._arrived:
            return self._arrived.wait_for(
                lambda: self._stock.present == self.shape.frames, within_s
            )

    def settled(self, within_s: float) -> bool:
        """Waits until every plan is clear, and all is overwritten that nobody holds; whether it is so."""
        with self._arrived:
            return self._arrived.wait_for(
                lambda: not self._plans and not self._stock.wiping, within_s
            )

    def _announce(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def lose(self, mover: int) -> None:
        """A rank is gone with all its bytes: what it had part in has failed, and everything is forgotten.

        Raises:
            InputError: there is no such rank.
        """
        if not 0 <= mover < self.shape.movers:
            raise InputError(f"rank {mover} is lost", limit=f"0 to {self.shape.movers - 1}")
        with self._call.alone(), self._call:
            self._stock.lose(mover)
            self._saves.lose(None)
            self._loads.drop(None)
            self._keeps.drop(None)
            self._stock.forget()
            # Whoever comes in its place must not do what was meant for it: nobody gets what was not sent yet.
            unsent = {plan.number for plan in self._plans.unsent()}
            for job in self._plans.jobs():
                all_of_them = tally_of(job).plan.number in unsent
                for rank in range(self.shape.movers) if all_of_them else (mover,):
                    self._tell(job, partial(Tally.lose, mover=rank))
            self._after()
        self._announce()

    def drop(self, prefix: Chain) -> int:
        """Forgets every page that begins with these, and overwrites it; whoever loads it now gets nothing.

        Returns:
            Pages that nobody finds any more.
        """
        prefix.require(self.shape.page_tokens)
        with self._call.alone(), self._call:
            self._saves.lose(prefix.root)
            self._loads.drop(prefix.root)
            gone = self._stock.drop(prefix)
            self._keeps.renew(prefix.root)
            self._after()
            return gone

    def drop_root(self, root: bytes | None) -> int:
        """Forgets all of one namespace, given by the root of its chains, or everything; as `drop`."""
        with self._call.alone(), self._call:
            self._saves.lose(root)
            self._loads.drop(root)
            self._keeps.drop(root)
            gone = self._stock.drop_root(root)
            self._after()
            return gone

    def _wipe(self) -> None:
        frames = self._stock.to_wipe()
        if len(frames):
            none = np.empty(0, np.int32)
            keys = bytes(KEY_BYTES * len(frames))
            outline = Outline(none, frames, keys, np.zeros(len(frames), np.uint32))
            self._send(Verb.WIPE, 0, outline, None)

    def keep(self, name: str, prefix: Chain, within_s: float | None = None) -> int:
        """Retains the pages of a prefix that are here, up to a share of the tier, until told otherwise.

        Args:
            name: by which it is ended; one that is kept already is kept anew.
            prefix: its full pages.
            within_s: seconds until it lapses by itself; None: never.

        Returns:
            Pages that are kept.
        """
        prefix.require(self.shape.page_tokens)
        with self._call.alone(), self._call:
            until_s = None if within_s is None else self._clock.now_s() + within_s
            kept = self._keeps.keep(name, prefix, until_s)
            self._after()
            return kept

    def unkeep(self, name: str) -> None:
        """Ends what `keep` began; nothing, if it has lapsed."""
        with self._call.alone(), self._call:
            self._keeps.end(name)
            self._after()

    @property
    def in_flight(self) -> int:
        """Plans that are not clear."""
        return len(self._plans)

    def stats(self) -> dict[str, int]:
        """Counts of `base.observe.METRICS`, and gauges."""
        with self._call.alone(), self._call:
            frames, prefixes = self._stock.frames, self._stock.prefixes
            return self._counters.snapshot() | {
                "frames_free": frames.free,
                "frames_held": prefixes.held,
                "frames_cached": prefixes.evictable,
                "plans_open": len(self._plans),
                "breaker_open": int(self._breaker.is_open),
            }

    def check(self) -> None:
        """Verifies every invariant; linear in the tier.

        Raises:
            InvariantError: with all that are broken.
        """
        with self._call.alone(), self._call:
            self._check()

    def _check(self) -> None:
        findings = Findings()
        self._stock.check(findings)
        self._saves.check(findings)
        self._loads.check(findings, self._keeps.held)
        findings.raise_if_any()

    def _after(self) -> None:
        """What every call ends with."""
        self._stock.collect()
        self._wipe()
        if self._debug:
            self._check()
