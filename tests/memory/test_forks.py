"""Forked children: zeros instead of bytes, refusals instead of waiting, nothing of the parent kept."""

from __future__ import annotations

import mmap
import os
import pathlib
import signal
import threading

import numpy as np
import pytest

from stepwell.base.errors import MisuseError
from stepwell.base.threads import Health
from stepwell.memory.arena import Arena
from stepwell.memory.ask import Ask, Kind
from stepwell.memory.region import Region

PAGE = mmap.PAGESIZE
HOST = [Kind.PRIVATE, Kind.SHARED, Kind.NAMED, Kind.FILE]


def counts(arena):
    stats = arena.stats()
    return stats.free, stats.used, stats.quarantined


def fill(region, value):
    with region.view(0, region.size_bytes, readonly=False) as view:
        np.frombuffer(view, np.uint8)[:] = value


def distinct(region):
    with region.view(0, region.size_bytes) as view:
        return np.unique(np.frombuffer(view, np.uint8)).tolist()


def in_child(work):
    """Runs in a forked child what is to return True; raises if it does not, or if it hangs or is killed."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        code = 1
        try:
            code = 0 if work() is True else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refuses(use):
    try:
        use()
    except MisuseError as error:
        return "belongs to the parent" in str(error)
    return False


@pytest.mark.parametrize("kind", HOST)
def test_a_forked_child_has_neither_bytes_nor_descriptor(of, kind, descriptors):
    with Region.open(of(kind, PAGE)) as region:
        region.prepare()
        fill(region, 6)
        number = region._mapping.descriptor

        def child():
            gone = number not in descriptors()
            uses = [
                lambda: region.address,
                lambda: region.view(0, 1),
                lambda: region.use("child"),
                region.prepare,
            ]
            region.close()  # does nothing
            return gone and region.closed and all(refuses(use) for use in uses)

        in_child(child)
        assert distinct(region) == [6]
        if kind is Kind.NAMED:
            Region.attach_named(region.record.ask.name).close()  # the child did not take the name


@pytest.mark.parametrize("kind", HOST)
def test_a_view_that_lives_in_a_forked_child_reads_zeros(of, kind):
    with Region.open(of(kind, PAGE)) as region:
        region.prepare()
        fill(region, 6)
        with region.view(0, PAGE) as view:
            in_child(lambda: view.tobytes() == bytes(PAGE))
            assert view.tobytes() == b"\6" * PAGE


def test_a_forked_child_may_open_regions_of_its_own():
    def child():
        with Region.open(Ask(PAGE)) as mine:
            mine.prepare()
            fill(mine, 2)
            return distinct(mine) == [2]

    with Region.open(Ask(PAGE)):
        in_child(child)


def test_a_child_that_was_forked_during_a_preparation_is_refused_and_does_not_hang():
    """A lock that a thread of the parent had is never released in the child."""
    with Region.open(Ask(PAGE)) as region:
        inside, over = threading.Event(), threading.Event()

        def ready(_):
            inside.set()
            assert over.wait(60)

        thread = threading.Thread(target=region.prepare, args=(ready,))
        thread.start()
        assert inside.wait(60)
        try:
            in_child(lambda: refuses(region.prepare))
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED])
def test_a_forked_child_reads_zeros_and_disturbs_nobody(make_arena, make_region, forked, kind):
    arena = make_arena(0, count=2)
    region = make_region(2 * PAGE, kind=kind)
    arena.add(region)
    lease = arena.reserve(1, "one")
    with lease.buffer().view() as memory:
        memory[:] = b"\x2a" * PAGE

        def child():
            seen = set(memory)
            memory[:] = b"\x01" * PAGE
            return sorted(seen)

        assert forked(child) == [0]
        assert set(memory) == {42}
    lease.release()
    assert counts(arena) == (2, 0, 0)


def test_a_forked_child_is_refused_everything_that_is_its_parents(make_arena, make_region, forked):
    arena, health = make_arena(2, count=4), Health()
    region = make_region(PAGE, kind=Kind.SHARED)
    idle = make_region(PAGE)
    arena.add(region)
    lease = arena.reserve(1, "one")
    buffer, pin = lease.buffer(), lease.pin("save")
    calls = {
        "reserve": lambda: arena.reserve(1, "two"),
        "stats": arena.stats,
        "check": arena.check,
        "add": lambda: arena.add(idle),
        "grow": lambda: arena.grow(idle, health),
        "drain": lambda: arena.drain(region),
        "overdue": arena.overdue,
        "addresses": lambda: arena.addresses(lease),
        "addresses of some": lambda: arena.addresses(lease, [0]),
        "frames": lambda: lease.frames,
        "pin": lambda: lease.pin("save"),
        "pin some": lambda: lease.pin("save", [0]),
        "view": lambda: buffer.view().__enter__(),
        "plain": buffer.plain,
        "region view": lambda: region.view(0, 8),
        "prepare": region.prepare,
        "address": lambda: region.address,
        "descriptor": lambda: region.descriptor,
        "use": lambda: region.use("me"),
    }

    def child():
        answers = {}
        for name, call in calls.items():
            try:
                answers[name] = repr(call())
            except MisuseError as error:
                answers[name] = "refused" if "belongs to the parent" in str(error) else str(error)
        return answers

    assert forked(child) == dict.fromkeys(calls, "refused")
    assert not health.degraded
    pin.end()
    lease.release()
    assert counts(arena) == (3, 0, 0)


def test_a_forked_child_may_end_what_it_cannot_use(make_arena, forked):
    """Blocks that were open at the fork end in the child too: that must not raise, nor end anything here."""
    arena = make_arena(3)
    region = arena.regions[0]
    lease, other = arena.reserve(1, "one"), arena.reserve(1, "two")
    pin, view = lease.pin("save"), lease.buffer().view()
    view.__enter__()

    def child():
        view.__exit__(None, None, None)
        with other:
            pass
        answers = [
            pin.end(),
            pin.end(),
            arena.end_pin(10**9),
            lease.give_back([int(lease.books.frames[0])]),
            lease.release(),
            lease.release(),
            arena.close(),
            region.close(),
        ]
        return [answers, region.closed]

    assert forked(child) == [[None] * 8, True]
    assert counts(arena) == (1, 2, 0)
    assert (arena.stats().pins, arena.stats().views) == (1, 1)
    view.__exit__(None, None, None)
    pin.end()
    lease.release()
    other.release()
    assert not region.closed


def test_a_forked_child_waits_for_no_lock_of_its_parents_threads(make_arena, make_region, forked):
    """A thread that was in a call is not there to end it."""
    arena = make_arena(2)
    region = arena.regions[0]
    lease = arena.reserve(1, "one")
    buffer, pin = lease.buffer(), lease.pin("save")
    held, release = threading.Event(), threading.Event()

    def hold():
        with arena._call.alone(), region._call.alone(), region._preparing:
            held.set()
            assert release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)

    def child():
        refused = 0
        for call in (
            lambda: arena.reserve(1, "two"),
            arena.stats,
            lambda: lease.frames,
            lambda: lease.pin("save"),
            lambda: arena.addresses(lease),
            buffer.plain,
            lambda: buffer.view().__enter__(),
            lambda: region.view(0, 8),
            lambda: region.use("me"),
            region.prepare,
            lambda: arena.drain(region),
        ):
            try:
                call()
            except MisuseError:
                refused += 1
        pin.end()
        lease.release()
        arena.close()
        region.close()
        return refused

    assert forked(child) == 11
    release.set()
    thread.join(30)
    pin.end()
    lease.release()


def test_a_forked_child_has_no_descriptor_of_its_parent(make_region, forked, tmp_path, name):
    regions = [
        make_region(PAGE, kind=Kind.SHARED),
        make_region(PAGE, kind=Kind.FILE, folder=str(tmp_path)),
        make_region(PAGE, kind=Kind.NAMED, name=name),
    ]
    numbers = [region.descriptor for region in regions]

    def child():
        answers = []
        for number in numbers:
            try:
                answers.append(os.fstat(number).st_size)
            except OSError as error:
                answers.append(error.strerror)
        return answers

    assert forked(child) == ["Bad file descriptor"] * 3
    assert [os.fstat(number).st_size for number in numbers] == [PAGE] * 3
    assert pathlib.Path("/dev/shm", f"stepwell-{name}").exists()


def test_a_forked_child_may_have_an_arena_of_its_own(make_arena, forked):
    from stepwell.memory.ask import Ask
    from stepwell.memory.region import Region

    arena = make_arena(2)
    lease = arena.reserve(1, "one")

    def child():
        own, region = Arena(PAGE, 3), Region.open(Ask(3 * PAGE))
        own.add(region)
        with own.reserve(2, "child") as mine:
            with mine.buffer().view() as memory:
                memory[0] = 6

            def grandchild():
                try:
                    own.reserve(1, "grandchild")
                except MisuseError as error:
                    return "parent" in str(error)

            told = forked(grandchild)
        own.close()
        region.close()
        return [told, region.closed]

    assert forked(child) == [True, True]
    lease.release()
    assert counts(arena) == (2, 0, 0)


def test_a_forked_child_is_told_that_numbers_and_frames_are_its_parents(make_arena, forked):
    arena = make_arena(2)
    region = arena.regions[0]

    def child():
        told = []
        for call in (arena.number, arena.frames_in):
            try:
                call(region)
            except MisuseError as error:
                told.append("belongs to the parent" in str(error))
        return told

    assert forked(child) == [True, True]
