"""Frames that somebody has, as one object; and pins, by which transfers protect them.

Plain books and what callers hold. Must not know memory. Neighbours: `arena` decides; `buffer` gives the bytes.

A lease says whose frames these are, for as long as the owner likes. A pin says that a transfer touches them
right now, and has a deadline. Neither is what an operator keeps: that is the ledger's, and moves no frame.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from stepwell.base.errors import InputError
from stepwell.core.frames import FrameIds
from stepwell.memory.buffer import Buffer

if TYPE_CHECKING:
    from stepwell.memory.arena import Arena


@dataclass(frozen=True, slots=True)
class Short:
    """A reservation that got nothing.

    Attributes:
        by: frames that are missing.
        count: the most frames that the arena can have; more will never be there.
    """

    by: int
    count: int

    def __bool__(self) -> bool:
        """False, as opposed to a lease."""
        return False


@dataclass(slots=True, eq=False)
class LeaseBooks:
    """What the arena knows of one lease; outlives the `Lease` that a caller has.

    Attributes:
        owner: who has the frames, for messages.
        place: file and line that took it.
        number: never used again, so a frame's number tells whether it still belongs to this lease; 0 until
            it has frames.
        frames: all that it got.
        left: how many of them were not returned.
        late: names of its pins that missed their deadline, or were lost.
        ref: to the caller's object, to notice that it was lost.
        ended: file and line that returned the last frame.
        released: its owner has said that it needs none of them any more.
    """

    owner: str | int
    place: str
    number: int = 0
    frames: FrameIds = field(default_factory=lambda: np.zeros(0, np.int32))
    left: int = 0
    late: list[str] = field(default_factory=list)
    ref: weakref.ref[Lease] | None = None
    ended: str = ""
    released: bool = False


class Lease:
    """Frames of one owner, returned exactly once.

    A lease that is lost is returned and reported by the arena's next call: the collector only queues. Usable as
    a `with` block, which releases what is left.
    """

    __slots__ = ("__weakref__", "arena", "books")

    def __init__(self, arena: Arena, books: LeaseBooks) -> None:
        self.arena = arena
        self.books = books

    @property
    def owner(self) -> str | int:
        """Who has the frames."""
        return self.books.owner

    @property
    def frames(self) -> FrameIds:
        """The frames that it has; shape [n]."""
        return self.arena.frames_of(self)

    @property
    def late(self) -> tuple[str, ...]:
        """Names of pins that missed their deadline, or were lost: not all bytes are what they were to be."""
        return tuple(self.books.late)

    def buffer(self, index: int = 0, used_bytes: int | None = None) -> Buffer:
        """The bytes of one frame.

        Args:
            index: which of the frames that it got, counted from 0; returned ones count too.
            used_bytes: of the frame, from its first byte on; all by default.

        Raises:
            InputError: there is no such frame, or it is smaller.
        """
        frames = self.books.frames
        if type(index) is not int or not 0 <= index < len(frames):
            raise InputError(f"frame {index!r} of a lease", limit=f"0 to {len(frames) - 1}")
        used_bytes = self.arena.frame_bytes if used_bytes is None else used_bytes
        return Buffer(self, int(frames[index]), used_bytes)

    def pin(self, name: str, frames: FrameIds | None = None, within_s: float | None = None) -> Pin:
        """Protects frames for a transfer: even when returned, they are given to nobody before its end.

        Args:
            name: of the transfer, for messages.
            frames: some of `Lease.frames`, which are numbers in the arena; all by default.
            within_s: seconds until `Arena.overdue` finds the transfer late; None: never.

        Raises:
            InputError: there are no frames, the name is no text, or the time no number of seconds.
            StaleError: a frame is not this lease's any more.
            LateError: an earlier transfer of a frame is late.
        """
        return self.arena.pin(self, name, frames, within_s)

    def give_back(self, frames: FrameIds) -> None:
        """Returns some of the frames: all of these or none.

        Raises:
            StaleError: a frame is not this lease's any more.
            MisuseError: a frame comes twice.
        """
        self.arena.give_back(self, frames)

    def renew(self, frames: FrameIds | None = None) -> None:
        """Makes frames good again that went out of use: what is in them is nothing, and will be written anew.

        For owners that know frames by their number, and cannot take others instead.

        Args:
            frames: some of this lease's; all by default.

        Raises:
            StaleError: a frame is not this lease's any more.
            LateError: a transfer or view of a frame has not ended.
        """
        self.arena.renew(self, frames)

    def release(self) -> None:
        """Returns all that is left; nothing, if all was given back before.

        From a finalizer that interrupts a call of the arena it only queues: the next call returns them.

        Raises:
            StaleError: it was released before; says where.
        """
        self.arena.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self.books.ended:
            self.arena.release(self)  # the place that returned it is the block's, not this line


@dataclass(slots=True, eq=False)
class PinBooks:
    """What the arena knows of one pin; outlives the `Pin` that a caller has.

    Attributes:
        arena: of the frames, which lives as long as the transfer.
        name: of the transfer.
        frames: that it protects.
        lease: whose they were when it began.
        deadline_s: on the arena's clock; None: none.
        place: file and line that took it.
        number: of this pin, for `Arena.end_pin`; 0 until it began.
        late: the deadline has passed.
        lost: the caller's object is gone, so nobody will say when the transfer ends.
        ended: the transfer touches nothing any more.
        ref: to the caller's object.
    """

    arena: Arena
    name: str
    frames: FrameIds
    lease: LeaseBooks
    deadline_s: float | None
    place: str
    number: int = 0
    late: bool = False
    lost: bool = False
    ended: bool = False
    ref: weakref.ref[Pin] | None = None


class Pin:
    """A transfer that touches frames now. Usable as a `with` block.

    A pin that is lost is reported, and its frames stay out of use: nobody knows whether the transfer has ended.
    Who does says so with `Arena.end_pin`.
    """

    __slots__ = ("__weakref__", "arena", "books")

    def __init__(self, arena: Arena, books: PinBooks) -> None:
        self.arena = arena
        self.books = books

    @property
    def number(self) -> int:
        """For `Arena.end_pin`."""
        return self.books.number

    @property
    def late(self) -> bool:
        """Whether the arena found it past its deadline."""
        return self.books.late

    def end(self) -> None:
        """The transfer has really ended, in time or not.

        Raises:
            MisuseError: it ended before.
        """
        self.arena.end_pin(self.books.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self.books.ended:
            self.end()
