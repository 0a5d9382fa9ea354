"""Pins: a frame that a transfer touches is given to nobody, however late the transfer is."""

import gc
import itertools

import pytest

from stepwell.base.errors import InputError, LateError, MisuseError, StaleError
from stepwell.memory.arena import Short
from stepwell.testing.clock import FakeClock

PAGE = 4096


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def arena(make_arena, clock):
    return make_arena(4, clock=clock)


def counts(arena):
    stats = arena.stats()
    return stats.free, stats.used, stats.quarantined


def test_a_returned_frame_is_given_to_nobody_before_its_pin_ends(arena):
    lease = arena.reserve(3, "one")
    pin = lease.pin("save", lease.frames[:2])
    lease.release()
    assert counts(arena) == (2, 0, 2)
    assert arena.reserve(3, "two") == Short(by=1, count=4)
    pin.end()
    assert counts(arena) == (4, 0, 0)


def test_a_pin_that_ends_first_leaves_the_frames_with_their_lease(arena):
    with arena.reserve(2, "one") as lease:
        pin = lease.pin("load")
        assert arena.stats().pins == 1
        pin.end()
        assert counts(arena) == (2, 2, 0)
        with lease.buffer().view():
            pass


def test_a_frame_waits_for_all_of_its_pins(arena):
    lease = arena.reserve(1, "one")
    pins = [lease.pin(name) for name in "abc"]
    lease.release()
    for pin in (pins[1], pins[2], pins[0]):
        assert counts(arena) == (3, 0, 1)
        pin.end()
    assert counts(arena) == (4, 0, 0)


def test_a_pin_is_a_block(arena):
    lease = arena.reserve(1, "one")
    with lease.pin("save"):
        lease.release()
        assert counts(arena) == (3, 0, 1)
    assert counts(arena) == (4, 0, 0)
    with pytest.raises(KeyError), arena.reserve(1, "one") as lease, lease.pin("save"):
        raise KeyError
    assert counts(arena) == (4, 0, 0)
    with arena.reserve(1, "two") as lease, lease.pin("save") as pin:
        pin.end()


def test_a_pin_ends_once(arena):
    with arena.reserve(1, "one") as lease:
        one, two = lease.pin("save"), lease.pin("load")
        one.end()
        for again in (one.end, lambda: arena.end_pin(one.number), lambda: arena.end_pin(10**9)):
            with pytest.raises(MisuseError, match="has ended, or never began"):
                again()
        assert arena.stats().pins == 1
        two.end()


@pytest.mark.parametrize("within_s", [-1, -0.001, float("nan")])
def test_a_deadline_that_cannot_be_is_refused_by_value(arena, within_s):
    with arena.reserve(1, "one") as lease:
        with pytest.raises(InputError, match="deadline") as caught:
            lease.pin("save", within_s=within_s)
        assert repr(within_s) in str(caught.value)
        assert arena.stats().pins == 0


def test_a_pin_is_late_after_its_deadline_and_found_late_once(arena, clock):
    lease = arena.reserve(3, "one")
    soon, later = lease.pin("save", [0], within_s=1.5), lease.pin("load", [1], within_s=2.0)
    never = lease.pin("forever", [2])
    assert arena.overdue() == ()
    clock.advance_s(1.5)
    assert arena.overdue() == (), "at its deadline it is in time"
    clock.advance_s(0.001)
    assert arena.overdue() == (soon.books,)
    assert (soon.late, later.late, never.late) == (True, False, False)
    assert arena.overdue() == ()
    clock.advance_s(100)
    assert arena.overdue() == (later.books,)
    assert lease.late == ("save", "load")
    assert arena.stats().pins_late == 2
    assert arena.stats().pins == 3, "late is not ended"
    for pin in (soon, later, never):
        pin.end()
    lease.release()


def test_a_deadline_of_no_time_is_over_as_soon_as_time_passes(arena, clock):
    with arena.reserve(1, "one") as lease, lease.pin("save", within_s=0) as pin:
        assert arena.overdue() == ()
        clock.advance_s(0.1)
        assert arena.overdue() == (pin.books,)


def test_the_owner_of_a_late_pin_is_told_and_cannot_use_the_bytes(arena, clock):
    lease = arena.reserve(2, "one")
    pin = lease.pin("load from disk", lease.frames[:1], within_s=1)
    clock.advance_s(2)
    assert [books.number for books in arena.overdue()] == [pin.number]
    assert lease.late == ("load from disk",)
    assert counts(arena) == (2, 1, 1)
    for use in (lease.buffer().view().__enter__, lambda: lease.pin("save", lease.frames[:1])):
        with pytest.raises(LateError, match="because of 'load from disk'"):
            use()
    with lease.buffer(1).view(), lease.pin("save", lease.frames[1:]):
        pass  # the other frame is as good as before
    pin.end()
    with pytest.raises(LateError):
        lease.buffer().view().__enter__()
    lease.release()
    with arena.reserve(4, "two") as lease, lease.buffer().view():
        assert lease.late == ()


def test_a_view_that_is_open_when_a_pin_is_late_stays_the_owners(arena, clock, write):
    lease = arena.reserve(1, "one")
    pin = lease.pin("save", within_s=1)
    with lease.buffer().view() as memory:
        memory[:] = b"x" * PAGE
        clock.advance_s(2)
        arena.overdue()
        lease.release()
        pin.end()
        assert arena.reserve(4, "two") == Short(by=1, count=4)
        assert bytes(memory) == b"x" * PAGE
    assert counts(arena) == (4, 0, 0)


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["late", "release", "end"])), ids="-".join
)
def test_a_frame_is_free_when_it_is_returned_and_its_pin_has_ended(arena, clock, order):
    """Being late frees nothing, whenever it is found: only the transfer's end does."""
    lease = arena.reserve(4, "one")
    pin = lease.pin("save", lease.frames[:1], within_s=1)
    clock.advance_s(2)
    done = set()
    for step in order:
        if step == "late":
            assert arena.overdue() == (() if "end" in done else (pin.books,))
        elif step == "release":
            lease.release()
        else:
            pin.end()
        done.add(step)
        late = "late" in done and order.index("late") < order.index("end")
        free = 4 * ("release" in done) - ("release" in done and "end" not in done)
        assert arena.stats().free == free
        assert lease.late == (("save",) if late else ())
        assert isinstance(arena.reserve(free + 1, "two"), Short)
    assert arena.stats().pins_late == (order.index("late") < order.index("end"))
    assert counts(arena) == (4, 0, 0)


def test_a_lost_pin_keeps_its_frames_until_somebody_knows(arena):
    lease = arena.reserve(2, "one")
    pin = lease.pin("save", lease.frames[:1])
    number, place = pin.number, pin.books.place
    del pin
    with pytest.warns(ResourceWarning) as caught:
        assert counts(arena) == (2, 1, 1)
    texts = [str(one.message) for one in caught]
    assert len(texts) == 1
    assert texts[0].startswith(
        f"pin {number} ('save') was lost, not ended; it was taken at {place};"
    )
    assert texts[0].endswith(f"out of use until end_pin({number})")
    assert place.startswith(__file__)
    assert arena.stats().pins_lost == 1
    assert lease.late == ("save",)
    with pytest.raises(LateError):
        lease.buffer().view().__enter__()
    lease.release()
    assert counts(arena) == (3, 0, 1)
    arena.end_pin(number)
    assert counts(arena) == (4, 0, 0)
    with pytest.raises(MisuseError, match="has ended"):
        arena.end_pin(number)


def test_a_lost_pin_may_be_late_too(arena, clock):
    lease = arena.reserve(1, "one")
    books = lease.pin("save", within_s=1).books
    with pytest.warns(ResourceWarning, match="was lost"):
        arena.stats()
    lease.release()
    clock.advance_s(2)
    assert arena.overdue() == (books,)
    assert counts(arena) == (3, 0, 1)
    arena.end_pin(books.number)
    assert counts(arena) == (4, 0, 0)
    assert (arena.stats().pins_lost, arena.stats().pins_late) == (1, 1)


def test_a_lease_and_its_pin_that_are_lost_together_are_both_reported(arena):
    pair = [arena.reserve(2, "one")]
    pair.append(pair[0].pin("save", [0]))
    number = pair[1].number
    pair.append(pair)
    del pair
    gc.collect()
    with pytest.warns(ResourceWarning) as caught:
        assert counts(arena) == (3, 0, 1)
    assert len(caught) == 2
    arena.end_pin(number)
    assert counts(arena) == (4, 0, 0)


def test_a_pin_that_ended_is_not_lost(arena):
    with arena.reserve(1, "one") as lease:
        pin = lease.pin("save")
        pin.end()
        del pin
        gc.collect()
        assert arena.stats().pins_lost == 0


def test_a_pin_outlives_the_lease_object(arena):
    lease = arena.reserve(1, "one")
    pin = lease.pin("save")
    lease.release()
    del lease
    gc.collect()
    assert counts(arena) == (3, 0, 1)
    pin.end()
    assert counts(arena) == (4, 0, 0)


def test_a_frame_that_is_not_the_leases_is_not_pinned(arena):
    lease, other = arena.reserve(1, "one"), arena.reserve(1, "two")
    with pytest.raises(StaleError, match="'two' has it"):
        lease.pin("save", other.frames)
    lease.release()
    with pytest.raises(StaleError, match="nobody has it"):
        lease.pin("save", [0])
    other.release()
    assert arena.stats().pins == 0


def test_frames_of_a_pin_are_the_ones_that_were_given(arena):
    with arena.reserve(4, "one") as lease:
        given = lease.frames[[2, 0]]
        pin = lease.pin("save", given)
        given[:] = 3
        assert pin.books.frames.tolist() == [2, 0]
        lease.give_back([2])
        assert counts(arena) == (0, 3, 1)
        pin.end()
        assert counts(arena) == (1, 3, 0)


def test_a_pin_on_a_lease_that_was_released_protects_nothing_and_is_refused(arena):
    lease = arena.reserve(1, "one")
    lease.release()
    for call in (lambda: lease.pin("save"), lambda: arena.addresses(lease), lease.renew):
        with pytest.raises(StaleError, match="'one' has no frames any more: returned at"):
            call()
    assert arena.stats().pins == 0


@pytest.mark.parametrize(
    ("name", "frames", "within_s", "limit"),
    [
        (7, None, None, "text"),
        ("save", [], None, "1 or more"),
        ("save", None, "3", "0 or more, or None"),
        ("save", None, float("nan"), "0 or more, or None"),
        ("save", None, -1, "0 or more, or None"),
        ("save", None, True, "0 or more, or None"),
    ],
)
def test_what_is_no_pin_is_refused(arena, name, frames, within_s, limit):
    with arena.reserve(1, "one") as lease, pytest.raises(InputError, match=limit):
        lease.pin(name, frames, within_s=within_s)


def test_frames_that_went_out_of_use_are_good_again_when_nothing_touches_them(arena, clock):
    """A ledger that counts frames itself cannot take others instead."""
    lease = arena.reserve(3, "ledger")
    frames = lease.frames.tolist()
    pin = lease.pin("load", frames[:1], within_s=1)
    clock.advance_s(2)
    assert arena.overdue() == (pin.books,)
    with pytest.raises(LateError, match="still touched"):
        lease.renew()
    assert lease.late == ("load",)
    pin.end()
    with pytest.raises(LateError):
        lease.buffer().plain()
    lease.renew(frames[:1])
    assert lease.late == ()
    assert lease.frames.tolist() == frames
    with lease.buffer().view() as memory:
        memory[0] = 1
    arena.check()
    lease.release()
