"""Known faults of caches with more than one tier, over a pool whose mover, streams and clock a test drives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from stepwell.base.settings import HostSettings, PoolSettings
from stepwell.cache.pool import Busy, Flags, Loading, PagePool, Ready
from stepwell.cache.store import TieredStore
from stepwell.core.chain import Chain
from stepwell.core.page import Status
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import FakeDevice, FakePlace
from stepwell.testing.faults import FaultKind, FaultyPlace, PlannedFault


class Tiered:
    """A bench whose pool has a host tier; nothing moves below it but when a test says so."""

    def __init__(self, make: Any, groups: str, frames: int, host_frames: int = 200, **more: Any):
        self.device = FakeDevice()
        self.clock = FakeClock()
        script = more.pop("script", ())
        settings = HostSettings(capacity_bytes=1 << 30, debug=True, **more)
        self.bench = make(groups, frames=frames)
        before = self.bench.pool

        def store(model, places):
            self.place = FaultyPlace(
                FakePlace(places[0], self.device.out, self.device.into), script
            )
            each = places[0].frame_bytes // 4096 + 1
            sizes = HostSettings(
                **{name: getattr(settings, name) for name in HostSettings.__slots__}
                | {"capacity_bytes": host_frames * (each * 4096 + 600)}
            )
            return TieredStore.local(model, [self.place], sizes, clock=self.clock, threads=False)

        sizes = PoolSettings(
            4, frames * before.limits.frame_bytes, 4, 128, ahead_tokens=8, debug=True
        )
        self.bench.pool = self.pool = PagePool(self.bench.geometry, sizes, "numpy", tiers=store)
        self.store = self.pool.store
        self.mover = self.store._joints[0].mover
        self.mover.host.wait()
        self.mover.look()

    def settle(self) -> None:
        """Everything that is on its way arrives."""
        moves = True
        while moves:
            self.pool.step()  # what ends may begin something
            moves = self.mover.work() or self.device.advance_all() > 0
        self.pool.step()

    def ready(self, name: str, tokens: list[int], **more: Any) -> Ready:
        """Opens a request, with all that it has to wait for."""
        answer = self.bench.open(name, tokens, **more)
        while isinstance(answer, Loading) or (isinstance(answer, Busy) and self.pool.moving):
            self.settle()
            answer = self.bench.open(name, tokens, **more)
        assert isinstance(answer, Ready), answer
        return answer

    def serve(self, name: str, tokens: list[int], grow: int = 0, **more: Any) -> Ready:
        """Opens, computes (which proves all that is read), generates, closes; and all of it arrives below."""
        answer = self.ready(name, tokens, **more)
        self.bench.compute(name)
        self.bench.grow(name, grow)
        self.bench.close(name)
        self.settle()
        return answer

    def forget(self) -> None:
        """The device loses all that it may; the tier keeps what it has."""
        held = self.pool._held
        held.prefixes.evict(held.prefixes.evictable)
        held.supply.collect()

    def idle(self) -> None:
        self.settle()
        self.bench.idle()
        stats, below = self.pool.stats(), self.store.stats()
        assert (stats["frames_moving"], below["frames_held"], below["plans_open"]) == (0, 0, 0)
        self.pool.check()
        self.store.check()
        assert self.pool.end()


@pytest.fixture
def make(make_groups):
    made = []

    def tiered(groups="full", frames=12, **more):
        made.append(Tiered(make_groups, groups, frames, **more))
        return made[-1]

    yield tiered
    for one in made:
        one.idle()


def tokens_of(count: int, seed: int = 1) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(90) for _ in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_f001_a_frame_that_is_saved_is_not_written_before_it_was_read(make, seed):
    """Copies are cut into four and delayed at random, while others want the frames."""
    choose = random.Random(seed)
    world = make("full", frames=10)
    for _ in range(25):
        prompt = tokens_of(choose.randrange(4, 24), seed=choose.randrange(4))
        answer = world.bench.open("a", prompt)
        if isinstance(answer, Ready):
            world.bench.compute("a")
            world.bench.close("a")
        elif isinstance(answer, Loading) and choose.random() < 0.3:
            world.pool.give_up("a")
        for _ in range(choose.randrange(6)):
            world.mover.work()
            world.device.advance_some(choose)
    world.settle()
    world.pool.give_up("a")
    host = world.mover.host
    world.forget()
    for number in range(4):
        world.serve("b", tokens_of(23, seed=number))
    assert all(host.holds(entry.slot, 0) for entry in host.scan())


def test_f001_nothing_is_copied_before_the_step_has_written_it(make):
    """A device runs behind the commit: what is saved is what it writes, not what was there."""
    world = make("full", frames=12)
    prompt = tokens_of(13)
    pool, device = world.pool, world.device
    assert isinstance(world.bench.open("a", prompt), Ready)
    view = pool.bind({"a": 13})
    k, v = (part.copy() for part in pool._memory._both)
    world.bench.model.step(view, [prompt])
    done = [part.copy() for part in pool._memory._both]

    def arrive():
        for part, right in zip(pool._memory._both, done, strict=True):
            part[:] = right

    for part, old in zip(pool._memory._both, (k, v), strict=True):
        part[:] = old
    device.compute.enqueue("step", arrive)
    pool.commit("a", prompt, fence=device.compute.fence())
    for _ in range(20):
        world.mover.work()
        device.out.advance()
    assert device.out.queued == 0
    assert world.store.stats()["pages_saved"] == 0
    device.compute.advance_all()
    world.settle()
    assert world.store.stats()["pages_saved"] == 3
    world.bench.close("a")
    world.forget()
    assert world.serve("b", prompt).loaded == 12


@pytest.mark.parametrize("verb", ["copy_in", "copy_out"])
@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.LATE])
def test_f003_f068_a_transfer_that_fails_or_hangs_costs_a_miss_and_its_deadline(make, verb, kind):
    fault = PlannedFault(kind, verb, at=0)
    world = make("all", frames=60, script=[fault])
    prompt = tokens_of(21)
    assert world.ready("a", prompt).cached == 0
    world.bench.compute("a")
    world.bench.close("a")
    world.mover.work()
    world.device.advance_all()
    world.clock.advance_s(60)
    world.mover.look()
    world.pool.step()
    world.settle()
    world.forget()
    answer = world.bench.open("b", prompt)
    if isinstance(answer, Loading):
        world.mover.work()
        world.device.advance_all()
        world.clock.advance_s(60)
        world.mover.look()
        answer = world.bench.open("b", prompt)
    assert isinstance(answer, Ready)
    world.bench.compute("b")
    world.bench.close("b")
    fault.gate.set()


def test_f003_late_bytes_reach_nobody(make):
    """A load ends at its deadline; what it then still writes lies in frames that nobody has."""
    world = make("full", frames=12)
    prompt, other = tokens_of(21), tokens_of(40, seed=2)
    world.serve("a", prompt)
    world.forget()
    assert isinstance(world.bench.open("b", prompt), Loading)
    world.mover.work()
    assert world.device.into.queued == 4
    world.device.into.advance()
    world.clock.advance_s(60)
    world.mover.look()
    answer = world.bench.open("b", prompt)
    assert isinstance(answer, Ready | Busy)
    assert world.pool._held.frames.census()[Status.QUARANTINED] == 5
    if isinstance(answer, Ready):
        world.bench.compute("b")
        world.device.into.advance_all()
        world.bench.close("b")
    world.settle()
    assert world.pool._held.frames.census()[Status.QUARANTINED] == 0
    world.serve("c", other)


def test_f008_a_prefix_is_no_longer_than_its_second_component(make):
    """The state at the deepest boundary is gone from the tier: what remains is a shorter prefix, or none."""
    world = make("states", frames=60)
    prompt = tokens_of(33)
    assert world.serve("a", prompt).cached == 0
    world.forget()
    index = world.store.ledger._stock.prefixes.walked[0]
    deepest = max(index.records(), key=lambda record: index._places[record])
    index.forget_record(deepest)
    world.store.ledger._stock.collect()
    answer = world.serve("b", prompt)
    assert answer.cached < 32
    world.forget()
    assert world.serve("c", prompt).cached == 32


def test_f009_f012_what_was_saved_does_not_change_when_answers_grow(make):
    world = make("full", frames=30)
    prompt = tokens_of(20)
    world.serve("a", prompt)
    host = world.mover.host
    before = {entry.name: host.row(entry.slot).copy() for entry in host.scan()}
    for turn in range(4):
        world.forget()
        world.serve(f"{turn}", prompt, grow=7)
    after = {entry.name: host.row(entry.slot) for entry in host.scan()}
    assert len(before) == 5
    assert all(np.array_equal(after[name], row) for name, row in before.items())


def test_f011_nobody_gets_tokens_of_another(make):
    """Eight clients with alphabets of their own, a pool of twelve pages, a host tier four times as large."""
    world = make("full", frames=12, host_frames=48)
    choose = random.Random(3)
    prompts = {n: [n * 11 + choose.randrange(11) for _ in range(30)] for n in range(8)}
    loaded = 0
    for _ in range(60):
        client = choose.randrange(8)
        answer = world.serve(f"{client}", prompts[client][: choose.randrange(5, 30)], grow=3)
        loaded += answer.loaded
    assert loaded > 100


@pytest.mark.parametrize("groups", ["equal", "several", "windows", "all", "no full"])
def test_f024_f025_a_windowed_prefix_comes_back_with_its_window(make, groups):
    world = make(groups, frames=64)
    prompt = tokens_of(43)
    assert world.serve("a", prompt).cached == 0
    world.forget()
    assert world.serve("b", prompt).loaded == 40
    world.forget()
    for cut in (41, 37, 22, 9):  # ends between kept boundaries: shorter, or nothing, and right
        assert world.serve(f"{cut}", prompt[:cut]).cached <= cut - 1
        world.forget()


def test_f027_a_device_that_lost_its_pages_hits_what_is_below_only(make):
    """Asleep, awake: what was on the device is no hit; what was saved is one, after a load."""
    world = make("full", frames=20)
    prompt = tokens_of(30)
    world.serve("a", prompt)
    world.pool._held.prefixes.drop_root(None)
    world.pool._held.supply.collect()
    for part in world.pool._memory._both:
        part[:] = -1
    answer = world.serve("b", prompt)
    assert (answer.cached, answer.loaded) == (28, 28)


def test_f028_weights_that_changed_find_nothing_below(make):
    world = make("full", frames=20)
    prompt = tokens_of(30)
    world.serve("a", prompt)
    epoch = world.pool.raise_epoch()
    space = world.bench.space.__class__(4, model="weights", epoch=epoch)
    world.bench.space = space
    assert world.serve("b", prompt).cached == 0
    world.forget()
    assert world.serve("c", prompt).loaded == 28


def test_what_arrives_after_the_weights_changed_is_found_by_nobody(make):
    world = make("full", frames=20)
    prompt = tokens_of(30)
    world.serve("a", prompt)
    world.forget()
    assert isinstance(world.bench.open("b", prompt), Loading)
    world.pool.raise_epoch()
    world.settle()
    assert world.pool.stats()["frames_cached"] == 0
    world.pool.give_up("b")


@pytest.mark.parametrize("arrived", [False, True])
def test_what_arrives_after_it_was_dropped_is_found_by_nobody(make, arrived):
    """Dropped while the copy goes on, or when it has ended and the pool has not heard of it."""
    world = make("all", frames=60)
    prompt = tokens_of(30)
    world.serve("a", prompt)
    world.forget()
    assert isinstance(world.bench.open("b", prompt), Loading)
    while arrived and (world.mover.work() or world.device.advance_all()):
        pass
    world.pool.drop(prompt[:4], world.bench.space)
    world.settle()
    answer = world.bench.open("b", prompt)
    assert (answer.cached, answer.loaded) == (0, 0)
    world.bench.close("b")
    world.settle()
    assert not list(world.mover.host.scan())


@pytest.mark.parametrize("save", ["sealed", "second_use", "evicted"])
def test_f051_what_is_written_below_is_read_again(make, save):
    world = make("all", frames=400 if save == "evicted" else 60, save=save)
    prompts = [tokens_of(33, seed=n) for n in range(6)]
    for prompt in prompts:
        world.serve("a", prompt)
        world.serve("a", prompt)
    world.forget()
    world.settle()
    answers = [world.serve("b", prompt) for prompt in prompts]
    assert sum(answer.loaded for answer in answers) > 0
    if save == "sealed":
        assert [answer.cached for answer in answers] == [32] * 6


def test_f081_matches_that_nobody_loads_end(make):
    world = make("full", frames=20, match_steps=3)
    prompt = tokens_of(30)
    world.serve("a", prompt)
    chain = Chain(world.bench.space, prompt)
    for number in range(1000):
        world.store.match(f"{number}", chain, 7)
        if number % 10 == 0:
            world.pool.step()
    for _ in range(4):
        world.pool.step()
    stats = world.store.stats()
    assert (stats["frames_held"], stats["matches_expired"]) == (0, 1000)


def test_f086_the_tier_holds_its_limit_at_every_step_of_a_burst(make):
    """Twice the budget at once: colder pages make room, and no save is lost while there are some."""
    world = make("full", frames=80, host_frames=20)
    stock = world.store.ledger._stock
    frames = stock.frames.count
    for turn in range(4):
        for number in range(2):
            world.ready(f"{number}", tokens_of(21, seed=10 * turn + number))
            world.bench.compute(f"{number}")
            census = stock.frames.census()
            assert sum(census.values()) == frames
            world.bench.close(f"{number}")
        world.settle()
    stats = world.store.stats()
    assert stats["frames_without_room"] == 0
    assert stats["pages_saved"] == 4 * 2 * 5
    assert stats["frames_free"] + stats["frames_cached"] == frames


def test_a_second_name_for_the_same_prompt_loads_what_the_first_one_loads_not(make):
    """Two requests wait for one prefix: both get it, and what came twice is kept once."""
    world = make("all", frames=80)
    prompt = tokens_of(33)
    world.serve("a", prompt)
    world.forget()
    assert isinstance(world.bench.open("b", prompt), Loading)
    assert isinstance(world.bench.open("c", prompt), Loading)
    world.settle()
    for name in "bc":
        assert world.ready(name, prompt).cached == 32
        world.bench.compute(name)
        world.bench.close(name)


def test_a_name_that_comes_back_with_another_prompt_gives_its_load_up(make):
    world = make("full", frames=40)
    first, second = tokens_of(21), tokens_of(21, seed=2)
    world.serve("a", first)
    world.forget()
    assert isinstance(world.bench.open("b", first), Loading)
    answer = world.bench.open("b", second)
    assert (answer.cached, answer.loaded) == (0, 0)
    world.bench.compute("b")
    world.settle()
    world.bench.close("b")


def test_who_waits_with_what_came_for_it_loses_it_to_who_runs(make):
    """Else two requests could wait for ever, each holding what the other needs."""
    world = make("full", frames=12)
    first, second = tokens_of(29), tokens_of(29, seed=2)
    world.serve("a", first)
    world.serve("a", second)
    world.forget()
    assert isinstance(world.bench.open("b", first), Loading)
    world.settle()
    assert isinstance(world.bench.open("c", second), Busy)
    assert world.pool.stats()["frames_held"] == 7
    other = world.ready("d", tokens_of(40, seed=3))
    assert other.cached == 0
    world.bench.compute("d")
    world.bench.close("d")
    world.settle()
    assert world.serve("b", first).cached == 28


def test_no_read_and_no_write_mean_the_tiers_too(make):
    world = make("full", frames=40)
    prompt = tokens_of(21)
    world.serve("a", prompt, flags=Flags.NO_WRITE)
    assert world.store.stats()["pages_saved"] == 0
    world.serve("a", prompt)
    assert world.store.stats()["pages_saved"] == 5
    world.forget()
    assert world.serve("b", prompt, flags=Flags.NO_READ).cached == 0
