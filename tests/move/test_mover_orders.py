"""A mover in every order of events: a frame is what was sealed, or it is not there."""

import threading
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.core.plan import Grown, Outcome, Verb

SAVE, LOAD, WIPE = Verb.SAVE, Verb.LOAD, Verb.WIPE
OK, MISS, TIMEOUT = Outcome.OK, Outcome.MISS, Outcome.TIMEOUT
LATE_S = 1.0
"""Deadline of the plans of a bench."""


class Ledger:
    """What a ledger may do with a mover, and what it may rely on; a fingerprint for every page.

    A source is overwritten in the very moment in which it is released, and memory is given to the next plan as soon
    as it is clear.
    """

    def __init__(self, bench, seed):
        self.bench, self.random = bench, Random(seed)
        self.content = {}  # frame of the tier: number of its key
        self.open = {}
        self.pages = 0
        self.host = set(range(len(bench.rows)))
        self.device = set(range(len(bench.rows)))
        self.loading = {}
        self.ended = []
        self.lock = threading.RLock()  # reports come from threads
        bench.telling = self.told

    def fingerprint(self, page):
        return np.random.default_rng(page).integers(0, 256, 256, np.uint8)

    def take(self, frames):
        count = self.random.randint(1, min(4, len(frames))) if frames else 0
        chosen = self.random.sample(sorted(frames), count)
        frames.difference_update(chosen)
        return chosen

    def begin(self, verb, inside, outside, pages, within_ms):
        plan = self.bench.plan(verb, inside, outside, keys=pages, within_ms=within_ms)
        source = verb is SAVE
        self.open[plan.number] = {"plan": plan, "pages": pages, "outcomes": None, "source": source}
        self.bench.mover.take(plan)

    def save(self, within_ms=1000):
        inside = self.take(self.host)
        outside = self.take(self.device)
        count = min(len(inside), len(outside))
        self.host.update(inside[count:])
        self.device.update(outside[count:])
        inside, outside = inside[:count], outside[:count]
        pages = list(range(self.pages, self.pages + count))
        self.pages += count
        for frame, page in zip(outside, pages, strict=True):
            self.bench.rows[frame] = self.fingerprint(page)
        for frame in inside:
            self.content.pop(frame, None)
        if count:
            self.begin(SAVE, inside, outside, pages, within_ms)

    def load(self, within_ms=1000):
        known = sorted(self.content)
        outside = self.take(self.device)
        count = min(len(known), len(outside))
        self.device.update(outside[count:])
        inside = self.random.sample(known, count)
        for frame in inside:
            self.loading[frame] = self.loading.get(frame, 0) + 1
            self.host.discard(frame)
        self.bench.rows[outside[:count]] = 0xFF
        if count:
            pages = [self.content[frame] for frame in inside]
            self.begin(LOAD, inside, outside[:count], pages, within_ms)

    def wipe(self, within_ms=1000):
        inside = self.take(self.host)
        for frame in inside:
            self.content.pop(frame, None)
        if inside:
            self.begin(WIPE, inside, None, inside, within_ms)

    def told(self, report):
        if isinstance(report, Grown):
            return
        with self.lock:
            self.hear(report)

    def hear(self, report):
        one = self.open[report.plan]
        plan, verb = one["plan"], one["plan"].verb
        if one["source"]:
            one["source"] = False
            self.bench.rows[plan.outside] = 0xEE
            self.device.update(plan.outside.tolist())
        elif report.outcomes is None:
            assert report.clear, "released twice"
        if report.outcomes is not None:
            assert one["outcomes"] is None, "ended twice"
            one["outcomes"] = report.outcomes.tolist()
            assert set(one["outcomes"]) <= {OK, TIMEOUT}
            self.end(one, verb)
        if report.clear:
            assert one["outcomes"] is not None, "clear before its end"
            del self.open[report.plan]
            self.clear(one, verb)

    def end(self, one, verb):
        inside, outside = one["plan"].inside.tolist(), one["plan"].outside
        self.ended += one["outcomes"]
        for index, outcome in enumerate(one["outcomes"]):
            if outcome != OK:
                continue
            if verb is SAVE:
                self.content[inside[index]] = one["pages"][index]
                self.host.add(inside[index])
                assert self.bench.named(inside[index], keys=[one["pages"][index]]) == [OK]
            elif verb is LOAD:
                there = self.bench.rows[outside[index]]
                assert np.array_equal(there, self.fingerprint(one["pages"][index]))
            else:
                assert not self.bench.host.row(inside[index]).any()

    def clear(self, one, verb):
        inside = one["plan"].inside.tolist()
        if verb is LOAD:
            self.bench.rows[one["plan"].outside] = 0xDD
            self.device.update(one["plan"].outside.tolist())
        for frame, page, outcome in zip(inside, one["pages"], one["outcomes"], strict=True):
            if verb is LOAD:
                self.loading[frame] -= 1
                if not self.loading[frame]:
                    self.host.add(frame)
            elif verb is WIPE or outcome != OK:
                self.host.add(frame)
                assert self.bench.named(frame, keys=[page]) == [MISS]

    def whole(self):
        """Everything is over: what the ledger believes to be there is there."""
        assert self.bench.mover.health.faults == ()
        assert self.open == {}
        assert self.bench.mover.idle
        assert len(self.host) == len(self.device) == len(self.bench.rows)
        for frame, page in self.content.items():
            assert np.array_equal(self.bench.host.row(frame), self.fingerprint(page))
        here = [entry.slot for entry in self.bench.host.scan()]
        assert here == sorted(self.content)


ACTIONS = ("save", "load", "wipe", "brief", "work", "out", "into", "look", "late")


def act(ledger, action):
    bench = ledger.bench
    if action in ("save", "load", "wipe"):
        getattr(ledger, action)()
    elif action == "brief":
        ledger.random.choice([ledger.save, ledger.load])(within_ms=1)
    elif action == "work":
        bench.mover.work()
    elif action in ("out", "into"):
        getattr(bench.device, action).advance()
    elif action == "look":
        bench.clock.advance_s(0.002)
        bench.mover.look()
    else:
        bench.clock.advance_s(LATE_S)
        bench.mover.look()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=80), st.integers(0, 2**32), st.integers(1, 3))
def test_f001_in_every_interleaving_a_frame_is_what_was_sealed_or_not_there(
    bench_of, actions, seed, at_once
):
    with bench_of(streams=True, at_once=at_once) as bench:
        ledger = Ledger(bench, seed)
        for action in actions:
            act(ledger, action)
        while bench.device.advance_all() or bench.mover.work():
            pass
        ledger.whole()


def test_the_interleavings_are_not_empty(make_bench):
    """The test before this one would hold for a mover that does nothing."""
    bench = make_bench(streams=True, at_once=2)
    ledger = Ledger(bench, 1)
    random = Random(2)
    for _ in range(2000):
        act(ledger, random.choice((*ACTIONS[:-1], "work", "work", "out", "into")))
    while bench.device.advance_all() or bench.mover.work():
        pass
    ledger.whole()
    assert ledger.ended.count(OK) > 100
    assert ledger.ended.count(TIMEOUT) > 20


@pytest.mark.parametrize("seed", range(6))
def test_f001_with_threads_a_frame_is_what_was_sealed_or_not_there(make_bench, seed):
    bench = make_bench(frames=16, streams=True, at_once=1 + seed % 3, threads=2)
    ledger, random = Ledger(bench, seed), Random(seed)
    for _ in range(400):
        with ledger.lock:
            act(ledger, random.choice(("save", "load", "wipe", "brief", "look", "look")))
        bench.device.out.wait_queued(1, 0.001)
        for _ in range(random.randint(0, 12)):
            bench.device.advance_some(random)
    for stream in bench.device.streams:
        stream.free_run()
    assert bench.wait_told(*range(1, bench._numbers + 1))
    ledger.whole()
    assert ledger.ended.count(OK) > 20
    assert bench.mover.close()
