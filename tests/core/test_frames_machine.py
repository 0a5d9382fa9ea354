"""Frames against a dict, over every step that a frame can make."""

from collections import Counter

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

from stepwell.base.errors import MisuseError
from stepwell.core.check import Findings
from stepwell.core.frames import Frames
from stepwell.core.page import LEGAL, Status

COUNT = 10
FIRED: Counter[str] = Counter()
MOVES: Counter[tuple[Status, Status]] = Counter()
IN_USE = (Status.FILLING, Status.SEALED, Status.LEAVING)


class Recorded(Frames):
    """Frames that note every step they really made."""

    def reserve(self, n):
        taken = super().reserve(n)
        if taken is not None:
            MOVES[Status.FREE, Status.FILLING] += len(taken)
        return taken

    def move(self, frames, after):
        before = [Status(int(self.status[f])) for f in frames if 0 <= f < self.count]
        super().move(frames, after)
        MOVES.update((one, after) for one in before)


class FramesMachine(RuleBasedStateMachine):
    """`status` and `lives` are the model: what each frame must be, and how often it was freed."""

    def __init__(self):
        super().__init__()
        self.frames = Recorded(COUNT)
        self.status = dict.fromkeys(range(COUNT), Status.FREE)
        self.lives = dict.fromkeys(range(COUNT), 0)

    @initialize(sealed=st.integers(0, 5), leaving=st.integers(0, 2))
    def begin(self, sealed, leaving):
        """Somewhere in the middle: few walks of this length would reach the later steps often."""
        taken = self.frames.reserve(6)
        for count, after in ((sealed, Status.SEALED), (min(sealed, leaving), Status.LEAVING)):
            self.frames.move(taken[:count], after)
            self.status.update(dict.fromkeys(taken[:count].tolist(), after))
        self.status.update(dict.fromkeys(taken[sealed:].tolist(), Status.FILLING))

    def having(self, *statuses):
        return [frame for frame, status in self.status.items() if status in statuses]

    def some(self, data, *statuses):
        among = self.having(*statuses)
        few = st.lists(st.sampled_from(among), min_size=1, max_size=4, unique=True)
        return data.draw(few | st.just(among), label="frames")

    def step(self, name, data, before, after):
        frames = self.some(data, before)
        self.frames.move(np.array(frames, np.int32), after)
        for frame in frames:
            self.status[frame] = after
            self.lives[frame] += after is Status.FREE
        FIRED[name] += 1

    @rule(n=st.integers(0, 4) | st.just(COUNT))
    def reserve(self, n):
        taken = self.frames.reserve(n)
        free = self.having(Status.FREE)
        if n > len(free):
            assert taken is None
            FIRED["reserve refused"] += 1
            return
        assert len(set(taken.tolist())) == len(taken) == n
        assert set(taken.tolist()) <= set(free)
        self.status.update(dict.fromkeys(taken.tolist(), Status.FILLING))
        FIRED["reserve"] += 1

    @precondition(lambda self: self.having(Status.FILLING))
    @rule(data=st.data())
    def seal(self, data):
        self.step("seal", data, Status.FILLING, Status.SEALED)

    @precondition(lambda self: self.having(Status.FILLING))
    @rule(data=st.data())
    def abort(self, data):
        self.step("abort", data, Status.FILLING, Status.FREE)

    @precondition(lambda self: self.having(Status.SEALED))
    @rule(data=st.data())
    def leave(self, data):
        self.step("leave", data, Status.SEALED, Status.LEAVING)

    @precondition(lambda self: self.having(Status.LEAVING))
    @rule(data=st.data())
    def release(self, data):
        self.step("release", data, Status.LEAVING, Status.FREE)

    @precondition(lambda self: self.having(*IN_USE))
    @rule(data=st.data())
    def quarantine(self, data):
        among = sorted({self.status[frame] for frame in self.having(*IN_USE)})
        before = data.draw(st.sampled_from(among), label="status")
        self.step("quarantine", data, before, Status.QUARANTINED)

    @precondition(lambda self: self.having(Status.QUARANTINED))
    @rule(data=st.data())
    def clear(self, data):
        self.step("clear", data, Status.QUARANTINED, Status.FREE)

    @rule(data=st.data(), after=st.sampled_from([s for s in Status if s is not Status.FILLING]))
    def refused(self, data, after):
        """One bad frame in a batch of good ones: nothing moves."""
        good = [f for f, before in self.status.items() if (before, after) in LEGAL]
        bad = [f for f in self.status if f not in good] + [-1, COUNT, *good[:1]]
        batch = good.copy()
        place = data.draw(st.integers(0, len(good)), label="place")
        batch.insert(place, data.draw(st.sampled_from(bad), label="bad"))
        with pytest.raises(MisuseError, match="frame"):
            self.frames.move(np.array(batch, np.int32), after)
        FIRED["refused"] += 1

    @invariant()
    def as_the_model(self):
        findings = Findings()
        self.frames.check(findings)
        findings.raise_if_any()
        assert self.frames.status.tolist() == list(self.status.values())
        assert self.frames.generation.tolist() == list(self.lives.values())
        assert self.frames.free == len(self.having(Status.FREE))
        expected = {status: len(self.having(status)) for status in Status}
        assert self.frames.census() == expected


RULES = (
    "reserve",
    "reserve refused",
    "seal",
    "abort",
    "leave",
    "release",
    "quarantine",
    "clear",
    "refused",
)


def test_frames_do_what_a_dict_does():
    FIRED.clear()
    MOVES.clear()
    run_state_machine_as_test(
        FramesMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=32,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A machine that never gets somewhere proves nothing about it.
    assert {name: FIRED[name] for name in RULES if FIRED[name] < 50} == {}
    assert set(MOVES) == LEGAL
    assert {step: MOVES[step] for step in LEGAL if MOVES[step] < 50} == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_frames_do_what_a_dict_does_for_long() -> None:
    """Random, not derandomised: every run goes elsewhere, and a failure prints how to come back."""
    run_state_machine_as_test(
        FramesMachine,
        settings=settings(
            max_examples=3000,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
