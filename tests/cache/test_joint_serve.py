"""The life of a process that has a mover: it does what a ledger says, and ends with it."""

import contextlib
import pathlib
import socket
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest

from stepwell.base.errors import InputError
from stepwell.base.settings import HostSettings
from stepwell.cache.joint import decode, encode, serve_mover
from stepwell.core.plan import KEY_BYTES, Outcome, Plan, Report, Verb
from stepwell.move.carrier import Rank
from stepwell.move.mover import Mover
from stepwell.testing.device import BytesPlace
from stepwell.tiers.host import HostSize, HostTier

LONG_S = 30
BOUNDS = (0, 100, 256)
OK = Outcome.OK


def pair():
    """Two ends that are sockets, as `multiprocessing.Pipe` gives them."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def plan(number, verb, *frames, within_ms=60_000):
    inside = np.array(frames, np.int32)
    keys = b"".join(bytes([frame + 1]) * KEY_BYTES for frame in frames)
    outside = inside[:0] if verb is Verb.WIPE else inside
    which = np.zeros(len(frames), np.uint32)
    return Plan(number, verb, 0, outside, inside, keys, which, within_ms)


def message_of(number):
    return encode(Report(number, 5, np.zeros(1, np.uint8), released=True, clear=True))


@pytest.fixture
def usage():
    """Threads of ours, and open descriptors, now."""

    def count():
        ours = [one.name for one in threading.enumerate() if one.name.startswith("stepwell-")]
        return sorted(ours), len(list(pathlib.Path("/proc/self/fd").iterdir()))

    return count


class Served:
    """`serve_mover` in a thread; this end of its pipe is the test's."""

    def __init__(self, make=None, fence=None):
        self.pipe, theirs = pair()
        self.movers, self.answers, self.errors = [], [], []
        self.rows = np.arange(8 * 256, dtype=np.int64).astype(np.uint8).reshape(8, 256)

        def run():
            try:
                self.answers.append(serve_mover(theirs, make or self.make, fence))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.errors.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def make(self, told):
        host = HostTier(HostSize(256, BOUNDS, 8))
        rank = Rank(host, (BytesPlace(self.rows, BOUNDS),), (bytes(32),))
        self.movers.append(Mover(rank, told, HostSettings()))
        return self.movers[0]

    def ready(self):
        """Waits until all frames have been reported."""
        grown = []
        while len(grown) < 8:
            grown += decode(self.pipe.recv_bytes()).frames.tolist()
        return self

    def hear(self, number):
        """Waits until a plan is clear."""
        while True:
            record = decode(self.pipe.recv_bytes())
            if isinstance(record, Report) and record.plan == number and record.clear:
                return record.outcomes.tolist()

    def ended(self):
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()

    def rest(self):
        """What still comes, to the end of the other side."""
        found = []
        with contextlib.suppress(EOFError, OSError):
            while True:
                found.append(self.pipe.recv_bytes())
        return found


@pytest.fixture
def serve():
    made = []

    def start(**more):
        made.append(Served(**more))
        return made[-1]

    yield start
    for one in made:
        one.pipe.close()
        one.ended()


def test_serving_ends_when_it_is_told_to_and_says_that_it_has(serve):
    one = serve().ready()
    one.pipe.send_bytes(encode(plan(1, Verb.SAVE, 0, 1)))
    assert one.hear(1) == [OK, OK]
    one.pipe.send_bytes(b"")
    assert one.rest()[-1:] == [b""], "nothing is touched any more"
    one.ended()
    assert one.answers == [True]
    assert one.movers[0].idle


def test_serving_ends_when_the_ledger_is_gone(serve, usage):
    before = usage()
    one = serve()
    one.pipe.send_bytes(encode(plan(1, Verb.SAVE, 0)))
    one.pipe.close()
    one.ended()
    assert one.answers == [True]
    assert usage() == before


@pytest.mark.parametrize("message", [b"nonsense", message_of(1)])
def test_serving_does_not_believe_what_no_ledger_says(serve, usage, message):
    before = usage()
    one = serve()
    one.pipe.send_bytes(message)
    one.rest()
    one.ended()
    (error,) = one.errors
    assert isinstance(error, InputError)
    assert one.movers[0].idle
    one.pipe.close()
    assert usage() == before


def test_a_mover_that_cannot_be_made_ends_the_pipe(serve, usage):
    before = usage()

    def make(_):
        raise MemoryError("no host memory")

    one = serve(make=make)
    assert one.rest() == []
    one.ended()
    assert isinstance(one.errors[0], MemoryError)
    one.pipe.close()
    assert usage() == before


def test_each_plan_waits_for_the_work_that_was_launched_when_it_came(serve):
    class Launched:
        def __init__(self):
            self.event = threading.Event()

        def done(self):
            return self.event.is_set()

        def wait(self, within_s):
            return self.event.wait(within_s)

    made, arrived = [], threading.Semaphore(0)

    def fence():
        made.append(Launched())
        arrived.release()
        return made[-1]

    one = serve(fence=fence).ready()
    for number in (1, 2):
        one.pipe.send_bytes(encode(plan(number, Verb.SAVE, number)))
        assert arrived.acquire(timeout=LONG_S)
    made[1].event.set()
    assert one.hear(2) == [OK]
    one.rows[1] = 7
    made[0].event.set()
    assert one.hear(1) == [OK]
    assert (one.movers[0].host.row(1) == 7).all()
