"""A device on the CPU whose streams a test moves: a copy stops half-way, a fence comes when the test says so.

Owns: streams of operations, the order in which they ran, and copies cut into pieces. Must not know: tiers, movers,
policies. Neighbours: `move.fence` and `move.place` are the protocols; `faults` breaks what is whole here.

    device = FakeDevice()
    place = FakePlace(BytesPlace(rows, bounds), device.out, device.into)
    fence = place.copy_out(frames, into_rows)
    device.out.advance()        a quarter of the bytes is there, and fence.done() is False
    device.out.advance_all()    all of them are

Threads wait for fences and for queues on one condition of the device: nothing sleeps, nothing looks again and again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError, MisuseError
from stepwell.core.frames import FrameIds
from stepwell.move.fence import PASSED, Fence
from stepwell.move.place import Place
from stepwell.tiers.tier import Row


@dataclass(frozen=True, slots=True)
class _Operation:
    what: str
    action: Callable[[], None]
    after: FakeFence | None = None

    @property
    def ready(self) -> bool:
        return self.after is None or self.after.done()


class FakeStream:
    """Operations in the order in which they were enqueued, each run when a test lets it.

    One that raises stays at the head, raises at whoever moves the stream, and its fence never comes.

    Args:
        device: that it belongs to.
        name: for the log.

    Attributes:
        passed: how many operations have run.
        free: operations run as soon as they can; see `free_run`.
    """

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.passed = 0
        self.free = False
        self._queue: deque[_Operation] = deque()
        self._running = False

    @property
    def queued(self) -> int:
        """How many operations have not run."""
        return len(self._queue)

    @property
    def ready(self) -> bool:
        """Whether the next operation could run now."""
        return bool(self._queue) and not self._running and self._queue[0].ready

    def enqueue(self, what: str, action: Callable[[], None]) -> None:
        """Adds an operation.

        Args:
            what: for the log.
            action: called once, under the device's lock: it must not wait.
        """
        self._add(_Operation(what, action))

    def wait_for(self, fence: FakeFence) -> None:
        """Adds an operation that stays at the head until a fence has come.

        Raises:
            InputError: the fence is another device's, which would not wake this one.
        """
        if fence.stream.device is not self.device:
            raise InputError("a fence of another device", limit="streams of one device")
        self._add(_Operation(f"after {fence.stream.name}", _nothing, fence))

    def _add(self, operation: _Operation) -> None:
        with self.device.moving():
            self._queue.append(operation)

    def fence(self) -> FakeFence:
        """The end of all that was enqueued so far."""
        with self.device.moved:
            return FakeFence(self, self.passed + len(self._queue))

    def advance(self, n: int = 1) -> int:
        """Runs up to n operations; how many ran: fewer where the queue ends, or waits for another stream."""
        ran = 0
        with self.device.moving():
            while ran < n and self.ready:
                self.step()
                ran += 1
        return ran

    def advance_all(self) -> int:
        """Runs what is enqueued, up to what waits for another stream; how many ran."""
        return self.advance(self.queued)

    def free_run(self, free: bool = True) -> None:
        """From now on operations run as soon as they can, in the thread that enqueues or moves; or no longer."""
        with self.device.moving():
            self.free = free

    def wait_queued(self, n: int, within_s: float) -> bool:
        """Waits until n operations or more have not run, as another thread enqueues them; whether they are there."""
        with self.device.moved:
            return self.device.moved.wait_for(lambda: self.queued >= n, within_s)

    def step(self) -> None:
        """Runs the head, which is ready; under the device's lock."""
        operation = self._queue[0]
        self._running = True  # an action that enqueues must not start the next one
        try:
            operation.action()
        finally:
            self._running = False
        self._queue.popleft()
        self.passed += 1
        self.device.log.append((self.name, operation.what))


def _nothing() -> None:
    pass


class FakeFence:
    """A point in a stream: see `move.fence.Fence`. Made by `FakeStream.fence`.

    Args:
        stream: whose point it is.
        position: operations of that stream that lie before it.
    """

    def __init__(self, stream: FakeStream, position: int) -> None:
        self.stream = stream
        self.position = position

    def done(self) -> bool:
        return self.stream.passed >= self.position

    def wait(self, within_s: float) -> bool:
        """Waits until another thread has moved the stream far enough, in seconds of the machine; whether it has."""
        moved = self.stream.device.moved
        with moved:
            return moved.wait_for(self.done, within_s)


class GateFence:
    """The end of a copy that is told by a test: see `move.fence.Fence`.

    Args:
        gate: set when it has come; a fence that never comes is one whose gate is never set.
    """

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def done(self) -> bool:
        return self._gate.is_set()

    def wait(self, within_s: float) -> bool:
        return self._gate.wait(within_s)


class FakeDevice:
    """Streams that move as a test wants, one operation at a time on the whole device.

    Any thread may enqueue, move and wait. One condition orders them: what runs is seen by nobody half-way but in the
    bytes that it has not written yet.

    Attributes:
        compute: the engine's stream.
        out: copies out of the device.
        into: copies into it.
        streams: all three.
        moved: notified when anything was enqueued or has run.
        log: stream and operation, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.compute, self.out, self.into = (
            FakeStream(self, name) for name in ("compute", "out", "into")
        )
        self.streams = (self.compute, self.out, self.into)
        self.moved = threading.Condition()
        self.log: list[tuple[str, str]] = []

    @contextmanager
    def moving(self) -> Iterator[None]:
        """The lock, for a change: at its end free streams go on, and whoever waits looks again."""
        with self.moved:
            try:
                yield
                while stream := next((one for one in self.streams if one.free and one.ready), None):
                    stream.step()
            finally:
                self.moved.notify_all()

    def advance_some(self, random: Random) -> bool:
        """Runs the next operation of one stream, chosen at random of those that can move; whether there was one."""
        with self.moved:
            ready = [stream for stream in self.streams if stream.ready]
            if ready:
                random.choice(ready).advance()
            return bool(ready)

    def advance_all(self) -> int:
        """Runs everything that can run, stream after stream; how many operations."""
        ran = 0
        with self.moved:
            while now := sum(stream.advance_all() for stream in self.streams):
                ran += now
        return ran


class BytesPlace:
    """Frames as rows of one array, copied at once: the smallest `move.place.Place`.

    Args:
        rows: shape [frames, frame_bytes], uint8; the caller's, who may look at it and write it.
        bounds: where each layer begins, and the end of the last; shape [layers + 1].
    """

    def __init__(self, rows: npt.NDArray[np.uint8], bounds: tuple[int, ...]) -> None:
        self.rows = rows
        self.bounds = bounds
        self.frames, self.frame_bytes = rows.shape
        if (bounds[0], bounds[-1]) != (0, self.frame_bytes):
            raise InputError(f"layers begin at {bounds}", limit=f"from 0 up to {self.frame_bytes}")

    def copy_out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        """As `Place`.

        Raises:
            InputError: a frame does not exist, or there are not as many rows as frames.
        """
        for frame, row in self._pairs(frames, rows):
            row[:] = self.rows[frame]
        return PASSED

    def copy_in(
        self, rows: Sequence[Row], frames: FrameIds, layers: tuple[int, int] | None = None
    ) -> Fence:
        """As `Place`.

        Raises:
            InputError: a frame does not exist, or there are not as many rows as frames.
        """
        first, last = span_of(self.bounds, layers)
        for frame, row in self._pairs(frames, rows):
            self.rows[frame, first:last] = row[first:last]
        return PASSED

    def _pairs(self, frames: FrameIds, rows: Sequence[Row]) -> Iterator[tuple[int, Row]]:
        numbers = frames.tolist()
        if len(numbers) != len(rows) or any(not 0 <= frame < self.frames for frame in numbers):
            raise InputError(
                f"frames {numbers} for {len(rows)} rows", limit=f"0 to {self.frames - 1}"
            )
        return zip(numbers, rows, strict=True)


def span_of(bounds: tuple[int, ...], layers: tuple[int, int] | None) -> tuple[int, int]:
    """First byte of some layers of a frame, and one behind the last; of all by default."""
    first, last = layers or (0, len(bounds) - 1)
    return bounds[first], bounds[last]


def at_once(fence: Fence) -> None:
    """Requires that a copy has ended when its call has.

    Raises:
        MisuseError: it has not.
    """
    if not fence.done():
        raise MisuseError(
            "a copy goes on after its call",
            limit="places that copy at once",
            remedy="put this one on top",
        )


_Span = tuple[int, int, int]
"""Which of the frames of a copy, its first byte, and one behind the last."""


class FakePlace:
    """A place whose copies are operations of streams, each in several pieces: see `move.place.Place`.

    A piece is some frames, or a range of the bytes of one where frames are fewer than pieces. What it reads is read
    when it runs: whoever changes rows or frames before the fence finds a mixture, as on a device.

    Args:
        place: has the frames; copies at once.
        out: runs copies out of the place.
        into: runs copies into it.
        pieces: operations of one copy.
    """

    def __init__(self, place: Place, out: FakeStream, into: FakeStream, pieces: int = 4) -> None:
        if pieces < 1:
            raise InputError(f"copies in {pieces} pieces", limit="1 or more")
        self.frame_bytes = place.frame_bytes
        self.bounds = place.bounds
        self.frames = place.frames
        self._place = place
        self._out = out
        self._into = into
        self._pieces = pieces

    def copy_out(self, frames: FrameIds, rows: Sequence[Row]) -> Fence:
        frames, rows = frames.copy(), list(rows)
        for what, piece in self._cut(len(rows), (0, self.frame_bytes)):
            self._out.enqueue(f"out {what}", partial(self._read, frames, rows, piece))
        return self._out.fence()

    def copy_in(
        self, rows: Sequence[Row], frames: FrameIds, layers: tuple[int, int] | None = None
    ) -> Fence:
        frames, rows = frames.copy(), list(rows)
        for what, piece in self._cut(len(rows), span_of(self.bounds, layers)):
            self._into.enqueue(f"into {what}", partial(self._write, frames, rows, piece))
        return self._into.fence()

    def _cut(self, n: int, span: tuple[int, int]) -> Iterator[tuple[str, list[_Span]]]:
        """The pieces of a copy of n frames, or of a span of bytes of each."""
        ranges = -(-self._pieces // n) if n else 1
        cuts = np.linspace(*span, ranges + 1).astype(int).tolist()
        spans = [
            (index, first, last)
            for index in range(n)
            for first, last in pairwise(cuts)
            if first < last
        ]
        count = min(self._pieces, len(spans))
        ends = [number * len(spans) // count for number in range(count + 1)] if count else []
        for number, (first, last) in enumerate(pairwise(ends), 1):
            yield f"{number}/{count}", spans[first:last]

    def _frame(self, frame: FrameIds) -> Row:
        row: Row = np.empty(self.frame_bytes, np.uint8)
        at_once(self._place.copy_out(frame, [row]))
        return row

    def _read(self, frames: FrameIds, rows: list[Row], piece: list[_Span]) -> None:
        for index, first, last in piece:
            rows[index][first:last] = self._frame(frames[index : index + 1])[first:last]

    def _write(self, frames: FrameIds, rows: list[Row], piece: list[_Span]) -> None:
        for index, first, last in piece:
            frame = frames[index : index + 1]
            row = self._frame(frame)
            row[first:last] = rows[index][first:last]
            at_once(self._place.copy_in([row], frame))
