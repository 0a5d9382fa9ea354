"""Touching a mapping in parallel, piece by piece.

Memory that nobody has touched does not exist yet: taking it here makes a machine that is out of memory an
error at start instead of a killed process later. Neighbours: `region` prepares itself with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from stepwell.base.errors import RefusedError
from stepwell.base.threads import Health, start
from stepwell.base.units import format_bytes
from stepwell.memory import system
from stepwell.memory.ask import Refusal
from stepwell.memory.machine import available_bytes

STRIDE_BYTES = 64 << 20
"""What one thread touches between two looks at who wants it to stop."""
_SHARE_BYTES = 8 << 20
"""Less than that is not worth a thread."""
_MOST_THREADS = 8


def touch(address: int, size_bytes: int, page_bytes: int, *, node: int | None, fresh: bool) -> None:
    """Touches a part of a mapping from several threads.

    Args:
        address: of its first byte, at the beginning of a memory page.
        size_bytes: of the part.
        page_bytes: of one memory page.
        node: that it is bound to, if it is.
        fresh: nobody else has bytes there.

    Raises:
        RefusedError: there is no memory for it.
    """
    _require_room(size_bytes, page_bytes, node)
    threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1, size_bytes // _SHARE_BYTES))
    share = -(-size_bytes // threads // page_bytes) * page_bytes
    health = Health()
    errors: list[OSError] = []

    def touch_share(first: int) -> None:
        try:
            system.populate(address + first, min(share, size_bytes - first), fresh=fresh)
        except OSError as error:
            errors.append(error)

    others: list[threading.Thread] = []
    try:
        here = [0]
        for first in range(share, size_bytes, share):
            try:
                others.append(start(f"touch-{first}", _bound(touch_share, first), health))
            except RuntimeError:  # no more threads can be started
                here.append(first)
        for first in here:
            touch_share(first)
    finally:
        for thread in others:
            thread.join()
    if health.faults:
        raise health.faults[0].error
    if errors:
        raise no_memory(size_bytes, errors[0]) from errors[0]


def no_memory(size_bytes: int, error: OSError) -> RefusedError:
    """The refusal of a touch."""
    reason = f"{format_bytes(size_bytes)} could not be touched: {error.strerror}"
    remedy = "ask for less; for shared memory, give /dev/shm or the control group more"
    return Refusal("region", reason, remedy).error()


def _bound(function: Callable[[int], None], first: int) -> Callable[[], None]:
    return lambda: function(first)


def pieces(size_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte and size of each piece; the last one may be smaller."""
    for first in range(0, size_bytes, piece_bytes):
        yield first, min(piece_bytes, size_bytes - first)


def _require_room(size_bytes: int, page_bytes: int, node: int | None) -> None:
    if page_bytes == system.HUGE_BYTES:
        return  # reserved when it was mapped
    room = available_bytes(node)
    if room is not None and size_bytes > room:
        where = "" if node is None else f" on node {node}"
        reason = f"the next {format_bytes(size_bytes)} are not there, {format_bytes(room)} are available{where}"
        raise Refusal("region", reason, "ask for less, or free memory").error()
