"""One owner of an arena and other processes that fill its frames, alive and killed."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from stepwell.base.errors import MisuseError
from stepwell.memory.arena import Arena, Short
from stepwell.memory.ask import Ask, Kind
from stepwell.memory.region import Region
from stepwell.testing.clock import FakeClock

PAGE = 4096
FRAMES = 6
WAIT_S = 30

CHILD = """
    import json, socket, sys
    from stepwell.memory.region import Region

    line = socket.socket(fileno=int(sys.argv[1]))
    _, (descriptor,), _, _ = socket.recv_fds(line, 16, 1)
    region = Region.attach(descriptor)
    told = line.makefile("r")
    for text in told:
        order = json.loads(text)
        spans = [(plain["offset"], plain["used_bytes"]) for plain in order["frames"]]
        if order["do"] == "fill":
            for offset, size_bytes in spans:
                with region.view(offset, size_bytes, readonly=False) as memory:
                    memory[:] = bytes([order["byte"]]) * size_bytes
            answer = "filled"
        elif order["do"] == "read":
            answer = []
            for offset, size_bytes in spans:
                with region.view(offset, size_bytes) as memory:
                    answer.append(sorted(set(memory)))
        elif order["do"] == "hang":
            with region.view(*spans[0], readonly=False) as memory:
                memory[:10] = b"unfinished"
                line.sendall(b'"begun"\\n')
                told.readline()
        line.sendall(json.dumps(answer).encode() + b"\\n")
    region.close()
    line.sendall(b'"closed"\\n')
"""


class Other:
    """The parent's end of a process that has the region."""

    def __init__(self, region, code):
        self.line, theirs = socket.socketpair()
        self.line.settimeout(WAIT_S)
        command = [sys.executable, "-c", code, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        socket.send_fds(self.line, [b"region"], [region.descriptor])
        self.told = self.line.makefile("r")

    def order(self, do, buffers, **more):
        """Plain records go out, a plain answer comes back."""
        frames = [dataclasses.asdict(buffer.plain()) for buffer in buffers]
        self.line.sendall(json.dumps({"do": do, "frames": frames, **more}).encode() + b"\n")
        return json.loads(self.told.readline())

    def gone(self):
        """Whether the kernel closed its end."""
        return bool(select.select([self.line], [], [], WAIT_S)[0]) and self.told.readline() == ""

    def end(self):
        self.line.shutdown(socket.SHUT_WR)
        text = self.told.readline()
        assert self.process.wait(WAIT_S) == 0
        return json.loads(text)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self.told.close()
        self.line.close()


def shared_names():
    return sorted(path.name for path in pathlib.Path("/dev/shm").glob("stepwell-*"))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def arena(clock, descriptors):
    before, names = descriptors(), shared_names()
    region = Region.open(Ask(FRAMES * PAGE, Kind.SHARED))
    with contextlib.closing(region), Arena(PAGE, FRAMES, clock=clock, debug=True) as arena:
        arena.add(region)
        yield arena
        arena.check()
    assert descriptors() == before
    assert [name for name in shared_names() if name not in names and "test-" not in name] == []


@pytest.fixture
def other(arena):
    others = []

    def start():
        others.append(Other(arena.regions[0], textwrap.dedent(CHILD)))
        return others[-1]

    yield start
    for one in others:
        one.close()


def test_another_process_fills_frames_that_the_owner_reads(arena, other, read):
    child = other()
    with arena.reserve(3, "child") as lease:
        buffers = [lease.buffer(0), lease.buffer(1, 100), lease.buffer(2).narrowed(1)]
        with lease.pin("fill"):
            assert child.order("fill", buffers, byte=7) == "filled"
        assert [set(read(buffer)) for buffer in buffers] == [{7}] * 3
        assert set(read(lease.buffer(1))) == {0, 7}, "not more than it was told of"
        assert read(lease.buffer(1))[100:] == bytes(PAGE - 100)
    assert child.end() == "closed"


def test_two_processes_see_each_others_bytes(arena, other, read, write):
    one, two = other(), other()
    with arena.reserve(2, "one") as mine, arena.reserve(2, "two") as theirs:
        assert one.order("fill", [mine.buffer(0), mine.buffer(1)], byte=1) == "filled"
        assert two.order("fill", [theirs.buffer(0)], byte=2) == "filled"
        write(theirs.buffer(1), 3)
        order = [mine.buffer(0), mine.buffer(1), theirs.buffer(0), theirs.buffer(1)]
        for child in (one, two):
            assert child.order("read", order) == [[1], [1], [2], [3]]
        assert [set(read(buffer)) for buffer in order] == [{1}, {1}, {2}, {3}]
    assert (one.end(), two.end()) == ("closed", "closed")


def test_a_killed_process_gives_its_frames_back_through_their_owner(
    arena, clock, other, read, write
):
    """Its death is the only end of its transfers: time alone frees nothing."""
    child = other()
    mine = arena.reserve(2, "mine")
    write(mine.buffer(0), 5)
    lease = arena.reserve(3, "child")
    pins = [lease.pin("fill", [int(frame)], within_s=1) for frame in lease.frames]
    assert child.order("fill", [lease.buffer(0)], byte=9) == "filled"
    assert child.order("hang", [lease.buffer(1)]) == "begun"

    clock.advance_s(10)
    assert len(arena.overdue()) == 3
    lease.release()
    assert arena.reserve(2, "next") == Short(by=1, count=FRAMES)
    assert (mine.late, lease.late) == ((), ("fill",) * 3)

    os.kill(child.process.pid, signal.SIGKILL)
    assert child.gone()
    assert child.process.wait(WAIT_S) == -signal.SIGKILL
    for pin in pins:
        pin.end()
    arena.check()
    with arena.reserve(4, "next") as after:
        for index in range(4):
            write(after.buffer(index), 6)
        assert set(read(mine.buffer(0))) == {5}
        fresh = other()
        assert fresh.order("read", [after.buffer(index) for index in range(4)]) == [[6]] * 4
        assert fresh.end() == "closed"
    mine.release()
    stats = arena.stats()
    assert (stats.free, stats.leases, stats.pins, stats.views) == (FRAMES, 0, 0, 0)
    assert stats.pins_late == 3


def test_a_process_that_is_killed_while_it_writes_leaves_the_other_frames_as_they_were(
    arena, other, read, write
):
    child = other()
    lease, mine = arena.reserve(1, "child"), arena.reserve(FRAMES - 1, "mine")
    for index in range(FRAMES - 1):
        write(mine.buffer(index), index + 1)
    pin = lease.pin("fill")
    assert child.order("hang", [lease.buffer()]) == "begun"
    child.process.kill()
    assert child.gone()
    pin.end()
    assert read(lease.buffer(0, 10)) == b"unfinished"
    assert [set(read(mine.buffer(i))) for i in range(FRAMES - 1)] == [{i} for i in range(1, FRAMES)]
    lease.release()
    mine.release()


def test_the_owner_may_end_before_the_others(arena, other, write):
    """They keep what they have mapped; the owner's region is closed without waiting for them."""
    child = other()
    region = arena.regions[0]
    with arena.reserve(1, "one") as lease:
        write(lease.buffer(), 4)
        plain = lease.buffer()
        assert child.order("read", [plain]) == [[4]]
        record = dataclasses.asdict(plain.plain())
    arena.close()
    region.close()
    with pytest.raises(MisuseError, match="closed"):
        region.view(0, 8)
    child.line.sendall(json.dumps({"do": "read", "frames": [record]}).encode() + b"\n")
    assert json.loads(child.told.readline()) == [[255]], "what debug filled it with"
    assert child.end() == "closed"
