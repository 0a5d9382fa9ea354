"""The rules of the schedule, one test each, over a pool without buffers."""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.base.settings import EngineSettings, PoolSettings
from stepwell.cache.pool import Flags, PagePool
from stepwell.core.geometry import Geometry
from stepwell.core.key import Namespace
from stepwell.engine.request import Finish, Request
from stepwell.engine.schedule import Schedule
from stepwell.testing.clock import FakeClock

PAGE = 4


class Desk:
    """A schedule whose model answers 7 to everything."""

    def __init__(self, frames: int = 100, step_tokens: int = 8, batch_requests: int = 4) -> None:
        geometry = Geometry.full(1, 1, 1)
        sizes = PoolSettings(PAGE, frames * geometry.page_bytes(PAGE), 16, 400, debug=True)
        self.pool = PagePool(geometry, sizes, device="none")
        limits = EngineSettings(step_tokens, batch_requests)
        space = Namespace(PAGE, model="m")
        self.schedule = Schedule(self.pool, space, limits, FakeClock())

    def add(self, name: str, tokens: int) -> Request:
        ids = [ord(name[0]) * 1000 + n for n in range(tokens)]
        request = Request(name, tokens, ids, 1000, frozenset(), Flags.NONE, 0.0)
        self.schedule.waiting.append(request)
        return request

    def step(self) -> list[tuple[str, int]]:
        """One step; says who computed how much."""
        batch = self.schedule.next_batch()
        for request, count in batch:
            end = request.computed + count
            self.pool.commit(request.name, request.tokens[request.computed : end])
            request.computed = end
        for request, _ in batch:
            if request.computed == len(request.tokens):
                request.tokens.append(7)
        return [(request.name, count) for request, count in batch]


@pytest.fixture
def desk() -> Any:
    return Desk()


def test_who_generates_goes_before_a_long_prompt(desk: Desk) -> None:
    desk.add("p", 8)
    desk.step()
    desk.add("q", 40)
    desk.add("a", 1)  # one token of a prompt is like one that is generated
    assert sorted(desk.step()[:2]) == [("a", 1), ("p", 1)]
    assert desk.step()[2] == ("q", 6)


def test_prompts_share_what_is_left_in_order_of_arrival(desk: Desk) -> None:
    desk.add("p", 13)
    desk.add("q", 40)
    assert [desk.step() for _ in range(3)] == [
        [("p", 8)],
        [("p", 5), ("q", 3)],
        [("p", 1), ("q", 7)],
    ]


def test_those_served_longest_ago_go_first_where_a_step_is_too_small() -> None:
    desk = Desk(step_tokens=2)
    for name in "abc":
        desk.add(name, 1)
    served = [name for _ in range(9) for name, _ in desk.step()]
    counts = {name: served.count(name) for name in "abc"}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_no_more_get_in_than_a_step_serves(desk: Desk) -> None:
    """Else they would hold frames and compute nothing."""
    for name in "abcdef":
        desk.add(name, 1)
    desk.step()
    assert [request.name for request in desk.schedule.running] == list("abcd")
    assert [request.name for request in desk.schedule.waiting] == list("ef")


def test_nobody_overtakes_one_that_waits_for_room() -> None:
    desk = Desk(frames=10)
    desk.add("a", 20)
    desk.step()
    desk.add("big", 24)
    desk.add("c", 1)
    desk.step()
    assert [request.name for request in desk.schedule.waiting] == ["big", "c"]


def test_the_youngest_loses_its_frames_and_waits_at_the_front() -> None:
    desk = Desk(frames=6)
    old, young = desk.add("a", 8), desk.add("b", 8)
    desk.step()
    desk.add("waits", 24)  # would fit into an empty pool
    while not young.preemptions and not old.preemptions:
        desk.step()
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert desk.schedule.waiting[0] is young
    assert young.computed == 0


def test_who_lost_its_frames_does_not_come_back_in_the_same_step() -> None:
    """Else it would lose them again at once, and compute nothing in between."""
    desk = Desk(frames=6)
    desk.add("a", 8)
    young = desk.add("b", 8)
    while not young.preemptions:
        desk.step()
    assert young in desk.schedule.waiting
    assert young not in desk.schedule.running


def test_the_oldest_always_goes_on() -> None:
    desk = Desk(frames=7, step_tokens=64)
    requests = [desk.add(name, 5) for name in "abcd"]
    for _ in range(200):
        before = len(requests[0].tokens)
        desk.step()
        if desk.schedule._refused:
            break
        assert len(requests[0].tokens) == before + 1
    assert desk.schedule.take_refused() == [(requests[0], Finish.NO_ROOM)]
    assert len(requests[0].tokens) == 7 * PAGE + 1
    assert desk.schedule.take_refused() == []
