"""Finalizers and the collector in the middle of calls: they queue, and wait for nobody (M04)."""

import contextlib
import gc
import itertools
import warnings

import pytest

from stepwell.base.errors import MisuseError, StaleError
from stepwell.memory.arena import Short

PAGE = 4096


def counts(arena):
    stats = arena.stats()
    return stats.free, stats.used, stats.quarantined


HOLDERS = 20_000


class Holder:
    """Holds something, in a cycle: the collector finds it some time later, in the middle of something else."""

    def __init__(self, held):
        self.held = held
        self.me = self


class Releasing(Holder):
    inside = 0

    def __del__(self):
        Releasing.inside += self.held.arena._call.inside
        self.held.release()


class Ending(Holder):
    inside = 0

    def __del__(self):
        Ending.inside += self.held.arena._call.inside
        self.held.end()


class Reserving(Holder):
    """What it may not do from inside of a call it is told, and nothing waits for itself."""

    refused = got = 0

    def __del__(self):
        arena = self.held.arena
        try:
            lease = arena.reserve(1, "a finalizer")
        except MisuseError:
            Reserving.refused += arena._call.inside
        else:
            Reserving.got += 1
            lease.release()
        # A call that is no end takes what was found lost together with this one: then it is back already.
        with contextlib.suppress(StaleError):
            self.held.release()


def churn(arena, make):
    for number in range(HOLDERS):
        lease = arena.reserve(1, number)
        while isinstance(lease, Short):
            gc.collect()
            lease = arena.reserve(1, number)
        make(lease)
    gc.collect()


@pytest.fixture
def busy(make_arena):
    """With the default thresholds of the collector, which differ from those of no other test."""
    assert gc.isenabled()
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    arena = make_arena(4000, frame_bytes=64, align_bytes=64, debug=False)
    reserve, calls = arena._custody.frames.reserve, itertools.count(1)

    def collecting(n):
        if not next(calls) % 1000:
            gc.collect(0)  # chance brings it here often, but not in every run
        return reserve(n)

    arena._custody.frames.reserve = collecting
    yield arena
    gc.set_threshold(*before)


@pytest.mark.parametrize("what", ["lease", "buffer"])
def test_m04_leases_that_the_collector_finds_during_calls_come_back(in_time, busy, what):
    def run():
        churn(busy, lambda lease: Holder(lease if what == "lease" else lease.buffer()))
        busy.check()
        assert counts(busy) == (4000, 0, 0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_time(run)
    assert len(caught) == HOLDERS == busy.stats().leases_lost
    assert all("lost, not released" in str(one.message) for one in caught)


def test_m04_finalizers_may_release_during_calls(in_time, busy):
    """Not one of these leases was lost: their holders released them, if late."""
    Releasing.inside = 0

    def run():
        churn(busy, Releasing)
        busy.check()
        assert counts(busy) == (4000, 0, 0)

    in_time(run)
    assert busy.stats().leases_lost == 0
    assert Releasing.inside > 0, "the collector ran inside of calls"


def test_m04_finalizers_may_end_pins_during_calls(in_time, busy):
    Ending.inside = 0

    def pinned(lease):
        Ending(lease.pin("save"))
        lease.release()

    def run():
        churn(busy, pinned)
        busy.check()
        assert counts(busy) == (4000, 0, 0)

    in_time(run)
    assert (busy.stats().pins, busy.stats().pins_lost) == (0, 0)
    assert Ending.inside > 0, "the collector ran inside of calls"


def test_m04_a_finalizer_that_reserves_during_a_call_is_refused(in_time, busy):
    Reserving.refused = Reserving.got = 0

    def run():
        churn(busy, Reserving)
        busy.check()
        assert counts(busy) == (4000, 0, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        in_time(run)
    assert Reserving.refused > 0
    assert Reserving.refused + Reserving.got == HOLDERS


def test_m04_a_finalizer_that_ends_twice_fails_nobody_elses_call(make_arena, monkeypatch):
    """It learns nothing of it, so whoever calls next is warned, and gets what it asked for."""
    arena = make_arena(4)
    lease, mine = arena.reserve(1, "one"), arena.reserve(1, "mine")
    real = arena._custody.frames.reserve

    def collecting(n):
        lease.release()
        lease.release()
        return real(n)

    with monkeypatch.context() as patch:
        patch.setattr(arena._custody.frames, "reserve", collecting)
        other = arena.reserve(1, "two")
    mine.release()
    with pytest.warns(
        ResourceWarning, match="finalizer wanted to end: frame 0 is not of the lease"
    ):
        assert counts(arena) == (3, 1, 0)
    other.release()
    assert counts(arena) == (4, 0, 0)


LAST = """
    import faulthandler, gc
    from stepwell.memory.arena import Arena
    from stepwell.memory.ask import Ask
    from stepwell.memory.region import Region
    from stepwell.memory.users import Users

    class Holder:
        def __init__(self, lease):
            self.lease, self.me = lease, self
        def __del__(self):
            self.lease.release()

    settle = Users._settle

    def collecting(users):
        gc.collect()
        settle(users)

    Users._settle = collecting
    faulthandler.dump_traceback_later(30, exit=True)
    region, arena = Region.open(Ask(4096)), Arena(4096, 1)
    arena.add(region)
    holder = Holder(arena.reserve(1, "one"))
    assert arena.drain(region) == 1
    del holder
    region.end_use(region.use("somebody"))
    assert arena.regions == ()
    region.close()
"""


def test_m04_a_finalizer_may_return_the_last_frame_of_a_region_inside_of_its_own_call(run_python):
    done = run_python(LAST)
    assert (done.returncode, done.stderr) == (0, "")


def test_m04_a_finalizer_that_was_slower_than_the_collector_is_not_blamed(make_arena):
    """Another thread's call found the lease lost before its holder's finalizer released it."""
    arena = make_arena(2)
    lease = arena.reserve(2, "one")
    arena._books.lost.append(lease.books)
    with pytest.warns(ResourceWarning, match="'one' was lost"):
        assert arena.stats().free == 2
    lease.release()
    with pytest.raises(StaleError, match="the collector"):
        lease.release()
    assert arena.stats().free == 2
