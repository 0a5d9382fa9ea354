"""Eight owners, one checker and regions that come and go, all at once: nothing is given to two, and nothing leaks."""

import ctypes
import random
import threading
import traceback
import warnings

import numpy as np
import pytest

from stepwell.base.errors import MisuseError
from stepwell.base.threads import Health
from stepwell.memory.arena import Arena, Short
from stepwell.memory.ask import Ask
from stepwell.memory.machine import read_machine
from stepwell.memory.region import Region

PAGE = 4096
FRAME_BYTES = 512
THREADS = 8


class Owner:
    """One thread: takes frames, marks them, lets transfers run on them, looks whether they are still its own."""

    def __init__(self, arena, number):
        self.arena, self.number = arena, number
        self.dice = random.Random(number)
        self.held, self.lost_pins, self.kept = [], [], []
        self.count = self.short = self.looks = 0

    def mark(self):
        """Says who wrote it, and when."""
        self.count += 1
        word = (self.number << 24 | self.count & 0xFFFFFF).to_bytes(4, "little")
        return word * (FRAME_BYTES // 4)

    def step(self):
        chance = self.dice.random()
        if chance < 0.5 and len(self.held) < 4:
            self.reserve(self.dice.randint(1, 5))
        elif self.held:
            lease, mark = self.held.pop(self.dice.randrange(len(self.held)))
            self.look(lease, mark)
            if chance < 0.7:
                self.transfer(lease, mark)
            elif chance < 0.75:
                self.leak(lease)
            elif chance < 0.85 and len(lease.frames) > 1:
                lease.give_back(lease.frames[1:])
                self.held.append((lease, mark))
            elif chance < 0.9:
                del lease  # lost
            else:
                lease.release()
        if chance > 0.95:
            self.kept.clear()
        if self.lost_pins and chance > 0.9:
            self.arena.end_pin(self.lost_pins.pop())

    def reserve(self, n):
        lease = self.arena.reserve(n, self.number)
        if isinstance(lease, Short):
            self.short += 1
            return
        mark = self.mark()
        for index in range(n):
            with lease.buffer(index).view() as memory:
                memory[:] = mark
        self.held.append((lease, mark))

    def look(self, lease, mark):
        """The bytes of all frames, wherever they lie, out of use or not."""
        for address in self.arena.addresses(lease).tolist():
            self.looks += 1
            assert ctypes.string_at(address, FRAME_BYTES) == mark

    def transfer(self, lease, mark):
        """A copy that goes on when its frames have been returned already."""
        addresses = self.arena.addresses(lease).tolist()
        pin = lease.pin("copy")
        lease.release()
        assert all(ctypes.string_at(address, FRAME_BYTES) == mark for address in addresses)
        if self.dice.random() < 0.1:
            self.lost_pins.append(pin.number)
            del pin
        else:
            pin.end()

    def leak(self, lease):
        frame = lease.frames[:1].tolist()
        try:
            with lease.buffer(lease.books.frames.tolist().index(frame[0])).view() as memory:
                self.kept.append(np.asarray(memory))
        except MisuseError as error:
            assert "after its block" in str(error)  # noqa: PT017
        lease.release()

    def end(self):
        self.kept.clear()
        for number in self.lost_pins:
            self.arena.end_pin(number)
        for lease, mark in self.held:
            self.look(lease, mark)
            lease.release()
        self.held.clear()


class Together:
    """Runs owners, checker and the one who adds and drains, and keeps what any of them dies of."""

    def __init__(self):
        self.machine = read_machine()
        self.region = Region.open(Ask(8 * PAGE))
        self.arena = Arena(FRAME_BYTES, 256, align_bytes=FRAME_BYTES)
        self.arena.add(self.region)
        self.health = Health()
        self.stop = threading.Event()
        self.errors, self.checks, self.drained = [], 0, 0
        self.owners = [Owner(self.arena, number) for number in range(1, THREADS + 1)]

    def guarded(self, action):
        def run():
            try:
                action()
            except BaseException:  # noqa: BLE001 - told below
                self.errors.append(traceback.format_exc())
                self.stop.set()

        return threading.Thread(target=run, daemon=True)

    def own(self, owner, operations):
        while not self.stop.is_set():
            if (
                operations is not None
                and operations <= 0
                and self.checks > 50
                and self.drained > 10
            ):
                break
            owner.step()
            operations = None if operations is None else operations - 1
        owner.end()

    def check(self):
        while not self.stop.is_set():
            self.arena.check()
            stats = self.arena.stats()
            assert stats.frames == stats.free + stats.used + stats.quarantined
            self.checks += 1

    def change(self):
        """Regions grow in the background, and drain while their frames are used."""
        leaving = []
        while not self.stop.is_set():
            self.let_go(leaving)
            if len(leaving) < 3:
                region = Region.open(Ask(4 * PAGE, piece_bytes=PAGE), machine=self.machine)
                self.arena.grow(region, self.health)
                self.arena.check()
                self.arena.drain(region)
                leaving.append(region)
        self.leaving = leaving

    def let_go(self, leaving):
        for region in [one for one in leaving if one not in self.arena.regions]:
            region.close()
            leaving.remove(region)
            self.drained += 1

    def run(self, operations, seconds):
        owners = [self.guarded(lambda o=owner: self.own(o, operations)) for owner in self.owners]
        others = [self.guarded(self.check), self.guarded(self.change)]
        for thread in owners + others:
            thread.start()
        if seconds is not None:
            self.stop.wait(seconds)
            self.stop.set()
        for thread in owners:
            thread.join(120)
        assert self.errors or not any(thread.is_alive() for thread in owners)
        self.stop.set()
        for thread in others:
            thread.join(120)
        assert self.errors == []
        assert not any(thread.is_alive() for thread in owners + others)

    def end(self):
        self.arena.check()
        self.let_go(self.leaving)
        assert self.leaving == []
        stats = self.arena.stats()
        assert (stats.frames, stats.free) == (64, 64)
        assert (stats.leases, stats.pins, stats.views) == (0, 0, 0)
        assert not self.health.degraded
        self.arena.close()
        self.region.close()
        return stats


def everything(descriptors, operations=None, seconds=None):
    before, threads = descriptors(), threading.active_count()
    together = Together()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        together.run(operations, seconds)
        stats = together.end()
    assert stats.leases_lost > THREADS
    assert stats.pins_lost > THREADS
    assert together.checks > 50
    assert together.drained > 10
    assert all(owner.looks > 50 for owner in together.owners)
    assert sum(owner.short for owner in together.owners) > 0
    assert threading.active_count() == threads
    assert descriptors() == before


def test_threads_share_an_arena_and_nothing_is_given_to_two_or_lost(descriptors):
    everything(descriptors, operations=120)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_threads_share_an_arena_for_half_a_minute(descriptors):
    everything(descriptors, seconds=30)
