"""One ledger, and two ranks that are processes of their own: what they have differs, what is decided does not."""

import signal
import socket
import subprocess
import sys
import textwrap
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest

from stepwell.base.settings import HostSettings
from stepwell.base.threads import Health
from stepwell.cache.joint import PipeJoint
from stepwell.cache.ledger.ledger import Ledger
from stepwell.cache.ledger.loads import Loaded
from stepwell.cache.ledger.records import Cleared, Released, Shape
from stepwell.cache.ledger.saves import Offer
from stepwell.cache.store import TieredStore
from stepwell.core.chain import Chain
from stepwell.core.cut import Cut
from stepwell.core.geometry import Group, Rule
from stepwell.core.key import Namespace
from stepwell.core.plan import Verb
from stepwell.testing.clock import FakeClock

LONG_S = 30
FRAMES, PAGES = 8, 5
SPACE = Namespace(4, model="weights")
CUT = Cut(Group("full", Rule.FULL, (0, 1), 1, 1, 1, "int64"), 1, 0)

RANK = """
    import signal, sys
    from multiprocessing.connection import Connection
    import numpy as np
    from stepwell.base.settings import HostSettings
    from stepwell.cache.joint import serve_mover
    from stepwell.move.carrier import Rank
    from stepwell.move.mover import Mover
    from stepwell.testing.device import BytesPlace
    from stepwell.testing.faults import FaultKind, FaultyHost, FaultyPlace, PlannedFault
    from stepwell.tiers.host import HostSize

    descriptor, number, within_ms, path, *faults = sys.argv[1:]
    bounds = (0, 100, 256)
    tier, copies = [], []
    for text in faults:
        kind, call, name = text.split(":")
        fault = PlannedFault(FaultKind(kind), call, name=bytes.fromhex(name) or None)
        (copies if call.startswith("copy") else tier).append(fault)
    signal.signal(signal.SIGUSR1, lambda *_: [fault.gate.set() for fault in copies])

    def make(told):
        rows = np.memmap(path, np.uint8, "r+", shape=(8, 256))
        place = FaultyPlace(BytesPlace(rows, bounds), copies)
        part = int(number).to_bytes(32, "big")
        rank = Rank(FaultyHost(HostSize(256, bounds, 8), tier), (place,), (part,), int(number))
        return Mover(rank, told, HostSettings(within_ms=int(within_ms)))

    pipe = Connection(int(descriptor))
    signal.signal(signal.SIGUSR2, lambda *_: pipe.send_bytes(b"nonsense"))
    serve_mover(pipe, make)
"""


class Other:
    """One rank: its process, its joint, and the plans that went there."""

    def __init__(self, number, folder, within_ms):
        self.number, self.within_ms = number, within_ms
        self.path = folder / f"device-{number}"
        self.first = np.random.default_rng(number).integers(1, 255, (FRAMES, 256), np.uint8)
        self.path.write_bytes(self.first.tobytes())
        self.plans, self.lost = [], threading.Event()
        self.grown = set()

    def begin(self, ledger, faults=()):
        """Starts the process; also another one after the first is gone."""
        ours, theirs = socket.socketpair()
        code = [sys.executable, "-c", textwrap.dedent(RANK), str(theirs.fileno())]
        code += [str(self.number), str(self.within_ms), str(self.path), *faults]
        self.process = subprocess.Popen(code, pass_fds=[theirs.fileno()])
        theirs.close()
        self.lost.clear()
        self.health = Health()

        def lost():
            ledger.lose(self.number)
            self.lost.set()

        pipe = Connection(ours.detach())
        self.joint = PipeJoint(pipe, ledger.report, lost, number=self.number, health=self.health)

    def send(self, plan, fence):
        self.plans.append(plan)
        self.joint.send(plan, fence)

    def close(self, within_s):
        return self.joint.close(within_s)

    @property
    def rows(self):
        return np.fromfile(self.path, np.uint8).reshape(FRAMES, 256)

    def spoil(self):
        with self.path.open("r+b") as file:  # in place: the rank has it mapped
            file.write(b"\xff" * FRAMES * 256)

    def signal(self, number):
        self.process.send_signal(number)


class Replica:
    """A ledger with two ranks. Its clock is the test's; the ranks have one of their own."""

    def __init__(self, folder, faults, within_ms):
        self.clock = FakeClock()
        settings = HostSettings(within_ms=within_ms, debug=True)
        self.ledger = Ledger(Shape(4, (CUT,), FRAMES, 256, 2), settings, self.clock)
        self.ranks = [Other(number, folder, within_ms) for number in range(2)]
        for rank, its in zip(self.ranks, faults, strict=True):
            rank.begin(self.ledger, its)
        self.store = TieredStore(self.ledger, self.ranks, Health())
        self.news = []
        assert self.wait(lambda: self.store.stats()["frames_free"] == FRAMES)

    def wait(self, reached):
        """Waits until something holds that a report changes."""
        with self.ledger._arrived:
            return self.ledger._arrived.wait_for(reached, LONG_S)

    def hear(self, kind, plan):
        """Waits for news of a plan."""

        def found():
            self.news += self.store.poll()
            return any(type(one) is kind and one.plan == plan for one in self.news)

        assert self.wait(found), f"no {kind.__name__} of plan {plan}"
        return next(one for one in self.news if type(one) is kind and one.plan == plan)

    def save(self, chain):
        frames = np.arange(FRAMES, dtype=np.int32)
        number = self.store.save(Offer(chain, chain.pages, lambda first, last: frames[first:last]))
        self.hear(Released, number)
        return number

    def match(self, chain):
        """Pages that would be loaded now; holds nothing."""
        pages = self.store.match("probe", chain, chain.pages).pages
        self.store.give_up("probe")
        return pages

    def load(self, chain):
        """Asks for all of a prompt, into the first frames of the device; number of the plan."""
        for rank in self.ranks:
            rank.spoil()
        match = self.store.match("r", chain, chain.pages)
        return self.store.load(match, 0, np.arange(match.pages, dtype=np.int32))

    def sent(self, verb):
        """How many plans of a kind went to each rank."""
        return [sum(plan.verb is verb for plan in rank.plans) for rank in self.ranks]

    def end(self):
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait(LONG_S)
        assert self.store.close(LONG_S)


@pytest.fixture
def make_replica(tmp_path):
    made = []

    def make(*faults, within_ms=60_000):
        made.append(Replica(tmp_path, faults or ((), ()), within_ms))
        return made[-1]

    yield make
    for replica in made:
        replica.end()


@pytest.fixture
def chain():
    return Chain(SPACE, range(4 * PAGES))


def name(chain, page, rank):
    """Of one page of a prompt on one rank, as text."""
    return (chain.key(page) + rank.to_bytes(32, "big") + bytes(2)).hex()


def test_both_ranks_get_back_what_they_gave(make_replica, chain):
    replica = make_replica()
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    assert replica.match(chain) == PAGES
    number = replica.load(chain)
    loaded = replica.hear(Loaded, number)
    assert (loaded.pages, loaded.clear) == (PAGES, True)
    for rank in replica.ranks:
        assert np.array_equal(rank.rows[:PAGES], rank.first[:PAGES])
    assert not np.array_equal(replica.ranks[0].first, replica.ranks[1].first)
    stats = replica.store.stats()
    assert (stats["pages_saved"], stats["pages_loaded"], stats["plans_open"]) == (PAGES, PAGES, 0)
    assert replica.store.close(LONG_S)
    assert [rank.process.wait(LONG_S) for rank in replica.ranks] == [0, 0]
    assert not any(rank.lost.is_set() for rank in replica.ranks)


@pytest.mark.parametrize(
    ("fault", "bad"), [("lost:proves", 1), ("lost:seal", 0), ("flip:seal", 1), ("zeros:seal", 0)]
)
def test_f072_ranks_that_differ_agree_on_the_shorter_length_in_one_round(
    make_replica, chain, fault, bad
):
    """Page 3 is gone on one rank only: both use two pages, and nobody votes."""
    third = 2
    faults = [[], []]
    faults[bad] = [f"{fault}:{name(chain, third, bad)}"]
    replica = make_replica(*faults)
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    assert replica.match(chain) == PAGES, "nobody knows it yet"
    number = replica.load(chain)
    loaded = replica.hear(Loaded, number)
    assert (loaded.pages, loaded.clear) == (third, True)
    assert replica.sent(Verb.LOAD) == [1, 1]
    assert [type(one) for one in replica.news].count(Loaded) == 1
    for rank in replica.ranks:
        assert np.array_equal(rank.rows[:third], rank.first[:third])
    assert (replica.ranks[bad].rows[third] == 0xFF).all(), "wrong bytes do not reach the device"
    assert replica.match(chain) == third, "page 3 and what hangs on it are found no more"
    assert replica.store.drain(LONG_S)
    stats = replica.store.stats()
    assert stats["frames_distrusted"] == 1
    assert stats["frames_failed"] == 1
    assert stats["frames_held"] == stats["plans_open"] == 0
    replica.store.check()
    again = replica.hear(Loaded, replica.load(chain))
    assert again.pages == third
    assert replica.sent(Verb.LOAD) == [2, 2]


@pytest.mark.parametrize("slow", [0, 1])
def test_f072_f068_a_rank_whose_copy_hangs_costs_one_deadline(make_replica, chain, slow):
    faults = [[], []]
    faults[slow] = ["never:copy_in:"]
    replica = make_replica(*faults, within_ms=300)
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    number = replica.load(chain)
    loaded = replica.hear(Loaded, number)
    assert (loaded.pages, loaded.clear) == (0, False), "a copy of one rank may still write"
    assert np.array_equal(
        replica.ranks[1 - slow].rows[:PAGES], replica.ranks[1 - slow].first[:PAGES]
    )
    assert replica.match(chain) == PAGES, "slow is not wrong"
    assert not any(type(one) is Cleared for one in replica.news)
    replica.ranks[slow].signal(signal.SIGUSR1)
    replica.hear(Cleared, number)
    assert replica.store.drain(LONG_S)
    assert replica.hear(Loaded, replica.load(chain)).pages == PAGES


def test_f001_a_page_that_is_late_on_one_rank_is_sealed_on_none(make_replica, chain):
    replica = make_replica([], ["never:copy_out:"], within_ms=300)
    replica.save(chain)
    assert replica.wait(lambda: replica.store.stats()["pages_unsaved"] == PAGES)
    assert replica.match(chain) == 0
    stats = replica.store.stats()
    assert stats["frames_free"] == FRAMES - PAGES, "the frames of a late copy are out of use"
    assert stats["plans_open"] == 1
    replica.ranks[1].signal(signal.SIGUSR1)
    assert replica.store.drain(LONG_S)
    assert replica.store.stats()["frames_free"] == FRAMES
    assert replica.match(chain) == 0
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    assert replica.match(chain) == PAGES


def test_f072_a_rank_that_says_nothing_at_all_is_given_up_by_the_ledger(make_replica, chain):
    replica = make_replica()
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    replica.ranks[0].signal(signal.SIGSTOP)
    number = replica.load(chain)
    assert replica.wait(lambda: len(replica.ledger._plans) == 1)
    replica.clock.advance_s(2 * 60 - 0.1)
    replica.store.step()
    replica.news += replica.store.poll()
    assert replica.news == [one for one in replica.news if type(one) is Released]
    replica.clock.advance_s(0.2)
    replica.store.step()
    loaded = replica.hear(Loaded, number)
    assert (loaded.pages, loaded.clear) == (0, False)
    replica.ranks[0].signal(signal.SIGCONT)
    replica.hear(Cleared, number)
    assert replica.store.drain(LONG_S)
    assert replica.hear(Loaded, replica.load(chain)).pages == PAGES


@pytest.mark.parametrize(
    ("gone", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGUSR2)]
)
def test_f072_a_rank_that_is_lost_makes_all_a_miss_and_nobody_waits(make_replica, chain, gone, how):
    """Killed, or out of its mind."""
    faults = [[], []]
    faults[gone] = ["never:copy_in:"]
    replica = make_replica(*faults)
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    kept = replica.store.match("waiting", chain, PAGES)
    assert kept.pages == PAGES
    number = replica.load(chain)
    rank = replica.ranks[gone]
    rank.signal(how)
    assert rank.lost.wait(LONG_S)
    loaded = replica.hear(Loaded, number)
    assert (loaded.pages, loaded.clear) == (0, True)
    assert replica.match(chain) == 0
    assert (
        replica.store.save(Offer(chain, PAGES, lambda *_: np.arange(PAGES, dtype=np.int32))) is None
    )
    replica.store.give_up("waiting")
    assert replica.store.drain(LONG_S), "nothing waits for a rank that is gone"
    replica.store.check()
    stats = replica.store.stats()
    assert stats["plans_open"] == stats["frames_free"] == stats["frames_held"] == 0


def test_f072_a_rank_that_comes_back_begins_with_nothing(make_replica, chain):
    replica = make_replica()
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    rank = replica.ranks[1]
    rank.signal(signal.SIGKILL)
    assert rank.lost.wait(LONG_S)
    rank.process.wait(LONG_S)
    assert rank.joint.close(LONG_S)
    assert replica.match(chain) == 0
    rank.begin(replica.ledger)
    assert replica.wait(lambda: replica.store.stats()["frames_free"] == FRAMES)
    for one in replica.ranks:
        one.path.write_bytes(one.first.tobytes())
    replica.save(chain)
    assert replica.store.drain(LONG_S)
    number = replica.load(chain)
    assert replica.hear(Loaded, number).pages == PAGES
    for one in replica.ranks:
        assert np.array_equal(one.rows[:PAGES], one.first[:PAGES])
    replica.store.check()
