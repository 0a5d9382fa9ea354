"""Fixed frames in one or more regions, given to owners and taken back.

Neighbours: `books` does the work under the lock that is here, `ground` has the regions; callers hold a `Lease`, a `Pin`
or a `View`. Memory never calls up: when frames are short, the caller is told by how many.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable

import numpy as np

from stepwell.base.call import Call
from stepwell.base.clock import Clock, SystemClock
from stepwell.base.errors import InputError, LateError, MisuseError, StaleError
from stepwell.base.threads import Health
from stepwell.core.frames import MAX_FRAMES, FrameIds
from stepwell.core.lease import caller
from stepwell.core.page import Status
from stepwell.memory import registry
from stepwell.memory.ask import MAX_BYTES
from stepwell.memory.books import ArenaBooks, ArenaStats, one
from stepwell.memory.buffer import Buffer, PlainBuffer
from stepwell.memory.closing import Closing
from stepwell.memory.custody import Custody
from stepwell.memory.ground import Ground
from stepwell.memory.growth import Growth
from stepwell.memory.lease import Lease, LeaseBooks, Pin, PinBooks, Short
from stepwell.memory.places import Addresses, Places
from stepwell.memory.region import Region
from stepwell.memory.system import PAGE_BYTES
from stepwell.memory.users import Use
from stepwell.memory.view import View, ViewBooks

_NO_FRAMES: FrameIds = np.zeros(0, np.int32)


class Arena(Closing):
    """Frames of one size.

    What an entry is: a frame with a place in a region. It enters when its part of the region is ready, and leaves
    when the region is drained or the arena closed. One lock orders all calls; nothing foreign is called and
    nothing is written or reported under it. A call from inside a call (a finalizer, a signal handler) may
    return things, which is queued; anything else raises. Counts are exact. When a call is torn by something
    foreign (no memory, Ctrl-C), the books are checked, and if they are broken every later call raises. In a
    forked child the arena is closed.

    Args:
        frame_bytes: of one frame.
        count: the most frames, of all regions together.
        name: for messages.
        clock: deadlines of pins are on it.
        align_bytes: frames begin at multiples of it, a power of two up to the memory page, which
            direct disk I/O needs.
        debug: check the books after every call, and fill returned frames with NaN; slow.
    """

    def __init__(
        self,
        frame_bytes: int,
        count: int,
        *,
        name: str = "arena",
        clock: Clock | None = None,
        align_bytes: int = PAGE_BYTES,
        debug: bool = False,
    ) -> None:
        if type(frame_bytes) is not int or not 1 <= frame_bytes <= MAX_BYTES:
            raise InputError(f"frames of {frame_bytes!r} bytes", limit=f"1 to {MAX_BYTES}")
        if type(count) is not int or not 1 <= count <= MAX_FRAMES:
            raise InputError(f"{count!r} frames", limit=f"1 to {MAX_FRAMES}")
        powers = {1 << bit for bit in range(PAGE_BYTES.bit_length())}
        if type(align_bytes) is not int or align_bytes not in powers:
            raise InputError(
                f"frames are to begin at multiples of {align_bytes!r}",
                limit=f"a power of two up to {PAGE_BYTES}",
            )
        self.frame_bytes = frame_bytes
        self.name = name
        self._clock = SystemClock() if clock is None else clock
        self._debug = debug
        self._places = Places(frame_bytes, count, align_bytes)
        self._custody = Custody(count)
        self._call = Call(f"arena {name}", self._check)
        self._ground = Ground(name, self._places, self._custody, self._call)
        self._books = ArenaBooks(self._custody, self._places, self._ground, debug=debug)
        self._forks = registry.forks()
        made = f"the arena {name}, made at {caller(1)}, was lost, not closed"
        weakref.finalize(self, _abandon, self._ground.uses, made).atexit = False

    @property
    def count(self) -> int:
        """The most frames."""
        return self._places.count

    @property
    def free(self) -> int:
        """How many frames can be reserved now, as far as this thread knows."""
        return self._custody.frames.free

    @property
    def regions(self) -> tuple[Region, ...]:
        """That have frames here, or will."""
        return self._places.regions

    def number(self, region: Region) -> int:
        """What `PlainBuffer.region` calls a region: told to whoever gets its descriptor, and never used again.

        Raises:
            MisuseError: it is not part of the arena.
        """
        registry.require_own(self._forks, f"the arena {self.name}")
        with self._call.alone(), self._call:
            return self._places.number(region)

    def frames_in(self, region: Region) -> FrameIds:
        """The frames of a region, free or used: what has to come back before it has drained.

        Raises:
            MisuseError: it is not part of the arena.
        """
        registry.require_own(self._forks, f"the arena {self.name}")
        with self._call.alone(), self._call:
            return self._places.of(region)

    def add(self, region: Region) -> int:
        """Prepares a region here and now, and gives its frames out as they become ready.

        Args:
            region: open; it cannot be closed before it is drained or the arena closed.

        Returns:
            The number of its frames; not more than the arena has room for.

        Raises:
            InputError: the region has no room for a frame, or the arena has for no more.
            MisuseError: the region is here already.
            RefusedError: a part could not be had; what was ready before stays.
        """
        self._tidy()
        return self._ground.add(region)

    def grow(self, region: Region, health: Health | None = None) -> Growth:
        """Does what `add` does, but in a thread; misuse raises at once.

        Args:
            region: as for `add`.
            health: told when a part could not be had, beside `Growth.wait`.

        Returns:
            The growth: `wait` for its end, `stop` it, or look at `ready_bytes`.
        """
        self._tidy()
        return self._ground.grow(region, Health() if health is None else health)

    def drain(self, region: Region) -> int:
        """Gives out no more frames of a region, and lets it go when the last one is back.

        Returns:
            How many of its frames are still used; at 0, and from then on, it is no part of the arena any more.

        Raises:
            MisuseError: it never was part of the arena.
        """
        self._tidy()
        return self._ground.drain(region)

    def reserve(self, n: int, owner: str | int) -> Lease | Short:
        """Takes n frames: all of them, or none.

        Args:
            n: frames, 1 or more.
            owner: who has them, for messages.

        Returns:
            A lease, or by how many frames it fell short: whoever can make room does, and asks again.

        Raises:
            InputError: n is less than 1, or the owner neither text nor a number.
        """
        if type(n) is not int or n < 1:
            raise InputError(f"{n!r} frames were asked for", limit="1 or more")
        if type(owner) not in (str, int):  # printed under the lock, so nobody's own __repr__
            raise InputError(f"the owner is a {type(owner).__name__}", limit="text or a number")
        self._tidy()
        books = LeaseBooks(owner, caller(1))
        lease = Lease(self, books)
        lost = self._books.lost
        # Before it gets frames: a call that is torn afterwards loses the lease, which is noticed.
        books.ref = weakref.ref(lease, lambda _: lost.append(books))
        with self._call.alone(), self._call:
            self._ground.require_open()
            if not self._custody.reserve(n, books):
                books.ref = None
                return Short(n - self._custody.frames.free, self._places.count)
            self._check_if_debug()
        return lease

    def frames_of(self, lease: Lease) -> FrameIds:
        """See `Lease.frames`."""
        self._require_mine(lease)
        with self._call.alone(), self._call:
            return self._custody.of(lease.books).copy()

    def renew(self, lease: Lease, frames: object = None) -> None:
        """See `Lease.renew`."""
        self._tidy()
        given = None if frames is None else self._custody.ids(frames)
        with self._call.alone(), self._call:
            ids = self._frames(lease, given)
            self._custody.renew(ids)
            if not self._custody.out_of_use(lease.books):
                lease.books.late.clear()
            self._check_if_debug()

    def _frames(self, lease: Lease, given: FrameIds | None) -> FrameIds:
        """Frames of a lease that somebody named, each once, or all of them; inside of a call."""
        self._require_mine(lease)
        if given is None:
            self._custody.require_held(lease.books)
            return self._custody.of(lease.books).copy()
        self._custody.require(lease.books, given)
        self._custody.require_distinct(given)
        return given

    def give_back(self, lease: Lease, frames: object) -> None:
        """See `Lease.give_back`."""
        ids, place = self._custody.ids(frames), caller(2)
        self._end(lambda: self._take(lease, ids, place))

    def release(self, lease: Lease) -> None:
        """See `Lease.release`."""
        place = caller(2)
        self._end(lambda: self._take(lease, None, place))

    def _take(self, lease: Lease, frames: FrameIds | None, place: str) -> None:
        self._require_mine(lease)
        self._books.take(lease.books, frames, place)

    def _end(self, action: Callable[[], None]) -> None:
        """Does what ends something: later from a finalizer, not at all in a forked child."""
        if self._forks != registry.forks():
            return
        if self._call.inside:
            self._books.later.append(action)
            return
        # Not tidied here: this may be a finalizer, and those of other lost leases are about to release them.
        with self._call.alone(), self._call:
            self._books.end_views()
            action()
            self._check_if_debug()

    def addresses(self, lease: Lease, frames: object = None) -> Addresses:
        """Of the first bytes of frames, for adapters and movers; a `Pin` protects what they do there.

        Args:
            lease: whose frames they are.
            frames: some of them; all by default.

        Raises:
            StaleError: a frame is not the lease's, or it has none any more.
        """
        self._require_mine(lease)
        given = None if frames is None else self._custody.ids(frames)
        with self._call.alone(), self._call:
            return self._places.addresses(self._frames(lease, given))

    def pin(
        self, lease: Lease, name: str, frames: object = None, within_s: float | None = None
    ) -> Pin:
        """See `Lease.pin`."""
        if not isinstance(name, str):
            raise InputError(f"the name of a transfer is a {type(name).__name__}", limit="text")
        if within_s is not None and (type(within_s) not in (int, float) or not within_s >= 0):
            raise InputError(f"a deadline in {within_s!r} s", limit="0 or more, or None")
        self._tidy()
        deadline_s = None if within_s is None else self._clock.now_s() + within_s
        given = None if frames is None else self._custody.ids(frames)
        if given is not None and not len(given):
            raise InputError("a pin of no frames", limit="1 or more")
        books = PinBooks(self, name, _NO_FRAMES, lease.books, deadline_s, caller(2))
        pin = Pin(self, books)
        lost = self._books.lost
        books.ref = weakref.ref(pin, lambda _: lost.append(books))
        with self._call.alone(), self._call:
            books.frames = self._frames(lease, given)
            self._custody.require_usable(lease.books, books.frames)
            self._custody.pin(books)
            self._check_if_debug()
        return pin

    def end_pin(self, number: int) -> None:
        """The transfer of a pin has really ended: also for pins that were lost.

        Raises:
            MisuseError: no pin has this number, or it ended before.
        """
        self._end(lambda: self._books.end_pin(number))

    def overdue(self) -> tuple[PinBooks, ...]:
        """Finds pins past their deadline: their frames are out of use until each has really ended.

        Memory has no timer: whoever has one calls this. A transfer that ends before it was found late was
        in time.

        Returns:
            Those that were not found late before; `number`, `name`, `frames`, `place` and `lease.owner` tell
            which they are.
        """
        self._tidy()
        now_s = self._clock.now_s()
        with self._call.alone(), self._call:
            late = self._books.overdue(now_s)
            self._check_if_debug()
        return late

    def view(self, buffer: Buffer, *, readonly: bool, place: str) -> View:
        """See `Buffer.view`."""
        span = (self._places.address(buffer.frame), self.frame_bytes)
        return View(self, buffer, span, slice(0, buffer.used_bytes), readonly, place)

    def view_began(self, books: ViewBooks) -> None:
        """See `ViewOwner`."""
        self._tidy()
        with self._call.alone(), self._call:
            self._require_mine(books.token.lease)
            self._books.begin_view(books)

    def view_left(self, books: ViewBooks) -> None:
        """See `ViewOwner`."""
        self._end(lambda: self._books.leave_view(books))

    def view_ended(self, books: ViewBooks) -> None:
        """See `ViewOwner`."""
        self._books.views_ended.append(books)

    def plain(self, buffer: Buffer) -> PlainBuffer:
        """See `Buffer.plain`."""
        self._require_mine(buffer.lease)
        with self._call.alone(), self._call:
            self._custody.require_usable(buffer.lease.books, one(buffer.frame))
            region, offset = self._places.place(buffer.frame)
            generation = int(self._custody.frames.generation[buffer.frame])
            number = self._places.number(region)
            return PlainBuffer(number, offset, buffer.used_bytes, buffer.frame, generation)

    def require_current(self, plain: PlainBuffer) -> None:
        """Requires of a record that comes back from another process that its lease still has the frame.

        Raises:
            StaleError: it was returned since, or made good again by `Lease.renew`.
            LateError: it went out of use.
        """
        registry.require_own(self._forks, f"the arena {self.name}")
        self._custody.ids([plain.frame])  # one that exists
        with self._call.alone(), self._call:
            generation = int(self._custody.frames.generation[plain.frame])
            if not self._custody.held(plain.frame) or generation != plain.generation:
                raise StaleError(
                    f"frame {plain.frame} in life {plain.generation} was returned",
                    remedy="ask its owner for a new record",
                )
            if self._custody.frames.status[plain.frame] != Status.FILLING:
                raise LateError(
                    f"frame {plain.frame} went out of use", remedy="see `late` of its lease"
                )

    def stats(self) -> ArenaStats:
        """Counts, at one moment; linear in the frames."""
        self._tidy()
        with self._call.alone(), self._call:
            return self._books.stats()

    def check(self) -> None:
        """Raises `InvariantError` with every broken invariant of the books."""
        self._tidy()
        with self._call.alone(), self._call:
            self._check()

    def _check(self) -> None:
        self._books.check()

    def _check_if_debug(self) -> None:
        if self._debug:
            self._check()

    def _tidy(self) -> None:
        """Returns what was lost or ended since the last call, and reports what somebody forgot."""
        registry.require_own(self._forks, f"the arena {self.name}")
        books = self._books
        queued = books.lost or books.views_ended or books.later or books.reports
        if queued and not self._call.inside:
            with self._call.alone(), self._call:
                books.settle()
            with contextlib.suppress(IndexError):  # where warnings are errors, the others wait
                while True:
                    warnings.warn(books.reports.popleft(), ResourceWarning, stacklevel=3)

    def close(self) -> None:
        """Lets all regions go; a second time, and in a forked child, does nothing.

        The regions are the caller's to close.

        Raises:
            MisuseError: somebody has or touches frames; names who, and where they took them.
        """
        if self._forks != registry.forks():
            return
        self._tidy()
        with self._call.alone(), self._call:
            users = self._books.users()
            if users:
                more = f"; and {len(users) - 5} more" if len(users) > 5 else ""
                raise MisuseError(
                    f"the arena {self.name} is in use: {'; '.join(users[:5])}{more}",
                    limit="no leases, pins and views",
                    remedy="release and end them first",
                )
            self._ground.end()
        self._ground.stop()
        with self._call.alone(), self._call:
            self._ground.let_all_go()

    def _require_mine(self, lease: Lease) -> None:
        registry.require_own(self._forks, f"the arena {self.name}")
        self._ground.require_open()
        if lease.arena is not self:
            raise MisuseError(
                f"the lease of {lease.owner!r} is not of the arena {self.name}",
                remedy="ask the arena that gave it",
            )


def _abandon(uses: dict[Region, Use], story: str) -> None:
    """The arena is gone, and with it all leases, pins and views: its regions can be closed."""
    if uses:
        registry.report(story)
    for region, use in uses.items():
        region.end_use(use)
