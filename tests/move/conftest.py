"""A mover over a small host tier and device memory, all of whose reports are kept and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading

import numpy as np
import pytest

from stepwell.base.settings import HostSettings
from stepwell.core.plan import KEY_BYTES, Grown, Plan, Verb
from stepwell.move.carrier import Rank
from stepwell.move.fence import PASSED
from stepwell.move.mover import Mover
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import BytesPlace, FakeDevice, FakePlace
from stepwell.testing.faults import FaultyHost, FaultyPlace, PlannedFault
from stepwell.tiers.host import HostSize

BOUNDS = (0, 100, 101, 256)
PARTS = (b"p" * 32, b"q" * 32)
LONG_S = 30
SETTINGS = HostSettings(threads=2, within_ms=1000)


class Bench:
    """One mover; device frames are full of bytes of their own, and frame n of the tier gets the key of n.

    Without `threads` a test calls `mover.work` and `mover.look`, and the clock is the test's.
    """

    def __init__(
        self, frames=8, *, copies=(), host=(), streams=False, at_once=100, wrap=None, **more
    ):
        real_clock = more.pop("real_clock", False)
        self.clock = FakeClock()
        self.device = FakeDevice()
        self.gates = [fault.gate for fault in (*copies, *host)]
        self.rows = np.random.default_rng(1).integers(1, 255, (frames, 256), np.uint8)
        self.first = self.rows.copy()
        place = FaultyPlace(BytesPlace(self.rows, BOUNDS), copies, self.clock)
        place = FakePlace(place, self.device.out, self.device.into) if streams else place
        self.host = FaultyHost(HostSize(256, BOUNDS, frames), host, fake_clock=self.clock)
        assert self.host.wait(LONG_S)
        self.told = []
        self.telling = None  # called with each record, and may raise
        self.arrived = threading.Condition()
        self.settings = dataclasses.replace(SETTINGS, **more)
        rank = Rank(self.host, (place if wrap is None else wrap(place),), PARTS, 3)
        clock = None if real_clock else self.clock
        self.mover = Mover(rank, self._tell, self.settings, clock=clock)
        self.mover._frames_at_once = at_once
        self._numbers = 0

    def _tell(self, record):
        with self.arrived:
            self.told.append(record)
            self.arrived.notify_all()
        if self.telling is not None:
            self.telling(record)

    def strike(self, kind, call, **more):
        """From now on, and only then, this goes wrong in the tier."""
        fault = PlannedFault(kind, call, **more)
        self.gates.append(fault.gate)
        self.host._stage._script = (fault,)
        return fault

    def plan(self, verb, inside, outside=None, *, keys=None, within_ms=1000, which=0, place=0):
        """The next plan: frame n of the device belongs to frame n of the tier unless told otherwise."""
        self._numbers += 1
        inside = np.array(inside, np.int32)
        outside = inside if outside is None else np.array(outside, np.int32)
        names = inside.tolist() if keys is None else keys
        return Plan(
            self._numbers,
            verb,
            place,
            outside[:0] if verb is Verb.WIPE else outside,
            inside,
            b"".join(key(one) for one in names),
            np.full(len(inside), which, np.uint32),
            within_ms,
        )

    def begin(self, verb, inside, *rest, fence=PASSED, **more):
        """Hands a plan over; its number."""
        plan = self.plan(verb, inside, *rest, **more)
        self.mover.take(plan, fence)
        return plan.number

    def work(self):
        while self.mover.work():
            pass

    def do(self, verb, inside, *rest, **more):
        """Hands a plan over and works until there is nothing to do; its outcomes."""
        number = self.begin(verb, inside, *rest, **more)
        self.work()
        return self.outcomes(number)

    def save(self, *frames, **more):
        return self.do(Verb.SAVE, frames, **more)

    def load(self, *frames, **more):
        return self.do(Verb.LOAD, frames, **more)

    def of(self, number):
        """What was told of a plan: (outcomes or None, clear) in order."""
        return [
            (None if one.outcomes is None else one.outcomes.tolist(), one.clear)
            for one in self.told
            if not isinstance(one, Grown) and one.plan == number
        ]

    def outcomes(self, number):
        """The outcomes of a plan that is clear; also checks the order of all that was told of it."""
        said = self.of(number)
        assert [clear for _, clear in said] == [False] * (len(said) - 1) + [True]
        (ended,) = [at for at, (outcomes, _) in enumerate(said) if outcomes is not None]
        assert len(said) - ended <= 2, "between its end and that it is clear nothing is told"
        assert all(one.released and one.mover == 3 for one in self.told if hasattr(one, "plan"))
        return said[ended][0]

    def wait_told(self, *numbers, clear=True):
        """Waits for the end of plans that threads move; whether it came."""
        with self.arrived:
            return self.arrived.wait_for(
                lambda: all(
                    any(was_clear if clear else outcomes for outcomes, was_clear in self.of(one))
                    for one in numbers
                ),
                LONG_S,
            )

    def end(self):
        """Lets everything go on, and closes the mover."""
        for stream in self.device.streams:
            stream.free_run()
        for gate in self.gates:
            gate.set()
        self.telling = None
        assert self.mover.close(LONG_S), "something still touches memory"

    def grown(self):
        return sorted(
            frame for one in self.told if isinstance(one, Grown) for frame in one.frames.tolist()
        )

    def named(self, *frames, keys=None, which=0):
        """What the tier says to the names of frames."""
        keys = frames if keys is None else keys
        pairs = zip(frames, keys, strict=True)
        return [self.host.proves(frame, name(number, which)) for frame, number in pairs]

    def spoil(self, byte=0xFF):
        """The engine has used all device frames for something else."""
        self.rows[:] = byte


def key(number):
    return (number + 1).to_bytes(KEY_BYTES, "big")


def name(number, which=0):
    return key(number) + PARTS[which >> 16] + (which & 0xFFFF).to_bytes(2, "little")


def bench_with(*args, threads=0, **more):
    made = Bench(*args, threads=threads or 1, **more)
    made.mover.look()
    if threads:
        made.mover.start()
    return made


@pytest.fixture
def make_bench():
    """Benches whose movers are closed at the end."""
    made = []

    def make(*args, **more):
        made.append(bench_with(*args, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.end()


@pytest.fixture
def bench(make_bench):
    return make_bench()


@pytest.fixture(scope="session")
def bench_of():
    """A bench for one example of a property."""

    @contextlib.contextmanager
    def of(**more):
        made = bench_with(**more)
        try:
            yield made
        finally:
            made.end()

    return of


@pytest.fixture(scope="session")
def key_of():
    return key


@pytest.fixture(scope="session")
def name_of():
    return name


@pytest.fixture
def usage():
    """Threads of ours, and open descriptors, now."""

    def count():
        ours = [one.name for one in threading.enumerate() if one.name.startswith("stepwell-")]
        return sorted(ours), len(list(pathlib.Path("/proc/self/fd").iterdir()))

    return count
