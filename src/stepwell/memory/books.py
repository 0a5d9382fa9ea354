"""All that an arena does under its lock: taking back, pins, views, and what was lost.

Must not lock, warn or call anybody. Neighbours: `arena` has the lock; `custody` knows who has which frame; `ground` takes
frames of draining regions out.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stepwell.base.errors import MisuseError
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds
from stepwell.core.page import Status
from stepwell.memory.ask import Kind
from stepwell.memory.buffer import Buffer
from stepwell.memory.custody import Custody
from stepwell.memory.ground import Ground
from stepwell.memory.lease import LeaseBooks, PinBooks
from stepwell.memory.places import Places
from stepwell.memory.view import ViewBooks

_POISON = 0xFF
"""NaN in every float type that KV has."""


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Counts of an arena; `frames` is the sum of `free`, `used` and `quarantined`.

    Attributes:
        frames: that have a place.
        free: can be reserved now.
        used: belong to a lease.
        quarantined: out of use: late or lost transfers, views after their block, regions that drain.
        leases: open.
        pins: not ended, late ones included.
        views: not ended.
        leases_lost: leases that the collector found, so far.
        pins_late: pins that missed their deadline, so far.
        pins_lost: pins that the collector found, so far.
    """

    frames: int
    free: int
    used: int
    quarantined: int
    leases: int
    pins: int
    views: int
    leases_lost: int
    pins_late: int
    pins_lost: int


class ArenaBooks:
    """Frames, pins and views of one arena. Not thread-safe: the owner has the lock.

    Args:
        custody: who has which frame.
        places: where frames lie.
        ground: the regions.
        debug: fill frames that become free with NaN.
    """

    def __init__(self, custody: Custody, places: Places, ground: Ground, *, debug: bool) -> None:
        self.custody = custody
        self._places = places
        self._ground = ground
        self._debug = debug
        self._views: dict[int, ViewBooks] = {}
        # The three queues take what happens in finalizers, at any moment: appending needs no lock.
        self.lost: deque[LeaseBooks | PinBooks] = deque()
        self.views_ended: deque[ViewBooks] = deque()
        self.later: deque[Callable[[], object]] = deque()
        self.reports: deque[str] = deque()
        self._leases_lost = self._pins_late = self._pins_lost = 0

    def take(self, books: LeaseBooks, frames: FrameIds | None, place: str) -> None:
        """Takes frames back from a lease, all that it has by default."""
        if frames is None:
            first, books.released = not books.released, True
            if first and not books.left:
                return  # all was given back, or the collector was faster than the finalizer that releases it
            # With none left, the error says where they went.
            frames = self.custody.of(books) if books.left else books.frames
            self.custody.require(books, frames)
        else:
            self.custody.require(books, frames)
            self.custody.require_distinct(frames)
        self._set_free(self.custody.give_back(books, frames, place))

    def _set_free(self, idle: FrameIds) -> None:
        """Frames that nobody has or touches."""
        idle = self._ground.keep(idle)
        if self._debug:
            for frame in map(int, idle):
                if not self._on_device(frame):
                    ctypes.memset(self._places.address(frame), _POISON, self._places.frame_bytes)
        self.custody.frames.move(idle, Status.FREE)

    def _on_device(self, frame: int) -> bool:
        """Whether the frame lies in device memory."""
        return self._places.place(frame)[0].record.ask.kind is Kind.DEVICE

    def end_pin(self, number: int) -> None:
        """A transfer has really ended."""
        pin = self.custody.pins.get(number)
        if pin is None:
            raise MisuseError(f"pin {number} has ended, or never began", remedy="end each pin once")
        self._set_free(self.custody.unpin(pin))

    def overdue(self, now_s: float) -> tuple[PinBooks, ...]:
        """Pins that are found late now."""
        late = tuple(
            pin
            for pin in self.custody.pins.values()
            if pin.deadline_s is not None and pin.deadline_s < now_s and not pin.late
        )
        for pin in late:
            pin.late = True
            self._pins_late += 1
            self.custody.spoil(pin)
        return late

    def begin_view(self, view: ViewBooks) -> None:
        """Protects the bytes of a buffer that is still good."""
        buffer: Buffer = view.token
        self.custody.touch_one(buffer.lease.books, buffer.frame)
        if self._on_device(buffer.frame):
            self.custody.untouch_one(buffer.frame)
            raise MisuseError("device memory has no bytes here", remedy="copy it to the host first")
        self._views[id(view)] = view

    def leave_view(self, view: ViewBooks) -> None:
        """A view is used after its block."""
        if id(view) in self._views:
            self.custody.quarantine(one(view.token.frame))

    def settle(self) -> None:
        """Empties the queues, and notes what is to be reported."""
        self.end_views()
        # Ends come first: the collector queues a lease as lost before it calls the finalizer that releases it.
        while self.later or self.lost:
            if self.later:
                self._end_later(self.later.popleft())
            else:
                self._take_lost(self.lost[0])
                self.lost.popleft()  # last: what an interrupt left undone is done by the next call

    def end_views(self) -> None:
        """Lets go of the frames of views that have ended."""
        while self.views_ended:
            view = self.views_ended[0]
            # Not if it never began, or an interrupt came after this line when it was looked at before.
            if self._views.pop(id(view), None) is not None:
                if self.custody.untouch_one(view.token.frame):
                    self._set_free(one(view.token.frame))
                if not view.over:
                    text = f"a view taken at {view.place} was lost inside of its block"
                    self.reports.append(text)
            self.views_ended.popleft()

    def _end_later(self, action: Callable[[], object]) -> None:
        try:
            action()
        except MisuseError as error:  # whoever calls now did nothing wrong
            self.reports.append(f"what a finalizer wanted to end: {error}")

    def _take_lost(self, books: LeaseBooks | PinBooks) -> None:
        if books.ended or not books.number:
            return  # or it never began
        if isinstance(books, PinBooks):
            self.reports.append(self._lost_pin(books))
            return
        self._leases_lost += 1
        self.take(books, None, "the collector")
        books.released = False
        self.reports.append(
            f"the lease of {books.owner!r} was lost, not released; it was taken at {books.place}"
        )

    def _lost_pin(self, pin: PinBooks) -> str:
        self._pins_lost += 1
        pin.lost = True
        self.custody.spoil(pin)
        what = f"pin {pin.number} ({pin.name!r}) was lost, not ended; it was taken at {pin.place}"
        return f"{what}; its frames are out of use until end_pin({pin.number})"

    def users(self) -> list[str]:
        """Who has or touches frames, in words."""
        users = [
            f"{books.owner!r} has {books.left} frames, taken at {books.place}"
            for books in self.custody.leases.values()
        ]
        users += [
            f"pin {pin.number} ({pin.name!r}), taken at {pin.place}"
            for pin in self.custody.pins.values()
        ]
        return users + [f"a view taken at {view.place}" for view in self._views.values()]

    def stats(self) -> ArenaStats:
        """Counts now; linear in the frames."""
        census = self.custody.frames.census()
        present = int((~self._places.absent).sum())
        free, used = census[Status.FREE], census[Status.FILLING]
        return ArenaStats(
            frames=present,
            free=free,
            used=used,
            quarantined=present - free - used,
            leases=len(self.custody.leases),
            pins=len(self.custody.pins),
            views=len(self._views),
            leases_lost=self._leases_lost,
            pins_late=self._pins_late,
            pins_lost=self._pins_lost,
        )

    def check(self) -> None:
        """Raises `InvariantError` with everything that is broken."""
        findings = Findings()
        views = [view.token.frame for view in self._views.values()]
        self.custody.check(findings, np.array(views, np.int32))
        self._places.check(findings)
        status = self.custody.frames.status[self._places.absent]
        findings.expect((status == Status.QUARANTINED).all(), "a frame without a place is in use")
        self._ground.check(findings)
        findings.raise_if_any()


def one(frame: int) -> FrameIds:
    """One frame as an array."""
    return np.array([frame], np.int32)
