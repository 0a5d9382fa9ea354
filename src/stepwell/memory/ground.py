"""The regions of an arena: how frames come to be, and how they leave.

Neighbours: `arena` owns one of these and shares its lock; `places` numbers the frames; `growth` prepares regions.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack

import numpy as np

from stepwell.base.call import Call
from stepwell.base.errors import InputError, MisuseError, RefusedError
from stepwell.base.threads import Health
from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds
from stepwell.core.page import Status
from stepwell.memory.custody import Custody
from stepwell.memory.growth import Growth
from stepwell.memory.places import Places
from stepwell.memory.region import Region
from stepwell.memory.users import Use


class Ground:
    """The regions behind an arena.

    A region enters before it is ready, gives frames as it becomes so, and may drain: then it gives no more, and
    leaves when its last frame comes back.

    Args:
        name: of the arena: who uses the regions.
        places: where frames lie.
        custody: who has them.
        call: the arena's lock.
    """

    def __init__(self, name: str, places: Places, custody: Custody, call: Call) -> None:
        self.places = places
        self._who = f"arena {name}"
        self._custody = custody
        self._call = call
        self._growths: dict[Region, Growth] = {}
        self._draining: set[Region] = set()
        self._drained: weakref.WeakSet[Region] = weakref.WeakSet()
        self.uses: dict[Region, Use] = {}
        """Of the regions that are here; ended by whoever finds the arena lost."""
        self._closed = False

    def add(self, region: Region) -> int:
        """See `Arena.add`."""
        self._enter(region)
        self._give_out(region, region.record.ready_bytes)
        region.prepare(lambda ready_bytes: self._give_out(region, ready_bytes))
        with self._call.alone(), self._call:
            return len(self.places.of(region))

    def grow(self, region: Region, health: Health) -> Growth:
        """See `Arena.grow`."""
        self._enter(region)
        self._give_out(region, region.record.ready_bytes)
        growth = Growth(region, lambda ready_bytes: self._give_out(region, ready_bytes), health)
        with self._call.alone(), self._call:
            self.require_open()
            if region not in self.uses or region in self._draining:
                raise MisuseError(
                    "the region was drained before it could grow", remedy="add it again"
                )
            self._growths[region] = growth
        # Outside of the call: starting waits for the thread, whose first step may be a finalizer that waits for
        # the call. Whoever drains or closes in between stops a growth that then never begins.
        try:
            growth.begin()
        except RuntimeError as error:
            self.drain(region)
            remedy = "fewer threads, or add the region instead"
            raise RefusedError(f"no thread can be started: {error}", remedy=remedy) from error
        return growth

    def _enter(self, region: Region) -> None:
        if self.places.capacity(region) < 1:
            raise InputError(
                f"a region of {region.size_bytes} bytes, in pieces of {region.piece_bytes}",
                limit=f"room for one frame of {self.places.stride_bytes} bytes in a piece",
            )
        if region in self.uses:
            raise MisuseError(
                "the region is part of this arena already",
                limit="once",
                remedy="drain it first, to add it again",
            )
        # The region's lock is never taken under the arena's: a finalizer inside of a region's call may
        # return frames, which takes the arena's.
        use = region.use(self._who, alone=True)
        with ExitStack() as undo, self._call.alone(), self._call:
            undo.callback(region.end_use, use)
            self.require_open()
            self.places.enter(region)
            self.uses[region] = use
            self._drained.discard(region)
            undo.pop_all()

    def _give_out(self, region: Region, ready_bytes: int) -> None:
        with self._call.alone(), self._call:
            if region in self.uses and region not in self._draining and not self._closed:
                frames = self.places.extend(region, ready_bytes)
                self._custody.frames.move(frames, Status.FREE)

    def drain(self, region: Region) -> int:
        """See `Arena.drain`."""
        with self._call.alone(), self._call:
            if region in self._drained:
                return 0
            self._withdraw(region)
            self._draining.add(region)
            growth = self._growths.get(region)
        if growth is not None:
            growth.stop()  # outside of the call, which its thread may be waiting for
        with self._call.alone(), self._call:
            if region not in self._draining:
                return 0  # the last frame came back meanwhile; the region may even be here again
            if self._growths.get(region) is growth:
                self._growths.pop(region, None)
            return self._let_go(region)

    def _withdraw(self, region: Region) -> None:
        """Its idle frames can be reserved no more."""
        frames = self.places.of(region)
        books = self._custody.frames
        idle: FrameIds = frames[books.status[frames] == Status.FREE]
        books.take(idle)
        books.move(idle, Status.QUARANTINED)

    def _let_go(self, region: Region) -> int:
        """Ends a draining region if nothing of it is used; how many frames are."""
        used = len(self._custody.used(self.places.of(region)))
        if not used and region not in self._growths:
            self._leave(region)
        return used

    def _leave(self, region: Region) -> None:
        self.places.leave(region)
        self._draining.discard(region)
        self._drained.add(region)
        region.end_use(self.uses.pop(region))

    def keep(self, idle: FrameIds) -> FrameIds:
        """Takes frames of draining regions out of some that came back; the others."""
        for region in tuple(self._draining):
            leaving = self.places.within(idle, region)
            if leaving.any():
                self._custody.quarantine(idle[leaving])
                idle = idle[~leaving]
                self._let_go(region)
        return idle

    def require_open(self) -> None:
        """Raises `MisuseError` once the arena is closed."""
        if self._closed:
            raise MisuseError(f"the {self._who} is closed", remedy="make another one")

    def end(self) -> None:
        """Nothing enters or is given out from now on."""
        self._closed = True

    def stop(self) -> None:
        """Ends all growth; not under the lock, for which their threads may be waiting."""
        for growth in tuple(self._growths.values()):
            growth.stop()

    def let_all_go(self) -> None:
        """All regions leave; nothing of them is used."""
        for region in self.places.regions:
            self._withdraw(region)
            self._leave(region)
        self._growths.clear()

    def check(self, findings: Findings) -> None:
        """Notes regions that drain without being here, and frames that are out of use for no reason."""
        findings.expect(self._draining <= set(self.places.regions), "a region drains that has left")
        status = self._custody.frames.status
        for region in self.places.regions:
            frames = self.places.of(region)
            idle = np.setdiff1d(frames, self._custody.used(frames))
            free = status[idle] == Status.FREE
            if region in self._draining:
                findings.expect(not free.any(), f"a frame of {region.place}, which drains, is free")
            else:
                findings.expect(free.all(), f"an idle frame of {region.place} is not free")
