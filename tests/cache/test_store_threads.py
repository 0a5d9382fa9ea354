"""`TieredStore` called from many threads: nothing hangs, nothing is lost, and nobody gets another page."""

import pathlib
import threading
from random import Random

import numpy as np
import pytest

from stepwell.base.errors import MisuseError
from stepwell.base.settings import HostSettings
from stepwell.base.threads import Health
from stepwell.cache.ledger.ledger import Ledger
from stepwell.cache.ledger.loads import Loaded
from stepwell.cache.ledger.records import Cleared, Released, Shape
from stepwell.cache.ledger.saves import Offer
from stepwell.cache.store import StoreModel, TieredStore
from stepwell.core.chain import Chain
from stepwell.core.cut import Cut
from stepwell.core.geometry import Group, Rule
from stepwell.core.key import Namespace
from stepwell.core.plan import Grown
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import BytesPlace, GateFence
from stepwell.tiers.host import HostSize

LONG_S = 30
BOUNDS = (0, 100, 256)
SIZE = 4
"""Tokens of a page."""
SPACE, OTHER = Namespace(SIZE, model="weights"), Namespace(SIZE, model="weights", tenant="b")
FULL = Cut(Group("full", Rule.FULL, (0, 1), 1, 1, 1, "int64"), 1, 0)


def fingerprint(chain, page):
    """The bytes that a page of a prompt has, whoever computes it."""
    seed = int.from_bytes(chain.key(page)[:8], "little")
    return np.random.default_rng(seed).integers(1, 256, 256, np.uint8)


class Bench:
    """A store with threads, over device frames of one array."""

    def __init__(self, frames, **more):
        self.rows = np.zeros((64, 256), np.uint8)
        capacity = frames * HostSize(256, BOUNDS, 1).each_bytes
        settings = HostSettings(capacity_bytes=capacity, **more)
        model = StoreModel(SIZE, (FULL,), (bytes(32),))
        self.store = TieredStore.local(model, [BytesPlace(self.rows, BOUNDS)], settings)
        assert self.store.ledger.ready(LONG_S)
        self.host = self.store._joints[0].mover.host


@pytest.fixture
def make_bench():
    made = []

    def make(frames, **more):
        made.append(Bench(frames, **more))
        return made[-1]

    yield make
    for bench in made:
        assert bench.store.close(LONG_S)
        assert bench.store.health.faults == ()


@pytest.fixture
def usage():
    """Threads of ours, and open descriptors, now."""

    def count():
        ours = [one.name for one in threading.enumerate() if one.name.startswith("stepwell-")]
        return sorted(ours), len(list(pathlib.Path("/proc/self/fd").iterdir()))

    return count


def prompt(*tokens, space=SPACE):
    """Pages of equal tokens: the n-th page is four times the n-th argument."""
    return Chain(space, [token for token in tokens for _ in range(SIZE)])


ABC = prompt(1, 2, 3)


# Fences.


class Recorder:
    """A joint that keeps what it is sent."""

    def __init__(self):
        self.sent = []

    def send(self, plan, fence):
        self.sent.append((plan, fence))

    def close(self, within_s):
        return True


@pytest.fixture
def recorded():
    """A store whose mover is a list."""
    joint = Recorder()
    shape = Shape(SIZE, (FULL,), 4096, 256)
    ledger = Ledger(shape, HostSettings(), FakeClock())
    ledger.report(Grown(0, np.arange(4096, dtype=np.int32)))
    return TieredStore(ledger, [joint, Recorder()], Health()), joint


def frames_of(first, last):
    return np.arange(first, last, dtype=np.int32)


def test_a_plan_is_never_sent_without_its_fence_while_another_thread_sends(recorded):
    store, joint = recorded
    plan_save, others = store.ledger.save, []

    def interrupted(*args):
        number = plan_save(*args)
        others.append(threading.Thread(target=store.step))
        others[0].start()
        others[0].join(0.1)  # it would have sent the plan by now, if it could
        return number

    store.ledger.save = interrupted
    fence = GateFence(threading.Event())
    number = store.save(Offer(ABC, 3, frames_of), fence)
    others[0].join(LONG_S)
    assert [(plan.number, its) for plan, its in joint.sent] == [(number, fence)]


def test_every_plan_has_its_own_fence_when_many_threads_save(recorded):
    store, joint = recorded
    given = {}

    def save(first):
        for n in range(first, first + 50):
            fence = GateFence(threading.Event())
            given[store.save(Offer(prompt(n), 1, frames_of), fence)] = fence
            store.step()

    threads = [threading.Thread(target=save, args=(1000 * n,)) for n in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LONG_S)
    assert len(joint.sent) == 400
    assert all(given[plan.number] is fence for plan, fence in joint.sent)
    numbers = [plan.number for plan, _ in joint.sent]
    assert numbers == sorted(numbers)
    assert store._fences == {}


@pytest.mark.parametrize("turn", range(3))
def test_a_close_under_load_ends_everything(make_bench, turn):
    bench = make_bench(64)
    begun, errors = threading.Event(), []

    def save():
        try:
            for n in range(100_000):
                bench.store.save(Offer(prompt(n), 1, frames_of))
                if n > 20 * turn:
                    begun.set()
        except MisuseError as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(2)]
    for one in threads:
        one.start()
    assert begun.wait(LONG_S)
    assert bench.store.close(LONG_S)
    for one in threads:
        one.join(LONG_S)
    assert len(errors) == 2
    assert bench.store.drain(LONG_S)
    stats = bench.store.stats()
    assert stats["plans_open"] == 0
    assert stats["frames_held"] == 0
    bench.store.check()


class Actor:
    """One thread of an engine, with device frames of its own: nobody else may ever write there."""

    def __init__(self, crowd, number):
        self.crowd, self.store, self.number = crowd, crowd.bench.store, number
        self.random = Random(number)
        self.frames = np.arange(8 * number, 8 * number + 8, dtype=np.int32)
        self.rows = crowd.bench.rows
        self.errors = []
        self.loaded = 0

    def run(self):
        try:
            for _ in range(self.crowd.operations):
                self.random.choice(self.actions)(self)
        except BaseException as error:
            self.errors.append(error)
            raise

    def chain(self):
        """Prompts that share their beginnings."""
        tokens = [self.random.randint(1, 3) for _ in range(self.random.randint(1, 6))]
        return prompt(*tokens, space=self.random.choice([SPACE, OTHER]))

    def save(self):
        chain = self.chain()
        for page in range(chain.pages):
            self.rows[self.frames[page]] = fingerprint(chain, page)
        mine = self.frames
        offer = Offer(chain, chain.pages, lambda first, last: mine[first:last])
        number = self.store.save(offer)
        if number is not None:
            self.crowd.hear(number, Released)
        self.rows[self.frames] = 0xEE

    def load(self):
        chain = self.chain()
        match = self.store.match(self.number, chain, chain.pages)
        if not match.pages:
            return
        if self.random.random() < 0.1:
            self.store.give_up(self.number)
            return
        first = self.random.randint(0, match.pages - 1)
        self.rows[self.frames] = 0xFF
        number = self.store.load(match, first, self.frames[: match.pages - first])
        loaded = self.crowd.hear(number, Loaded)
        for page in range(first, first + loaded.pages):
            row = self.rows[self.frames[page - first]]
            assert np.array_equal(row, fingerprint(chain, page)), "wrong bytes"
        self.loaded += loaded.pages
        self.crowd.hear(number, Cleared)

    def match(self):
        self.store.match((self.number, "left"), self.chain(), 6)

    def keep(self):
        self.store.keep(f"keep {self.number}", self.chain(), self.random.choice([None, 0.001]))

    def unkeep(self):
        self.store.unkeep(f"keep {self.number}")

    def drop(self):
        self.store.drop(
            self.random.choice([self.chain(), SPACE]) if self.number == 0 else self.chain()
        )

    def step(self):
        self.store.step()
        self.store.stats()

    actions = (*[save] * 6, *[load] * 8, match, keep, unkeep, drop, step, step)


class Crowd:
    """Actors over one store, and the news for all of them."""

    def __init__(self, bench, operations):
        self.bench, self.operations = bench, operations
        self.news, self.arrived = {}, threading.Condition()

    def hear(self, number, kind):
        """Waits for news of a plan; whoever waits takes in what there is for all."""
        for _ in range(10_000):
            with self.arrived:
                for one in self.bench.store.poll():
                    self.news.setdefault(one.plan, []).append(one)
                    self.arrived.notify_all()
                for one in self.news.get(number, []):
                    if type(one) is kind:
                        return one
                self.arrived.wait(0.005)
        raise AssertionError(f"no {kind.__name__} of plan {number}")


@pytest.mark.parametrize(("frames", "debug"), [(12, True), (40, False)])
def test_f010_eight_threads_lose_nothing_and_get_only_what_was_saved(
    make_bench, usage, frames, debug
):
    before = usage()
    bench = make_bench(frames, debug=debug, match_steps=10_000)
    crowd = Crowd(bench, 150 if debug else 400)
    actors = [Actor(crowd, number) for number in range(8)]
    threads = [threading.Thread(target=actor.run) for actor in actors]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
        assert not one.is_alive(), "it hangs"
    assert [actor.errors for actor in actors] == [[]] * 8
    assert sum(actor.loaded for actor in actors) > 100
    for number in range(8):
        bench.store.give_up((number, "left"))
        bench.store.unkeep(f"keep {number}")
    assert bench.store.drain(LONG_S)
    bench.store.check()
    stats = bench.store.stats()
    assert stats["plans_open"] == stats["frames_held"] == stats["frames_distrusted"] == 0
    assert stats["frames_free"] + stats["frames_cached"] == frames
    for space in (SPACE, OTHER):
        bench.store.drop(space)
    assert bench.store.drain(LONG_S)
    assert not any(bench.host.row(frame).any() for frame in range(frames))
    assert bench.store.close(LONG_S)
    assert usage() == before
