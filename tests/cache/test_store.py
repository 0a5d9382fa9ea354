"""`TieredStore` over a mover in this process: the life of a prompt, drops that overwrite, and calls from many threads."""

import pathlib
import threading

import numpy as np
import pytest

from stepwell.base.errors import InputError, MisuseError
from stepwell.base.settings import HostSettings
from stepwell.cache.ledger.loads import Loaded
from stepwell.cache.ledger.records import Cleared, Released
from stepwell.cache.ledger.saves import Carried, Offer
from stepwell.cache.store import StoreModel, TieredStore
from stepwell.core.chain import Chain
from stepwell.core.cut import Cut
from stepwell.core.geometry import Group, Rule
from stepwell.core.key import Namespace
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import BytesPlace, FakeDevice, FakePlace, GateFence
from stepwell.testing.faults import FaultKind, FaultyPlace, PlannedFault
from stepwell.tiers.host import HostSize

LONG_S = 30
BOUNDS = (0, 100, 256)
SIZE = 4
"""Tokens of a page."""
SPACE, OTHER = Namespace(SIZE, model="weights"), Namespace(SIZE, model="weights", tenant="b")
FULL = Cut(Group("full", Rule.FULL, (0, 1), 1, 1, 1, "int64"), 1, 0)
WINDOW = Cut(Group("window", Rule.WINDOW, (2, 3), 1, 1, 1, "int64", window=6), 2, 2)
"""A page of it is two frames, and two of them have to be before a boundary."""
PARTS = (b"p" * 32, b"q" * 32)


def fingerprint(chain, page, group=0, at=0):
    """The bytes that a page of a prompt has, whoever computes it."""
    seed = int.from_bytes(chain.key(page)[:8], "little")
    return np.random.default_rng((seed, group, at)).integers(1, 256, 256, np.uint8)


class Bench:
    """A store over device frames of one array.

    Without threads its mover is driven by `work`, and the clock is the test's.
    """

    def __init__(self, *cuts, frames=16, threads=False, streams=False, faults=(), **more):
        cuts = cuts or (FULL,)
        self.rows = np.zeros((64, 256), np.uint8)
        self.device, self.clock, self.faults = FakeDevice(), FakeClock(), faults
        place = FaultyPlace(BytesPlace(self.rows, BOUNDS), faults)
        place = FakePlace(place, self.device.out, self.device.into) if streams else place
        capacity = frames * HostSize(256, BOUNDS, 1).each_bytes
        settings = HostSettings(capacity_bytes=capacity, **{"debug": True} | more)
        model = StoreModel(SIZE, cuts, PARTS[: len(cuts)])
        clock = None if threads else self.clock
        self.store = TieredStore.local(model, [place], settings, clock=clock, threads=threads)
        self.mover = self.store._joints[0].mover
        self.windowed = len(cuts) > 1
        self.host = self.mover.host
        assert self.host.wait(LONG_S)
        if not threads:
            self.mover.look()
        assert self.store.ledger.ready(LONG_S)
        self.news = []

    def work(self):
        while self.mover.work():
            pass

    def offer(self, chain, pages=None, at=0):
        """Computes all pages of a prompt on the device, from a frame on; what may be saved of them."""
        last = chain.pages if pages is None else pages
        frames = np.arange(at, at + last, dtype=np.int32)
        for page in range(last):
            self.rows[at + page] = fingerprint(chain, page)
        records = []
        if self.windowed:
            for page in range(max(0, last - 2), last):
                begin = at + last + 2 * len(records)
                for index in range(2):
                    self.rows[begin + index] = fingerprint(chain, page, 1, index)
                records.append(Carried(0, page, np.array([begin, begin + 1], np.int32)))
        return Offer(chain, last, lambda first, end: frames[first:end], records)

    def save(self, chain, pages=None, **more):
        """Saves a prompt, up to its end, and uses its device frames for something else as soon as it may."""
        number = self.store.save(self.offer(chain, pages), **more)
        if number is not None:
            self.finish(Released, number)
            self.rows[:] = 0xEE
        assert self.store.drain(LONG_S)
        return number

    def finish(self, kind, number):
        """Waits for news of a plan, and works meanwhile if nobody else does."""
        for _ in range(100_000):
            self.news += self.store.poll()
            found = [one for one in self.news if type(one) is kind and one.plan == number]
            if found:
                return found[0]
            if self.mover._threads:
                assert self.store.wait(LONG_S)
            else:
                self.work()
        raise AssertionError(f"no {kind.__name__} of plan {number}")

    def found(self, chain, name="probe"):
        """Pages that could be loaded now; holds nothing."""
        pages = self.store.match(name, chain, chain.pages).pages
        self.store.give_up(name)
        return pages

    def begin_load(self, chain, name="r", first=0):
        match = self.store.match(name, chain, chain.pages)
        pages = np.arange(match.pages - first, dtype=np.int32)
        records = [
            np.arange(32, 32 + 2 * count, dtype=np.int32).reshape(count, 2)
            for count in match.records
        ]
        return self.store.load(match, first, pages, records), match

    def load(self, chain, name="r", first=0):
        """Loads what there is of a prompt and compares every byte; how it ended."""
        self.rows[:] = 0xFF
        number, match = self.begin_load(chain, name, first)
        loaded = self.finish(Loaded, number)
        for page in range(first, first + loaded.pages):
            assert np.array_equal(self.rows[page - first], fingerprint(chain, page))
        for oks in loaded.records:
            for index, fine in enumerate(oks):
                page = match.pages - len(oks) + index
                for at in range(2):
                    row = self.rows[32 + 2 * index + at]
                    assert not fine or np.array_equal(row, fingerprint(chain, page, 1, at))
        self.finish(Cleared, number)
        return loaded

    def holds(self, chain):
        """Whether memory of the tier has bytes of a prompt, at any place."""
        memory = b"".join(self.host.row(frame).tobytes() for frame in range(self.host.frames))
        canaries = [
            fingerprint(chain, page, group, at)[40:56]
            for page in range(chain.pages)
            for group, at in ((0, 0), (1, 0), (1, 1))
        ]
        return any(canary.tobytes() in memory for canary in canaries)

    def end(self):
        for stream in self.device.streams:
            stream.free_run()
        for fault in self.faults:
            fault.gate.set()
        assert self.store.close(LONG_S)
        assert self.store.health.faults == ()


@pytest.fixture
def make_bench():
    made = []

    def make(*cuts, **more):
        made.append(Bench(*cuts, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.end()


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


# The life of a prompt.


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("cuts", [(FULL,), (FULL, WINDOW)])
def test_a_prompt_is_saved_found_and_loaded(make_bench, cuts, threads):
    bench = make_bench(*cuts, threads=threads)
    assert bench.found(ABC) == 0
    assert bench.save(ABC) is not None
    assert bench.found(ABC) == 3
    longer = prompt(1, 2, 3, 4, 5)
    loaded = bench.load(longer)
    assert (loaded.pages, loaded.request) == (3, "r")
    assert loaded.records == (((True, True),) if len(cuts) > 1 else ())
    assert bench.load(longer, first=2).pages == 1
    assert bench.found(prompt(2, 2, 3)) == 0
    assert bench.found(prompt(1, 2, 3, space=OTHER)) == 0
    bench.store.check()


@pytest.mark.parametrize("threads", [False, True])
def test_what_is_there_or_on_its_way_is_not_saved_again(make_bench, threads):
    bench = make_bench(threads=threads)
    bench.save(ABC)
    assert bench.store.save(bench.offer(ABC)) is None
    number = bench.store.save(bench.offer(prompt(1, 2, 3, 4), at=8))
    bench.finish(Released, number)
    assert bench.store.drain(LONG_S)
    assert bench.store.stats()["pages_saved"] == 4
    assert bench.load(prompt(1, 2, 3, 4)).pages == 4


def test_a_window_page_that_is_missing_moves_the_boundary(make_bench):
    bench = make_bench(FULL, WINDOW)
    bench.save(ABC)
    assert bench.found(prompt(1, 2, 9)) == 0, "there is no window before page 2"
    bench.save(prompt(1, 2, 9), pages=2)
    assert bench.found(prompt(1, 2, 9)) == 2


def test_a_match_ends_when_it_is_given_up_loaded_or_old(make_bench):
    bench = make_bench(match_steps=2)
    bench.save(ABC)
    for name in ("a", "b"):
        assert bench.store.match(name, ABC, 3).pages == 3
    assert bench.store.stats()["frames_held"] == 3
    bench.store.give_up("a")
    assert bench.store.stats()["frames_held"] == 3
    for _ in range(3):
        bench.store.step()
    assert bench.store.stats()["frames_held"] == 0
    assert bench.store.stats()["matches_expired"] == 1
    match = bench.store.match("c", ABC, 3)
    bench.store.give_up("c")
    with pytest.raises(MisuseError, match="no match"):
        bench.store.load(match, 0, np.arange(3, dtype=np.int32))


def test_stats_add_up(make_bench):
    faults = [PlannedFault(FaultKind.RAISE, "copy_out", at=1)]
    bench = make_bench(faults=faults, frames=4)
    bench.save(ABC)
    bench.save(prompt(7, 8))  # takes the last page of the first, and fails
    bench.host.row(1)[0] ^= 1  # the second page
    assert bench.load(ABC).pages == 1
    stats = bench.store.stats()
    wanted = {
        "pages_saved": 3,
        "pages_unsaved": 2,
        "pages_evicted": 1,
        "frames_without_room": 0,
        "pages_loaded": 1,
        "frames_failed": 1,
        "frames_distrusted": 1,
        "frames_cached": 1,
        "frames_free": 2,
        "frames_held": 0,
        "plans_open": 0,
        "breaker_opened": 0,
    }
    assert {name: stats[name] for name in wanted} == wanted


def test_waiting_ends_with_news_or_when_nothing_is_under_way(make_bench):
    fault = PlannedFault(FaultKind.NEVER, "copy_out", at=0)
    bench = make_bench(threads=True, faults=[fault])
    assert bench.store.wait(0), "nothing is under way"
    assert bench.store.poll() == []
    number = bench.store.save(bench.offer(ABC))
    assert fault.reached.wait(LONG_S)
    assert not bench.store.wait(0.01)
    assert not bench.store.drain(0.01)
    fault.gate.set()
    assert bench.store.wait(LONG_S)
    assert bench.store.poll() == [Released(number)]
    assert bench.store.drain(LONG_S)
    assert bench.store.poll() == []


def frames_of(first, last):
    return np.arange(first, last, dtype=np.int32)


def test_a_load_waits_for_its_own_fence(make_bench):
    bench = make_bench(threads=True)
    bench.save(ABC)
    gate = threading.Event()
    bench.rows[:] = 0xFF
    match = bench.store.match("r", ABC, 3)
    number = bench.store.load(match, 0, frames_of(0, 3), fence=GateFence(gate))
    other = bench.store.save(bench.offer(prompt(5, 6), at=40))
    bench.finish(Released, other)
    assert (bench.rows[:3] == 0xFF).all(), "a step still reads these frames"
    gate.set()
    assert bench.finish(Loaded, number).pages == 3
    assert np.array_equal(bench.rows[2], fingerprint(ABC, 2))


def test_a_save_waits_for_its_own_fence_and_loads_pass_it(make_bench):
    bench = make_bench(threads=True)
    bench.save(ABC)
    gate = threading.Event()
    number = bench.store.save(bench.offer(prompt(5, 6), at=40), GateFence(gate))
    assert bench.store.load(bench.store.match("r", ABC, 3), 0, frames_of(0, 3)) > number
    bench.finish(Loaded, number + 1)
    assert not any(type(one) is Released and one.plan == number for one in bench.news)
    gate.set()
    bench.finish(Released, number)
    assert bench.store.drain(LONG_S)
    assert bench.found(prompt(5, 6)) == 2


def test_a_load_of_what_was_dropped_moves_nothing_and_leaves_nothing(make_bench):
    bench = make_bench()
    bench.save(ABC)
    match = bench.store.match("r", ABC, 3)
    bench.store.drop(ABC)
    bench.rows[:] = 0xFF
    fence = GateFence(threading.Event())
    number = bench.store.load(match, 0, frames_of(0, 3), fence=fence)
    assert bench.finish(Loaded, number).pages == 0
    bench.work()
    assert (bench.rows == 0xFF).all()
    assert bench.store._fences == {}
    assert bench.store.drain(0)


def test_f081_matches_that_nobody_loads_hold_nothing_after_some_steps(make_bench):
    bench = make_bench(match_steps=3, debug=False)
    bench.save(ABC)
    for n in range(1000):
        assert bench.store.match(n, ABC, 3).pages == 3
        if n % 100 == 0:
            bench.store.step()
    for _ in range(4):
        bench.store.step()
    stats = bench.store.stats()
    assert (stats["frames_held"], stats["matches_expired"]) == (0, 1000)


# Drops.


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("cuts", [(FULL,), (FULL, WINDOW)])
@pytest.mark.parametrize("what", ["prefix", "namespace"])
def test_f114_what_is_dropped_is_overwritten_and_what_is_not_stays(make_bench, cuts, threads, what):
    bench = make_bench(*cuts, threads=threads, frames=40)
    mine, theirs = prompt(1, 2, 3, 4), prompt(1, 2, 3, 4, space=OTHER)
    for chain in (mine, theirs, prompt(9, 9)):
        bench.save(chain)
    assert bench.holds(mine)
    assert bench.store.drop(SPACE if what == "namespace" else prompt(1)) in (4, 6)
    bench.work()
    assert bench.store.drain(LONG_S)
    assert not bench.holds(mine)
    assert bench.found(mine) == 0
    assert bench.load(theirs).pages == 4
    assert bench.found(prompt(9, 9)) == (0 if what == "namespace" else 2)
    bench.store.check()


def test_f114_what_is_being_saved_when_it_is_dropped_is_not_left_in_memory(make_bench):
    for begun in (False, True):
        bench = make_bench(streams=True)
        bench.store.save(bench.offer(ABC))
        if begun:
            bench.mover.work()
            bench.device.out.advance(2)
        bench.store.drop(ABC)
        bench.device.out.free_run()
        bench.work()
        bench.store.step()
        bench.work()
        assert bench.store.drain(0)
        assert not bench.holds(ABC)
        assert bench.found(ABC) == 0
        assert bench.store.stats()["frames_free"] == 16


def test_f114_a_drain_waits_for_what_is_overwritten_only_after_a_load(make_bench):
    """Nobody sends plans meanwhile: the drain itself has to."""
    bench = make_bench(threads=True, streams=True)
    bench.device.out.free_run()
    bench.save(ABC)
    number, _ = bench.begin_load(ABC)
    assert bench.device.into.wait_queued(1, LONG_S)
    bench.store.drop(prompt(1))
    assert not bench.store.drain(0.01)
    assert bench.holds(ABC), "the load still reads it"
    answers = []
    draining = threading.Thread(target=lambda: answers.append(bench.store.drain(5)))
    draining.start()
    bench.device.into.free_run()
    draining.join(LONG_S)
    assert answers == [True]
    assert not bench.holds(ABC)
    loaded = bench.finish(Loaded, number)
    assert loaded.pages == 0, "what was dropped meanwhile is a miss"


# Keeps.


def fill(bench, count):
    """Saves so many prompts of one page each."""
    for n in range(count):
        bench.save(prompt(100 + n))


def test_what_is_kept_stays_until_it_is_not(make_bench):
    bench = make_bench(frames=16, keep_percent=25)
    bench.save(ABC)
    assert bench.store.keep("system", ABC) == 3
    fill(bench, 40)
    assert bench.load(ABC).pages == 3
    bench.store.unkeep("system")
    bench.store.unkeep("system")
    fill(bench, 40)
    assert bench.found(ABC) == 0


def test_a_keep_lapses_by_itself(make_bench):
    bench = make_bench(frames=16)
    bench.save(ABC)
    assert bench.store.keep("system", ABC, 10.0) == 3
    bench.clock.advance_s(9.9)
    bench.store.step()
    fill(bench, 40)
    assert bench.found(ABC) == 3
    bench.clock.advance_s(0.2)
    bench.store.step()
    fill(bench, 40)
    assert bench.found(ABC) == 0


def test_keeps_have_a_share_and_end_from_the_tail(make_bench):
    bench = make_bench(frames=16, keep_percent=25)
    long = prompt(*range(1, 9))
    bench.save(long)
    assert bench.store.keep("a", long) == 4
    assert bench.store.keep("b", ABC) == 0
    bench.store.unkeep("a")
    assert bench.store.keep("b", ABC) == 3


# Ends.


def test_after_the_close_nothing_begins(make_bench, usage):
    before = usage()
    bench = make_bench(threads=True)
    bench.save(ABC)
    match = bench.store.match("r", ABC, 3)
    assert bench.store.close(LONG_S)
    assert bench.store.close(LONG_S)
    assert usage() == before
    for call in (
        lambda: bench.store.match("s", ABC, 3),
        lambda: bench.store.load(match, 0, frames_of(0, 3)),
        lambda: bench.store.save(Offer(prompt(8), 1, frames_of)),
        lambda: bench.store.keep("k", ABC),
        lambda: bench.store.drop(SPACE),
    ):
        with pytest.raises(MisuseError, match="the store is closed"):
            call()
    bench.store.give_up("r")
    bench.store.unkeep("k")
    bench.store.step()
    assert bench.store.stats()["frames_held"] == 0
    assert bench.store.poll() == []
    assert bench.store.drain(0)


def test_a_store_is_closed_at_the_end_of_its_block(usage):
    before = usage()
    model = StoreModel(SIZE, (FULL,), PARTS[:1])
    place = BytesPlace(np.zeros((4, 256), np.uint8), BOUNDS)
    with TieredStore.local(model, [place], HostSettings(capacity_bytes=1 << 16)) as store:
        assert usage() != before
    assert usage() == before
    with pytest.raises(MisuseError, match="closed"):
        store.match("r", ABC, 3)


def test_a_close_while_a_copy_hangs_is_true_only_when_it_is_over(make_bench):
    fault = PlannedFault(FaultKind.NEVER, "copy_out", at=0)
    bench = make_bench(threads=True, faults=[fault])
    number = bench.store.save(bench.offer(ABC))
    assert fault.reached.wait(LONG_S)
    for _ in range(2):
        assert not bench.store.close(0.01)
    assert bench.store.poll() == [Released(number)], "who waits for it hears of it"
    assert bench.store.stats()["plans_open"] == 1
    fault.gate.set()
    assert bench.store.close(LONG_S)
    assert bench.store.stats()["plans_open"] == 0
    bench.store.check()


WRONG = {
    "no places": ([], {}, "without device memory"),
    "no room for a frame": ([BOUNDS], {"capacity_bytes": 300}, "capacity_bytes"),
    "places that differ": ([BOUNDS, (0, 99, 256)], {}, "a place has frames of"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_store_that_cannot_be_leaves_nothing_behind(usage, what):
    bounds, more, text = WRONG[what]
    before = usage()
    places = [BytesPlace(np.zeros((4, 256), np.uint8), one) for one in bounds]
    settings = HostSettings(**{"capacity_bytes": 1 << 20} | more)
    with pytest.raises(InputError, match=text):
        TieredStore.local(StoreModel(SIZE, (FULL,), PARTS[:1]), places, settings)
    assert usage() == before


@pytest.mark.parametrize(
    ("cuts", "parts"),
    [((), ()), ((FULL, FULL), PARTS), ((WINDOW, FULL), PARTS), ((FULL,), PARTS), ((FULL,), (b"",))],
)
def test_a_model_is_one_full_group_first_and_a_digest_for_each(cuts, parts):
    with pytest.raises(InputError):
        StoreModel(SIZE, cuts, parts)
