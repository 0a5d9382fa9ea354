"""Regions of every kind, opened on the kernel that is here: bytes, preparation, registration, close and loss."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import pathlib
import socket
import threading

import numpy as np
import pytest

from stepwell.base.errors import InputError, MisuseError, RefusedError
from stepwell.memory import registry, system
from stepwell.memory.ask import Ask, Kind
from stepwell.memory.machine import read_machine
from stepwell.memory.prepare import STRIDE_BYTES
from stepwell.memory.region import Region
from stepwell.testing.gpu import FakeGpu

PAGE = mmap.PAGESIZE
DEVICE_PAGE = 1 << 16
MIB = 1 << 20
HOST = [Kind.PRIVATE, Kind.SHARED, Kind.NAMED, Kind.FILE]

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def fill(region, value):
    with region.view(0, region.size_bytes, readonly=False) as view:
        np.frombuffer(view, np.uint8)[:] = value


def distinct(region):
    with region.view(0, region.size_bytes) as view:
        return np.unique(np.frombuffer(view, np.uint8)).tolist()


@pytest.mark.parametrize("kind", HOST)
@pytest.mark.parametrize(("asked", "got"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_a_size_is_rounded_up_to_whole_pages(of, kind, asked, got):
    with Region.open(of(kind, asked)) as region:
        assert region.size_bytes == got
        assert region.record.size_bytes == got
        assert region.record.page_bytes == PAGE
        assert region.record.ask.size_bytes == asked
        assert region.address % PAGE == 0


@pytest.mark.parametrize("kind", HOST)
def test_bytes_of_every_kind_begin_as_zeros_and_can_be_written_and_read(of, kind):
    with Region.open(of(kind, 3 * PAGE)) as region:
        region.prepare()
        assert distinct(region) == [0]
        with region.view(PAGE - 1, 3, readonly=False) as view:
            view[:] = b"abc"
        with region.view(PAGE, 1) as view:
            assert view.tobytes() == b"b"
        with region.view(0, 3 * PAGE) as view:
            whole = view.tobytes()
    assert whole == bytes(PAGE - 1) + b"abc" + bytes(2 * PAGE - 2)


def test_a_view_is_readonly_unless_it_is_asked_to_write(of):
    with Region.open(Ask(PAGE)) as region:
        with region.view(0, 8) as view, pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        assert distinct(region) == [0]


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [
        (-1, 4),
        (0, 0),
        (0, -4),
        (0, PAGE + 1),
        (PAGE, 1),
        (1, PAGE),
        (2**70, 1),
        (0.0, 4),
        (0, True),
    ],
)
def test_bytes_outside_of_the_region_are_refused(offset, size_bytes):
    with Region.open(Ask(PAGE)) as region, pytest.raises(InputError):
        region.view(offset, size_bytes)


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.NAMED, Kind.FILE])
def test_the_descriptor_leads_to_the_same_bytes(of, kind):
    with Region.open(of(kind, PAGE)) as region:
        region.prepare()
        fill(region, 7)
        assert os.pread(region.descriptor, PAGE, 0) == b"\7" * PAGE
        os.pwrite(region.descriptor, b"x", 5)
        with region.view(5, 1) as view:
            assert view.tobytes() == b"x"
        assert not os.get_inheritable(region.descriptor)


def test_a_private_region_has_no_descriptor(of):
    with (
        Region.open(Ask(PAGE)) as region,
        pytest.raises(MisuseError, match="SHARED, NAMED or FILE"),
    ):
        _ = region.descriptor


def test_a_file_region_leaves_nothing_in_its_folder_and_has_all_its_blocks(of, tmp_path):
    with Region.open(of(Kind.FILE, 5 * PAGE)) as region:
        status = os.fstat(region.descriptor)
        assert status.st_nlink == 0
        assert status.st_size == 5 * PAGE
        assert status.st_blocks * 512 >= 5 * PAGE
        assert list((tmp_path / "files").iterdir()) == []
    assert list((tmp_path / "files").iterdir()) == []


def test_shared_memory_cannot_change_its_size(of):
    with Region.open(of(Kind.SHARED, PAGE)) as region:
        for size_bytes in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(region.descriptor, size_bytes)


@pytest.mark.parametrize("kind", HOST)
def test_preparing_tells_what_is_ready_up_to_the_end(of, kind):
    size_bytes = STRIDE_BYTES + 3 * PAGE
    told = []
    with Region.open(of(kind, size_bytes)) as region:
        assert region.record.ready_bytes == 0
        assert region.record.node is None
        record = region.prepare(told.append)
        assert told == [STRIDE_BYTES, size_bytes]
        assert record == region.record
        assert record.ready_bytes == size_bytes
        assert record.refusals == ()
        assert not record.pinned
        nodes = read_machine().nodes
        assert record.node in nodes if nodes else record.node is None


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED])
def test_prepared_memory_is_there(of, kind):
    """Every page was touched: the kernel counts them as resident."""
    with Region.open(of(kind, 20 * MIB)) as region:
        assert resident_pages(region.address) == 0
        region.prepare()
        assert resident_pages(region.address) == 20 * MIB // PAGE


def resident_pages(address):
    """Of the mapping that begins at or before this address and contains it."""
    inside = False
    with pathlib.Path("/proc/self/smaps").open() as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head:
                first, last = (int(end, 16) for end in head.split("-"))
                inside = first <= address < last
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024 // PAGE
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_preparing_again_does_nothing():
    told = []
    with Region.open(Ask(3 * PAGE)) as region:
        before = region.prepare()
        fill(region, 9)
        assert region.prepare(told.append) == before
        assert told == []
        assert distinct(region) == [9]


def test_a_stop_ends_the_preparation_early_and_a_later_one_goes_on():
    stop = threading.Event()
    told = []

    def ready(bytes_so_far):
        told.append(bytes_so_far)
        if bytes_so_far == 2 * MIB:
            stop.set()

    with Region.open(Ask(4 * MIB, piece_bytes=MIB)) as region:
        record = region.prepare(ready, stop=stop)
        assert told == [MIB, 2 * MIB]
        assert record.ready_bytes == 2 * MIB
        assert region.prepare(told.append, stop=stop).ready_bytes == 2 * MIB
        assert region.prepare(told.append).ready_bytes == 4 * MIB
        assert told == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]


def test_a_stop_inside_of_a_piece_forgets_nothing_that_was_told():
    """What was told to be ready is ready for good: somebody may use it already."""
    stop = threading.Event()
    told = []

    def ready(bytes_so_far):
        told.append(bytes_so_far)
        stop.set()

    with Region.open(Ask(STRIDE_BYTES + PAGE)) as region:
        record = region.prepare(ready, stop=stop)
        assert told == [STRIDE_BYTES]
        assert record.ready_bytes == STRIDE_BYTES
        assert region.prepare(told.append).ready_bytes == STRIDE_BYTES + PAGE
        assert told == [STRIDE_BYTES, STRIDE_BYTES + PAGE]


@pytest.mark.parametrize("piece_bytes", [0, -PAGE, 1, PAGE + 1, PAGE * 1.5])
def test_a_piece_is_a_whole_number_of_pages(piece_bytes):
    with pytest.raises(InputError, match=f"multiples of {PAGE}"):
        Ask(PAGE, piece_bytes=piece_bytes)


def test_the_reader_of_progress_may_look_but_not_close():
    seen = []

    def ready(bytes_so_far):
        with region.view(0, bytes_so_far) as view:
            seen.append(len(view))
        with pytest.raises(MisuseError, match="its preparation"):
            region.close()

    with Region.open(Ask(PAGE)) as region:
        region.prepare(ready)
    assert seen == [PAGE]


def test_a_reader_of_progress_that_raises_leaves_a_region_that_can_be_prepared_and_closed():
    def ready(_):
        raise ZeroDivisionError

    with Region.open(Ask(PAGE)) as region:
        with pytest.raises(ZeroDivisionError):
            region.prepare(ready)
        assert region.prepare().ready_bytes == PAGE


def test_two_threads_that_prepare_touch_everything_once():
    gpu = FakeGpu()
    with Region.open(Ask(8 * MIB, pinned=True, piece_bytes=MIB), gpu=gpu) as region:
        threads = [threading.Thread(target=region.prepare) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert region.record.ready_bytes == 8 * MIB
        assert len([call for call in gpu.calls if call[0] == "register"]) == 8


def test_a_node_that_was_asked_for_is_the_node_that_was_got(of):
    nodes = read_machine().nodes
    if not nodes:
        pytest.skip("NOT RUN: needs a kernel that tells its memory nodes")
    with Region.open(of(Kind.SHARED, MIB, node=nodes[-1])) as region:
        record = region.prepare()
    assert record.node == nodes[-1]
    assert record.refusals == ()


# Close and its neighbours.


@pytest.mark.parametrize("kind", HOST)
def test_closing_gives_everything_back_once(of, kind, mapped):
    region = Region.open(of(kind, 3 * PAGE))
    region.prepare()
    address = region.address
    assert mapped(address)
    assert not region.closed
    region.close()
    assert region.closed
    assert not mapped(address)
    region.close()
    region.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda region: region.address,
        lambda region: region.descriptor,
        lambda region: region.view(0, 1),
        lambda region: region.prepare(),
        lambda region: region.use("somebody"),
    ],
    ids=["address", "descriptor", "view", "prepare", "use"],
)
def test_a_closed_region_is_refused_with_the_place_that_opened_it(of, use):
    region = Region.open(of(Kind.SHARED, PAGE))
    region.close()
    with pytest.raises(MisuseError, match=rf"{__file__}:\d+ is closed"):
        use(region)


def test_what_a_closed_region_was_can_still_be_read():
    region = Region.open(Ask(PAGE))
    region.prepare()
    region.close()
    assert region.record.ready_bytes == PAGE
    assert region.size_bytes == PAGE
    assert __file__ in region.place


def test_a_view_taken_before_the_close_cannot_begin_after_it():
    region = Region.open(Ask(PAGE))
    view = region.view(0, 8)
    region.close()
    with pytest.raises(MisuseError, match="is closed"), view:
        pass


def test_m32_a_region_in_use_does_not_close_and_names_its_users():
    region = Region.open(Ask(PAGE))
    one, two, again = (region.use(who) for who in ("arena one", "arena two", "arena two"))
    with region.view(0, 8, readonly=False) as view:
        with pytest.raises(MisuseError) as caught:
            region.close()
        for part in ("arena one", "arena two", f"a view taken at {__file__}"):
            assert part in str(caught.value)
        view[0] = 5  # and the bytes are still there
    region.end_use(one)
    region.end_use(two)
    region.end_use(two)
    with pytest.raises(MisuseError, match="used by arena two;"):
        region.close()
    region.end_use(again)
    assert distinct(region) == [0, 5]
    region.close()


def test_m32_an_array_that_outlives_its_view_keeps_the_region_open():
    region = Region.open(Ask(PAGE))
    with pytest.raises(MisuseError, match="used after its block"), region.view(0, 8) as view:
        values = np.frombuffer(view, np.uint8)
    del view
    with pytest.raises(MisuseError, match="a view taken at"):
        region.close()
    assert values.tolist() == [0] * 8
    del values
    region.close()


def test_a_use_is_ended_by_whoever_has_it():
    """By its own object, not by a name that anybody can guess."""
    with Region.open(Ask(PAGE)) as region, Region.open(Ask(PAGE)) as other:
        use = region.use("one")
        region.end_use(other.use("one"))
        with pytest.raises(MisuseError, match="used by one;"):
            region.close()
        region.end_use(use)


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.NAMED, Kind.FILE])
def test_m33_closing_twice_never_closes_a_descriptor_of_somebody_else(of, kind, tmp_path):
    region = Region.open(of(kind, PAGE))
    number = region.descriptor
    region.close()
    other = os.open(tmp_path / "innocent", os.O_CREAT | os.O_RDWR)
    try:
        assert other == number  # the kernel gives the smallest free number
        region.close()
        del region
        gc.collect()
        Region.open(Ask(PAGE)).close()  # looks after what was lost
        assert os.write(other, b"still here") == 10
    finally:
        os.close(other)


def test_views_of_a_long_life_leave_nothing_behind():
    """A process that reads from a shared region all day takes a view for every read."""
    with Region.open(Ask(PAGE)) as region:
        for _ in range(1000):
            with region.view(0, 8):
                pass
        assert len(region._users._views) + len(region._users.ended) < 10


def test_m14_views_of_many_lengths_leave_no_types_behind(run_python):
    """A type of ctypes is never freed, so there may not be one for each length."""
    ran = run_python("""
        import os
        from stepwell.memory.ask import Ask
        from stepwell.memory.region import Region

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

        with Region.open(Ask(1 << 20)) as region:
            def look(lengths):
                for length in lengths:
                    with region.view(0, length):
                        pass

            look(range(1, 1000))
            before = resident()
            look(range(1000, 31000))
            print(resident() - before)
    """)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 3 << 20


# Loss.


@pytest.mark.parametrize("kind", HOST)
def test_a_region_that_is_lost_is_reported_and_given_back_by_the_next_open(of, kind, mapped):
    region = Region.open(of(kind, PAGE))
    region.prepare()
    address, place = region.address, region.place
    del region
    gc.collect()
    assert mapped(address)  # the collector only queues
    with pytest.warns(ResourceWarning, match=f"lost, not closed; it was opened at {place}"):
        other = Region.open(of(kind, PAGE)) if kind is Kind.NAMED else Region.open(Ask(64 * MIB))
    assert not mapped(address) or address == other.address
    other.close()


def test_a_region_that_was_closed_is_not_reported_when_it_goes():
    """A warning is an error here."""
    region = Region.open(Ask(PAGE))
    region.close()
    del region
    gc.collect()
    Region.open(Ask(PAGE)).close()


def test_a_lost_region_lives_as_long_as_an_array_of_it(mapped):
    region = Region.open(Ask(PAGE))
    address = region.address
    with (
        pytest.raises(MisuseError, match="used after its block"),
        region.view(0, PAGE, readonly=False) as view,
    ):
        values = np.frombuffer(view, np.uint8)
    del region, view
    gc.collect()
    Region.open(Ask(PAGE)).close()  # reports nothing
    assert mapped(address)
    values[:] = 3
    assert values.sum() == 3 * PAGE
    del values
    gc.collect()
    with pytest.warns(ResourceWarning, match="lost, not closed"):
        Region.open(Ask(64 * MIB)).close()
    assert not mapped(address)


def test_a_lost_region_lets_the_device_go_before_its_memory():
    """Memory that is given back while the device knows it is written by the device later on."""
    gpu = FakeGpu()
    region = Region.open(Ask(2 * PAGE, pinned=True), gpu=gpu)
    region.prepare()
    assert gpu.registered
    del region
    gc.collect()
    with pytest.warns(ResourceWarning, match="lost, not closed"):
        registry.collect()
    assert gpu.registered == {}
    assert [call[0] for call in gpu.calls] == ["register", "synchronise", "unregister"]


def test_m04_the_collector_only_queues(mapped):
    """A region in a cycle goes whenever the collector runs: also inside of another call."""
    region = Region.open(Ask(PAGE))
    address = region.address
    cycle = [region]
    cycle.append(cycle)
    del region, cycle
    gc.collect()
    assert mapped(address)
    with pytest.warns(ResourceWarning, match="lost, not closed"):
        registry.collect()
    assert not mapped(address)


def test_many_threads_that_look_after_lost_regions_do_not_meet(monkeypatch):
    """Two of them see the last one in the queue; only one gets it."""
    barrier = threading.Barrier(2)

    class Slow(type(registry._lost)):
        def __bool__(self):
            there = len(self) > 0
            if there:
                barrier.wait(60)
            return there

    mine = Slow()
    monkeypatch.setattr(registry, "_lost", mine)
    errors = []

    class Gone:
        place = "here"

        def close(self):
            raise AssertionError("is not looked after any more")

    def look():
        try:
            registry.collect()
        except IndexError as error:
            errors.append(error)

    mine.append(Gone())
    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# Attaching.


ATTACHED = """
    import sys
    from stepwell.memory.region import Region

    with Region.attach(int(sys.argv[1])) as region:
        assert region.size_bytes == 8192, region.size_bytes
        record = region.prepare()
        assert record.ready_bytes == 8192 and record.ask.kind == "shared", record
        with region.view(4096, 5) as view:
            print(view.tobytes().decode())
        with region.view(0, 5, readonly=False) as view:
            view[:] = b"reply"
"""


def test_another_process_sees_the_bytes_by_an_inherited_descriptor(of, run_python):
    with Region.open(of(Kind.SHARED, 2 * PAGE)) as region:
        with region.view(PAGE, 5, readonly=False) as view:
            view[:] = b"hello"
        ran = run_python(ATTACHED, region.descriptor, pass_fds=[region.descriptor])
        assert ran.stdout == "hello\n", ran.stderr
        with region.view(0, 5) as view:
            assert view.tobytes() == b"reply"


def test_another_process_sees_the_bytes_by_a_descriptor_from_a_socket(of, holding):
    code = """
        import array, socket, sys
        from stepwell.memory.region import Region

        with socket.socket(fileno=int(sys.argv[1])) as ours:
            _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
            with Region.attach(descriptor) as region, region.view(PAGE, 5) as view:
                print(view.tobytes().decode(), flush=True)
    """.replace("PAGE", str(PAGE))
    ours, theirs = socket.socketpair()
    with ours, theirs, Region.open(of(Kind.SHARED, 2 * PAGE)) as region:
        with region.view(PAGE, 5, readonly=False) as view:
            view[:] = b"hello"
        socket.send_fds(ours, [b"x"], [region.descriptor])
        with holding(code, theirs.fileno(), pass_fds=[theirs.fileno()]) as (_, line):
            assert line == "hello"


def test_the_descriptor_stays_the_callers_and_the_bytes_outlive_the_opener(of):
    region = Region.open(of(Kind.SHARED, PAGE))
    mine = os.dup(region.descriptor)
    with Region.attach(mine) as attached:
        os.close(mine)
        assert attached.descriptor not in (mine, region.descriptor)
        fill(region, 4)
        region.close()
        assert distinct(attached) == [4]


def memory_file(size_bytes, seals):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("size_bytes", "seals", "said"),
    [
        (PAGE, 0, "could be made shorter"),
        (PAGE, fcntl.F_SEAL_GROW, "could be made shorter"),
        (PAGE + 1, fcntl.F_SEAL_SHRINK, f"has {PAGE + 1} bytes"),
        (0, fcntl.F_SEAL_SHRINK, "has 0 bytes"),
        (PAGE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, "Operation not permitted"),
    ],
    ids=["unsealed", "may shrink", "odd", "empty", "not to be written"],
)
def test_shared_memory_that_a_reader_must_fear_is_refused(size_bytes, seals, said):
    descriptor = memory_file(size_bytes, seals)
    try:
        with pytest.raises(RefusedError, match=said) as caught:
            Region.attach(descriptor)
        assert caught.value.remedy
        os.fstat(descriptor)  # the caller keeps it
    finally:
        os.close(descriptor)


def test_memory_that_was_passed_for_reading_only_is_refused(of):
    with Region.open(of(Kind.SHARED, PAGE)) as region:
        descriptor = os.open(f"/proc/self/fd/{region.descriptor}", os.O_RDONLY)
        try:
            with pytest.raises(RefusedError, match="Permission denied"):
                Region.attach(descriptor)
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("where", ["tmp", "/dev/shm"])
def test_a_plain_file_is_refused(tmp_path, where):
    flags = os.O_TMPFILE | os.O_RDWR
    descriptor = os.open(tmp_path if where == "tmp" else where, flags, 0o600)
    try:
        os.ftruncate(descriptor, PAGE)
        with pytest.raises(RefusedError, match=f"descriptor {descriptor} ") as caught:
            Region.attach(descriptor)
        assert caught.value.remedy
    finally:
        os.close(descriptor)


def test_a_number_without_a_file_is_refused():
    with pytest.raises(RefusedError, match=r"descriptor 1000000.*Bad file descriptor"):
        Region.attach(1_000_000)


@pytest.mark.parametrize("way", ["descriptor", "name"])
def test_attaching_that_reports_a_lost_region_leaves_no_descriptor(of, name, way):
    """With warnings as errors the report is raised; the region that was to be attached must not stay half open."""
    kind = Kind.SHARED if way == "descriptor" else Kind.NAMED
    with Region.open(of(kind, PAGE)) as region:
        lost = Region.open(Ask(PAGE))
        del lost
        gc.collect()
        with pytest.raises(ResourceWarning, match="lost"):
            Region.attach(region.descriptor) if way == "descriptor" else Region.attach_named(name)


def test_an_attached_region_is_registered_by_preparing_it(of):
    gpu = FakeGpu()
    with (
        Region.open(of(Kind.SHARED, PAGE)) as region,
        Region.attach(region.descriptor, gpu=gpu) as attached,
    ):
        assert attached.prepare().registered_bytes == PAGE
        assert gpu.registered == {attached.address: PAGE}
    assert gpu.registered == {}


def test_m35_an_exit_with_open_regions_and_views_says_nothing(run_python, tmp_path):
    ran = run_python(
        """
        import sys
        import numpy as np
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region
        from stepwell.testing.gpu import FakeGpu

        regions = [Region.open(Ask(4096)), Region.open(Ask(4096, Kind.SHARED))]
        regions.append(Region.open(Ask(4096, Kind.FILE, folder=sys.argv[1])))
        regions.append(Region.open(Ask(4096, pinned=True), gpu=FakeGpu()))
        for region in regions:
            region.prepare()
        cycle = [regions]
        cycle.append(cycle)
        view = regions[0].view(0, 8)
        array = np.frombuffer(view.__enter__(), np.uint8)
        """,
        tmp_path,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("descriptor", [-1, 10**9, "3", None])
def test_attaching_to_what_is_no_descriptor_is_refused(descriptor):
    with pytest.raises(RefusedError, match="is no shared memory"):
        Region.attach(descriptor)


def test_a_preparation_inside_of_itself_is_refused_instead_of_waiting():
    def ready(_):
        region.prepare()

    with Region.open(Ask(PAGE)) as region:
        with pytest.raises(MisuseError, match="inside of its preparation"):
            region.prepare(ready)
        assert region.prepare().ready_bytes == PAGE


def test_a_kernel_that_cannot_touch_without_writing_leaves_the_bytes_of_others(monkeypatch):
    """Writing back what was read would undo what another process wrote in between."""
    with Region.open(Ask(PAGE, Kind.SHARED)) as owner:
        fill(owner, 7)
        libc = system._libc()

        class Old:
            def __getattr__(self, name):
                return getattr(libc, name)

            def madvise(self, *_):
                ctypes.set_errno(errno.EINVAL)
                return -1

        monkeypatch.setattr(system, "_libc", Old)
        system.populate(owner.address, PAGE, fresh=False)
        assert distinct(owner) == [7]
        system.populate(owner.address, PAGE, fresh=True)
        assert distinct(owner) == [0, 7]


def test_a_region_that_a_finalizer_brings_back_to_life_keeps_its_memory_while_it_is_used():
    """The collector clears weak references before it calls finalizers: lost does not mean dead."""
    seen = []

    class Holder:
        def __del__(self):
            with self.region.view(0, PAGE) as view:
                with pytest.warns(ResourceWarning, match="stays mapped: a view taken at"):
                    seen.append(Region.open(Ask(PAGE)))
                seen.append(bytes(view[:4]))

    holder = Holder()
    holder.region = Region.open(Ask(PAGE))
    holder.me = holder
    mapping = holder.region._mapping
    del holder
    gc.collect()
    assert seen[1] == bytes(4)
    assert mapping.mapped
    seen[0].close()
    mapping.close()


def test_a_signal_handler_cannot_close_a_region_inside_of_its_calls(monkeypatch):
    region = Region.open(Ask(PAGE))
    begin = region._users.begin_view
    refused = []

    def interrupted(books):
        try:
            region.close()  # as a handler does
        except MisuseError as error:
            refused.append(str(error))
        begin(books)

    monkeypatch.setattr(region._users, "begin_view", interrupted)
    with region.view(0, 4) as view:
        assert bytes(view) == bytes(4)
    assert "called from inside one of its own calls" in refused[0]
    monkeypatch.undo()
    region.close()


def test_threads_that_cannot_be_started_are_done_without(monkeypatch):
    from stepwell.memory import prepare

    started = []

    def few(name, target, health):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(name)
        return start(name, target, health)

    start = prepare.start
    monkeypatch.setattr(prepare, "start", few)
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 8)
    with Region.open(Ask(STRIDE_BYTES)) as region:
        before = resident()
        region.prepare()
        assert resident() - before > STRIDE_BYTES - MIB
    assert len(started) == 1


def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * PAGE
