"""Two processes share frames: one owns the arena, the other fills what it is told to; then a transfer is late.

The parent sends the descriptor of a SHARED region and plain records over a socket. Only the parent counts frames; the
socket's end tells it that the child is gone, whatever ended it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict

import numpy as np

from stepwell import Arena, Ask, Kind, PlainBuffer, Region, Short
from stepwell.testing.clock import FakeClock

FRAME_BYTES = 64 << 10


def child(number: int) -> None:
    """Fills the frames that come over the socket, each with its place in the list."""
    with socket.socket(fileno=number) as line:
        message, descriptors, _, _ = socket.recv_fds(line, 1 << 16, 1)
        records = [PlainBuffer(**record) for record in json.loads(message)]
        with Region.attach(descriptors[0]) as region:
            for value, record in enumerate(records, start=1):
                with region.view(record.offset, record.used_bytes, readonly=False) as view:
                    array = np.frombuffer(view, np.uint8)
                    array[:] = value
                    del array  # whatever is made from a view ends with its block
        line.sendall(b"filled")


def parent() -> None:
    """Owns the frames."""
    clock = FakeClock()  # of a test; without one an arena takes the machine's
    with (
        Region.open(Ask(1 << 20, Kind.SHARED)) as region,
        Arena(FRAME_BYTES, 16, clock=clock) as arena,
    ):
        print("frames:", arena.add(region))
        lease = arena.reserve(3, owner="child")
        assert not isinstance(lease, Short), f"evict {lease.by} frames, then ask again"
        pin = lease.pin("filling", within_s=2.0)
        records = [lease.buffer(index).plain() for index in range(3)]
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            message = json.dumps([asdict(record) for record in records]).encode()
            socket.send_fds(ours, [message], [region.descriptor])
            assert ours.recv(16) == b"filled", "empty: the child is dead, and so is its transfer"
        assert process.returncode == 0
        for record in records:
            arena.require_current(record)
        pin.end()
        for index in range(3):
            with lease.buffer(index).view(readonly=True) as view:
                print("filled with", view[0], view[-1])

        # A transfer that does not end in time. Nothing is freed under it; whoever has a timer finds it.
        slow = lease.pin("slow", within_s=2.0)
        clock.advance_s(3)
        print("late:", [late.name for late in arena.overdue()], lease.late)
        lease.release()
        print("free while it lasts:", arena.free)
        slow.end()  # now it has really ended; an owner that keeps its frames calls lease.renew() instead
        print("free afterwards:", arena.free)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(int(sys.argv[1]))
    else:
        parent()
