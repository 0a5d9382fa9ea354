"""What the machine has, read from made-up `/proc` and `/sys`, and from the real ones."""

import dataclasses
import mmap
import os

import pytest

from stepwell.memory.machine import HugePages, Machine, available_bytes, read_machine

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNLIMITED_V1 = 9223372036854771712
IPC_LOCK = 1 << 14


@pytest.fixture
def root(tmp_path):
    """A machine of 16 GiB with 8 GiB available, and nothing else."""
    write(tmp_path, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n")
    return tmp_path


def write(root, path, content):
    where = root / path
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(f"{content}\n")


def version_two(root, path, limit, used, idle=0):
    home = f"sys/fs/cgroup/{path}".rstrip("/")
    write(root, f"{home}/memory.max", limit)
    write(root, f"{home}/memory.current", used)
    write(root, f"{home}/memory.stat", f"anon 5\ninactive_anon 99\ninactive_file {idle}\nfile 7")


def version_one(root, path, limit, used, idle=0):
    home = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    write(root, f"{home}/memory.limit_in_bytes", limit)
    write(root, f"{home}/memory.usage_in_bytes", used)
    write(root, f"{home}/memory.stat", f"inactive_file 1\ntotal_inactive_file {idle}")


def test_an_empty_tree_has_no_answers_and_no_errors(tmp_path):
    assert read_machine(tmp_path) == Machine(None, None, None, None, (), None, 0, None)


def test_without_a_control_group_the_machine_itself_is_the_limit(root):
    machine = read_machine(root)
    assert machine.memory_bytes == 16 * GIB
    assert machine.available_bytes == 8 * GIB
    assert machine.cgroup_bytes is None


def test_the_room_of_a_group_is_its_limit_less_what_cannot_be_given_up(root):
    """Page cache that nobody has used lately is counted as used, and given up before anybody is killed."""
    write(root, "proc/self/cgroup", "0::/job")
    version_two(root, "job", 4 * GIB, 3 * GIB, idle=GIB)
    machine = read_machine(root)
    assert machine.cgroup_bytes == 4 * GIB
    assert machine.available_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("outer", "inner", "room", "limit"),
    [
        ((4 * GIB, GIB), (2 * GIB, GIB // 2), 3 * GIB // 2, 2 * GIB),
        ((4 * GIB, 4 * GIB - MIB), (2 * GIB, GIB), MIB, 2 * GIB),
        ((GIB, 0), (2 * GIB, 0), GIB, GIB),
        ((12 * GIB, 0), (11 * GIB, 0), 8 * GIB, 11 * GIB),
    ],
    ids=["inner", "outer is full", "outer is smaller", "machine"],
)
def test_of_nested_groups_the_smallest_room_and_the_smallest_limit_win(
    root, outer, inner, room, limit
):
    write(root, "proc/self/cgroup", "0::/outer/middle/inner")
    version_two(root, "outer", *outer)
    version_two(root, "outer/middle", "max", 5)
    version_two(root, "outer/middle/inner", *inner)
    machine = read_machine(root)
    assert machine.available_bytes == room
    assert machine.cgroup_bytes == limit


def test_in_a_container_the_group_is_the_mount_itself(root):
    """`/proc/self/cgroup` may show the path of the outside, which is not there inside."""
    write(root, "proc/self/cgroup", "0::/system.slice/docker-0123.scope")
    version_two(root, "", 2 * GIB, GIB)
    assert read_machine(root).available_bytes == GIB
    assert read_machine(root).cgroup_bytes == 2 * GIB


def test_a_path_that_leads_out_of_the_namespace_finds_the_mount(root):
    write(root, "proc/self/cgroup", "0::/../../other")
    version_two(root, "", 2 * GIB, GIB)
    assert read_machine(root).cgroup_bytes == 2 * GIB


def test_a_path_with_a_colon_is_read_to_its_end(root):
    write(root, "proc/self/cgroup", "0::/a:b/c")
    version_two(root, "a:b/c", 2 * GIB, 0)
    assert read_machine(root).cgroup_bytes == 2 * GIB


def test_max_is_no_limit(root):
    write(root, "proc/self/cgroup", "0::/job")
    version_two(root, "job", "max", 3 * GIB)
    assert read_machine(root).cgroup_bytes is None
    assert read_machine(root).available_bytes == 8 * GIB


def test_version_one_is_read_under_its_controller(root):
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:/job/inner\n0::/job")
    version_one(root, "job", 6 * GIB, 2 * GIB)
    version_one(root, "job/inner", 3 * GIB, 2 * GIB, idle=GIB // 2)
    machine = read_machine(root)
    assert machine.cgroup_bytes == 3 * GIB
    assert machine.available_bytes == 3 * GIB // 2


def test_version_one_in_a_container_is_the_mount_itself(root):
    write(root, "proc/self/cgroup", "4:memory:/docker/0123")
    version_one(root, "", 3 * GIB, 2 * GIB)
    assert read_machine(root).available_bytes == GIB


def test_a_controller_of_another_name_is_not_memory(root):
    write(root, "proc/self/cgroup", "4:memoryless:/job\n5:cpu:/job\nnonsense\n")
    version_one(root, "job", GIB, 0)
    assert read_machine(root).cgroup_bytes is None


def test_the_huge_number_of_version_one_is_no_limit(root):
    write(root, "proc/self/cgroup", "4:memory:/job")
    version_one(root, "", UNLIMITED_V1, 9 * GIB)
    version_one(root, "job", UNLIMITED_V1, 9 * GIB)
    assert read_machine(root).cgroup_bytes is None
    assert read_machine(root).available_bytes == 8 * GIB


def test_a_group_that_uses_more_than_its_limit_has_no_room_and_no_debt(root):
    write(root, "proc/self/cgroup", "0::/job")
    version_two(root, "job", GIB, 2 * GIB)
    assert read_machine(root).available_bytes == 0


def test_a_group_without_statistics_counts_all_its_use(root):
    write(root, "proc/self/cgroup", "0::/job")
    version_two(root, "job", 4 * GIB, GIB)
    (root / "sys/fs/cgroup/job/memory.stat").unlink()
    assert read_machine(root).available_bytes == 3 * GIB


def test_huge_pages_that_are_promised_to_somebody_are_not_free(root):
    home = "sys/kernel/mm/hugepages/hugepages-2048kB"
    write(root, f"{home}/nr_hugepages", 10)
    write(root, f"{home}/free_hugepages", 7)
    assert read_machine(root).huge == HugePages(total=10, free=7)
    write(root, f"{home}/resv_hugepages", 3)
    assert read_machine(root).huge == HugePages(total=10, free=4)
    write(root, f"{home}/resv_hugepages", 9)
    assert read_machine(root).huge == HugePages(total=10, free=0)


@pytest.mark.parametrize("missing", ["nr_hugepages", "free_hugepages"])
def test_a_kernel_without_huge_pages_has_none(root, missing):
    home = "sys/kernel/mm/hugepages/hugepages-2048kB"
    for name in {"nr_hugepages", "free_hugepages"} - {missing}:
        write(root, f"{home}/{name}", 1)
    assert read_machine(root).huge is None


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("0", (0,)),
        ("0-1,4", (0, 1, 4)),
        ("0-3", (0, 1, 2, 3)),
        ("2,7-8", (2, 7, 8)),
        ("", ()),
        ("what", ()),
    ],
)
def test_the_kernels_list_of_nodes_is_read(root, text, nodes):
    write(root, "sys/devices/system/node/has_memory", text)
    assert read_machine(root).nodes == nodes


def limits(root, memlock, capabilities):
    write(root, "proc/self/status", f"VmLck:\t  64 kB\nCapEff:\t{capabilities:016x}")
    write(
        root,
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max locked memory         {memlock:<20} 67108864             bytes\n"
        "Max address space         unlimited            unlimited            bytes",
    )


def test_the_soft_limit_of_locked_memory_counts(root):
    limits(root, 8388608, 0)
    assert read_machine(root).memlock_bytes == 8 * MIB
    assert read_machine(root).locked_bytes == 64 * KIB


def test_a_limit_of_nothing_is_a_limit(root):
    limits(root, 0, 0)
    assert read_machine(root).memlock_bytes == 0


def test_whoever_may_lock_has_no_limit(root):
    limits(root, 8388608, IPC_LOCK)
    assert read_machine(root).memlock_bytes is None
    limits(root, 8388608, (1 << 40) - 1 - IPC_LOCK)
    assert read_machine(root).memlock_bytes == 8 * MIB


def test_in_a_namespace_of_users_the_limit_holds_whatever_the_capabilities_say(root):
    limits(root, 8388608, IPC_LOCK)
    write(root, "proc/self/uid_map", "         0          0 4294967295")
    assert read_machine(root).memlock_bytes is None
    write(root, "proc/self/uid_map", "         0       1000          1")
    assert read_machine(root).memlock_bytes == 8 * MIB


def test_unlimited_is_no_limit(root):
    limits(root, "unlimited", 0)
    assert read_machine(root).memlock_bytes is None


def test_free_shared_memory_is_of_its_own_file_system(root):
    assert read_machine(root).shared_free_bytes is None
    (root / "dev/shm").mkdir(parents=True)
    status = os.statvfs(root / "dev/shm")
    free = read_machine(root).shared_free_bytes
    assert free % status.f_frsize == 0
    assert 0 < free <= status.f_blocks * status.f_frsize


NOTHING = Machine(None, None, None, None, (), None, 0, None)


@pytest.mark.parametrize(
    ("facts", "part", "expected"),
    [
        ({"memory_bytes": 1000, "available_bytes": 900}, 0.5, 500),
        ({"memory_bytes": 1000, "available_bytes": 900}, 1.0, 900),
        ({"memory_bytes": 1000, "available_bytes": 300}, 0.5, 300),
        ({"memory_bytes": 1000, "available_bytes": 300, "cgroup_bytes": 400}, 0.5, 200),
        ({"memory_bytes": 1000, "available_bytes": 900, "cgroup_bytes": 4000}, 0.5, 500),
        ({"memory_bytes": 1000, "available_bytes": 900}, 0.0, 0),
        ({"memory_bytes": 1000}, 0.5, 0),
        ({"available_bytes": 900}, 0.5, 0),
        ({}, 1.0, 0),
    ],
)
def test_a_share_is_of_the_smallest_limit_and_never_more_than_is_there(facts, part, expected):
    assert dataclasses.replace(NOTHING, **facts).share(part) == expected


def test_this_machine_answers():
    machine = read_machine()
    assert machine.memory_bytes == os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert 0 < machine.share(0.5) <= machine.memory_bytes // 2
    assert 0 < available_bytes() <= machine.memory_bytes


def test_the_room_of_a_node_is_what_is_free_there_and_what_would_be_given_up(root):
    text = (
        "Node 1 MemFree:  1048576 kB\nNode 1 Inactive(anon): 9 kB\nNode 1 Inactive(file): 1024 kB"
    )
    write(root, "sys/devices/system/node/node1/meminfo", text)
    assert available_bytes(1, root) == GIB + MIB
    assert available_bytes(None, root) == available_bytes(0, root) == 8 * GIB, "unknown is no limit"
    write(root, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 1024 kB")
    assert available_bytes(1, root) == MIB
