"""The rules of docs/internals/scheduling.md, each with its tests, over a pool without buffers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stepwell.base.settings import EngineSettings, PoolSettings
from stepwell.cache.pool import Flags, PagePool
from stepwell.cache.pool.limits import Limits
from stepwell.core.geometry import Geometry, Group, Rule, StateTensor
from stepwell.core.key import Namespace
from stepwell.engine.request import Finish, Request, Wishes
from stepwell.engine.schedule import Schedule
from stepwell.testing.clock import FakeClock

PAGE = 4
FULL = Group("full", Rule.FULL, (0,), 1, 1, 1, "float32")
WINDOWS = Group("window", Rule.WINDOW, (1,), 1, 1, 1, "float32", window=9)
STATES = Group(
    "state", Rule.STATE, (2,), 0, 0, 0, "float32", state=(StateTensor("conv", (4,), "float32"),)
)


class Desk:
    """A schedule whose model answers 7 to everything; an answer of `answer` tokens ends."""

    def __init__(
        self,
        frames: int = 100,
        step_tokens: int = 8,
        batch_requests: int = 4,
        groups: tuple[Group, ...] = (FULL,),
    ) -> None:
        geometry = Geometry(groups)
        one = PoolSettings(PAGE, 1 << 20, 16, 400, ahead_tokens=step_tokens, debug=True)
        frame_bytes = Limits.of(geometry, one).frame_bytes
        sizes = dataclasses.replace(one, capacity_bytes=frames * frame_bytes)
        self.pool = PagePool(geometry, sizes, device="none")
        limits = EngineSettings(step_tokens, batch_requests)
        self.schedule = Schedule(self.pool, Namespace(PAGE, model="m"), limits, FakeClock())
        self.count = 0

    def add(self, name: str, tokens: int, answer: int = 1000, **more: Any) -> Request:
        """A request; one with a leader has its prompt."""
        leader, wishes = more.pop("leader", None), Wishes(answer, **more)
        same = name if leader is None else leader.name
        ids = [hash_of(same) + n for n in range(tokens)]
        self.count += 1
        request = Request(name, tokens, ids, wishes, 0, self.count, 0.0, leader=leader)
        self.schedule.enqueue(request)
        return request

    def step(self) -> list[tuple[str, int]]:
        """One step; says who computed how much."""
        batch = self.schedule.next_batch()
        for request, _ in self.schedule._refused:
            request.finish = Finish.NO_ROOM
        if batch:
            self.pool.bind({request.name: count for request, count in batch})
        for request, count in batch:
            end = request.computed + count
            self.pool.commit(request.name, request.tokens[request.computed : end])
            request.computed = end
        for request, _ in batch:
            if request.computed == len(request.tokens):
                request.tokens.append(7)
                request.first_token_s = 0.0
                if len(request.generated) >= request.wishes.max_tokens:
                    self.end(request)
        return [(request.name, count) for request, count in batch]

    def end(self, request: Request, finish: Finish = Finish.LENGTH) -> None:
        if request in self.schedule.running:
            self.schedule.leave(request)
        else:
            self.schedule.waiting.remove(request)
        request.finish = finish

    def names(self) -> tuple[list[str], list[str]]:
        """Who runs, and who waits, each in order of arrival."""
        both = self.schedule.running, self.schedule.waiting
        return tuple(
            [one.name for one in sorted(part, key=lambda one: one.number)] for part in both
        )


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[:2], "little") * 1000


# Order


def test_the_important_get_in_first_then_the_earlier() -> None:
    desk = Desk(batch_requests=2)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)):
        desk.add(name, 1, answer=2, priority=priority)
    order = []
    for _ in range(8):
        desk.step()
        order += [name for name in desk.names()[0] if name not in order]
    assert order == ["b", "d", "a", "c", "e"]


def test_an_unimportant_request_gets_in_although_important_ones_keep_coming() -> None:
    desk = Desk(batch_requests=1)
    low = desk.add("low", 1, answer=1)
    steps = 0
    while low.finish is None and steps < 2000:
        desk.add(f"{steps}", 1, answer=1, priority=2)
        desk.step()
        steps += 1
    # Two priorities are made up for in 512 steps; then it is the first of its equals.
    assert 512 <= steps <= 514


def test_age_is_lost_with_the_frames() -> None:
    desk = Desk(batch_requests=1)
    first = desk.add("first", 1)
    old = desk.add("old", 1)
    for _ in range(300):
        desk.step()
    assert desk.schedule._priority(old) == 1
    desk.end(first)
    desk.step()
    assert desk.names() == (["old"], [])
    assert desk.schedule._priority(old) == 1
    desk.schedule.preempt(old)
    assert desk.schedule._priority(old) == 0


# Getting in


def test_no_more_get_in_than_a_step_serves(desk: Desk) -> None:
    """Else they would hold frames and compute nothing."""
    for name in "abcdef":
        desk.add(name, 1)
    desk.step()
    assert desk.names() == (list("abcd"), list("ef"))


def test_nobody_overtakes_one_that_waits_for_room() -> None:
    desk = Desk(frames=10)
    first = desk.add("a", 20)
    desk.step()
    desk.add("big", 24)
    desk.add("c", 1)
    for _ in range(5):
        desk.step()
        assert desk.names() == (["a"], ["big", "c"])
    desk.end(first)
    desk.step()
    assert desk.names() == (["big", "c"], [])


def test_followers_wait_for_the_first_token_of_their_leader_and_block_nobody() -> None:
    desk = Desk(step_tokens=8)
    leader = desk.add("x", 18)
    followers = [desk.add(f"x{n}", 18, leader=leader) for n in range(2)]
    other = desk.add("other", 1)
    while leader.first_token_s is None:
        desk.step()
        assert desk.names()[1] == ["x0", "x1"]
    assert other.first_token_s is not None
    desk.step()
    assert desk.names() == (["x", "x0", "x1", "other"], [])
    assert [one.reused_tokens for one in followers] == [16, 16]


@pytest.mark.parametrize("place", ["waiting", "prompt"])
def test_when_a_leader_ends_too_early_one_follower_computes_in_its_place(place: str) -> None:
    """Not all of them at once: that would be the same prompt several times in one step."""
    desk = Desk(step_tokens=8)
    leader = desk.add("x", 21)
    followers = [desk.add(f"x{n}", 21, leader=leader) for n in range(3)]
    if place == "prompt":
        desk.step()
    desk.end(leader, Finish.CANCELLED)
    for _ in range(8):
        desk.step()
    assert all(one.first_token_s is not None for one in followers)
    found = 8 if place == "prompt" else 0
    assert [one.reused_tokens for one in followers] == [found, 20, 20]


def test_followers_of_a_leader_that_can_never_fit_are_refused_too() -> None:
    desk = Desk(frames=5)
    leader = desk.add("x", 30)
    followers = [desk.add(f"x{n}", 30, leader=leader) for n in range(3)]
    for _ in range(4):
        assert desk.step() == []
    assert [one for one, _ in desk.schedule.take_refused()] == [leader, *followers]
    assert desk.names() == ([], [])


def test_a_leader_that_loses_its_frames_still_leads() -> None:
    desk = Desk(frames=100)
    leader = desk.add("x", 18)
    follower = desk.add("x0", 18, leader=leader)
    desk.step()
    desk.schedule.preempt(leader)
    while leader.first_token_s is None:
        desk.step()
        assert desk.names()[1] == ["x0"]
    for _ in range(2):
        desk.step()
    assert follower.first_token_s is not None


# Sharing a step


def test_answers_leave_a_quarter_of_the_step_to_prompts() -> None:
    desk = Desk(step_tokens=8, batch_requests=12)
    for name in "abcdefgh":
        desk.add(name, 1)
    desk.step()
    assert desk.step() == [(name, 1) for name in "abcdefgh"]
    desk.add("long", 100)
    step = desk.step()
    assert step == [*((name, 1) for name in "abcdef"), ("long", 2)]


def test_those_served_longest_ago_go_first_where_a_step_is_too_small() -> None:
    desk = Desk(step_tokens=2)
    for name in "abc":
        desk.add(name, 1)
    for _ in range(2):
        desk.step()  # until nobody is in its prompt
    served = [name for _ in range(9) for name, _ in desk.step()]
    counts = {name: served.count(name) for name in "abc"}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_answers_and_prompts_take_turns_where_a_step_has_one_token() -> None:
    """Also when a prompt has never been served: it must not have every turn."""
    desk = Desk(step_tokens=1)
    desk.add("a", 1)
    desk.step()
    desk.add("p", 30)
    desk.add("q", 30)
    assert [desk.step()[0][0] for _ in range(12)] == ["p", "a"] * 6


def test_the_first_prompt_gets_half_and_the_shortest_of_the_others_the_rest() -> None:
    desk = Desk(step_tokens=16)
    desk.add("long", 100)
    desk.add("middle", 40)
    desk.add("short", 6)
    assert desk.step() == [("long", 8), ("middle", 2), ("short", 6)]
    # "short" answers now; what the others do not need goes back to the first.
    assert desk.step() == [("short", 1), ("long", 8), ("middle", 7)]


def test_what_the_others_do_not_need_goes_back_to_the_first() -> None:
    desk = Desk(step_tokens=16)
    desk.add("long", 100)
    desk.add("short", 3)
    assert desk.step() == [("long", 13), ("short", 3)]


def test_a_request_ends_a_step_where_its_state_is_to_be_kept() -> None:
    desk = Desk(step_tokens=64, groups=(FULL, STATES))
    request = desk.add("a", 23)
    ends = []
    while request.first_token_s is None:
        desk.step()
        ends.append(request.computed)
    assert request.checkpoints == (16, 20)
    assert ends == [16, 20, 23]


def test_a_request_computes_no_further_than_its_room_in_window_groups() -> None:
    desk = Desk(step_tokens=64, groups=(FULL, WINDOWS))
    request = desk.add("a", 100)
    desk.schedule.next_batch()
    held = desk.pool._held.requests["a"]
    assert desk.schedule._step_of(request) == held.windows[0].end * PAGE == 64


def test_where_all_logits_are_wanted_a_part_has_256_tokens() -> None:
    desk = Desk(frames=200, step_tokens=1000)
    desk.add("a", 390, prompt_logprobs=0)
    assert [desk.step() for _ in range(3)] == [[("a", 256)], [("a", 134)], [("a", 1)]]


# Losing frames


def test_the_youngest_loses_its_frames_and_gets_in_before_later_ones() -> None:
    desk = Desk(frames=6)
    old, young = desk.add("a", 8), desk.add("b", 8)
    desk.step()
    desk.add("waits", 24)  # would fit into an empty pool
    while not young.preemptions and not old.preemptions:
        desk.step()
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert young.computed == 0
    desk.end(old)
    desk.step()
    assert desk.names() == (["b"], ["waits"])


def test_the_least_important_loses_its_frames_however_old_it_is() -> None:
    desk = Desk(frames=6)
    low, high = desk.add("a", 8, priority=-1), desk.add("b", 8)
    while not low.preemptions and not high.preemptions:
        desk.step()
    assert (low.preemptions, high.preemptions) == (1, 0)


def test_who_lost_its_frames_does_not_come_back_in_the_same_step() -> None:
    """Else it would lose them again at once, and compute nothing in between."""
    desk = Desk(frames=6)
    desk.add("a", 8)
    young = desk.add("b", 8)
    while not young.preemptions:
        desk.step()
    assert desk.names() == (["a"], ["b"])


def test_who_needs_fewer_frames_at_its_beginning_does_not_come_back_either() -> None:
    """A windowed model far in its prompt holds a window behind it that it need not have at the start."""
    desk = Desk(frames=60, step_tokens=8, groups=(FULL, WINDOWS))
    desk.add("a", 4)
    young = desk.add("b", 120, flags=Flags.NO_WRITE)
    while not young.preemptions:
        before = desk.names()[0]
        desk.step()
        if len(desk.schedule.running[0].tokens) > 390:
            pytest.fail("nobody lost frames")
    assert before == ["a", "b"]
    assert desk.names() == (["a"], ["b"])


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOWS), (FULL, WINDOWS, STATES)])
def test_the_oldest_always_goes_on(groups: tuple[Group, ...]) -> None:
    desk = Desk(frames=20, step_tokens=32, groups=groups)
    requests = [desk.add(name, 5) for name in "abcd"]
    for _ in range(200):
        before = len(requests[0].tokens), requests[0].computed
        desk.step()
        if desk.schedule._refused:
            break
        assert (len(requests[0].tokens), requests[0].computed) > before
    assert (requests[0], Finish.NO_ROOM) in desk.schedule.take_refused()
    assert requests[0].preemptions == 0
    assert desk.schedule.take_refused() == []
    if groups == (FULL,):
        assert len(requests[0].tokens) == 20 * PAGE + 1


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOWS), (FULL, STATES)])
def test_every_request_of_a_crowd_ends(groups: tuple[Group, ...]) -> None:
    desk = Desk(frames=26, step_tokens=8, groups=groups)
    requests = [desk.add(f"{n:02}", 3 + n * 7 % 37, answer=9, priority=n % 3) for n in range(30)]
    steps = 0
    while any(one.finish is None for one in requests):
        desk.step()
        steps += 1
        assert steps < 3000
    assert all(one.finish is Finish.LENGTH for one in requests)
    assert sum(one.preemptions for one in requests) > 3
    stats = desk.pool.stats()
    assert stats["frames_filling"] == stats["frames_held"] == 0


@pytest.fixture
def desk() -> Any:
    return Desk()
