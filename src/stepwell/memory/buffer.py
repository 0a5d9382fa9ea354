"""The bytes of one frame of a lease: a value that is checked whenever it is used.

Neighbours: `lease` makes them, `arena` knows whether they are still good, `view` shows the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.base.errors import InputError
from stepwell.core.lease import caller
from stepwell.memory.view import View

if TYPE_CHECKING:
    from stepwell.memory.lease import Lease


@dataclass(frozen=True, slots=True)
class PlainBuffer:
    """Where a buffer lies in its region, for another process that has the region too.

    Attributes:
        region: number of the region, see `Arena.number`.
        offset: of its first byte in the region.
        used_bytes: of it.
        frame: its number.
        generation: how often the frame was freed before: another life has another one, see
            `Arena.require_current`.
    """

    region: int
    offset: int
    used_bytes: int
    frame: int
    generation: int


class Buffer:
    """The used part of one frame.

    It holds nothing by itself: when its lease has returned the frame, every use raises `StaleError`.

    Args:
        lease: whose frame it is.
        frame: its number.
        used_bytes: of the frame, from its first byte on.
    """

    __slots__ = ("frame", "lease", "used_bytes")

    def __init__(self, lease: Lease, frame: int, used_bytes: int) -> None:
        most = lease.arena.frame_bytes
        if type(used_bytes) is not int or not 1 <= used_bytes <= most:
            raise InputError(f"{used_bytes!r} bytes of a frame", limit=f"1 to {most}")
        if type(frame) is not int or not 0 <= frame < lease.arena.count:
            raise InputError(f"frame {frame!r}", limit=f"0 to {lease.arena.count - 1}")
        self.lease = lease
        self.frame = frame
        self.used_bytes = used_bytes

    def narrowed(self, used_bytes: int) -> Buffer:
        """The same frame with fewer bytes.

        Raises:
            InputError: these are more.
        """
        if type(used_bytes) is int and used_bytes > self.used_bytes:
            raise InputError(f"{used_bytes} bytes of a buffer", limit=f"1 to {self.used_bytes}")
        return Buffer(self.lease, self.frame, used_bytes)

    def view(self, *, readonly: bool = False) -> View:
        """The bytes, `used_bytes` of them, for one `with` block; the frame is given to nobody before its end.

        Whatever is made from them (slices, arrays, tensors) must end with the block. Otherwise leaving it raises
        `MisuseError`, and the frame stays out of use until the last of them is gone, and the frame was
        returned or made good again by `Lease.renew`.

        Raises:
            StaleError: when entered, if the frame is not the lease's any more.
            LateError: when entered, if a transfer of the frame is late.
        """
        return self.lease.arena.view(self, readonly=readonly, place=caller(1))

    def plain(self) -> PlainBuffer:
        """Where it lies, for another process.

        Raises:
            StaleError: the frame is not the lease's any more.
            LateError: a transfer of the frame is late.
        """
        return self.lease.arena.plain(self)
