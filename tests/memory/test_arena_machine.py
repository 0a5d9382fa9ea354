"""`Arena` against a plain model, with regions that come and go, and owners that forget.

After every step the books are in order, the counts are the model's, and every frame that somebody has or
touches holds the number that its owner wrote: had two the same frame, one number would be gone.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stepwell.base.errors import InputError, LateError, MisuseError, StaleError
from stepwell.base.threads import Health
from stepwell.memory.arena import Arena, Short
from stepwell.memory.ask import Ask
from stepwell.memory.lease import Lease
from stepwell.memory.machine import read_machine
from stepwell.memory.region import Region
from stepwell.testing.clock import FakeClock

FIRED: collections.Counter[str] = collections.Counter()
PAGE = 4096
FRAME_BYTES = 1000
STRIDE_BYTES = 1024
COUNT = 14
MACHINE = read_machine()


@dataclasses.dataclass(eq=False)
class Owner:
    """One lease, and what it must still have."""

    lease: Any
    mark: int
    got: list[int]
    frames: set[int]
    late: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Transfer:
    pin: Any
    number: int
    owner: Owner
    name: str
    frames: list[int]
    deadline_s: float | None
    late: bool = False


@dataclasses.dataclass(eq=False)
class Look:
    """A view, in its block or (with `kept`) after it."""

    view: Any
    memory: Any
    owner: Owner
    frame: int
    kept: Any = None


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.arena = Arena(FRAME_BYTES, COUNT, clock=self.clock, align_bytes=256)
        self.health = Health()
        self.places: dict[Region, list[int]] = {}
        self.draining: set[Region] = set()
        self.holder: dict[int, Owner] = {}
        self.spoiled: set[int] = set()
        self.marks: dict[int, int] = {}
        self.owners: dict[int, Owner] = {}
        self.transfers: dict[int, Transfer] = {}
        self.lost: dict[int, Transfer] = {}
        self.open: dict[int, Look] = {}
        self.leaked: dict[int, Look] = {}
        self.number = 0
        self.past: list[Owner] = []
        self.grown = [0, 0, 0]
        self.add(2, in_the_background=False)

    @initialize(data=st.data(), seed=st.integers(1, 3))
    def begin(self, data: st.DataObject, seed: int) -> None:
        """Somewhere in the middle: few walks of this length would reach the later steps often."""
        for n in range(1, seed + 1):
            self.reserve(n)
            self.pin(data, within_s=1)
            self.view(data, used_bytes=10)
        if seed == 1:
            self.view(data, used_bytes=FRAME_BYTES)
            self.release(data)
        else:
            self.leak(data, part=True)
        if seed == 2:
            self.lose_a_pin(data)
        if seed == 3:
            self.overdue(2)

    # The model

    def touching(self) -> collections.Counter[int]:
        touching: collections.Counter[int] = collections.Counter()
        for transfers in (self.transfers, self.lost):
            for transfer in transfers.values():
                touching.update(transfer.frames)
        for looks in (self.open, self.leaked):
            touching.update(look.frame for look in looks.values())
        return touching

    def free(self) -> set[int]:
        busy = set(self.holder) | set(self.touching())
        return {
            frame
            for region, frames in self.places.items()
            if region not in self.draining
            for frame in frames
            if frame not in busy
        }

    def usable(self, owner: Owner) -> list[int]:
        return sorted(owner.frames - self.spoiled)

    def spoil(self, frames: list[int]) -> None:
        self.spoiled |= {frame for frame in frames if frame in self.holder}

    def returned(self, owner: Owner, frames: list[int]) -> None:
        for frame in frames:
            del self.holder[frame]
            owner.frames.remove(frame)
            self.spoiled.discard(frame)

    def ended(self, owner: Owner, number: int) -> None:
        if not owner.frames:
            del self.owners[number]
            self.past = [*self.past[-2:], owner]

    def settled(self) -> None:
        """Draining regions leave with their last frame, and can be closed then."""
        self.arena.check()
        busy = set(self.holder) | set(self.touching())
        for region in list(self.draining):
            if not busy & set(self.places[region]):
                self.draining.remove(region)
                del self.places[region]
                FIRED["a region left"] += 1
                region.close()

    def some(self, data: st.DataObject, among: Any, label: str) -> Any:
        return data.draw(st.sampled_from(sorted(among)), label=label)

    def several(self, data: st.DataObject, among: Any) -> list[int]:
        few = st.lists(st.sampled_from(sorted(among)), min_size=1, unique=True)
        return data.draw(few, label="frames")

    # Regions

    @precondition(lambda self: len(self.places) < 4)
    @rule(pages=st.integers(1, 2), in_the_background=st.booleans())
    def add(self, pages: int, in_the_background: bool) -> None:
        region = Region.open(Ask(pages * PAGE, piece_bytes=PAGE), machine=MACHINE)
        room = COUNT - sum(map(len, self.places.values()))
        if not room:
            with pytest.raises(InputError, match="no room"):
                self.arena.add(region)
            region.close()
            FIRED["add without room"] += 1
            return
        if in_the_background:
            growth = self.arena.grow(region, self.health)
            assert growth.wait(30)
            growth.stop()
        else:
            self.arena.add(region)
        frames = self.arena._places.of(region).tolist()
        assert len(frames) == min(room, pages * (PAGE // STRIDE_BYTES))
        assert not set(frames) & {one for others in self.places.values() for one in others}
        self.places[region] = frames
        FIRED["add"] += 1

    @precondition(lambda self: len(self.places) > 1)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        regions = list(self.places)
        region = regions[data.draw(st.integers(0, len(regions) - 1), label="region")]
        busy = set(self.holder) | set(self.touching())
        used = self.arena.drain(region)
        assert used == len(busy & set(self.places[region]))
        self.draining.add(region)
        FIRED["drain of used frames" if used else "drain of idle frames"] += 1
        self.settled()

    # Leases

    @rule(n=st.sampled_from([1, 1, 2, 2, 3, 4, COUNT]))
    def reserve(self, n: int) -> None:
        free = self.free()
        lease = self.arena.reserve(n, f"owner {self.number}")
        if n > len(free):
            assert lease == Short(n - len(free), COUNT)
            FIRED["reserve short"] += 1
            return
        assert isinstance(lease, Lease)
        got = lease.frames.tolist()
        assert len(set(got)) == n
        assert set(got) <= free
        mark = self.number % 250 + 1
        owner = Owner(lease, mark, got, set(got))
        for index, frame in enumerate(got):
            self.holder[frame], self.marks[frame] = owner, mark
            with lease.buffer(index).view() as memory:
                memory[:] = bytes([mark]) * FRAME_BYTES
        self.owners[self.number] = owner
        self.number += 1
        FIRED["reserve"] += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        number = self.some(data, self.owners, "owner")
        owner = self.owners[number]
        frames = self.several(data, owner.frames)
        owner.lease.give_back(frames)
        self.returned(owner, frames)
        FIRED["give back some"] += bool(owner.frames)
        self.ended(owner, number)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = self.some(data, self.owners, "owner")
        owner = self.owners[number]
        FIRED["release while touched"] += bool(owner.frames & set(self.touching()))
        owner.lease.release()
        self.returned(owner, sorted(owner.frames))
        self.ended(owner, number)
        FIRED["release"] += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def lose_a_lease(self, data: st.DataObject) -> None:
        number = self.some(data, self.owners, "owner")
        owner = self.owners[number]
        if any(look.owner is owner for look in [*self.open.values(), *self.leaked.values()]):
            return  # a view keeps its lease
        lease = weakref.ref(owner.lease)
        owner.lease = None
        if lease() is not None:
            gc.collect()
        assert lease() is None
        with pytest.warns(ResourceWarning, match=f"'owner {number}' was lost"):
            self.arena.check()
        self.grown[0] += 1
        self.returned(owner, sorted(owner.frames))
        del self.owners[number]
        FIRED["lose a lease"] += 1

    # Pins

    @precondition(lambda self: any(map(self.usable, self.owners.values())))
    @rule(data=st.data(), within_s=st.sampled_from([None, 0, 1, 1, 3]))
    def pin(self, data: st.DataObject, within_s: float | None) -> None:
        able = [number for number, owner in self.owners.items() if self.usable(owner)]
        owner = self.owners[self.some(data, able, "owner")]
        frames = self.several(data, self.usable(owner))
        name = f"transfer {len(self.transfers)}"
        pin = owner.lease.pin(name, frames, within_s)
        deadline_s = None if within_s is None else self.clock.now_s() + within_s
        self.transfers[pin.number] = Transfer(pin, pin.number, owner, name, frames, deadline_s)
        FIRED["pin"] += 1

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        transfer = self.transfers.pop(self.some(data, self.transfers, "pin"))
        transfer.pin.end()
        FIRED["end late" if transfer.late else "end"] += 1

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def lose_a_pin(self, data: st.DataObject) -> None:
        number = self.some(data, self.transfers, "pin")
        transfer = self.lost[number] = self.transfers.pop(number)
        pin = weakref.ref(transfer.pin)
        transfer.pin = None
        if pin() is not None:
            gc.collect()
        assert pin() is None
        with pytest.warns(ResourceWarning, match=f"pin {number} .* was lost"):
            self.arena.check()
        self.grown[2] += 1
        transfer.owner.late.append(transfer.name)
        self.spoil(transfer.frames)
        FIRED["lose a pin"] += 1

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def end_a_lost_pin(self, data: st.DataObject) -> None:
        number = self.some(data, self.lost, "pin")
        del self.lost[number]
        self.arena.end_pin(number)
        FIRED["end a lost pin"] += 1

    @rule(seconds=st.sampled_from([0.5, 1, 2]))
    def overdue(self, seconds: float) -> None:
        self.clock.advance_s(seconds)
        now_s = self.clock.now_s()
        late = {books.number for books in self.arena.overdue()}
        expected = {
            number: transfer
            for number, transfer in (self.transfers | self.lost).items()
            if transfer.deadline_s is not None and transfer.deadline_s < now_s and not transfer.late
        }
        assert late == set(expected)
        for number in sorted(expected):
            transfer = expected[number]
            transfer.late = True
            transfer.owner.late.append(transfer.name)
            self.spoil(transfer.frames)
            self.grown[1] += 1
        FIRED["overdue"] += bool(late)

    # Views

    @precondition(lambda self: any(map(self.usable, self.owners.values())))
    @rule(data=st.data(), used_bytes=st.integers(1, FRAME_BYTES))
    def view(self, data: st.DataObject, used_bytes: int) -> None:
        able = [number for number, owner in self.owners.items() if self.usable(owner)]
        owner = self.owners[self.some(data, able, "owner")]
        frame = self.some(data, self.usable(owner), "frame")
        view = owner.lease.buffer(owner.got.index(frame), used_bytes).view(readonly=True)
        memory = view.__enter__()
        assert len(memory) == used_bytes
        self.open[self.number] = Look(view, memory, owner, frame)
        self.number += 1
        FIRED["view"] += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        look = self.open.pop(self.some(data, self.open, "view"))
        assert set(look.memory) == {self.marks[look.frame]}
        self.over(look)
        FIRED["leave"] += 1
        FIRED["leave a returned frame"] += look.frame not in look.owner.frames

    def over(self, look: Look) -> None:
        look.memory = None  # an attribute may be a tensor's: only names of functions are harmless
        look.view.__exit__(None, None, None)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), part=st.booleans())
    def leak(self, data: st.DataObject, part: bool) -> None:
        number = self.some(data, self.open, "view")
        look = self.leaked[number] = self.open.pop(number)
        look.kept = look.memory[:1] if part else np.asarray(look.memory)
        look.memory = None
        with pytest.raises(MisuseError, match="after its block"):
            look.view.__exit__(None, None, None)
        look.view = None
        if look.frame in look.owner.frames:
            self.spoil([look.frame])
        FIRED["leak"] += 1

    @precondition(lambda self: self.leaked)
    @rule(data=st.data())
    def a_leak_dies(self, data: st.DataObject) -> None:
        look = self.leaked.pop(self.some(data, self.leaked, "view"))
        assert set(np.asarray(look.kept).tolist()) == {self.marks[look.frame]}
        FIRED["a leak dies"] += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def lose_a_view(self, data: st.DataObject) -> None:
        look = self.open.pop(self.some(data, self.open, "view"))
        look.view = look.memory = None
        with pytest.warns(ResourceWarning, match="lost inside of its block"):
            self.arena.check()
        FIRED["lose a view"] += 1

    # What is refused

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        owner = self.past[data.draw(st.integers(0, len(self.past) - 1), label="past")]
        if not owner.lease.books.released:
            owner.lease.release()  # of nothing: all was given back, and this is the first time
        for use in (
            owner.lease.release,
            lambda: owner.lease.give_back(owner.got[:1]),
            lambda: owner.lease.pin("late", owner.got[:1]),
            lambda: owner.lease.buffer().view().__enter__(),
            lambda: owner.lease.buffer().plain(),
        ):
            with pytest.raises(StaleError, match="not of the lease"):
                use()
        FIRED["stale"] += 1

    @precondition(lambda self: len(self.owners) > 1)
    @rule(data=st.data())
    def foreign(self, data: st.DataObject) -> None:
        one = self.owners[self.some(data, self.owners, "owner")]
        frames = [*one.frames, self.some(data, set(self.holder) - one.frames, "foreign")]
        with pytest.raises(StaleError, match=r"'owner .*' has it"):
            one.lease.give_back(frames)
        with pytest.raises(MisuseError, match="twice"):
            one.lease.give_back([*one.frames, *one.frames])
        FIRED["foreign"] += 1

    @precondition(lambda self: self.spoiled)
    @rule(data=st.data())
    def out_of_use(self, data: st.DataObject) -> None:
        frame = self.some(data, self.spoiled, "frame")
        owner = self.holder[frame]
        for use in (
            lambda: owner.lease.buffer(owner.got.index(frame)).view().__enter__(),
            lambda: owner.lease.pin("again", [frame]),
        ):
            with pytest.raises(LateError, match="out of use"):
                use()
        FIRED["out of use"] += 1

    # What holds

    @invariant()
    def as_the_model(self) -> None:
        self.settled()
        stats = self.arena.stats()
        free, present = self.free(), sum(map(len, self.places.values()))
        used = len(set(self.holder) - self.spoiled)
        assert (stats.frames, stats.free, stats.used) == (present, len(free), used)
        assert stats.quarantined == present - len(free) - used
        assert stats.leases == len(self.owners)
        assert stats.pins == len(self.transfers) + len(self.lost)
        assert stats.views == len(self.open) + len(self.leaked)
        assert [stats.leases_lost, stats.pins_late, stats.pins_lost] == self.grown
        assert set(self.arena.regions) == set(self.places)
        for owner in self.owners.values():
            assert set(owner.lease.frames.tolist()) == owner.frames
            assert list(owner.lease.late) == owner.late
        assert not self.health.degraded

    @invariant()
    def everybody_has_its_bytes(self) -> None:
        for frame in set(self.holder) | set(self.touching()):
            found = ctypes.string_at(self.arena._places.address(frame), FRAME_BYTES)
            assert found == bytes([self.marks[frame]]) * FRAME_BYTES

    def teardown(self) -> None:
        for look in self.open.values():
            self.over(look)
        self.open.clear()
        self.leaked.clear()
        del self.past[:]
        for transfer in self.transfers.values():
            transfer.pin.end()
        for number in self.lost:
            self.arena.end_pin(number)
        for owner in self.owners.values():
            owner.lease.release()
        self.arena.check()
        busy = [region for region in self.places if region not in self.arena.regions]
        assert set(busy) == self.draining
        self.arena.close()
        for region in self.places:
            region.close()


RULES = (
    "add",
    "add without room",
    "drain of idle frames",
    "drain of used frames",
    "a region left",
    "reserve",
    "reserve short",
    "give back some",
    "release",
    "release while touched",
    "lose a lease",
    "pin",
    "end",
    "end late",
    "lose a pin",
    "end a lost pin",
    "overdue",
    "view",
    "leave",
    "leave a returned frame",
    "leak",
    "a leak dies",
    "lose a view",
    "stale",
    "foreign",
    "out of use",
)


def test_an_arena_does_what_the_plain_model_does() -> None:
    FIRED.clear()
    run_state_machine_as_test(
        ArenaMachine,
        settings=settings(
            max_examples=400,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A machine that never gets somewhere proves nothing about it.
    assert {name: FIRED[name] for name in RULES if FIRED[name] < 50} == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_arena_does_what_the_plain_model_does_for_long() -> None:
    """Random, not derandomised: every run goes elsewhere, and a failure prints how to come back."""
    run_state_machine_as_test(
        ArenaMachine,
        settings=settings(
            max_examples=3000,
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
