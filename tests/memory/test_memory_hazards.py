"""Hazards of earlier memory managers, each under its id: `m01` is H-1 of the reports, and so on."""

import ctypes
import gc
import pathlib
import pickle
import random
import threading
import warnings

import numpy as np
import pytest

import stepwell.memory
from stepwell.base.errors import InputError, LateError, MisuseError, StaleError
from stepwell.memory import registry
from stepwell.memory.arena import Arena, Short
from stepwell.memory.ask import Ask
from stepwell.memory.region import Region
from stepwell.testing.clock import FakeClock
from stepwell.testing.gpu import FakeGpu

PAGE = 4096


def counts(arena):
    stats = arena.stats()
    return stats.free, stats.used, stats.quarantined


# Returning what one does not have


def test_m01_a_double_return_is_found_and_frees_nothing(make_arena):
    arena = make_arena(10)
    lease = arena.reserve(1, "one")
    frames = lease.frames
    lease.give_back(frames)
    lease.release()  # of nothing
    for again in (lambda: lease.give_back(frames), lease.release):
        with pytest.raises(StaleError, match="nobody has it"):
            again()
    with arena.reserve(1, "two") as two, arena.reserve(1, "three") as three:
        assert two.frames.tolist() != three.frames.tolist()
    assert counts(arena) == (10, 0, 0)


def test_m02_a_frame_that_somebody_else_has_or_nobody_made_is_not_returned(make_arena):
    arena = make_arena(2)
    with arena.reserve(1, "one") as lease, arena.reserve(1, "two") as other:
        with pytest.raises(StaleError, match="'two' has it"):
            lease.give_back(other.frames)
        with pytest.raises(MisuseError, match="0 to 1"):
            lease.give_back([2**20])
        assert arena.reserve(1, "three") == Short(by=1, count=2)


@pytest.mark.parametrize(
    ("frame_bytes", "count", "align_bytes", "named"),
    [
        (0, 1, 1, "frames of 0 bytes"),
        (-8192, 1, 1, "frames of -8192 bytes"),
        (2**46 + 1, 1, 1, "frames of 70368744177665 bytes"),
        (8.0, 1, 1, "frames of 8.0 bytes"),
        (True, 1, 1, "frames of True bytes"),
        (8, 0, 1, "0 frames"),
        (8, -1, 1, "-1 frames"),
        (8, 2**31, 1, "2147483648 frames"),
        (8, "4", 1, "'4' frames"),
        (8, 1, 3000, "multiples of 3000"),
        (8, 1, 0, "multiples of 0"),
        (8, 1, -1, "multiples of -1"),
        (101, 1, -4, "multiples of -4"),
        (8, 1, 2 * PAGE, "multiples of 8192"),
        (8, 1, 1.0, "multiples of 1.0"),
        (8, 1, True, "multiples of True"),
    ],
    ids=str,
)
def test_m03_sizes_that_cannot_be_are_refused_by_value(frame_bytes, count, align_bytes, named):
    with pytest.raises(InputError, match=named):
        Arena(frame_bytes, count, align_bytes=align_bytes)


# Returning twice, late, or something else


def test_m05_a_lease_released_twice_gives_no_frame_to_two(make_arena, write, read):
    arena = make_arena(4)
    lease = arena.reserve(1, "one")
    lease.release()
    with pytest.raises(StaleError, match="returned at"):
        lease.release()
    leases = [arena.reserve(1, number) for number in range(4)]
    assert isinstance(arena.reserve(1, "five"), Short)
    for number, lease in enumerate(leases):
        write(lease.buffer(), number)
    for number, lease in enumerate(leases):
        assert set(read(lease.buffer())) == {number}
        lease.release()


def test_m06_an_extra_end_of_a_pin_frees_nothing(make_arena):
    arena = make_arena(4)
    lease = arena.reserve(1, "one")
    pin = lease.pin("save")
    lease.release()
    pin.end()
    for again in (pin.end, lambda: arena.end_pin(pin.number)):
        with pytest.raises(MisuseError, match="has ended"):
            again()
    assert counts(arena) == (4, 0, 0)
    with arena.reserve(4, "two") as lease:
        assert len(set(lease.frames.tolist())) == 4


def test_m07_an_old_owner_returns_nothing_of_the_new_one(make_arena, write, read):
    arena = make_arena(1)
    old = arena.reserve(1, "old")
    frames, pin = old.frames, old.pin("save")
    pin.end()
    old.release()
    new = arena.reserve(1, "new")
    write(new.buffer(), 9)
    for late in (old.release, lambda: old.give_back(frames), lambda: old.pin("save", frames)):
        with pytest.raises(StaleError, match="'new' has it"):
            late()
    with pytest.raises(MisuseError, match="has ended"):
        pin.end()
    with old:
        pass  # a block around a lease that was released leaves others alone
    assert set(read(new.buffer())) == {9}
    assert isinstance(arena.reserve(1, "third"), Short)
    new.release()


def test_m08_a_narrow_buffer_shows_no_byte_of_an_earlier_owner(make_arena, write):
    arena = make_arena(1, frame_bytes=1024, debug=False)
    with arena.reserve(1, "earlier") as lease:
        write(lease.buffer(), 7)
    with arena.reserve(1, "later") as lease:
        buffer = lease.buffer(0, 192)
        write(buffer, 1)
        with buffer.view() as memory:
            assert set(memory) == {1}
            assert len(memory) == np.asarray(memory).nbytes == 192
        plain = buffer.plain()
        with arena.regions[plain.region].view(plain.offset, plain.used_bytes) as memory:
            assert bytes(memory) == b"\1" * 192


def test_m09_a_stale_buffer_reads_and_writes_nothing(make_arena, write, read):
    arena = make_arena(1)
    one = arena.reserve(1, "one")
    stale, view = one.buffer(), one.buffer().view()
    one.release()
    with arena.reserve(1, "two") as two:
        write(two.buffer(), 5)
        for use in (lambda: write(stale, 77), lambda: read(stale), view.__enter__, stale.plain):
            with pytest.raises(StaleError, match="'two' has it"):
                use()
        assert set(read(two.buffer())) == {5}


# Time


def test_m10_no_time_frees_a_frame_under_its_reader(make_arena, write):
    clock = FakeClock()
    arena = make_arena(2, clock=clock)
    lease = arena.reserve(1, "reader")
    write(lease.buffer(), 3)
    with lease.buffer().view(readonly=True) as memory:
        pin = lease.pin("read", within_s=1)
        lease.release()
        clock.advance_s(1000)
        assert arena.overdue() == (pin.books,)
        with arena.reserve(1, "next") as other:
            write(other.buffer(), 99)
            assert isinstance(arena.reserve(1, "third"), Short)
        pin.end()
        assert isinstance(arena.reserve(2, "third"), Short)
        assert set(memory) == {3}
    assert counts(arena) == (2, 0, 0)


def test_m11_a_pin_needs_nothing_set_up(make_region):
    with Arena(PAGE, 1) as arena:
        arena.add(make_region(PAGE))
        with arena.reserve(1, "one") as lease, lease.pin("save", within_s=3600) as pin:
            assert not pin.late
        assert arena.overdue() == ()


@pytest.mark.parametrize("used_bytes", [1, 2, 99, 100])
def test_m12_a_narrow_length_is_the_same_everywhere(make_arena, used_bytes):
    arena = make_arena(3, frame_bytes=100)
    for n in (1, 3):
        with arena.reserve(n, "one") as lease:
            for buffer in (lease.buffer(0, used_bytes), lease.buffer().narrowed(used_bytes)):
                with buffer.view() as memory:
                    lengths = {len(memory), memory.nbytes, np.asarray(memory).size}
                assert lengths | {buffer.used_bytes, buffer.plain().used_bytes} == {used_bytes}
                with pytest.raises(InputError):
                    buffer.narrowed(PAGE)


def test_m14_lengths_leave_no_types_behind(make_arena, make_region):
    """ctypes makes a type for each length, and what caches them keeps them for ever."""
    arena = make_arena(1, frame_bytes=10_000)
    region = arena.regions[0]
    with arena.reserve(1, "one") as lease:
        with lease.buffer().view(), region.view(0, 10_000):
            pass
        gc.collect()
        before = len(ctypes.Array.__subclasses__())
        for used_bytes in range(1, 10_000):
            with lease.buffer(0, used_bytes).view() as memory:
                assert len(memory) == used_bytes
        gc.collect()
        assert len(ctypes.Array.__subclasses__()) <= before


def test_m14_views_of_a_region_leave_no_books_behind(make_region):
    region = make_region(PAGE)
    region.prepare()
    for _ in range(1000):
        with region.view(0, 8):
            pass
    assert len(region._users._views) + len(region._users.ended) <= 2


def test_m15_a_readers_deadline_gives_its_bytes_to_nobody(make_arena, write):
    clock = FakeClock()
    arena = make_arena(3, clock=clock)
    lease = arena.reserve(1, "reader")
    write(lease.buffer(), 1)
    read = lease.pin("send", within_s=1)
    clock.advance_s(5)
    arena.overdue()
    lease.release()
    for byte in (8, 9):
        with arena.reserve(2, byte) as other:
            assert isinstance(arena.reserve(1, "third"), Short)
            for index in range(2):
                write(other.buffer(index), byte)
    address = arena._places.address(int(read.books.frames[0]))
    assert set(ctypes.string_at(address, PAGE)) == {1}, "what the transfer still sends"
    read.end()
    assert counts(arena) == (3, 0, 0)


def test_m16_a_late_writer_cannot_write_into_what_the_next_one_got(make_arena, write, read):
    clock = FakeClock()
    arena = make_arena(2, clock=clock)
    first = arena.reserve(1, "first")
    filling = first.pin("load", within_s=1)
    address = arena._places.address(int(filling.books.frames[0]))
    clock.advance_s(5)
    assert arena.overdue() == (filling.books,)
    assert first.late == ("load",)
    with pytest.raises(LateError, match="return it and compute the bytes elsewhere"):
        first.buffer().view().__enter__()
    first.release()
    second = arena.reserve(1, "second")
    assert second.frames.tolist() != filling.books.frames.tolist()
    write(second.buffer(), 2)
    ctypes.memset(address, 66, PAGE)  # the transfer comes at last
    assert set(read(second.buffer())) == {2}
    filling.end()
    second.release()
    assert counts(arena) == (2, 0, 0)


@pytest.mark.parametrize("last", range(5))
def test_m17_a_late_pin_is_one_of_as_many_as_there_were(make_arena, last):
    """Whoever's deadline passes, the frame waits for all that touch it."""
    clock = FakeClock()
    arena = make_arena(1, clock=clock)
    lease = arena.reserve(1, "one")
    pins = [lease.pin(f"reader {n}", within_s=1) for n in range(4)]
    pins.append(lease.pin("the fifth", within_s=10))
    clock.advance_s(2)
    assert len(arena.overdue()) == 4
    lease.release()
    pins.append(pins.pop(last))
    for pin in pins:
        assert counts(arena) == (0, 0, 1)
        pin.end()
    assert counts(arena) == (1, 0, 0)


# Ends


def test_m32_an_arena_with_a_live_view_is_not_closed(make_arena):
    arena = make_arena(1)
    region = arena.regions[0]
    lease = arena.reserve(1, "one")
    with lease.buffer().view() as memory:
        memory[0] = 5
        lease.release()
        for close in (arena.close, region.close):
            with pytest.raises(MisuseError, match="arena"):
                close()
        assert memory[0] == 5
    arena.close()
    region.close()
    assert region.closed


def test_m34_a_batch_leaves_the_callers_array_alone_and_frees_no_pinned_frame(make_arena):
    arena = make_arena(4)
    with arena.reserve(4, "one") as lease:
        given = np.array([3, 0, 2], np.int32)
        pin = lease.pin("save", [0])
        lease.give_back(given)
        assert given.tolist() == [3, 0, 2]
        assert counts(arena) == (2, 1, 1)
        with arena.reserve(2, "two") as other:
            assert 0 not in other.frames
        assert given.tolist() == [3, 0, 2]
        pin.end()


EXIT = """
    import sys, threading
    import numpy as np
    from stepwell.base.errors import MisuseError
    from stepwell.base.threads import Health
    from stepwell.memory.arena import Arena
    from stepwell.memory.ask import Ask, Kind
    from stepwell.memory.region import Region
    from stepwell.testing.gpu import FakeGpu

    asked = threading.Event()

    class Waiting(FakeGpu):
        def register(self, address, size_bytes):
            super().register(address, size_bytes)
            if len(self.registered) == 2:
                asked.set()
                threading.Event().wait()

    class Holder:
        def __init__(self, *held):
            self.held, self.me = held, self
        def __del__(self):
            self.held[0].release()

    region = Region.open(Ask(1 << 20, Kind.SHARED, pinned=True, piece_bytes=1 << 16), gpu=Waiting())
    arena, health = Arena(4096, 300), Health()
    growth = arena.grow(region, health)
    assert asked.wait(30)
    leases = [arena.reserve(2, n) for n in range(4)]
    pins = [lease.pin("save", within_s=10) for lease in leases]
    view = leases[0].buffer().view()
    memory = view.__enter__()
    kept = []
    try:
        with leases[1].buffer().view() as other:
            kept.append(np.asarray(other))
    except MisuseError:
        kept.append(other)
    holder = Holder(arena.reserve(1, "holder"))
    lost = [arena.reserve(1, "lost")]
    lost.append(lost)
    if sys.argv[1] == "thread":
        threading.Thread(target=lambda: None).start()
    elif sys.argv[1] == "module":
        sys.modules["holding"] = (arena, leases, pins, view, memory, kept)
    elif sys.argv[1] == "cycle":
        leases.append(leases), pins.append(pins), kept.append(kept)
        del leases, pins, view, memory, kept, arena, region, growth, holder
    print("end")
"""


@pytest.mark.parametrize("way", ["plain", "thread", "module", "cycle"])
def test_m35_the_interpreter_ends_in_silence_whatever_lives(run_python, way):
    done = run_python(EXIT, way)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_m36_nothing_here_is_pickled(make_arena):
    """A record for another process is five numbers; what owns something stays here."""
    arena = make_arena(1)
    with arena.reserve(1, "one") as lease, lease.pin("save") as pin:
        for thing in (arena, lease, lease.buffer(), pin, lease.buffer().view(), arena.regions[0]):
            with pytest.raises(TypeError, match="pickle"):
                pickle.dumps(thing)
        plain = lease.buffer().plain()
        assert pickle.loads(pickle.dumps(plain)) == plain
        values = [getattr(plain, name) for name in plain.__dataclass_fields__]
        assert {type(value) for value in values} == {int}
    folder = pathlib.Path(next(iter(stepwell.memory.__path__)))
    words = ("pickle", "marshal", "shelve", "eval(", "exec(")
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    assert len(texts) > 10
    assert [(name, word) for name, text in texts.items() for word in words if word in text] == []


# Locks


def test_m38_nothing_is_reported_under_the_lock(make_arena, monkeypatch):
    """What shows warnings may call the arena: to log its counts, say."""
    arena = make_arena(4)
    seen = []

    def show(message, *_):
        seen.append((str(message), counts(arena)))
        arena.reserve(1, "hook").release()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        arena.reserve(1, "one")
        lease = arena.reserve(1, "two")
        lease.buffer().view().__enter__()
        lease.pin("save")
        arena.check()
    (number,) = arena._custody.pins
    begins = [text.split()[:2] for text, _ in seen]
    assert begins == [["the", "lease"], ["a", "view"], ["pin", str(number)]]
    assert [free + used + quarantined for _, (free, used, quarantined) in seen] == [4] * 3
    lease.release()
    arena.end_pin(number)


def test_m38_a_reservation_that_fails_says_nothing(make_arena, capfd, caplog):
    arena = make_arena(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1000):
            assert arena.reserve(2, "one") == Short(by=1, count=1)
    assert (caught, caplog.records, capfd.readouterr()) == ([], [], ("", ""))


def test_m39_whoever_is_called_may_call(in_time, make_arena, make_region):
    """Clock, GPU runtime and callbacks are foreign: each runs outside of every lock."""

    class Calling(FakeGpu, FakeClock):
        def __init__(self):
            FakeGpu.__init__(self)
            FakeClock.__init__(self)
            self.arena, self.region, self.called = None, None, 0

        def call(self):
            if self.arena is not None:
                self.called += 1
                self.arena.check()
                self.arena.stats()
                self.region.end_use(self.region.use("a callback"))

        def register(self, address, size_bytes):
            self.call()
            super().register(address, size_bytes)

        def now_s(self):
            self.call()
            return super().now_s()

    def run():
        foreign = Calling()
        arena = make_arena(0, count=4, clock=foreign)
        region = make_region(4 * PAGE, gpu=foreign, pinned=True, piece_bytes=PAGE)
        foreign.arena, foreign.region = arena, region
        assert arena.add(region) == 4
        assert foreign.called == 4
        with arena.reserve(1, "one") as lease, lease.pin("save", within_s=1):
            arena.overdue()
        assert foreign.called == 6
        foreign.arena = None
        plain = make_region(2 * PAGE)
        plain.prepare(lambda _: (arena.check(), plain.end_use(plain.use("me"))))

    in_time(run)


def test_m39_views_of_arena_and_region_end_in_any_order_from_any_thread(in_time, make_arena):
    arena = make_arena(2)
    region = arena.regions[0]

    def run():
        def some(call):
            for _ in range(300):
                with call():
                    pass

        lease = arena.reserve(1, "one")
        calls = [
            lambda: lease.buffer().view(),
            lambda: region.view(0, 8),
            lambda: lease.pin("save"),
            lambda: arena.reserve(1, "two") or None,
        ]
        threads = [
            threading.Thread(target=some, args=(call,), daemon=True)
            for call in [*calls, *calls[:3]]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        lease.release()

    in_time(run)
    assert counts(arena) == (2, 0, 0)


def test_m40_fixed_frames_never_fragment(make_arena, make_region):
    """A reservation fails when fewer are free, and at no other time."""
    arena = make_arena(30, frame_bytes=64, align_bytes=64, count=90, debug=False)
    arena.add(make_region(60 * 64))
    dice, leases, free, short = random.Random(40), [], 90, 0
    for _ in range(6000):
        if leases and dice.random() < 0.5:
            lease = leases.pop(dice.randrange(len(leases)))
            some = dice.sample(lease.frames.tolist(), dice.randint(1, len(lease.frames)))
            lease.give_back(some)
            free += len(some)
            if len(lease.frames):
                leases.append(lease)
        n = dice.choice([1, 3, 12, 20])
        got = arena.reserve(n, "one")
        if isinstance(got, Short):
            assert (got.by, n > free) == (n - free, True)
            short += 1
        else:
            assert n <= free
            leases.append(got)
            free -= n
    assert short > 500
    for lease in leases:
        lease.release()
    arena.check()
    assert counts(arena) == (90, 0, 0)


def test_m39_a_finalizer_in_a_call_of_a_region_waits_for_no_thread_that_waits_for_it(run_python):
    """One thread closes a region and collects, another returns the last frame of it: neither may hang."""
    done = run_python("""
        import faulthandler, gc, threading
        from stepwell.base.errors import MisuseError
        from stepwell.memory.arena import Arena
        from stepwell.memory.ask import Ask
        from stepwell.memory.region import Region
        from stepwell.memory.users import Users

        faulthandler.dump_traceback_later(30, exit=True)
        gc.disable()
        first, second, arena = Region.open(Ask(4096)), Region.open(Ask(4096)), Arena(4096, 2)
        arena.add(first)
        last = arena.reserve(1, "last of first")
        arena.drain(first)
        arena.add(second)

        class Holder:
            def __init__(self, lease):
                self.lease, self.me = lease, self
            def __del__(self):
                self.lease.release()

        Holder(arena.reserve(1, "in second"))
        closing, returned = threading.Event(), threading.Event()
        names = Users.names

        def collecting(users):
            closing.set()
            returned.wait(10)
            gc.collect()
            return names(users)

        Users.names = collecting

        def close():
            try:
                first.close()
            except MisuseError:
                pass

        def give_back():
            closing.wait()
            with arena._call.alone(), arena._call:
                returned.set()
                arena._take(last, None, "here")

        threads = [threading.Thread(target=one) for one in (close, give_back)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first.close()
        arena.close()
        second.close()
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_m10_memory_stays_mapped_under_a_transfer_that_everybody_lost(make_region):
    """Arena, region, lease and pin are gone; whether the transfer has ended, nobody knows."""
    arena, region = Arena(PAGE, 1), Region.open(Ask(PAGE))
    arena.add(region)
    lease = arena.reserve(1, "one")
    pin = lease.pin("save")
    number, mapping, place = pin.number, region._mapping, pin.books.place
    del arena, region, lease, pin
    gc.collect()
    make_region(PAGE)
    assert mapping.mapped
    held = [
        one for pin, one in registry._held.items() if pin.number == number and pin.place == place
    ]
    assert len(held) == 1
    with pytest.warns(ResourceWarning, match="was lost"):
        held[0].stats()
    held[0].end_pin(number)
    held[0].close()
    held.clear()
    gc.collect()
    with pytest.warns(ResourceWarning, match="a region was lost"):
        make_region(PAGE)
    assert not mapping.mapped
