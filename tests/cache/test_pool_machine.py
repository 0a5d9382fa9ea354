"""`PagePool` against the plain-dict pool and the fingerprint model, under random requests.

After every step every open request reads exactly its own KV, both pools give the same answers and have
the same frames free and cached, and every invariant holds.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
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

from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import Busy, Flags, NeverFits, PagePool, Ready
from stepwell.core.frames import Frames
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.testing.fingerprint import Fingerprint, geometry, reference
from stepwell.testing.model import DictPool

FIRED: collections.Counter[str] = collections.Counter()
MOVED: collections.Counter[tuple[Status, Status]] = collections.Counter()

# Prompts follow one of two sequences for a while and then go their own way: they meet, part, meet again.
SEQUENCES = ([0] * 26, [0, 1, 1, 0, 1] * 5)
TOKENS = st.integers(0, 1)
PROMPTS = st.builds(
    lambda sequence, cut, tail: [*sequence[:cut], *tail],
    st.sampled_from(SEQUENCES),
    st.sampled_from([1, 2, 3, 4, 5, 6, 8, 11, 16, 22]),
    st.lists(TOKENS, max_size=3),
)
NAMES = st.sampled_from("abcdef")


def counted_moves(frames: Frames) -> None:
    """Counts every transition that the pool makes."""
    reserve, move = frames.reserve, frames.move

    def counting_reserve(n: int) -> Any:
        taken = reserve(n)
        MOVED[Status.FREE, Status.FILLING] += 0 if taken is None else len(taken)
        return taken

    def counting_move(which: Any, after: Status) -> None:
        before = frames.status[which].copy()
        move(which, after)
        for one in before.tolist():
            MOVED[Status(one), after] += 1

    frames.reserve, frames.move = counting_reserve, counting_move


class PoolMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 2, 3]), frames=st.integers(4, 12))
    def make(self, size: int, frames: int) -> None:
        positions = frames * size
        capacity = frames * geometry().page_bytes(size)
        self.size = size
        self.pool = PagePool(
            geometry(), PoolSettings(size, capacity, 4, positions, debug=True), device="numpy"
        )
        np.random.default_rng(frames).shuffle(self.pool._held.frames._stack)
        counted_moves(self.pool._held.frames)
        self.model = DictPool(size, frames, 4, positions)
        self.compute = Fingerprint()
        self.spaces = [Namespace(size, model=name) for name in "ab"]
        self.live: dict[str, list[int]] = {}

    def missing(self, name: str) -> int:
        return len(self.live[name]) - self.pool._held.requests[name].committed

    @rule(tokens=PROMPTS, space=st.integers(0, 1))
    def serve(self, tokens: list[int], space: int) -> None:
        """A request that comes and goes at once, so that there is something to hit."""
        self.open("served", tokens, space, Flags.NONE)
        if "served" not in self.live:
            return
        FIRED["serve"] += 1
        self.run({"served": self.missing("served")})
        del self.live["served"]
        self.pool.close("served")
        self.model.close("served")

    def open(self, name: str, tokens: list[int], space: int, flags: Flags) -> None:
        answer = self.pool.open(name, tokens, self.spaces[space], flags)
        expected = self.model.open(name, tokens, space, flags)
        assert type(answer) is type(expected)
        FIRED[f"open {type(answer).__name__}"] += 1
        if not isinstance(answer, NeverFits):
            assert answer == expected
        if isinstance(answer, Ready):
            FIRED["open with a hit"] += answer.cached > 0
            self.live[name] = list(tokens)

    @rule(
        name=NAMES,
        tokens=PROMPTS,
        space=st.integers(0, 1),
        flags=st.sampled_from([Flags.NONE, Flags.NONE, Flags.NO_READ, Flags.NO_WRITE]),
    )
    def open_and_stay(self, name: str, tokens: list[int], space: int, flags: Flags) -> None:
        if name not in self.live:
            self.open(name, tokens, space, flags)

    def run(self, batch: dict[str, int]) -> None:
        """One step of the engine: bind, compute, commit."""
        FIRED["step"] += 1
        FIRED["step of several"] += len(batch) > 1
        view = self.pool.bind(batch)
        pieces = []
        for name, count in batch.items():
            done = self.pool._held.requests[name].committed
            pieces.append(self.live[name][done : done + count])
        self.compute.step(view, pieces)
        for name, piece in zip(batch, pieces, strict=True):
            self.pool.commit(name, piece)
            self.model.commit(name, piece)

    @precondition(lambda self: any(self.missing(name) for name in self.live))
    @rule(data=st.data())
    def step_in_pieces(self, data: st.DataObject) -> None:
        missing = {name: self.missing(name) for name in sorted(self.live) if self.missing(name)}
        self.run({name: data.draw(st.integers(1, most)) for name, most in missing.items()})

    @precondition(lambda self: any(self.missing(name) for name in self.live))
    @rule()
    def step_to_the_end(self) -> None:
        self.run({name: self.missing(name) for name in sorted(self.live) if self.missing(name)})

    @rule(tokens=PROMPTS, space=st.integers(0, 1))
    def two_equal_prompts_in_one_step(self, tokens: list[int], space: int) -> None:
        for name in "ab":
            if name not in self.live:
                self.open(name, tokens, space, Flags.NONE)
        missing = {name: self.missing(name) for name in sorted(self.live) if self.missing(name)}
        if missing:
            self.run(missing)

    @rule(pages=st.integers(1, 4))
    def everybody_grows(self, pages: int) -> None:
        for name in sorted(self.live):
            if not self.missing(name):
                self.grow(name, [1] * (pages * self.size))

    @precondition(lambda self: any(not self.missing(name) for name in self.live))
    @rule(
        data=st.data(), tokens=st.sampled_from(([0], [1, 0], [0, 1, 1], [0] * 5, [1] * 9, [0] * 30))
    )
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        ready = [name for name in sorted(self.live) if not self.missing(name)]
        self.grow(data.draw(st.sampled_from(ready)), tokens)

    def grow(self, name: str, tokens: list[int]) -> None:
        answer = self.pool.extend(name, len(tokens))
        expected = self.model.extend(name, len(tokens))
        FIRED[f"extend {type(answer).__name__}"] += 1
        assert expected == (
            True if isinstance(answer, Ready) else False if isinstance(answer, Busy) else None
        )
        if isinstance(answer, Ready):
            self.live[name] = [*self.live[name], *tokens]
            self.run({name: len(tokens)})

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        FIRED["close"] += 1
        FIRED["close before the end"] += self.missing(name) > 0
        del self.live[name]
        self.pool.close(name)
        self.model.close(name)

    @rule(sequence=st.sampled_from(SEQUENCES), pages=st.integers(1, 3), space=st.integers(0, 1))
    def drop(self, sequence: list[int], pages: int, space: int) -> None:
        prefix = sequence[: pages * self.size]
        gone = self.pool.drop(prefix, self.spaces[space])
        FIRED["drop"] += gone > 0
        assert gone == self.model.drop(prefix, space)

    @invariant()
    def frames_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()
        assert stats["frames_free"] == self.model.free()
        assert stats["frames_cached"] == self.model.evictable()

    @invariant()
    def everyone_reads_its_own(self) -> None:
        for name, tokens in getattr(self, "live", {}).items():
            state = self.pool._held.requests[name]
            slots = self.pool._held.table.slots[state.row, : state.committed]
            pair = self.pool.planes[0]
            read = np.stack((pair.k[:, slots, 0, 0], pair.v[:, slots, 0, 0]), axis=1)
            assert np.array_equal(read, reference(tokens[: state.committed]))


RULES = (
    "open Ready",
    "open Busy",
    "open NeverFits",
    "open with a hit",
    "serve",
    "step",
    "step of several",
    "extend Ready",
    "extend Busy",
    "extend NeverFits",
    "close",
    "close before the end",
    "drop",
)


def test_the_pool_equals_the_plain_dict_pool() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert {name: FIRED[name] for name in RULES if FIRED[name] < 50} == {}
    made = {
        (Status.FREE, Status.FILLING),
        (Status.FILLING, Status.SEALED),
        (Status.FILLING, Status.FREE),
        (Status.SEALED, Status.LEAVING),
        (Status.LEAVING, Status.FREE),
    }
    # A pool without tiers quarantines nothing; the machine of frames makes those transitions.
    assert set(MOVED) == made
    assert {move: MOVED[move] for move in made if MOVED[move] < 50} == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_pool_equals_the_plain_dict_pool_for_long() -> None:
    """Random, not derandomised: every run goes elsewhere, and a failure prints how to come back."""
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=3000,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
