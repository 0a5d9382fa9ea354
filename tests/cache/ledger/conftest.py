"""A ledger with movers that are dicts: what a rank has in a frame is the name that was written there last."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from stepwell.base.settings import HostSettings
from stepwell.cache.ledger.ledger import Ledger
from stepwell.cache.ledger.loads import Loaded
from stepwell.cache.ledger.records import Match, Shape
from stepwell.cache.ledger.saves import Carried, Offer
from stepwell.core.chain import Chain, Extra
from stepwell.core.cut import Cut
from stepwell.core.geometry import Geometry, Group, Rule, StateTensor
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.plan import Grown, Outcome, Plan, Report, Verb
from stepwell.testing.clock import FakeClock

SIZE = 4
SPACE = Namespace(SIZE, model="m")
_STATE = (StateTensor("conv", (4,), "float32"),)
FULL = Cut(Geometry.full(1, 1, 1).groups[0], 1, 0)


def window(frames: int = 1, reach: int = 2, name: str = "window") -> Cut:
    group = Group(name, Rule.WINDOW, (1,), 1, 1, 1, "float32", window=SIZE * reach)
    return Cut(group, frames, reach)


def state(frames: int = 2) -> Cut:
    group = Group("state", Rule.STATE, (2,), 0, 0, 0, "float32", state=_STATE)
    return Cut(group, frames, 1)


MODELS: dict[str, tuple[Cut, ...]] = {
    "full": (FULL,),
    "full and window": (FULL, window()),
    "full and states": (FULL, state(3)),
    "all": (FULL, window(), state()),
    "windows": (window(), window(2, 1, "short")),
    "no full": (window(), state()),
}


class Rank:
    """One mover: plans that it was sent and has not ended, and the name in each of its frames."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[int, tuple[bytes, int]] = {}
        self.spoiled: set[int] = set()

    def does(self, plan: Plan, bad: dict[int, Outcome]) -> np.ndarray:
        """Follows a plan; `bad` are outcomes of frames that fail. Returns all outcomes."""
        outcomes = np.zeros(len(plan), np.uint8)
        for n, frame in enumerate(plan.inside.tolist()):
            name = (plan.key(n), int(plan.which[n]))
            outcome = bad.get(n, Outcome.OK)
            if plan.verb is Verb.LOAD:
                if outcome is Outcome.OK and self.names.get(frame) != name:
                    outcome = Outcome.MISS
            elif outcome is not Outcome.OK:
                if plan.verb is Verb.SAVE:
                    self.names.pop(frame, None)  # torn
            elif plan.verb is Verb.SAVE:
                self.names[frame] = name
            else:
                self.names.pop(frame, None)
            outcomes[n] = outcome
        return outcomes


class World:
    """A ledger that is checked after every call, ranks without threads, and prompts whose pages are numbers."""

    def __init__(
        self, model: str = "full", movers: int = 1, frames: int = 16, **settings: Any
    ) -> None:
        self.clock = FakeClock()
        self.cuts = MODELS[model]
        settings = {"debug": True, "within_ms": 1000, "slowest_bytes": 1 << 40, **settings}
        self.ledger = Ledger(
            Shape(SIZE, self.cuts, frames, 1 << 10, movers), HostSettings(**settings), self.clock
        )
        self.stock = self.ledger._stock
        self.ranks = [Rank(number) for number in range(movers)]
        self.plans: dict[int, Plan] = {}
        self.news: list[Any] = []
        self._device = itertools.count()
        self._requests = itertools.count()
        for rank in self.ranks:
            self.grow(rank.number, range(frames))

    # What is said to the ledger, as records that went through their plain form

    def grow(self, mover: int, frames: Iterable[int]) -> None:
        grown = Grown(mover, np.array(list(frames), np.int32))
        self.ledger.report(Grown.from_plain(grown.plain()))

    def lose(self, mover: int) -> None:
        """A rank is gone with all that it had."""
        self.ledger.lose(mover)
        self.ranks[mover].names.clear()
        self.fetch()
        self.news += self.ledger.poll()

    def fetch(self) -> list[Plan]:
        """What the ledger wants done since the last time; every plan survives its plain form."""
        plans = self.ledger.plans()
        for plan in plans:
            copy = Plan.from_plain(plan.plain())
            assert copy.plain() == plan.plain()
            self.plans[plan.number] = copy
        return plans

    def say(
        self,
        number: int,
        mover: int = 0,
        outcomes: Sequence[int] | None = None,
        *,
        released: bool = False,
        clear: bool = False,
    ) -> None:
        array = None if outcomes is None else np.array(outcomes, np.uint8)
        report = Report(number, mover, array, released, clear)
        self.ledger.report(Report.from_plain(report.plain()))
        self.fetch()
        self.news += self.ledger.poll()

    def run(
        self,
        number: int | None,
        bad: dict[int, Outcome] | None = None,
        *,
        movers: Iterable[int] | None = None,
        clear: bool = True,
    ) -> None:
        """Ranks follow a plan and report that it has ended; with `bad`, frames that fail on all of them."""
        assert number is not None
        self.fetch()
        plan = self.plans[number]
        for mover in range(len(self.ranks)) if movers is None else movers:
            outcomes = self.ranks[mover].does(plan, bad or {})
            self.say(number, mover, outcomes.tolist(), released=True, clear=clear)

    def settle(self) -> None:
        """Wipes that wait are done."""
        self.fetch()
        for number in sorted(self.plans):
            job = self.ledger._plans.find(number)
            if job is not None and self.plans[number].verb is Verb.WIPE:
                self.run(number)

    # Prompts

    def chain(
        self, *pages: int, space: Namespace = SPACE, extras: Sequence[Extra] = (), kind: Any = Chain
    ) -> Chain:
        tokens = [page for page in pages for _ in range(SIZE)]
        return kind(space, tokens, extras)

    def boundary(self, pages: int) -> list[tuple[int, int]]:
        """Group and page of every record that the boundary after so many pages needs."""
        walked = self.ledger.shape.walked
        return [
            (group, page)
            for group, cut in enumerate(walked)
            for page in range(max(0, pages - cut.reach), pages)
        ]

    def offer(
        self, chain: Any, last: int | None = None, records: Iterable[tuple[int, int]] | None = None
    ) -> Offer:
        """All pages and the records of the last boundary, unless told otherwise."""
        last = chain.pages if last is None else last
        records = self.boundary(last) if records is None else records
        carried = [
            Carried(group, page, self.device(self.ledger.shape.walked[group].frames))
            for group, page in records
        ]
        full = len(self.ledger.shape.walked) < len(self.cuts)
        return Offer(
            chain, last if full else 0, lambda first, end: self.device(end - first), carried
        )

    def device(self, n: int) -> np.ndarray:
        return np.array([next(self._device) for _ in range(n)], np.int32)

    def save(
        self, chain: Any, last: int | None = None, records: Iterable[tuple[int, int]] | None = None
    ) -> int | None:
        number = self.ledger.save(self.offer(chain, last, records))
        self.fetch()
        return number

    def put(self, chain: Any, last: int | None = None, records: Any = None) -> None:
        """Saved, and arrived."""
        number = self.save(chain, last, records)
        if number is not None:
            self.run(number)

    def match(self, chain: Chain, request: Any = None, limit: int = 99, minimum: int = 1) -> Match:
        request = f"request {next(self._requests)}" if request is None else request
        match = self.ledger.match(request, chain, limit, minimum)
        self.fetch()
        return match

    def found(self, chain: Chain, limit: int = 99) -> int:
        """Pages that a match finds, without keeping it."""
        match = self.match(chain, "looks", limit)
        self.ledger.give_up("looks")
        self.fetch()
        return match.pages

    def load(self, chain: Chain, request: Any = "loads", first: int = 0) -> int:
        match = self.match(chain, request)
        return self.load_match(match, first)

    def load_match(self, match: Match, first: int = 0) -> int:
        walked = self.ledger.shape.walked
        full = match.pages - first if len(walked) < len(self.cuts) else 0
        records = [
            self.device(n * cut.frames).reshape(n, cut.frames)
            for n, cut in zip(match.records, walked, strict=True)
        ]
        number = self.ledger.load(match.request, first, self.device(full), records)
        self.fetch()
        self.news += self.ledger.poll()
        return number

    def loaded(self, number: int) -> Loaded:
        (answer,) = [n for n in self.news if isinstance(n, Loaded) and n.plan == number]
        return answer

    # What is there

    def count(self, name: str) -> int:
        return self.ledger.stats()[name]

    def status(self, status: Status) -> list[int]:
        return np.flatnonzero(self.stock.frames.status == status).tolist()

    def sums(self) -> dict[str, int]:
        """Where all frames are; they add up."""
        census, stats = self.stock.frames.census(), self.ledger.stats()
        sums = {
            "free": stats["frames_free"],
            "held": stats["frames_held"],
            "cached": stats["frames_cached"],
            "filling": census[Status.FILLING],
            "out": census[Status.QUARANTINED] + census[Status.LEAVING],
        }
        assert sum(sums.values()) == self.ledger.shape.frames
        assert sums["held"] + sums["cached"] == census[Status.SEALED]
        return {name: count for name, count in sums.items() if count}

    def idle(self) -> None:
        """Nothing is held, moved or waited for."""
        self.ledger.check()
        assert self.ledger.in_flight == 0
        assert not self.stock.wiping
        assert self.count("frames_held") == 0
        assert not self.status(Status.FILLING)


@pytest.fixture
def make_world() -> type[World]:
    return World


@pytest.fixture
def worlds() -> list[str]:
    return list(MODELS)


@pytest.fixture(params=["full", "full and window", "full and states", "all"])
def closed_model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=list(MODELS))
def any_model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[1, 2, 3])
def movers(request: pytest.FixtureRequest) -> int:
    return request.param
