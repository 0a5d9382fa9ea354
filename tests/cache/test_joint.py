"""Joints to movers in other processes, which end, hang, die or talk nonsense."""

import contextlib
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest

from stepwell.base.errors import InputError
from stepwell.base.threads import Health
from stepwell.cache.joint import PipeJoint, encode
from stepwell.core.plan import KEY_BYTES, Grown, Outcome, Plan, Report, Verb
from stepwell.move.fence import PASSED

LONG_S = 30
OK, UNAVAILABLE = Outcome.OK, Outcome.UNAVAILABLE


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


class Joined:
    """A joint, with all that it is told."""

    def __init__(self, pipe, telling=None, losing=None):
        self.told, self.lost = [], 0
        self._telling, self._losing = telling, losing
        self.arrived = threading.Condition()
        self.health = Health()
        self.joint = PipeJoint(pipe, self._tell, self._lose, number=5, health=self.health)

    def _tell(self, record):
        with self.arrived:
            self.told.append(record)
            self.arrived.notify_all()
        if self._telling is not None:
            self._telling(record)

    def _lose(self):
        with self.arrived:
            self.lost += 1
            self.arrived.notify_all()
        if self._losing is not None:
            self._losing()

    def send(self, number, verb, *frames, **more):
        self.joint.send(plan(number, verb, *frames, **more), PASSED)

    def of(self, number):
        return [one for one in self.told if isinstance(one, Report) and one.plan == number]

    def outcomes(self, number):
        """Waits until a plan is clear; its outcomes."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: any(o.clear for o in self.of(number)), LONG_S)
        (ended,) = [one for one in self.of(number) if one.outcomes is not None]
        return ended.outcomes.tolist()

    def wait_lost(self):
        with self.arrived:
            return self.arrived.wait_for(lambda: self.lost, LONG_S)

    def wait_grown(self, count):
        def grown():
            return [f for one in self.told if isinstance(one, Grown) for f in one.frames.tolist()]

        with self.arrived:
            assert self.arrived.wait_for(lambda: len(grown()) >= count, LONG_S)
        return grown()


CHILD = """
    import signal, sys, threading
    from multiprocessing.connection import Connection
    import numpy as np
    from stepwell.base.settings import HostSettings
    from stepwell.cache.joint import serve_mover
    from stepwell.move.carrier import Rank
    from stepwell.move.mover import Mover
    from stepwell.testing.device import BytesPlace
    from stepwell.testing.faults import FaultKind, FaultyPlace, PlannedFault
    from stepwell.tiers.host import HostSize, HostTier

    bounds = (0, 100, 256)
    hang = [PlannedFault(FaultKind.NEVER, call) for call in sys.argv[3:]]
    signal.signal(signal.SIGUSR1, lambda *_: [fault.gate.set() for fault in hang])

    def watch():
        for fault in hang:
            fault.reached.wait()
            print("reached", flush=True)

    threading.Thread(target=watch, daemon=True).start()

    def make(told):
        rows = np.memmap(sys.argv[2], np.uint8, "r+", shape=(8, 256))
        place = FaultyPlace(BytesPlace(rows, bounds), hang)
        rank = Rank(HostTier(HostSize(256, bounds, 8)), (place,), (bytes(32),), 5)
        return Mover(rank, told, HostSettings(threads=2))

    sys.exit(0 if serve_mover(Connection(int(sys.argv[1])), make) else 3)
"""


class Child(Joined):
    """A joint to a process of its own, whose device memory is a file that this one sees."""

    def __init__(self, folder, *hang):
        self.path = folder / f"device-{os.urandom(4).hex()}"
        self.first = np.random.default_rng(3).integers(1, 255, (8, 256), np.uint8)
        self.path.write_bytes(self.first.tobytes())
        ours, theirs = pair()
        code = [sys.executable, "-c", textwrap.dedent(CHILD), str(theirs.fileno()), str(self.path)]
        output = subprocess.PIPE if hang else None
        self.process = subprocess.Popen([*code, *hang], pass_fds=[theirs.fileno()], stdout=output)
        theirs.close()
        super().__init__(ours)

    def reached(self):
        """Waits until a copy hangs."""
        with self.process.stdout as output:
            return output.readline() == b"reached\n"

    @property
    def rows(self):
        return np.fromfile(self.path, np.uint8).reshape(8, 256)

    def spoil(self):
        """The engine has used all device frames for something else."""
        with self.path.open("r+b") as file:  # in place: the other process has it mapped
            file.write(b"\xff" * 8 * 256)

    def end(self):
        self.process.kill()
        self.process.wait(LONG_S)
        assert self.joint.close(LONG_S)


@pytest.fixture
def make_child(tmp_path):
    made = []

    def make(*hang):
        made.append(Child(tmp_path, *hang))
        return made[-1]

    yield make
    for child in made:
        child.end()


@pytest.fixture
def usage():
    """Threads of ours, and open descriptors, now."""

    def count():
        ours = [one.name for one in threading.enumerate() if one.name.startswith("stepwell-")]
        return sorted(ours), len(list(pathlib.Path("/proc/self/fd").iterdir()))

    return count


def test_plans_go_down_and_reports_come_back(make_child, usage):
    before = usage()
    child = make_child()
    assert sorted(child.wait_grown(8)) == list(range(8))
    child.send(1, Verb.SAVE, 0, 1, 2)
    assert child.outcomes(1) == [OK] * 3
    assert [one.mover for one in child.of(1)] == [5, 5], "released, then ended and clear"
    child.spoil()
    child.send(2, Verb.LOAD, 0, 2, 5)
    assert child.outcomes(2) == [OK, OK, Outcome.MISS]
    assert np.array_equal(child.rows[[0, 2]], child.first[[0, 2]])
    assert (child.rows[[1, 5]] == 0xFF).all()
    child.send(3, Verb.WIPE, 0)
    assert child.outcomes(3) == [OK]
    child.send(4, Verb.LOAD, 0, 2)
    assert child.outcomes(4) == [Outcome.MISS, OK]
    assert child.joint.close(LONG_S)
    assert child.process.wait(LONG_S) == 0, "it ended by itself"
    assert child.lost == 0, "it was closed"
    assert child.health.faults == ()
    assert usage() == before


def test_a_closed_joint_can_be_closed_again_and_answers_for_its_mover(make_child):
    child = make_child()
    assert child.joint.close(LONG_S)
    assert child.joint.close(LONG_S)
    child.send(9, Verb.SAVE, 0, 1)
    assert len(child.of(9)) == 1
    (report,) = child.of(9)
    assert report.outcomes.tolist() == [UNAVAILABLE] * 2
    assert (report.mover, report.released, report.clear) == (5, True, True)


def test_a_mover_that_is_killed_is_lost_once_and_nobody_waits_for_it(make_child, usage):
    before = usage()
    child = make_child("copy_out")
    child.wait_grown(8)
    child.send(1, Verb.SAVE, 0, 1)
    assert child.reached()
    child.process.send_signal(signal.SIGKILL)
    assert child.wait_lost()
    child.send(2, Verb.SAVE, 2)
    assert child.outcomes(2) == [UNAVAILABLE]
    assert child.joint.close(LONG_S)
    assert (child.lost, child.of(1)) == (1, []), (
        "what was under way is whose it tells that it is lost"
    )
    assert child.health.faults == ()
    child.process.wait(LONG_S)
    assert usage() == before


def test_a_mover_whose_copy_hangs_is_closed_when_the_copy_returns(make_child):
    child = make_child("copy_out")
    child.wait_grown(8)
    child.send(1, Verb.SAVE, 0)
    assert child.reached()
    assert not child.joint.close(0.01), "it still touches memory"
    assert not child.joint.close(0.01)
    child.process.send_signal(signal.SIGUSR1)
    assert child.joint.close(LONG_S)
    assert child.process.wait(LONG_S) == 0
    assert child.lost == 0


def test_a_mover_that_does_not_read_makes_nobody_wait(make_child):
    child = make_child()
    child.wait_grown(8)
    child.process.send_signal(signal.SIGSTOP)
    frames = range(60_000)
    large = Plan(
        1,
        Verb.SAVE,
        0,
        np.array(frames, np.int32),
        np.array(frames, np.int32),
        bytes(60_000 * KEY_BYTES),
        np.zeros(60_000, np.uint32),
        1,
    )
    for _ in range(3):
        child.joint.send(large, PASSED)  # far more than a socket takes
    assert not child.joint.close(0.01)
    child.process.kill()
    assert child.joint.close(LONG_S)
    assert child.lost == 1


# What comes out of a pipe, without a process.


def message_of(number):
    return encode(Report(number, 5, np.zeros(1, np.uint8), released=True, clear=True))


@pytest.fixture
def joined():
    """A joint whose other end is the test's."""
    ours, theirs = pair()
    made = []

    def join(**more):
        made.append(Joined(ours, **more))
        return made[0], theirs

    yield join
    theirs.close()
    assert made[0].joint.close(LONG_S)


NONSENSE = {
    "no record": b"nonsense",
    "a plan": encode(plan(1, Verb.SAVE, 0)),
    "half a record": message_of(2)[:-3],
    "a report of another rank": encode(Report(2, 4, None, released=True, clear=True)),
    "frames of another rank": encode(Grown(6, np.array([1], np.int32))),
    "its end, unasked": b"",
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_mover_that_says_nonsense_is_lost_and_not_believed_any_more(joined, what):
    one, theirs = joined()
    theirs.send_bytes(message_of(1))
    theirs.send_bytes(NONSENSE[what])
    assert one.wait_lost()
    with contextlib.suppress(OSError):
        theirs.send_bytes(message_of(2))
    assert theirs.recv_bytes() == b"", "it hears that this is the end"
    assert not one.joint.close(0.01), "it lives, and may touch memory"
    one.send(3, Verb.SAVE, 0)
    assert one.outcomes(3) == [UNAVAILABLE]
    theirs.close()
    assert one.joint.close(LONG_S)
    assert one.lost == 1
    assert [report.plan for report in one.told] == [1, 3]
    assert one.health.faults == ()


def test_a_mover_that_ends_badly_while_it_is_closed_is_lost(joined):
    """What it was at was never told: somebody has to end it."""
    one, theirs = joined()
    assert not one.joint.close(0)
    assert theirs.recv_bytes() == b""
    theirs.send_bytes(message_of(1)[:-1])
    theirs.close()
    assert one.joint.close(LONG_S)
    assert one.lost == 1


@pytest.mark.parametrize("raw", [struct.pack("!i", 2**31 - 1), struct.pack("!i", 10) + b"four"])
def test_a_message_of_a_wrong_length_is_the_end(joined, raw):
    one, theirs = joined()
    os.write(theirs.fileno(), raw)
    theirs.close()
    assert one.wait_lost()
    assert one.joint.close(LONG_S)
    assert one.lost == 1


def test_a_report_that_fits_no_plan_is_nonsense(joined):
    def telling(report):
        raise InputError(f"no plan {report.plan}")

    one, theirs = joined(telling=telling)
    theirs.send_bytes(message_of(1))
    assert one.wait_lost()
    one.send(2, Verb.SAVE, 0)  # also told, also refused: nobody waits for it
    assert [report.plan for report in one.told] == [1, 2]
    assert one.health.faults == ()


@pytest.mark.parametrize("what", ["telling", "losing"])
def test_whoever_is_told_may_raise_and_the_mover_is_lost_all_the_same(joined, what):
    def broken(*_):
        raise ValueError("the ledger is broken")

    one, theirs = joined(**{what: broken})
    theirs.send_bytes(message_of(1))
    theirs.send_bytes(b"nonsense")
    assert one.wait_lost()
    theirs.close()
    assert one.joint.close(LONG_S)
    assert one.lost == 1
    (fault,) = one.health.faults
    assert "the ledger is broken" in fault.trace
