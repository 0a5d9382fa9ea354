"""H1 to H20: what a host prefix cache got wrong, run by an engine that has nothing but `TieredStore`."""

from __future__ import annotations

import importlib.util
import pathlib
import random

import numpy as np
import pytest

from stepwell.base.settings import HostSettings
from stepwell.cache.store import TieredStore
from stepwell.core.chain import Chain
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.reasons import Reason
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import FakeDevice, FakePlace
from stepwell.testing.faults import FaultKind, FaultyPlace, PlannedFault
from stepwell.tiers.host import HostSize

_PATH = pathlib.Path(__file__).parents[2] / "examples" / "byte_engine.py"
_SPEC = importlib.util.spec_from_file_location("byte_engine", _PATH)
byte_engine = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(byte_engine)

PAGE = byte_engine.PAGE
EACH = HostSize(byte_engine.BYTES, (0, byte_engine.BYTES), 1).each_bytes


class Engine(byte_engine.ByteEngine):
    """The example, whose mover is driven by its waits, on any place and clock."""

    def __init__(self, frames=64, *, script=(), device=None, blocks=256, **settings):
        settings = HostSettings(capacity_bytes=frames * EACH, debug=True, **settings)
        super().__init__(settings, blocks)
        assert self.store.close()
        self.clock = FakeClock()
        self.space = Namespace(PAGE, model="weights")
        self.colds = 0
        place = self.place
        if device is not None:
            place = FakePlace(place, device.out, device.into)
        place = FaultyPlace(place, script)
        self.store = TieredStore.local(
            byte_engine.MODEL, [place], settings, clock=self.clock, threads=False
        )
        self.ledger = self.store.ledger
        self.mover = self.store._joints[0].mover
        self.mover.host.wait()
        self.mover.look()
        assert self.ledger.stats()["frames_free"] == frames

    def wait(self):
        self.move()
        super().wait()

    def move(self):
        while self.mover.work():
            pass

    def serve(self, name, prompt, count=4, space=None):
        """Answers, and moves all that is on its way; what was cached. The answer is that of an engine without tiers."""
        said, cached = self.answer(name, prompt, count, space or self.space)
        self.settle()
        assert said == self.cold(prompt, count), name
        return cached

    def settle(self):
        self.move()
        self.wait()
        assert self.ledger.in_flight == 0

    @staticmethod
    def cold(prompt, count):
        """What the model says when it computes everything."""
        alone = byte_engine.ByteEngine.__new__(byte_engine.ByteEngine)
        alone.blocks = np.zeros((256, byte_engine.BYTES), np.uint8)
        alone.rings = np.zeros((1, byte_engine.BYTES), np.uint8)
        alone.free = {"blocks": list(range(256)), "rings": []}
        alone.restore = lambda *_: (np.empty(0, np.int32), alone.rings[0], 0)
        alone.save = lambda *_: None
        return alone.answer("cold", prompt, count, Namespace(PAGE, model="weights"))[0]

    def known(self, tokens):
        """Leading pages of a prompt that the tier has."""
        chain = Chain(self.space, tokens)
        return self.ledger._stock.prefixes.closed.longest(chain, chain.pages)

    def idle(self):
        """Everything that the engine has is free again, and nothing in the tier is held."""
        self.settle()
        assert sorted(self.free["blocks"]) == list(range(len(self.blocks)))
        assert len(self.free["rings"]) == byte_engine.RINGS
        stats = self.store.stats()
        assert (stats["frames_held"], stats["plans_open"]) == (0, 0)
        assert self.ledger._stock.frames.census()[Status.FILLING] == 0


@pytest.fixture
def make():
    made = []

    def engine(*args, **more):
        made.append(Engine(*args, **more))
        return made[-1]

    yield engine
    for one in made:
        one.idle()
        assert one.store.close()


def prompt_of(pages, seed=1):
    choose = random.Random(seed)
    return [choose.randrange(1000) for _ in range(pages * PAGE)]


def test_h01_saving_looks_at_each_page_a_fixed_number_of_times(make):
    looks = {}
    for pages in (50, 100, 200):
        engine = make(frames=300)
        contents = engine.ledger._stock.prefixes.closed._contents
        find, asked = contents.find, []
        contents.find = lambda key, find=find, asked=asked: asked.append(key) or find(key)
        engine.serve("a", prompt_of(pages), 1)
        looks[pages] = len(asked)
    assert looks[200] - looks[100] <= 2.2 * (looks[100] - looks[50])


def test_h02_tails_leave_before_heads(make):
    engine = make(frames=24)
    first = prompt_of(16)
    engine.serve("a", first, 1)
    before = engine.known(first)
    engine.serve("b", prompt_of(10, seed=2), 1)
    assert 0 < engine.known(first) < before
    assert engine.known(prompt_of(10, seed=2)) == 10


def test_h03_a_prompt_that_exceeds_the_tier_keeps_its_own_head(make):
    engine = make(frames=20)
    long = prompt_of(32)
    engine.serve("a", long[: 12 * PAGE], 1)
    engine.serve("b", long, 1)
    assert engine.known(long) >= 17
    assert engine.serve("c", long, 1) > 0


def test_h04_a_name_that_comes_back_with_other_tokens_finds_nothing_of_its_former_life(make):
    engine = make()
    assert engine.serve("same", prompt_of(8)) == 0
    assert engine.serve("same", prompt_of(8, seed=2)) == 0
    engine.store.match("same", Chain(engine.space, prompt_of(8)), 7)
    assert engine.serve("same", prompt_of(8, seed=3)) == 0


def test_h05_a_prompt_that_went_on_differently_reuses_what_is_common_only(make):
    engine = make()
    common = prompt_of(16)
    engine.serve("same", common + prompt_of(4, seed=2))
    assert engine.serve("same", common + prompt_of(4, seed=3)) <= len(common)
    assert engine.serve("same", common + prompt_of(4, seed=4)) == len(common)


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.LATE])
def test_h06_a_save_that_fails_leaves_nothing_behind(make, kind):
    gate = PlannedFault(kind, "copy_out", at=0)
    engine = make(script=[gate])
    engine.answer("a", prompt_of(8), 4, engine.space)
    engine.move()
    engine.clock.advance_s(60)
    engine.mover.look()
    engine.store.step()
    assert engine.known(prompt_of(8)) == 0
    gate.gate.set()
    engine.settle()
    assert engine.ledger._stock.frames.free == 64
    assert engine.serve("a", prompt_of(8)) == 0
    assert engine.serve("a", prompt_of(8)) > 0


def test_h07_a_load_that_fails_gives_back_all_it_took(make):
    engine = make(script=[PlannedFault(FaultKind.RAISE, "copy_in", at=n) for n in range(2)])
    engine.serve("a", prompt_of(8))
    assert engine.serve("a", prompt_of(8)) > 0  # the third try
    engine.idle()


def test_h08_faults_that_are_far_between_disable_nothing_and_an_open_breaker_closes_again(make):
    script = [PlannedFault(FaultKind.RAISE, "copy_out", at=n) for n in (0, 2, 4, 5, 6, 7)]
    engine = make(script=script, breaker_faults=3, breaker_rest_ms=1000)
    for turn in range(4):  # every other one fails
        engine.serve("a", prompt_of(4, seed=turn), 1)
    assert engine.store.stats()["breaker_opened"] == 0
    for turn in range(4, 8):
        engine.serve("a", prompt_of(4, seed=turn), 1)
    stats = engine.store.stats()
    assert (stats["breaker_opened"], stats["breaker_open"]) == (1, 1)
    match = engine.store.match("a", Chain(engine.space, prompt_of(4, seed=1)), 4)
    assert (match.pages, match.reason) == (0, Reason.TIER_DOWN)
    engine.clock.advance_s(1.1)
    engine.serve("a", prompt_of(4, seed=9), 1)  # the last that fails: it rests once more
    engine.clock.advance_s(1.1)
    engine.serve("a", prompt_of(4, seed=10), 1)
    assert engine.store.stats()["breaker_open"] == 0
    assert engine.serve("a", prompt_of(4, seed=10), 1) > 0


def test_h09_a_shared_beginning_with_other_tails_hits(make):
    engine = make(frames=200)
    shared = prompt_of(12)
    cached = [engine.serve(f"{n}", shared + prompt_of(5, seed=n)) for n in range(10, 14)]
    assert cached[0] == 0
    assert cached[2:] == [len(shared)] * 2


@pytest.mark.parametrize("more", [0, 1, 3, 16, 48])
def test_h10_follow_ups_of_every_length_hit(make, more):
    engine = make(frames=200)
    prompt = prompt_of(16)
    engine.serve("a", prompt, 24)
    assert engine.serve("b", prompt + prompt_of(12, seed=2)[:more], 1) >= len(prompt) - PAGE


def test_h11_no_record_stays_without_its_page_nor_the_other_way_round(make):
    engine = make(frames=14)
    for turn in range(30):
        engine.serve("a", prompt_of(2 + turn % 5, seed=turn % 7), 1)
        engine.ledger.check()  # a record whose page is not found is a broken invariant
        stats = engine.store.stats()
        assert stats["frames_free"] + stats["frames_cached"] == 14
    assert any(engine.serve("a", prompt_of(2 + n % 5, seed=n % 7), 1) for n in range(29, 20, -1))


def test_h12_nobody_elses_prefix_is_found(make):
    engine = make()
    spaces = [
        engine.space,
        Namespace(PAGE, model="weights", tenant="other"),
        Namespace(PAGE, model="other weights"),
        Namespace(PAGE, model="weights", adapter="digest"),
        Namespace(PAGE, model="weights", epoch=1),
        Namespace(PAGE, model="weights", facts=(("kv", "fp8"),)),
    ]
    assert [engine.serve("a", prompt_of(6), space=one) for one in spaces] == [0] * 6
    assert all(engine.serve("a", prompt_of(6), space=one) for one in spaces)


def test_h13_what_is_on_its_way_is_neither_found_nor_sent_again(make):
    engine = make()
    prompt = prompt_of(8)
    engine.answer("a", prompt, 1, engine.space)
    assert engine.store.match("b", Chain(engine.space, prompt), 7).pages == 0
    before = engine.ledger._stock.frames.free
    said, cached = engine.answer("b", prompt, 1, engine.space)
    assert (said, cached) == (engine.cold(prompt, 1), 0)
    assert engine.ledger._stock.frames.free == before
    engine.settle()
    assert engine.serve("c", prompt, 1) == 28


def test_h14_pages_that_arrived_unheard_can_make_room(make):
    engine = make(frames=16)
    for turn in range(6):
        engine.answer("a", prompt_of(8, seed=turn), 1, engine.space)
        engine.move()  # nobody polls
        assert engine.known(prompt_of(8, seed=turn)) == 8
    assert engine.store.stats()["frames_without_room"] == 0


def test_h15_a_short_prompt_moves_nothing_and_memory_comes_without_the_engine(make):
    engine = make()
    assert engine.serve("a", [1, 2], 1) == 0
    stats = engine.store.stats()
    assert (stats["pages_saved"], stats["frames_free"]) == (0, 64)
    settings = HostSettings(capacity_bytes=64 * EACH)
    store = TieredStore.local(byte_engine.MODEL, [engine.place], settings, threads=False)
    assert store.stats()["frames_free"] == 0  # made, and nothing of it waited for
    store._joints[0].mover.host.wait()
    store._joints[0].mover.look()
    assert store.stats()["frames_free"] == 64
    assert store.close()


def test_h16_asking_again_and_again_holds_once_and_counts_nothing(make):
    engine = make()
    engine.serve("a", prompt_of(8))
    chain = Chain(engine.space, prompt_of(8))
    pages = engine.store.match("b", chain, 7).pages
    first = engine.store.stats()
    for _ in range(50):
        assert engine.store.match("b", chain, 7).pages == pages
    assert engine.store.stats() == first
    engine.store.give_up("b")
    assert engine.store.stats()["frames_held"] == 0


def test_h17_room_that_cannot_be_made_changes_nothing(make):
    engine = make(frames=12, keep_percent=100)
    engine.serve("a", prompt_of(5, seed=1), 1)
    engine.serve("b", prompt_of(3, seed=2), 1)
    chain = Chain(engine.space, prompt_of(5, seed=1))
    engine.store.keep("all", chain)
    policy = engine.ledger._stock.prefixes._policy
    asked = []
    victim = policy.victim
    policy.victim = lambda: asked.append(1) or victim()
    assert engine.store.match("held", Chain(engine.space, prompt_of(3, seed=2)), 3).pages == 3
    before = engine.store.stats()
    engine.serve("c", prompt_of(30, seed=3), 1)
    assert len(asked) <= 12 - before["frames_held"]
    assert engine.known(prompt_of(5, seed=1)) >= 3
    engine.store.give_up("held")
    engine.store.unkeep("all")


def test_h18_the_engine_goes_on_while_copies_wait(make):
    device = FakeDevice()
    engine = make(device=device)
    said, _ = engine.answer("a", prompt_of(8), 4, engine.space)
    engine.move()
    assert device.out.queued > 0
    other, _ = engine.answer("b", prompt_of(8, seed=2), 4, engine.space)
    assert said == engine.cold(prompt_of(8), 4)
    assert other == engine.cold(prompt_of(8, seed=2), 4)
    assert engine.known(prompt_of(8)) == 0
    device.out.free_run()
    device.into.free_run()
    engine.settle()
    assert engine.serve("a", prompt_of(8)) > 0


def test_h19_an_end_on_one_stream_is_no_end_on_another(make):
    device = FakeDevice()
    engine = make(device=device)
    device.out.free_run()
    device.into.free_run()
    engine.serve("a", prompt_of(8))
    device.out.free_run(free=False)
    engine.answer("b", prompt_of(8, seed=2), 1, engine.space)
    engine.move()
    _, cached = engine.answer("a", prompt_of(8), 4, engine.space)
    assert cached > 0
    assert engine.known(prompt_of(8, seed=2)) == 0  # its own stream has not moved
    device.out.free_run()
    engine.settle()
    assert engine.known(prompt_of(8, seed=2)) == 8


def test_h20_answers_are_kept_too_nothing_is_remembered_of_requests_and_all_of_it_is_in_the_budget(
    make,
):
    engine = make(frames=40)
    prompt = prompt_of(6)
    said, _ = engine.answer("a", prompt, 16, engine.space)
    engine.settle()
    assert engine.serve("b", [*prompt, *said, 5]) >= len(prompt) + len(said) - PAGE
    for turn in range(100):
        engine.serve(f"request {turn}", prompt_of(5, seed=turn), 1)
    ledger = engine.ledger
    assert (len(ledger._saves), len(ledger._loads), ledger.in_flight) == (0, 0, 0)
    assert not ledger._loads._waiting
    assert not engine._moving
    stats = engine.store.stats()
    assert stats["frames_free"] + stats["frames_cached"] == 40
