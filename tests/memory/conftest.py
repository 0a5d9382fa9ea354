"""What tests of regions share: children with an interpreter of their own, and what this process has open and mapped."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import warnings

import pytest

from stepwell.memory.arena import Arena
from stepwell.memory.ask import Ask, Kind
from stepwell.memory.region import Region
from stepwell.testing.gpu import FakeGpu


@pytest.fixture(scope="session")
def run_python():
    """Runs code in an interpreter of its own, to its end."""

    def run(code, *arguments, before=(), **options):
        command = [*before, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, **options
        )

    return run


@pytest.fixture(scope="session")
def holding():
    """Runs code that prints a line when it has what it wants, and reads stdin to wait; gives child and line."""

    @contextlib.contextmanager
    def hold(code, *arguments, **options):
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options) as child:
            yield child, child.stdout.readline().strip()

    return hold


@pytest.fixture(scope="session")
def descriptors():
    """What this process has open, by number."""

    def read():
        found = {}
        for entry in pathlib.Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # of the listing itself
                found[int(entry.name)] = str(entry.readlink())
        return found

    return read


@pytest.fixture
def nothing_stays_open(descriptors):
    """Fails the test that leaves a descriptor behind."""
    before = descriptors()
    yield
    assert descriptors() == before


@pytest.fixture(scope="session")
def mapped():
    """Tells whether something is mapped at an address."""

    def is_mapped(address):
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        return any(first <= address < last for first, last in spans)

    return is_mapped


@pytest.fixture
def name(request, tmp_path):
    """In shared memory, of this test only; removed if the test left it."""
    text = f"test-{os.getpid()}-{abs(hash(str(tmp_path)))}"
    yield text
    pathlib.Path("/dev/shm", f"stepwell-{text}").unlink(missing_ok=True)


class Grounds:
    """Arenas and regions of one test. At its end all of them are closed, which fails if something is in use."""

    def __init__(self):
        self.arenas, self.regions = [], []

    def region(self, size_bytes, *, gpu=None, **ask):
        self.regions.append(Region.open(Ask(size_bytes, **ask), gpu=gpu))
        return self.regions[-1]

    def arena(self, frames=8, frame_bytes=4096, *, count=None, debug=True, **more):
        """An arena with one region of so many frames; with none for 0."""
        arena = Arena(frame_bytes, count or max(frames, 1), debug=debug, **more)
        self.arenas.append(arena)
        if frames:
            arena.add(self.region(frames * arena._places.stride_bytes))
        return arena

    def end(self):
        try:
            for arena in self.arenas:
                arena.check()
                arena.close()
            for region in self.regions:
                region.close()
        finally:
            for region in self.regions:  # a test that fails must not take the next one with it
                region._mapping.close()


@pytest.fixture
def grounds():
    made = Grounds()
    yield made
    made.end()


@pytest.fixture
def make_arena(grounds):
    return grounds.arena


@pytest.fixture
def make_region(grounds):
    return grounds.region


class GatedGpu(FakeGpu):
    """Registers a piece only when a test lets it: growth stands still where the test wants it."""

    def __init__(self, **more):
        super().__init__(**more)
        self.asked, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def register(self, address, size_bytes):
        self.asked.release()
        assert self.gate.acquire(timeout=30)
        super().register(address, size_bytes)


@pytest.fixture
def gated_gpu():
    return GatedGpu()


@pytest.fixture(scope="session")
def write():
    """Fills a buffer with one byte."""

    def fill(buffer, byte):
        with buffer.view() as memory:
            memory[:] = bytes([byte]) * len(memory)

    return fill


@pytest.fixture(scope="session")
def read():
    """The bytes of a buffer."""

    def copy(buffer):
        with buffer.view(readonly=True) as memory:
            return bytes(memory)

    return copy


@pytest.fixture(scope="session")
def forked():
    """What a function answers in a forked child, as long as it is made of plain values."""

    def run(child):
        answers, told = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: threads and fork
            number = os.fork()
        if number == 0:
            text = "'nothing'"
            try:
                text = repr(child())
            except BaseException:  # noqa: BLE001 - nobody is above to catch it
                text = traceback.format_exc()
            finally:
                os.write(told, text.encode())
                os._exit(0)
        os.close(told)
        with os.fdopen(answers, "rb") as answer:
            in_time = select.select([answer], [], [], 30)[0]
            if not in_time:
                os.kill(number, signal.SIGKILL)
            text = answer.read().decode()
        status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        assert (bool(in_time), status) == (True, 0), f"the child hung or died: {text}"
        assert "Traceback" not in text, text
        return ast.literal_eval(text)

    return run


@pytest.fixture
def of(name, tmp_path):
    """A valid ask of a kind."""
    (tmp_path / "files").mkdir()
    needs = {Kind.NAMED: {"name": name}, Kind.FILE: {"folder": str(tmp_path / "files")}}

    def make(kind, size_bytes, **more):
        return Ask(size_bytes, kind, **(needs.get(kind, {}) | more))

    return make


@pytest.fixture
def gpu():
    """A device in host memory; torch opens files of its own when it is imported."""
    return FakeGpu()


@pytest.fixture(scope="session")
def in_time():
    """Runs an action in a thread of its own: one that waits for itself must not take the tests with it."""

    def within(action):
        errors = []

        def run():
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it waits for itself"
        if errors:
            raise errors[0]

    return within
