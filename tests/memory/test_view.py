"""Views: bytes inside of a block, and nobody has the frame before the last use of them has ended."""

import contextlib
import gc
import io
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from stepwell.base.errors import LateError, MisuseError, StaleError
from stepwell.memory.arena import Short

PAGE = 4096


@pytest.fixture
def arena(make_arena):
    return make_arena(3)


def counts(arena):
    stats = arena.stats()
    return stats.free, stats.used, stats.quarantined


def test_a_view_shows_the_bytes_that_were_written(arena):
    with arena.reserve(2, "one") as lease:
        for index in range(2):
            with lease.buffer(index).view() as memory:
                assert (memory.nbytes, memory.format, memory.readonly) == (PAGE, "B", False)
                memory[:] = bytes([index + 1]) * PAGE
        for index in range(2):
            with lease.buffer(index).view(readonly=True) as memory:
                assert bytes(memory) == bytes([index + 1]) * PAGE
        assert arena.stats().views == 0


def test_a_view_is_as_long_as_what_is_used(arena, write):
    with arena.reserve(1, "one") as lease:
        write(lease.buffer(), 1)
        with lease.buffer(0, 10).view() as memory:
            assert memory.nbytes == 10
            memory[:] = bytes(10)
            with pytest.raises(ValueError, match="different structures"):
                memory[:] = bytes(11)
        with lease.buffer().view() as memory:
            assert bytes(memory) == bytes(10) + b"\1" * (PAGE - 10)


def test_a_readonly_view_cannot_be_written(arena, write):
    with arena.reserve(1, "one") as lease:
        write(lease.buffer(), 1)
        with lease.buffer().view(readonly=True) as memory:
            assert memory.readonly
            with pytest.raises(TypeError, match="read-only"):
                memory[0] = 2
            with pytest.raises(ValueError, match="read-only"):
                np.asarray(memory)[0] = 2
            assert memory[0] == 1


def test_the_name_of_a_view_shows_nothing_after_the_block(arena):
    with arena.reserve(1, "one") as lease:
        with lease.buffer().view() as memory:
            pass
        with pytest.raises(ValueError, match="released"):
            memory[0]


def test_arrays_that_end_with_the_block_are_no_use_after_it(arena):
    with arena.reserve(1, "one") as lease:
        with lease.buffer().view() as memory:
            array = np.asarray(memory).view(np.float32)
            array[:] = 1.5
            tensor = torch.from_numpy(array)
            tensor += 1
            total = float(tensor.sum())
            del tensor, array
        assert total == 2.5 * PAGE / 4
        assert counts(arena) == (2, 1, 0)


USES = {
    "memoryview": lambda memory: memory[5:],
    "cast": lambda memory: memory.cast("I"),
    "second memoryview": memoryview,
    "array": np.asarray,
    "part of an array": lambda memory: np.asarray(memory)[3:4],
    "typed array": lambda memory: np.frombuffer(memory, np.float16),
    "tensor of an array": lambda memory: torch.from_numpy(np.asarray(memory)),
    "part of a tensor": lambda memory: torch.from_numpy(np.asarray(memory)).view(-1, 8)[3],
    "tensor": lambda memory: torch.frombuffer(memory, dtype=torch.uint8),
    "typed tensor": lambda memory: torch.frombuffer(memory, dtype=torch.bfloat16)[4:8],
    "readonly": lambda memory: memory.toreadonly(),
    "in a list": lambda memory: [[memory[1:]]],
}


@pytest.mark.parametrize("use", USES)
def test_what_is_used_after_the_block_is_found_and_its_frame_given_to_nobody(arena, use):
    lease = arena.reserve(1, "one")
    view = lease.buffer().view()
    kept = None
    with pytest.raises(MisuseError) as caught, view as memory:  # noqa: PT012
        memory[:] = b"\7" * PAGE
        kept = USES[use](memory)
    assert f"the view taken at {view.books.place} is used after its block" in str(caught.value)
    assert view.books.place.startswith(__file__)
    assert counts(arena) == (2, 0, 1)
    with pytest.raises(LateError, match="a view that is used after its block"):
        lease.buffer().view().__enter__()
    lease.release()
    assert arena.reserve(3, "two") == Short(by=1, count=3)
    with arena.reserve(2, "two") as other, other.buffer().view() as foreign:
        foreign[:] = b"\x09" * PAGE
    assert kept is not None
    del kept, caught, memory
    gc.collect()
    assert counts(arena) == (3, 0, 0)


@pytest.mark.parametrize("use", ["array", "tensor", "typed tensor", "memoryview"])
def test_bytes_that_are_used_after_the_block_stay_what_they_were(arena, use):
    lease = arena.reserve(1, "one")
    with pytest.raises(MisuseError, match="after its block"), lease.buffer().view() as memory:  # noqa: PT012
        memory[:] = b"\7" * PAGE
        kept = USES[use](memory)
    lease.release()
    with arena.reserve(2, "two") as other:
        for index in range(2):
            with other.buffer(index).view() as foreign:
                foreign[:] = b"\x09" * PAGE
    if isinstance(kept, torch.Tensor):
        kept = kept.view(torch.uint8).numpy()
    assert set(np.asarray(kept).tolist()) == {7}
    del kept, memory
    assert counts(arena) == (3, 0, 0)


def test_a_frame_whose_view_was_used_too_long_is_good_again_in_the_next_lease(arena):
    lease = arena.reserve(1, "one")
    with pytest.raises(MisuseError, match="after its block"), lease.buffer().view() as memory:
        kept = np.asarray(memory)
    del kept, memory
    assert counts(arena) == (2, 0, 1)
    with pytest.raises(LateError):
        lease.buffer().view().__enter__()
    lease.release()
    with arena.reserve(3, "two") as lease:
        for index in range(3):
            with lease.buffer(index).view():
                pass


def test_another_name_for_the_view_is_of_no_use_after_the_block(arena):
    with arena.reserve(1, "one") as lease:
        with lease.buffer().view() as memory:
            other = memory
        with pytest.raises(ValueError, match="released"):
            other[0] = 1
    assert counts(arena) == (3, 0, 0)


def stacked(view):
    with contextlib.ExitStack() as stack:
        return torch.frombuffer(stack.enter_context(view), dtype=torch.uint8)


def unnamed(view):
    with view as memory:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        del memory
    return tensor


def stored(view):
    with view as memory:
        return [memory]


@pytest.mark.parametrize("use", [stacked, unnamed, stored])
def test_a_tensor_is_found_whatever_the_view_is_called(arena, use):
    """A tensor keeps the memoryview as a name does; only names are harmless."""
    lease = arena.reserve(1, "one")
    with pytest.raises(MisuseError, match="after its block"):
        use(lease.buffer().view())
    gc.collect()
    lease.release()
    assert counts(arena) == (3, 0, 0)


def test_a_view_on_a_stack_ends_with_it(arena):
    with arena.reserve(1, "one") as lease:
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(lease.buffer().view())
            memory[0] = 1
        with pytest.raises(ValueError, match="released"):
            memory[0] = 1
    assert counts(arena) == (3, 0, 0)


def test_looking_for_names_keeps_nothing_alive_and_empties_nobodys_locals(arena):
    with arena.reserve(1, "one") as lease:
        mine = locals()
        with lease.buffer().view() as memory:
            memory[0] = 1
        assert mine["lease"] is lease
        large = np.zeros(9)
        gone = weakref.ref(large)
        with lease.buffer().view() as memory:
            memory[0] = 1
        mine.clear()
        del large
        assert gone() is None


def test_an_exception_ends_the_block_and_passes(arena):
    with arena.reserve(1, "one") as lease:
        with pytest.raises(KeyError, match="mine"), lease.buffer().view():
            raise KeyError("mine")
        assert counts(arena) == (2, 1, 0)
        assert arena.stats().views == 0


def test_an_exception_from_below_does_not_take_the_frame_out_of_use(arena):
    """Its trace has the memoryview in a frame; nobody can use that once it is released."""

    def compute(memory):
        raise KeyError(len(memory))

    with arena.reserve(1, "one") as lease:
        try:
            with lease.buffer().view() as memory:
                compute(memory)
        except KeyError:  # while it is handled its trace is alive
            with lease.buffer().view() as memory:
                memory[0] = 1
        assert counts(arena) == (2, 1, 0)


def test_an_exception_does_not_hide_a_tensor_either(arena):
    with arena.reserve(1, "one") as lease:
        with pytest.raises(KeyError), lease.buffer().view() as memory:  # noqa: PT012
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
            raise KeyError
        with pytest.raises(LateError), lease.buffer().view():
            pass
        del tensor, memory
    assert counts(arena) == (3, 0, 0)


def test_an_exception_is_not_hidden_by_an_array_that_its_trace_keeps(arena):
    """The frame is out of use until the trace is gone, since the array is in it."""

    def compute(memory):
        array = np.asarray(memory)
        raise KeyError(int(array[0]))

    lease = arena.reserve(1, "one")
    caught = None
    try:
        with lease.buffer().view() as memory:
            memory[0] = 5
            compute(memory)
    except KeyError as error:
        caught = error
    assert caught.args == (5,)
    lease.release()
    assert counts(arena) == (2, 0, 1)
    del caught, memory
    gc.collect()
    assert counts(arena) == (3, 0, 0)


def test_a_view_lost_inside_of_its_block_is_reported(arena):
    lease = arena.reserve(1, "one")
    view = lease.buffer().view()
    place = view.books.place
    view.__enter__()
    assert arena.stats().views == 1
    del view
    with pytest.warns(ResourceWarning) as caught:
        assert counts(arena) == (2, 1, 0)
    assert [str(one.message) for one in caught] == [
        f"a view taken at {place} was lost inside of its block"
    ]
    lease.release()


def test_a_view_lost_in_a_generator_ends(arena):
    """Its block ends with the generator, so there is nothing to report."""

    def reading(buffer):
        with buffer.view() as memory:
            yield memory[0]
            yield memory[1]

    with arena.reserve(1, "one") as lease:
        some = reading(lease.buffer())
        next(some)
        assert arena.stats().views == 1
        del some
        gc.collect()
        assert arena.stats().views == 0
        cycle = [reading(lease.buffer())]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert arena.stats().views == 0
        with lease.buffer().view():
            pass


def test_a_generator_keeps_the_frame_of_its_view(arena):
    def reading(buffer):
        with buffer.view() as memory:
            yield from memory

    lease = arena.reserve(1, "one")
    with lease.buffer().view() as memory:
        memory[:3] = b"abc"
    some = reading(lease.buffer())
    assert next(some) == ord("a")
    lease.release()
    assert arena.reserve(3, "two") == Short(by=1, count=3)
    assert next(some) == ord("b")
    some.close()
    assert counts(arena) == (3, 0, 0)


def test_views_of_one_frame_may_lie_in_each_other(arena):
    lease = arena.reserve(1, "one")
    with lease.buffer().view() as outer:
        with lease.buffer(0, 8).view(readonly=True) as inner:
            outer[:4] = b"abcd"
            assert bytes(inner[:4]) == b"abcd"
            assert arena.stats().views == 2
            lease.release()
        assert counts(arena) == (2, 0, 1)
        assert bytes(outer[:4]) == b"abcd"
    assert counts(arena) == (3, 0, 0)


def test_a_view_that_is_used_too_long_spoils_no_other_view_of_the_frame(arena):
    lease = arena.reserve(1, "one")
    with lease.buffer().view() as outer:
        with pytest.raises(MisuseError, match="after its block"), lease.buffer().view() as inner:
            kept = inner[1:]
        outer[0] = 1
        del kept, inner
    lease.release()
    assert counts(arena) == (3, 0, 0)


def test_a_frame_that_is_returned_inside_of_a_view_waits_for_its_end(arena):
    lease = arena.reserve(1, "one")
    with lease.buffer().view() as memory:
        lease.release()
        assert counts(arena) == (2, 0, 1)
        assert arena.reserve(3, "two") == Short(by=1, count=3)
        with pytest.raises(StaleError, match="returned at"):
            lease.buffer().view().__enter__()
        memory[:] = b"x" * PAGE
    assert counts(arena) == (3, 0, 0)


def test_a_view_of_a_returned_frame_is_refused_before_it_shows_a_byte(arena):
    lease = arena.reserve(1, "one")
    view = lease.buffer().view()
    lease.release()
    with pytest.raises(StaleError, match="returned at"):
        view.__enter__()
    assert arena.stats().views == 0
    with arena.reserve(3, "two"):
        arena.check()


def test_a_view_is_for_one_block(arena):
    with arena.reserve(1, "one") as lease:
        view = lease.buffer().view()
        with view:
            with pytest.raises(MisuseError, match="for one block"):
                view.__enter__()
            assert arena.stats().views == 1
        with pytest.raises(MisuseError, match="for one block"):
            view.__enter__()
        assert arena.stats().views == 0


def test_a_view_that_is_never_entered_is_nothing(arena):
    lease = arena.reserve(1, "one")
    view = lease.buffer().view()
    lease.release()
    assert counts(arena) == (3, 0, 0)
    arena.close()
    del view


def test_bytes_may_be_released_by_the_block_itself(arena):
    with arena.reserve(1, "one") as lease:
        with lease.buffer().view() as memory:
            memory.release()
        assert arena.stats().views == 0


def test_a_view_is_what_readers_and_writers_of_bytes_take(arena, tmp_path):
    path = tmp_path / "bytes"
    with arena.reserve(2, "one") as lease:
        with lease.buffer(0).view() as memory:
            memory[:] = bytes(range(256)) * 16
            with path.open("wb", buffering=0) as file:
                assert file.write(memory) == PAGE
        with lease.buffer(1).view() as memory:
            with path.open("rb", buffering=0) as file:
                assert file.readinto(memory) == PAGE
            assert bytes(memory) == bytes(range(256)) * 16
            stream = io.BytesIO(memory)
        assert stream.getvalue() == bytes(range(256)) * 16, "a copy"
        assert arena.stats().views == 0


def test_two_threads_view_one_frame(arena):
    lease, start, seen = arena.reserve(1, "one"), threading.Barrier(3), []
    release = threading.Event()

    def look(byte):
        with lease.buffer().view() as memory:
            memory[byte] = byte
            start.wait(30)
            assert release.wait(30)
            seen.append(bytes(memory[1:3]))

    threads = [threading.Thread(target=look, args=(byte,)) for byte in (1, 2)]
    for thread in threads:
        thread.start()
    start.wait(30)
    assert arena.stats().views == 2
    lease.release()
    assert counts(arena) == (2, 0, 1)
    release.set()
    for thread in threads:
        thread.join(30)
    assert seen == [b"\1\2", b"\1\2"]
    assert counts(arena) == (3, 0, 0)


def test_a_view_may_end_in_another_thread(arena):
    lease = arena.reserve(1, "one")
    view = lease.buffer().view()
    view.__enter__()
    thread = threading.Thread(target=view.__exit__, args=(None, None, None))
    thread.start()
    thread.join(30)
    lease.release()
    assert counts(arena) == (3, 0, 0)


def test_an_array_that_outlives_everything_still_has_its_memory(make_region):
    """Reading freed memory would end the process: so the array keeps arena and region alive."""
    from stepwell.memory.arena import Arena
    from stepwell.memory.ask import Ask
    from stepwell.memory.region import Region

    arena, region = Arena(PAGE, 1), Region.open(Ask(PAGE))
    arena.add(region)
    lease = arena.reserve(1, "one")
    with pytest.raises(MisuseError, match="after its block"), lease.buffer().view() as memory:  # noqa: PT012
        memory[:] = b"\3" * PAGE
        kept = np.asarray(memory)
    region_books, address = region._mapping, region.address
    del arena, region, lease, memory
    gc.collect()
    assert int(kept.sum()) == 3 * PAGE
    assert kept.ctypes.data == address
    assert region_books.mapped
    owners = sys.getrefcount(region_books)
    del kept
    gc.collect()
    assert sys.getrefcount(region_books) < owners
    with pytest.warns(ResourceWarning) as told:
        make_region(PAGE)
    assert [str(one.message).partition(",")[0] for one in told] == [
        "the arena arena",
        "a region was lost",
    ]
    assert not region_books.mapped


def test_closing_is_refused_until_the_last_use_of_a_view_ends(arena):
    region = arena.regions[0]
    lease = arena.reserve(1, "one")
    view = lease.buffer().view()
    with pytest.raises(MisuseError, match="after its block"), view as memory:
        kept = np.asarray(memory)
    lease.release()
    with pytest.raises(MisuseError, match=f"a view taken at {view.books.place}"):
        arena.close()
    with pytest.raises(MisuseError, match="arena"):
        region.close()
    del kept, memory
    arena.close()
    region.close()
