"""Who has which frame, and which transfers touch it: the books of an arena.

Owns status, lease number and pin count of every frame. Must not know regions, bytes or threads. Neighbours: `arena`
has the lock and gives frames that are idle back to `core.frames`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError, LateError, MisuseError, StaleError
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.page import Status
from stepwell.memory import registry
from stepwell.memory.lease import LeaseBooks, PinBooks

NOBODY = 0


class Custody:
    """The books about a number of frames, none of which has a place yet.

    A frame of a lease is FILLING, or QUARANTINED once something about it went wrong. A returned frame is
    QUARANTINED while a transfer or view still touches it, and idle after that.

    Args:
        count: the most frames.
    """

    def __init__(self, count: int) -> None:
        self.frames = Frames(count, present=0)
        self.leases: dict[int, LeaseBooks] = {}
        self.pins: dict[int, PinBooks] = {}
        self._holder: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._touching: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        self._next = NOBODY + 1
        # Windows on the columns: views touch one frame at a time, which is faster through them.
        self._holder_of = self._holder.data
        self._touching_of = self._touching.data
        self._status_of = self.frames.status.data

    def reserve(self, n: int, books: LeaseBooks) -> bool:
        """Gives a lease n frames, unless fewer are free."""
        frames = self.frames.reserve(n)
        if frames is None:
            return False
        books.number = number = self._number()
        books.frames, books.left = frames, n
        self._holder[frames] = number
        self.leases[number] = books
        return True

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def ids(self, frames: object) -> FrameIds:
        """Frame numbers that somebody gave, as an array.

        Raises:
            InputError: they are no list of numbers.
            MisuseError: one does not exist.
        """
        try:
            given = np.asarray(frames)
        except ValueError as error:
            raise InputError(f"frames are {frames!r}", limit="a list of whole numbers") from error
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InputError(f"frames are {frames!r}", limit="a list of whole numbers")
        if given.size and (given.min() < 0 or given.max() >= self.frames.count):
            raise MisuseError(f"frames {frames!r}", limit=f"0 to {self.frames.count - 1}")
        return given.astype(np.int32)

    def require(self, books: LeaseBooks, frames: FrameIds) -> None:
        """Requires that these are frames of this lease.

        Raises:
            StaleError: one is not, or not any more.
        """
        foreign = self._holder.take(frames) != books.number
        if np.count_nonzero(foreign):
            frame = int(frames[foreign.argmax()])
            number = int(self._holder[frame])
            has = self.leases.get(number)
            now = "nobody has it" if has is None else f"{has.owner!r} has it, from {has.place}"
            ended = f"returned at {books.ended}" if books.ended else f"taken at {books.place}"
            raise StaleError(
                f"frame {frame} is not of the lease of {books.owner!r}, {ended}; {now}",
                remedy="return each frame once, and use none afterwards",
            )

    def require_distinct(self, frames: FrameIds) -> None:
        """Requires that somebody gave each frame once; raises `MisuseError`."""
        self.frames.require(
            frames, Status.FREE
        )  # every frame of a lease may be freed, if it comes once

    def of(self, books: LeaseBooks) -> FrameIds:
        """The frames that a lease still has."""
        if books.left == len(books.frames):
            return books.frames
        left: FrameIds = books.frames[self._holder[books.frames] == books.number]
        return left

    def give_back(self, books: LeaseBooks, frames: FrameIds, place: str) -> FrameIds:
        """Takes frames from a lease that has them; those that are idle now."""
        self._holder[frames] = NOBODY
        books.left -= len(frames)
        if not books.left and not books.ended:
            books.ended = place
            books.ref = None  # nobody need be told when the caller's object goes
            self.leases.pop(books.number, None)
        touched = self._touching.take(frames) > 0
        if not np.count_nonzero(touched):
            return frames
        self.quarantine(frames[touched])
        idle: FrameIds = frames[~touched]
        return idle

    def quarantine(self, frames: FrameIds) -> None:
        """Out of use until returned and touched by nothing."""
        filling: FrameIds = frames[self.frames.status[frames] == Status.FILLING]
        self.frames.move(filling, Status.QUARANTINED)

    def renew(self, frames: FrameIds) -> None:
        """Frames of one lease that are out of use, and touched by nothing, are good again."""
        out: FrameIds = frames[self.frames.status.take(frames) == Status.QUARANTINED]
        touched = self._touching.take(out) > 0
        if np.count_nonzero(touched):
            frame = int(out[touched.argmax()])
            pins = [
                f"pin {pin.number} ({pin.name!r}), taken at {pin.place}"
                for pin in self.pins.values()
                if frame in pin.frames
            ]
            raise LateError(
                f"frame {frame} is still touched by {', '.join(pins) or 'a view'}",
                limit="frames whose transfers and views have ended",
                remedy="end it first, or drop what was made from the view",
            )
        self.frames.move(out, Status.FREE)
        self.frames.take(out)

    def out_of_use(self, books: LeaseBooks) -> bool:
        """Whether any frame of a lease is."""
        return bool((self.frames.status.take(self.of(books)) == Status.QUARANTINED).any())

    def require_held(self, books: LeaseBooks) -> None:
        """Requires a lease that has frames; raises `StaleError`."""
        if not books.left:
            raise StaleError(
                f"the lease of {books.owner!r} has no frames any more: returned at {books.ended}",
                remedy="reserve again",
            )

    def require_usable(self, books: LeaseBooks, frames: FrameIds) -> None:
        """Requires frames of this lease about which nothing went wrong.

        Raises:
            StaleError: one is not the lease's.
            LateError: one is out of use.
        """
        self.require(books, frames)
        out = self.frames.status.take(frames) != Status.FILLING
        if np.count_nonzero(out):
            frame = int(frames[out.argmax()])
            why = ", ".join(map(repr, books.late)) or "a view that is used after its block"
            raise LateError(
                f"frame {frame} of {books.owner!r} is out of use because of {why}",
                remedy="return it and compute the bytes elsewhere, or end what touches it and call Lease.renew",
            )

    def touch(self, frames: FrameIds) -> None:
        """A transfer begins; the frames are distinct."""
        self._touching[frames] += 1

    def touch_one(self, books: LeaseBooks, frame: int) -> None:
        """A view of a frame begins.

        Raises:
            StaleError: it is not the lease's.
            LateError: it is out of use.
        """
        if self._holder_of[frame] != books.number or self._status_of[frame] != Status.FILLING:
            self.require_usable(books, np.array([frame], np.int32))
        self._touching_of[frame] += 1

    def untouch_one(self, frame: int) -> bool:
        """It has ended; whether the frame is idle now."""
        self._touching_of[frame] -= 1
        return self._touching_of[frame] == 0 and self._holder_of[frame] == NOBODY

    def untouch(self, frames: FrameIds) -> FrameIds:
        """It has ended; the frames that are idle now."""
        self._touching[frames] -= 1
        used = (self._touching.take(frames) > 0) | (self._holder.take(frames) != NOBODY)
        idle: FrameIds = frames[~used]
        return idle

    def pin(self, pin: PinBooks) -> None:
        """A transfer begins on frames that are usable."""
        pin.number = self._number()
        self.pins[pin.number] = pin
        # Whoever loses arena and region while a transfer runs must not take the memory from under it.
        registry.hold(pin, pin.arena)
        self.touch(pin.frames)

    def unpin(self, pin: PinBooks) -> FrameIds:
        """A transfer has ended; the frames that are idle now."""
        pin.ended = True
        pin.ref = None
        del self.pins[pin.number]
        registry.unhold(pin)
        return self.untouch(pin.frames)

    def spoil(self, pin: PinBooks) -> None:
        """A transfer is late or lost: what it was to bring, or has read, is not to be relied upon."""
        pin.lease.late.append(pin.name)
        self.quarantine(pin.frames)

    def held(self, frame: int) -> bool:
        """Whether a lease has the frame."""
        return self._holder_of[frame] != NOBODY

    def used(self, frames: FrameIds) -> FrameIds:
        """Which of some frames somebody has or touches."""
        used: FrameIds = frames[(self._holder[frames] != NOBODY) | (self._touching[frames] > 0)]
        return used

    def check(self, findings: Findings, views: FrameIds) -> None:
        """Notes every broken invariant.

        Args:
            findings: noted here.
            views: the frames of all views, each as often as it has some.
        """
        self.frames.check(findings)
        status = self.frames.status
        numbers, counts = np.unique(self._holder[self._holder != NOBODY], return_counts=True)
        held = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        left = {number: books.left for number, books in self.leases.items() if books.left}
        findings.expect(held == left, f"frames have leases {held}, leases have frames {left}")
        touching = np.zeros_like(self._touching)
        np.add.at(touching, views, 1)
        for pin in self.pins.values():
            np.add.at(touching, pin.frames, 1)
        findings.expect(
            (touching == self._touching).all(), "the counts of pins and views are not their number"
        )
        used = (self._holder != NOBODY) | (self._touching > 0)
        free = status == Status.FREE
        findings.expect(not (used & free).any(), "a frame is free and in use")
        unowned = (status == Status.FILLING) & (self._holder == NOBODY)
        findings.expect(not unowned.any(), "a frame belongs to no lease and is not free")
        other = (status == Status.SEALED) | (status == Status.LEAVING)
        findings.expect(not other.any(), "a frame of an arena is sealed: that is the ledger's word")
