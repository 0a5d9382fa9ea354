"""How a ledger and a mover are joined: by a call in one process, or by records over a pipe between two.

Owns: the wire form of plans and reports, and the two threads of a pipe. Must not know: what the records mean.
Neighbours: `store` has one joint for each rank; `core.plan` has the records.

    wire form: u32 length of the head ‖ head, JSON: kind, numbers, and the length of each field of bytes ‖ those bytes
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np

from stepwell.base.clock import SystemClock
from stepwell.base.errors import InputError
from stepwell.base.threads import Health, start
from stepwell.core.plan import Grown, Outcome, Plan, Report
from stepwell.move.fence import PASSED, Fence
from stepwell.move.mover import Mover, Told

_KINDS: dict[str, type[Plan | Report | Grown]] = {"plan": Plan, "report": Report, "grown": Grown}
_MAX_BYTES = 1 << 30

_END = b""
"""No record is empty: nothing follows, and nothing is touched any more."""


def encode(record: Plan | Report | Grown) -> bytes:
    """A record as bytes."""
    plain = record.plain()
    fields = {name: value for name, value in plain.items() if isinstance(value, bytes)}
    head = {name: value for name, value in plain.items() if not isinstance(value, bytes)}
    kind = next(kind for kind, made in _KINDS.items() if isinstance(record, made))
    sizes = {name: len(value) for name, value in fields.items()}
    text = json.dumps({"kind": kind, "numbers": head, "sizes": sizes}).encode()
    return b"".join((struct.pack("<I", len(text)), text, *fields.values()))


def decode(message: bytes) -> Plan | Report | Grown:
    """What `encode` gave.

    Raises:
        InputError: it is something else; nothing of it is believed.
    """
    try:
        (size,) = struct.unpack_from("<I", message)
        head = json.loads(message[4 : 4 + size])
        kind, plain, sizes = _KINDS[head["kind"]], dict(head["numbers"]), dict(head["sizes"])
        at = 4 + size
        for name, length in sizes.items():
            if type(length) is not int or not 0 <= length <= len(message) - at:
                raise InputError(f"a record has {length!r} bytes of {name}")
            plain[name] = message[at : at + length]
            at += length
    except (ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise InputError(f"a record cannot be read: {error!r}") from error
    if at != len(message):
        raise InputError(f"a record ends after {at} of {len(message)} bytes")
    return kind.from_plain(plain)


class Joint(Protocol):
    """The way to one mover."""

    def send(self, plan: Plan, fence: Fence) -> None:
        """Hands a plan over; never waits."""
        ...

    def close(self, within_s: float) -> bool:
        """Ends the mover; whether it touches nothing any more."""
        ...


class CallJoint:
    """A mover in this process.

    Args:
        mover: started, or driven by whoever calls its `work`.
    """

    def __init__(self, mover: Mover) -> None:
        self.mover = mover

    def send(self, plan: Plan, fence: Fence) -> None:
        """See `Joint`."""
        self.mover.take(plan, fence)

    def close(self, within_s: float) -> bool:
        """See `Joint`."""
        return self.mover.close(within_s)


class PipeJoint:
    """A mover in another process, which runs `serve_mover` at the other end of a pipe.

    Two threads, so that nobody who sends a plan waits for the pipe. A mover whose end of the pipe is gone, or that
    says what cannot be read or told, or what is another rank's to say, is lost with all its bytes. What is sent to one that is lost or closed has
    failed, and is told so at once.

    Args:
        pipe: this end of a pair of sockets; closed by `close`.
        told: is given what the mover reports.
        lost: called once when the mover is gone, unless it was closed and ended well.
        number: of the rank, as its mover knows it.
        health: told when a thread dies.
    """

    def __init__(
        self,
        pipe: Connection,
        told: Told,
        lost: Callable[[], None],
        *,
        number: int = 0,
        health: Health | None = None,
    ) -> None:
        health = Health() if health is None else health
        self._pipe = pipe
        self._told = told
        self._lost = lost
        self._number = number
        self._plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._shut = False  # closed or lost: nothing more is sent
        self._threads = [
            start(f"pipe-plans-{number}", self._write, health),
            start(f"pipe-reports-{number}", self._read, health),
        ]

    def send(self, plan: Plan, fence: Fence) -> None:  # noqa: ARG002 - its own process has the source
        """See `Joint`; what tells that the source is ready is known in the other process."""
        message = encode(plan)
        with self._gate:
            if not self._shut:
                self._plans.put(message)
                return
        failed = np.full(len(plan), Outcome.UNAVAILABLE, np.uint8)
        with contextlib.suppress(InputError):  # it has ended already, when the mover was lost
            self._told(Report(plan.number, self._number, failed, released=True, clear=True))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader says that the mover is lost
            while (message := self._plans.get()) is not None:
                self._pipe.send_bytes(message)
            self._pipe.send_bytes(_END)

    def _read(self) -> None:
        ended = False
        try:
            ended = self._listen()
        finally:
            closed = self._shuts()
            try:
                if not (ended and closed):
                    self._lost()
            finally:
                self._drain()

    def _listen(self) -> bool:
        """Tells reports up to the end of the other side; whether that was a good one."""
        with contextlib.suppress(EOFError, OSError, InputError):
            while message := self._pipe.recv_bytes(_MAX_BYTES):
                record = decode(message)
                if isinstance(record, Plan) or record.mover != self._number:
                    return False
                self._told(record)
            return True
        return False

    def _drain(self) -> None:
        """Waits for the other side: one that says nonsense may still live, and touch memory."""
        with contextlib.suppress(OSError):
            while os.read(self._pipe.fileno(), 1 << 16):
                pass

    def _shuts(self) -> bool:
        """Ends sending; whether that was so before."""
        with self._gate:
            before, self._shut = self._shut, True
            self._plans.put(None)
        return before

    def close(self, within_s: float) -> bool:
        """See `Joint`. If the other process does not end in time, a later call looks again."""
        self._shuts()
        clock = SystemClock()
        until_s = clock.now_s() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - clock.now_s()))
        if any(thread.is_alive() for thread in self._threads):
            return False  # they use the pipe
        self._pipe.close()
        return True


def serve_mover(
    pipe: Connection, make: Callable[[Told], Mover], fence: Callable[[], Fence] | None = None
) -> bool:
    """The life of a process that has a mover: does what comes over a pipe until its other end is closed.

    Args:
        pipe: this end. Closed, unless a copy hangs: its end says that nothing is touched any more.
        make: gives the mover, not started, for a function that is told its reports.
        fence: gives what tells that the work launched so far has been done; by default it has been.

    Returns:
        Whether nothing is touched any more.

    Raises:
        InputError: the other end says what no ledger says.
    """
    reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def write() -> None:
        with contextlib.suppress(OSError):  # the ledger is gone: the reader sees it
            while (message := reports.get()) is not None:
                pipe.send_bytes(message)

    with contextlib.ExitStack() as undo:
        undo.callback(pipe.close)
        mover = make(lambda record: reports.put(encode(record)))
        writer = start("pipe-reports", write, mover.health)
        clear = False
        try:
            mover.start()
            with contextlib.suppress(EOFError, OSError):  # nobody waits for what is under way
                while message := pipe.recv_bytes(_MAX_BYTES):
                    record = decode(message)
                    if not isinstance(record, Plan):
                        raise InputError("a ledger sent a report")
                    mover.take(record, PASSED if fence is None else fence())
        finally:
            clear = mover.close()
            if clear:
                reports.put(_END)
            reports.put(None)
            writer.join(10)
            if not clear or writer.is_alive():
                undo.pop_all()
    return clear
