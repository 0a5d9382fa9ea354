"""What the machine really refuses: pages, locks, room, nodes; with numbers, and with what would help."""

import dataclasses
import fcntl
import json
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import numpy as np
import pytest

from stepwell.base.errors import RefusedError
from stepwell.base.units import format_bytes
from stepwell.memory.ask import Ask, Kind, Trait
from stepwell.memory.machine import read_machine
from stepwell.memory.region import Region
from stepwell.testing.gpu import FakeGpu

PAGE = mmap.PAGESIZE
MIB = 1 << 20
HUGE = 2 * MIB
RESERVE = pathlib.Path("/proc/sys/vm/nr_hugepages")
PAGES = 8

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


# 2 MiB pages. One group: the reserve is the machine's.


@pytest.fixture
def reserve():
    """Some free pages, and none that other tests have."""
    if os.geteuid() != 0 or not os.access(RESERVE, os.W_OK):
        pytest.skip("NOT RUN: needs root")
    with pathlib.Path(tempfile.gettempdir(), "stepwell-test-hugepages").open("wb") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)  # another run on this machine would restore our number
        before = RESERVE.read_text()
        try:
            RESERVE.write_text(str(int(before) + PAGES))
            huge = read_machine().huge
            if huge is None or huge.free < PAGES:
                pytest.skip(f"NOT RUN: needs {PAGES} free pages of 2 MiB, has {huge}")
            yield huge
        finally:
            RESERVE.write_text(before)


hugepages = pytest.mark.xdist_group("hugepages")


@hugepages
@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED])
def test_huge_pages_are_taken_from_the_reserve_and_given_back(reserve, kind):
    with Region.open(Ask(2 * HUGE + 1, kind, huge=True)) as region:
        assert region.size_bytes == 3 * HUGE
        assert region.address % HUGE == 0
        # Ours from here on, though nothing is touched: nobody can take them before `prepare` does.
        assert read_machine().huge.free == reserve.free - 3
        record = region.prepare()
        assert record.page_bytes == HUGE
        assert record.ready_bytes == 3 * HUGE
        assert record.refusals == ()
        assert record.pinned  # the kernel has no way to page them out
        with region.view(0, 3 * HUGE, readonly=False) as view:
            values = np.frombuffer(view, np.uint8)
            values[:] = 8
            assert int(values.sum()) == 8 * 3 * HUGE
            del values
        assert read_machine().huge.free == reserve.free - 3
    assert read_machine().huge.free == reserve.free


@hugepages
def test_another_process_attaches_huge_pages(reserve, run_python):
    with Region.open(Ask(HUGE, Kind.SHARED, huge=True)) as region:
        region.prepare()
        with region.view(HUGE - 5, 5, readonly=False) as view:
            view[:] = b"hello"
        ran = run_python(
            """
            import sys
            from stepwell.memory.region import Region

            with Region.attach(int(sys.argv[1])) as region:
                record = region.prepare()
                with region.view(record.size_bytes - 5, 5) as view:
                    print(view.tobytes().decode(), record.page_bytes, record.pinned)
            """,
            region.descriptor,
            pass_fds=[region.descriptor],
        )
    assert ran.stdout == f"hello {HUGE} True\n", ran.stderr


@hugepages
@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED])
def test_more_huge_pages_than_are_free_are_refused_with_the_number_that_would_do(reserve, kind):
    ask = Ask((reserve.free + 3) * HUGE, kind, huge=True)
    with pytest.raises(RefusedError) as caught:
        Region.open(ask)
    needed, free, total = reserve.free + 3, reserve.free, reserve.total
    assert f"{needed} pages of 2 MiB are needed, {free} of {total} are free" in caught.value.fact
    assert caught.value.remedy == f"sysctl vm.nr_hugepages={total + 3}"
    assert read_machine().huge == reserve
    RESERVE.write_text(caught.value.remedy.rpartition("=")[2])
    with Region.open(ask) as region:
        assert region.prepare().page_bytes == HUGE


@hugepages
@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED])
def test_without_huge_pages_a_region_that_may_lack_them_has_small_ones_and_says_so(reserve, kind):
    ask = Ask((reserve.free + 1) * HUGE, kind, huge=True, may_lack=frozenset({Trait.HUGE}))
    with Region.open(ask) as region:
        record = region.prepare()
    assert record.page_bytes == PAGE
    assert not record.pinned
    (refusal,) = record.refusals
    assert refusal.what == "huge"
    assert f"{reserve.free + 1} pages of 2 MiB are needed" in refusal.reason
    assert refusal.remedy == f"sysctl vm.nr_hugepages={reserve.total + 1}"


@hugepages
def test_huge_pages_are_registered_with_a_device_too(reserve):
    gpu = FakeGpu()
    with Region.open(Ask(HUGE, huge=True, pinned=True), gpu=gpu) as region:
        assert region.prepare().registered_bytes == HUGE
        assert gpu.registered == {region.address: HUGE}
    assert gpu.registered == {}


@hugepages
def test_huge_pages_lie_on_the_node_that_was_asked_for(reserve):
    with Region.open(Ask(HUGE, huge=True, node=read_machine().nodes[0])) as region:
        assert region.prepare().node == read_machine().nodes[0]


@hugepages
@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED])
def test_a_forked_child_reads_zeros_where_its_parent_has_huge_pages(reserve, kind):
    with (
        Region.open(Ask(HUGE, kind, huge=True)) as region,
        region.view(0, HUGE, readonly=False) as view,
    ):
        view[:8] = b"\6" * 8
        child = os.fork()
        if not child:
            os._exit(0 if bytes(view[:8]) == bytes(8) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(view[:8]) == b"\6" * 8


# Locks.

LOCKING = """
    import json, os, resource, sys
    from stepwell.base.errors import RefusedError
    from stepwell.memory.ask import Ask, Trait
    from stepwell.memory.region import Region

    limit, size, lacking = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "may lack"
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)  # the capability to lock goes with the user
    may_lack = frozenset({Trait.PINNED} if lacking else ())
    try:
        with Region.open(Ask(size, pinned=True, may_lack=may_lack)) as region:
            print(json.dumps(region.prepare().plain()))
    except RefusedError as error:
        print(json.dumps({"fact": error.fact, "remedy": error.remedy}))
"""


def locking(run_python, limit, size_bytes, lacking="must have"):
    ran = run_python(LOCKING, limit, size_bytes, lacking)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("limit", "why"), [(0, "Operation not permitted"), (MIB, "Cannot allocate memory")]
)
def test_a_lock_that_the_limit_forbids_is_refused_with_the_limit(run_python, limit, why):
    said = locking(run_python, limit, 2 * MIB)
    expected = f"2.0 MiB are to be locked, under a limit of {format_bytes(limit)} with 0 B locked"
    assert expected in said["fact"]
    assert why in said["fact"]
    assert said["fact"].startswith("pinned refused")
    for remedy in ("ulimit -l", "LimitMEMLOCK=", "--ulimit memlock=-1"):
        assert remedy in said["remedy"]


def test_a_region_that_may_lack_the_lock_is_there_and_says_that_it_is_not_locked(run_python):
    record = locking(run_python, 0, 2 * MIB, "may lack")
    assert record["ready_bytes"] == 2 * MIB
    assert not record["locked"]
    assert not record["pinned"]
    (refusal,) = record["refusals"]
    assert refusal["what"] == "pinned"
    assert "a limit of 0 B" in refusal["reason"]


def test_a_lock_within_the_limit_is_given(run_python):
    record = locking(run_python, 2 * MIB, MIB)
    assert record["locked"]
    assert record["pinned"]
    assert record["refusals"] == []


def test_a_capability_of_a_user_namespace_is_no_permission_to_lock(run_python):
    """In a container without root the capability is shown, and the kernel does not honour it."""
    ran = run_python("""
        import ctypes, resource, sys

        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        new_user = 0x10000000
        if ctypes.CDLL(None).unshare(new_user):  # before there are threads
            sys.exit(9)
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask
        from stepwell.memory.machine import read_machine
        from stepwell.memory.region import Region

        print(read_machine().memlock_bytes)
        try:
            Region.open(Ask(1 << 20, pinned=True))
        except RefusedError as error:
            print(error.fact)
    """)
    if ran.returncode == 9:
        pytest.skip("NOT RUN: needs user namespaces")
    assert ran.returncode == 0, ran.stderr
    limit, fact = ran.stdout.splitlines()
    assert limit == "65536"
    assert "under a limit of 64.0 KiB" in fact


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED, Kind.NAMED])
def test_what_is_pinned_without_a_device_is_locked_and_what_is_closed_is_not(kind, name):
    limit = read_machine().memlock_bytes
    if limit is not None and limit < 2 * MIB:
        pytest.skip(f"NOT RUN: needs permission to lock 2 MiB, has {limit} bytes")
    ask = Ask(MIB, kind, pinned=True, name=name if kind is Kind.NAMED else "")
    before = read_machine().locked_bytes
    with Region.open(ask) as region:
        assert read_machine().locked_bytes == before + MIB
        record = region.prepare()
        assert record.locked
        assert record.pinned
        assert record.registered_bytes == 0
    assert read_machine().locked_bytes == before


# Room.


@pytest.fixture(scope="module")
def with_mount():
    """Begins of commands that run with a small tmpfs somewhere, which only they see."""
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]

    def begin(folder, options):
        script = f'mount -t tmpfs -o {options} tmpfs "{folder}" && exec "$@"'
        return [*enter, "sh", "-c", script, "sh"]

    probe = subprocess.run([*begin("/mnt", "size=1m"), "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("NOT RUN: needs root, or namespaces of users and mounts")
    return begin


def test_a_named_region_larger_than_shared_memory_is_refused_with_what_is_free(
    with_mount, run_python
):
    ran = run_python(
        """
        import os
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        try:
            Region.open(Ask(2 << 20, Kind.NAMED, name="large"))
        except RefusedError as error:
            print(error.fact)
            print(error.remedy)
        print(os.listdir("/dev/shm"))
        Region.open(Ask(2 << 20, Kind.SHARED)).prepare()  # needs no room there
        """,
        before=with_mount("/dev/shm", "size=1m"),
    )
    fact, remedy, there = ran.stdout.splitlines()
    assert "2.0 MiB are asked for, /dev/shm has 1.0 MiB free" in fact
    assert "remount,size=" in remedy
    assert "--shm-size" in remedy
    assert there == "[]"
    assert ran.returncode == 0, ran.stderr


def test_shared_memory_that_is_full_when_it_is_touched_is_a_refusal_and_no_signal(
    with_mount, run_python
):
    """The room was there at `open`; somebody took it before `prepare`."""
    ran = run_python(
        """
        import os
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        with Region.open(Ask(768 << 10, Kind.NAMED, name="late")) as region:
            with open("/dev/shm/other", "wb", buffering=0) as other:
                other.write(bytes(512 << 10))
            try:
                region.prepare()
            except RefusedError as error:
                print(error.fact)
                print(error.remedy)
            print(region.record.ready_bytes)
            os.unlink("/dev/shm/other")
            print(region.prepare().ready_bytes)
        print(os.listdir("/dev/shm"))
        """,
        before=with_mount("/dev/shm", "size=1m"),
    )
    assert ran.returncode == 0, ran.stderr
    fact, remedy, ready, later, there = ran.stdout.splitlines()
    assert "768.0 KiB could not be touched" in fact
    assert "/dev/shm" in remedy
    assert (ready, later, there) == ("0", str(768 << 10), "[]")


def test_without_shared_memory_a_name_is_refused(with_mount, run_python):
    ran = run_python(
        """
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        try:
            Region.open(Ask(4096, Kind.NAMED, name="any"))
        except RefusedError as error:
            print(error)
        """,
        before=with_mount("/dev/shm", "ro"),
    )
    assert "nothing can be made in /dev/shm: Read-only file system" in ran.stdout, ran.stderr
    assert "use a SHARED region" in ran.stdout


def test_a_file_region_in_a_full_folder_is_refused_and_one_that_fits_has_its_blocks(
    with_mount, run_python, tmp_path
):
    """Blocks are allocated at `open`: touching them later cannot end the process."""
    ran = run_python(
        """
        import os, sys
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        folder = sys.argv[1]
        try:
            Region.open(Ask(2 << 20, Kind.FILE, folder=folder))
        except RefusedError as error:
            print(error)
        with Region.open(Ask(512 << 10, Kind.FILE, folder=folder)) as region:
            try:
                with open(folder + "/other", "wb", buffering=0) as other:
                    while other.write(bytes(64 << 10)):
                        pass
            except OSError:
                os.unlink(folder + "/other")
            print(region.prepare().ready_bytes)
        print(os.listdir(folder))
        """,
        tmp_path,
        before=with_mount(tmp_path, "size=1m"),
    )
    assert ran.returncode == 0, ran.stderr
    refused, ready, there = ran.stdout.splitlines()
    assert f"2.0 MiB are asked for in '{tmp_path}' with 1.0 MiB free: No space left" in refused
    assert "another folder, or less" in refused
    assert (ready, there) == (str(512 << 10), "[]")


def test_a_file_region_that_does_not_fit_does_not_fill_the_disk_to_find_out(tmp_path, monkeypatch):
    """ext4 allocates until nothing is left before it refuses; everybody else's writes fail meanwhile."""
    tried = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: tried.append(arguments))
    size_bytes = shutil.disk_usage(tmp_path).free + (1 << 40)
    with pytest.raises(RefusedError, match="No space left"):
        Region.open(Ask(size_bytes, Kind.FILE, folder=str(tmp_path)))
    assert not tried


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_folder_that_is_none_is_refused(tmp_path, what):
    folder = tmp_path / "there"
    if what == "a file":
        folder.write_text("text")
    with pytest.raises(RefusedError, match=re.escape(str(folder))) as caught:
        Region.open(Ask(PAGE, Kind.FILE, folder=str(folder)))
    assert re.search("No such file|Not a directory", caught.value.fact)
    assert "another folder" in caught.value.remedy


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED, Kind.NAMED])
def test_more_than_the_memory_is_refused_before_anything_is_touched(kind, name):
    def size_now():
        fields = pathlib.Path("/proc/self/statm").read_text().split()
        return int(fields[0]) * PAGE

    machine = read_machine()
    size_bytes = machine.memory_bytes + 64 * MIB
    before = size_now()
    with pytest.raises(RefusedError) as caught:
        Region.open(Ask(size_bytes, kind, name=name if kind is Kind.NAMED else ""))
    assert size_now() - before < 64 * MIB
    assert f"{format_bytes(size_bytes)} are asked for" in caught.value.fact
    most = re.search(r"ask for at most ([0-9.]+ \w+) \(Machine\.share", caught.value.remedy)
    assert most is not None


def test_a_refusal_names_the_control_group_that_is_the_limit():
    machine = dataclasses.replace(read_machine(), available_bytes=MIB, cgroup_bytes=4 * MIB)
    with pytest.raises(RefusedError) as caught:
        Region.open(Ask(2 * MIB), machine=machine)
    expected = "2.0 MiB are asked for, 1.0 MiB are available under a control group of 4.0 MiB"
    assert expected in caught.value.fact
    assert "at most 1.0 MiB" in caught.value.remedy
    Region.open(Ask(MIB), machine=machine).close()


def test_memory_that_somebody_took_between_open_and_prepare_is_a_refusal(run_python):
    """Two regions that fit one by one; together they would end this process."""
    groups = pathlib.Path("/sys/fs/cgroup")
    home, limit = groups / "memory", "memory.limit_in_bytes"
    if (groups / "cgroup.controllers").exists():
        home, limit = groups, "memory.max"
    mine = home / f"stepwell-test-{os.getpid()}"
    try:
        mine.mkdir()
        (mine / limit).write_text(str(160 * MIB))
    except OSError as error:
        if mine.exists():
            mine.rmdir()
        pytest.skip(f"NOT RUN: needs a control group of its own: {error.strerror}")
    try:
        ran = run_python(
            """
            import os, sys
            with open(sys.argv[1] + "/cgroup.procs", "w") as group:
                group.write(str(os.getpid()))
            from stepwell.base.errors import RefusedError
            from stepwell.memory.ask import Ask
            from stepwell.memory.region import Region

            def attempt(call):
                try:
                    return call()
                except RefusedError as error:
                    print(error.fact)

            attempt(lambda: Region.open(Ask(256 << 20)))
            one, two = Region.open(Ask(80 << 20)), Region.open(Ask(80 << 20))
            attempt(one.prepare)
            attempt(two.prepare)
            print(one.record.ready_bytes >> 20, two.record.ready_bytes >> 20)
            """,
            mine,
        )
    finally:
        mine.rmdir()
    assert ran.returncode == 0, ran.stderr
    large, second, ready = ran.stdout.splitlines()
    assert "under a control group of 160.0 MiB" in large
    assert "64.0 MiB are not there" in second or "16.0 MiB are not there" in second
    assert ready in ("80 0", "80 64")


def test_addresses_that_have_run_out_are_a_refusal(run_python):
    ran = run_python("""
        import resource
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), -1))
        for kind in (Kind.PRIVATE, Kind.SHARED):
            try:
                Region.open(Ask(64 << 20, kind))
            except RefusedError as error:
                print(error.fact)
    """)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("64.0 MiB") == 2
    assert ran.stdout.count("Cannot allocate memory") == 2


# Nodes.


def test_a_node_that_is_not_here_is_refused_with_those_that_are():
    machine = read_machine()
    with pytest.raises(RefusedError) as caught:
        Region.open(Ask(PAGE, node=1023))
    if machine.nodes:
        nodes = ", ".join(map(str, machine.nodes))
        assert f"node 1023 is asked for, this machine has memory on nodes {nodes}" in (
            caught.value.fact
        )
    else:
        assert "has no NUMA" in caught.value.fact
    assert caught.value.remedy


def test_a_region_that_may_lack_its_node_is_there_and_says_where():
    ask = Ask(PAGE, node=1023, may_lack=frozenset({Trait.NODE}))
    with Region.open(ask) as region:
        record = region.prepare()
    (refusal,) = record.refusals
    assert refusal.what == "node"
    assert record.node != 1023
    assert record.ready_bytes == PAGE


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.NAMED])
def test_a_refused_trait_leaves_neither_name_nor_mapping(kind, name):
    """`nothing_stays_open` looks after the descriptor."""
    before = len(pathlib.Path("/proc/self/maps").read_text().splitlines())
    with pytest.raises(RefusedError, match="node 1023"):
        Region.open(Ask(MIB, kind, node=1023, name=name if kind is Kind.NAMED else ""))
    assert len(pathlib.Path("/proc/self/maps").read_text().splitlines()) <= before + 1
    assert not list(pathlib.Path("/dev/shm").glob(f"*{name}*"))


def test_a_view_of_what_was_not_prepared_is_refused_instead_of_ending_the_process(
    with_mount, run_python
):
    ran = run_python(
        """
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        region = Region.open(Ask(1 << 19, Kind.NAMED, name="late"))
        with open("/dev/shm/filler", "wb") as filler:
            filler.write(bytes(1 << 20))
        for _ in range(2):
            try:
                with region.view(5000, 5) as view:
                    print(bytes(view))
            except RefusedError as error:
                print("could not be touched" in error.fact)
        """,
        before=with_mount("/dev/shm", "size=1m"),
    )
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    assert ran.stdout.split() == ["True", "True"]
