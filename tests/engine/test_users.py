"""Two hundred users at a small pool: nobody starves, nothing leaks, and the books agree.

Waits are counted in steps, so that they are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections import defaultdict
from typing import Any

import pytest

from stepwell.base.settings import EngineSettings, PoolSettings, Settings
from stepwell.cache.pool.limits import Limits
from stepwell.core.geometry import Geometry
from stepwell.engine.engine import Engine
from stepwell.engine.request import Finish, Record
from stepwell.testing.clock import FakeClock
from stepwell.testing.families import VOCABULARY, tiny_model

PAGE = 4
SIZES = {"small": (2, 12), "middle": (30, 60), "large": (120, 220)}
TIMES_THE_MEDIAN = 5
AGING_STEPS = 256


@dataclasses.dataclass
class Asked:
    """One question of a user, and what became of it."""

    size: str
    prompt: list[int]
    arrived: int
    priority: int = 0
    cancel_at: int | None = None
    first_token: int | None = None
    waiting_at_cancel: bool = False
    record: Record | None = None


class Users:
    """Users who ask, read the answer, think, and ask again."""

    def __init__(self, engine: Engine, count: int, *, equals: bool) -> None:
        self.engine = engine
        self.priorities = (0,) if equals else (-1, *[0] * 18, 1)
        seed, think_steps = 1, 40
        self.random = random.Random(seed)
        self.think_steps = think_steps
        self.systems = [self.tokens(43) for _ in range(5)]
        self.due = {user: self.random.randrange(think_steps) for user in range(count)}
        self.open: dict[str, tuple[int, Asked]] = {}
        self.done: list[Asked] = []
        self.step_number = 0
        self.admissions = self.run_tokens = 0
        self.watch()

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, VOCABULARY) for _ in range(count)]

    def watch(self) -> None:
        """Counts beside the engine's own books."""
        start, run = self.engine._schedule._start, self.engine.runner.run

        def counted_start(*given: Any) -> None:
            self.admissions += 1
            start(*given)

        def counted_run(view: Any, tokens: Any, keep: Any) -> Any:
            self.run_tokens += len(tokens)
            return run(view, tokens, keep)

        self.engine._schedule._start = counted_start
        self.engine.runner.run = counted_run

    def ask(self, user: int) -> None:
        chance = self.random.random
        size = self.random.choices(list(SIZES), (6, 3, 1))[0]
        prompt = self.tokens(self.random.randint(*SIZES[size]))
        if size != "small" or chance() < 0.5:
            prompt = self.random.choice(self.systems) + prompt
        asked = Asked(size, prompt, self.step_number)
        asked.priority = self.random.choice(self.priorities)
        if chance() < 0.08:
            asked.cancel_at = self.step_number + self.random.randrange(60)
        if chance() < 0.03:
            asked.prompt = prompt * 30  # never fits
        name = self.engine.add(
            asked.prompt, max_tokens=self.random.randint(1, 24), priority=asked.priority
        )
        assert isinstance(name, str)
        self.open[name] = user, asked

    def end(self, name: str, record: Record) -> None:
        user, asked = self.open.pop(name)
        asked.record = record
        self.done.append(asked)
        self.due[user] = self.step_number + self.random.randrange(1, self.think_steps)

    def step(self, *, more: bool = True) -> None:
        self.step_number += 1
        for user in [user for user, at in self.due.items() if more and at <= self.step_number]:
            del self.due[user]
            self.ask(user)
        for name, (_, asked) in list(self.open.items()):
            if asked.cancel_at is not None and asked.cancel_at <= self.step_number:
                waiting = self.engine._schedule.waiting
                asked.waiting_at_cancel = any(one.name == name for one in waiting)
                self.end(name, self.engine.cancel(name))
        for event in self.engine.step():
            _, asked = self.open[event.name]
            if event.token is not None and asked.first_token is None:
                asked.first_token = self.step_number
            if event.record is not None:
                self.end(event.name, event.record)
        if self.step_number % 100 == 0:
            self.engine.pool.check()

    def drain(self) -> None:
        """Nobody asks any more."""
        while not self.engine.idle:
            self.step(more=False)
            assert self.step_number < 100_000

    def check_waits(self) -> None:
        """Among equals nobody waits five times as long as most do; a low priority may have to age first."""
        waits = defaultdict(list)
        for asked in self.done:
            if asked.first_token is not None:
                more = AGING_STEPS * max(0, -asked.priority)
                waits[asked.size].append((asked.first_token - asked.arrived, more))
        for size in SIZES:
            median = statistics.median(wait for wait, _ in waits[size])
            late = [wait for wait, more in waits[size] if wait > TIMES_THE_MEDIAN * median + more]
            assert not late, (size, median, late)
            assert len(waits[size]) >= 10

    def check_books(self) -> None:
        engine, records = self.engine, [asked.record for asked in self.done]
        engine.pool.check()
        stats = engine.pool.stats()
        assert stats["frames_filling"] == stats["frames_held"] == 0
        assert stats["frames_free"] + stats["frames_cached"] == engine.pool.frames
        assert engine.pool._held.rows.free == engine.pool._held.rows.count
        assert not engine.pool._held.requests
        assert not engine._schedule.running
        assert not engine._schedule.waiting
        reused = sum((one.reused_tokens or 0) + one.resumed_tokens for one in records)
        assert stats["tokens_reused"] == reused > 0
        admitted = [asked for asked in self.done if asked.record.reused_tokens is not None]
        admissions = sum(
            1
            + asked.record.preemptions
            - (asked.waiting_at_cancel and asked.record.preemptions > 0)
            for asked in admitted
        )
        assert stats["opens_ready"] == admissions == self.admissions
        never = [one for one in records if one.finish is Finish.NO_ROOM]
        assert stats["opens_refused"] == len(never) > 0
        assert sum(one.computed_tokens for one in records) == self.run_tokens
        assert sum(one.preemptions for one in records) > 0
        assert {one.finish for one in records} == {Finish.LENGTH, Finish.NO_ROOM, Finish.CANCELLED}


def engine_over(model: Any, frames: int, step_tokens: int = 64) -> Engine:
    geometry = Geometry.from_hf_config(model.config, "float32")
    one = PoolSettings(PAGE, 1 << 32, requests=32, positions=512)
    frame_bytes = Limits.of(geometry, one).frame_bytes
    pool = dataclasses.replace(one, capacity_bytes=frames * frame_bytes)
    settings = Settings(pool=pool, engine=EngineSettings(step_tokens, 16))
    return Engine(model, settings, clock=FakeClock())


def check_answers(model: Any, done: list[Asked], count: int) -> None:
    """What they were told is what each would have been told alone."""
    whole = [asked for asked in done if asked.record.finish is Finish.LENGTH]
    whole.sort(key=lambda asked: -asked.record.preemptions)
    with engine_over(model, 400) as alone:
        for asked in whole[:count] + whole[-count:]:
            again = alone.generate(asked.prompt, max_tokens=len(asked.record.tokens))
            assert again.tokens == asked.record.tokens


def run(family: str, users: int, frames: int, steps: int, *, equals: bool) -> None:
    model = tiny_model(family)
    with engine_over(model, frames) as engine:
        crowd = Users(engine, users, equals=equals)
        for _ in range(steps):
            crowd.step()
        crowd.drain()
        crowd.check_books()
        crowd.check_waits()
    check_answers(model, crowd.done, 5)


@pytest.mark.parametrize("equals", [True, False])
def test_two_hundred_users_share_a_small_pool(equals: bool) -> None:
    run("llama", 200, 150, 400, equals=equals)


def test_users_of_a_hybrid_model_share_a_small_pool() -> None:
    run("lfm2", 60, 250, 160, equals=False)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "equals"), [("llama", True), ("gemma2", True), ("llama", False)]
)
def test_two_hundred_users_for_two_minutes(family: str, equals: bool) -> None:
    model = tiny_model(family)
    with engine_over(model, 150 if family == "llama" else 350) as engine:
        crowd = Users(engine, 200, equals=equals)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            crowd.step()
        crowd.drain()
        crowd.check_books()
        crowd.check_waits()
    check_answers(model, crowd.done, 10)
