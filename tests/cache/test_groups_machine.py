"""Pools of several geometries under random requests, against the fingerprint model and sets of prefixes.

After every step each request has read and written exactly its own KV and states. What `open` reuses is
always a prefix that the plain sets know; as long as nothing was evicted, it is exactly what they say.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stepwell.cache.pool import Flags, Ready
from stepwell.core.key import Namespace

FIRED: collections.Counter[str] = collections.Counter()

SEQUENCES = ([0] * 26, [0, 1, 1, 0, 1] * 5)
PROMPTS = st.builds(
    lambda sequence, cut, tail: [*sequence[:cut], *tail],
    st.sampled_from(SEQUENCES),
    st.sampled_from([1, 3, 4, 7, 8, 9, 12, 13, 17, 22]),
    st.lists(st.integers(0, 1), max_size=3),
)
NAMES = st.sampled_from("abcd")
FLAGS = st.sampled_from(
    [Flags.NONE] * 4
    + [Flags.NO_READ, Flags.NO_WRITE, Flags.NEEDS_LOGITS, Flags.NO_READ | Flags.NO_WRITE]
)
SIZE = 4
Prefix = tuple[object, ...]


class Plain:
    """Everything that was ever sealed and not dropped, as prefixes; nothing is evicted here."""

    def __init__(self, full: bool, reaches: list[int], states: int) -> None:
        self.has_full, self.reaches, self.has_states = full, reaches, bool(states)
        self.pages: set[Prefix] = set()
        self.states: set[Prefix] = set()

    def boundary(self, space: object, tokens: list[int]) -> int:
        limit = (len(tokens) - 1) // SIZE
        at = [(space, *tokens[: page * SIZE]) for page in range(limit + 1)]
        known = limit
        if self.has_full:
            known = next((n for n in range(limit) if at[n + 1] not in self.pages), limit)
        for page in range(known, 0, -1):
            near = (at[max(0, page - reach) + 1 : page + 1] for reach in self.reaches)
            if all(one in self.pages for part in near for one in part) and (
                not self.has_states or at[page] in self.states
            ):
                return page * SIZE
        return 0

    def drop(self, prefix: Prefix) -> None:
        def goes(one: Prefix) -> bool:
            return one[0] == prefix[0] and (not self.has_full or one[: len(prefix)] == prefix)

        self.pages = {one for one in self.pages if not goes(one)}
        self.states = {one for one in self.states if not goes(one)}


class GroupsMachine(RuleBasedStateMachine):
    bench_type: Any = None

    @initialize(
        groups=st.sampled_from(["several", "windows", "all", "no full"]),
        requests=st.sampled_from([1, 1.5, 2.5, 8, 8]),
        kept=st.integers(1, 3),
    )
    def make(self, groups: str, requests: float, kept: int) -> None:
        more = {"positions": 48, "boundaries": kept, "ahead_tokens": 6}
        each = self.bench_type(groups, **more).pool.limits.request_frames(30)
        self.bench = self.bench_type(groups, int(each * requests), **more)
        held = self.bench.pool._held
        self.has_full = held.table is not None
        self.plain = Plain(
            self.has_full, [group.cut.reach for group in held.windows], len(held.states)
        )
        self.spaces: dict[str, Namespace] = {}
        self.lost: set[str] = set()  # who seals nothing more
        FIRED[groups] += 1

    @property
    def live(self) -> list[str]:
        return sorted(self.bench.tokens) if hasattr(self, "bench") else []

    def unfinished(self) -> list[str]:
        return [n for n in self.live if self.bench.done(n) < len(self.bench.tokens[n])]

    def finished(self) -> list[str]:
        return [n for n in self.live if self.bench.done(n) == len(self.bench.tokens[n])]

    def evicted(self) -> int:
        stats = self.bench.pool.stats()
        return sum(stats[name] for name in ("pages_evicted", "records_evicted", "states_skipped"))

    def prefix(self, name: str, tokens: int) -> Prefix:
        return (self.spaces[name], *self.bench.tokens[name][:tokens])

    def noted(self, name: str, before: int) -> None:
        """The plain sets learn what a commit sealed."""
        done, opened = self.bench.done(name), self.bench.opened(name)
        if name in self.lost or Flags.NO_WRITE in opened.flags:
            return
        for page in range(before // SIZE + 1, done // SIZE + 1):
            one = self.prefix(name, page * SIZE)
            if Flags.NO_READ in opened.flags and one in self.plain.pages:
                self.lost.add(name)
                return
            self.plain.pages.add(one)
        answered = done > opened.prompt_tokens and done % SIZE == 0
        if done in opened.answer.checkpoints or answered:
            self.plain.states.add(self.prefix(name, done))

    @rule(name=NAMES, tokens=PROMPTS, tenant=st.sampled_from("xxy"), flags=FLAGS)
    def open_and_stay(self, name: str, tokens: list[int], tenant: str, flags: Flags) -> None:
        if name not in self.live:
            self.open(name, tokens, tenant, flags)

    def open(self, name: str, tokens: list[int], tenant: str, flags: Flags) -> None:
        space = Namespace(SIZE, model="m", tenant=tenant, epoch=self.bench.pool.epoch)
        untouched = not self.evicted()
        answer = self.bench.open(name, tokens, space=space, flags=flags)
        FIRED[f"open {type(answer).__name__}"] += 1
        if not isinstance(answer, Ready):
            return
        self.spaces[name] = space
        self.lost.discard(name)
        most = self.plain.boundary(space, tokens)
        if flags & (Flags.NO_READ | Flags.NEEDS_LOGITS):
            FIRED["open without reading"] += 1
            most = 0
        assert answer.cached <= most
        FIRED["open with a hit"] += answer.cached > 0
        if untouched:
            FIRED["open before any eviction, with a hit"] += most > 0
            assert answer.cached == most

    def compute(self, name: str, count: int) -> bool:
        room = self.bench.pool.room(name)
        if not room and not isinstance(self.bench.pool.extend(name, 0), Ready):
            FIRED["no room for the prompt"] += 1
            return False
        count = min(count, self.bench.pool.room(name))
        before = self.bench.done(name)
        self.bench.step(name, count)
        self.noted(name, before)
        return True

    @rule(tokens=PROMPTS, tenant=st.sampled_from("xxy"))
    def serve(self, tokens: list[int], tenant: str) -> None:
        """A request that comes and goes at once, so that there is something to hit."""
        self.open("served", tokens, tenant, Flags.NONE)
        if "served" in self.live:
            FIRED["serve"] += self.to_the_checkpoints("served")
            self.bench.close("served")

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def compute_a_part(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.unfinished()))
        done = self.bench.done(name)
        count = data.draw(st.integers(1, len(self.bench.tokens[name]) - done))
        FIRED["compute a part"] += self.compute(name, count)

    @precondition(lambda self: self.unfinished())
    @rule()
    def compute_to_the_checkpoints(self) -> None:
        for name in self.unfinished():
            FIRED["compute to the checkpoints"] += self.to_the_checkpoints(name)

    def to_the_checkpoints(self, name: str) -> bool:
        stops = [*self.bench.opened(name).answer.checkpoints, len(self.bench.tokens[name])]
        for stop in stops:
            while self.bench.done(name) < stop:
                if not self.compute(name, stop - self.bench.done(name)):
                    return False
        return True

    @precondition(lambda self: self.finished())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def extend_and_generate(self, data: st.DataObject, tokens: list[int]) -> None:
        name = data.draw(st.sampled_from(self.finished()))
        answer = self.bench.pool.extend(name, len(tokens))
        FIRED[f"extend {type(answer).__name__}"] += 1
        if isinstance(answer, Ready):
            for token in tokens:
                if not self.bench.pool.room(name):
                    break
                self.bench.tokens[name].append(token)
                self.compute(name, 1)

    @precondition(lambda self: self.finished() and not self.plain.has_states)
    @rule(accepted=st.integers(0, 2))
    def draft(self, accepted: int) -> None:
        for name in self.finished():
            if not isinstance(self.bench.pool.extend(name, 3), Ready):
                continue
            if self.bench.pool.room(name) >= 3:
                before = self.bench.done(name)
                self.bench.tokens[name] += [1] * (1 + accepted)
                self.bench.step(name, 1 + accepted, [7] * (2 - accepted))
                self.noted(name, before)
                FIRED["draft"] += 1
            self.bench.pool.truncate(name, len(self.bench.tokens[name]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live))
        FIRED["close"] += 1
        FIRED["close before the end"] += name in self.unfinished()
        self.bench.close(name)

    @precondition(lambda self: hasattr(self, "bench"))
    @rule(
        sequence=st.sampled_from(SEQUENCES),
        pages=st.integers(1, 3),
        tenant=st.sampled_from("xxy"),
        often=st.integers(0, 1),
    )
    def drop(self, sequence: list[int], pages: int, tenant: str, often: int) -> None:
        if often:
            return
        space = Namespace(SIZE, model="m", tenant=tenant, epoch=self.bench.pool.epoch)
        prefix: Prefix = (space, *sequence[: pages * SIZE])
        gone = self.bench.pool.drop(list(prefix[1:]), space)
        if gone or not self.evicted():
            self.plain.drop(prefix)
        FIRED["drop"] += 1
        FIRED["drop of something"] += gone > 0
        for name in self.live:
            opened = self.bench.opened(name)
            has = opened.sealed * SIZE if self.has_full else opened.committed
            if has >= pages * SIZE and self.prefix(name, pages * SIZE) == prefix:
                self.lost.add(name)

    @precondition(lambda self: hasattr(self, "bench"))
    @rule(often=st.integers(0, 5))
    def raise_epoch(self, often: int) -> None:
        if often:
            return
        self.bench.pool.raise_epoch()
        FIRED["raise the epoch"] += 1
        self.lost |= set(self.live)

    @invariant()
    def everyone_reads_its_own(self) -> None:
        """All that the next step of each request would read; and nobody has more than was said."""
        for name in self.live:
            tokens = self.bench.tokens[name]
            least = self.bench.pool.limits.request_frames(len(tokens) + 6)
            assert self.bench.used(name) <= least
            if self.bench.pool.room(name):
                view = self.bench.pool.bind({name: 1})
                assert self.bench.model.wrong(view, 0, tokens[: self.bench.done(name)]) == []

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.idle()


RULES = (
    *("open Ready", "open Busy", "open with a hit", "open without reading"),
    "open before any eviction, with a hit",
    *("serve", "compute a part", "compute to the checkpoints", "extend Ready", "draft"),
    *("close", "close before the end", "drop", "drop of something", "raise the epoch"),
)


def test_groups_equal_the_plain_sets_of_prefixes(make_groups: Any) -> None:
    GroupsMachine.bench_type = make_groups
    run_state_machine_as_test(
        GroupsMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=28,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert {name: FIRED[name] for name in RULES if FIRED[name] < 50} == {}
    assert min(FIRED[name] for name in ("several", "windows", "all", "no full")) >= 30


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_groups_equal_the_plain_sets_of_prefixes_for_long(make_groups: Any) -> None:
    """Random, not derandomised: every run goes elsewhere, and a failure prints how to come back."""
    GroupsMachine.bench_type = make_groups
    run_state_machine_as_test(
        GroupsMachine,
        settings=settings(
            max_examples=3000,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
