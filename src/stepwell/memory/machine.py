"""What this machine has to give: free memory under every limit, huge pages, locks, nodes.

Reads `/proc` and `/sys`; what is not there is None. Neighbours: `mapping` and `prepare` say with it why
something was refused; `stepwell doctor` prints it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stepwell.base.errors import InputError

_CAP_IPC_LOCK = 14
SHARED_FOLDER = "/dev/shm"  # noqa: S108


@dataclass(frozen=True, slots=True)
class HugePages:
    """The reserve of 2 MiB pages."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits and reserves, read once.

    Attributes:
        memory_bytes: physical memory.
        available_bytes: that can be taken without pushing anybody out: of the machine, and of
            every control group that this process is in.
        cgroup_bytes: the smallest limit of a control group, if there is one.
        huge: 2 MiB pages; None if the kernel has none.
        nodes: memory nodes that are online; empty if unknown.
        memlock_bytes: that this process may lock; None: no limit.
        locked_bytes: that it has locked.
        shared_free_bytes: free in `/dev/shm`.
    """

    memory_bytes: int | None
    available_bytes: int | None
    cgroup_bytes: int | None
    huge: HugePages | None
    nodes: tuple[int, ...]
    memlock_bytes: int | None
    locked_bytes: int
    shared_free_bytes: int | None

    def share(self, part: float) -> int:
        """So much of the memory that this process may have, in bytes; 0 if that is unknown.

        Args:
            part: 0 to 1.
        """
        if not isinstance(part, int | float) or not 0 <= part <= 1:
            raise InputError(f"a share of {part!r}", limit="0 to 1")
        sizes = [size for size in (self.memory_bytes, self.cgroup_bytes) if size is not None]
        room = min(int(min(sizes, default=0) * part), self.available_bytes or 0)
        return max(0, room)


def read_machine(root: Path = Path("/")) -> Machine:
    """Reads what the machine has now.

    Args:
        root: where `proc`, `sys` and `dev` lie; another one in tests.
    """
    memory = _fields(root / "proc/meminfo", 1024)
    status = _fields(root / "proc/self/status", 1024)
    total = memory.get("MemTotal")
    groups = [group for group in _groups(root) if total is None or group[0] < total]
    return Machine(
        memory_bytes=total,
        available_bytes=available_bytes(root=root),
        cgroup_bytes=min((limit for limit, _ in groups), default=None),
        huge=_huge(root),
        nodes=_nodes(root),
        memlock_bytes=_memlock(root),
        locked_bytes=status.get("VmLck", 0),
        shared_free_bytes=_free_in(root / SHARED_FOLDER.lstrip("/")),
    )


def available_bytes(node: int | None = None, root: Path = Path("/")) -> int | None:
    """Of `read_machine`, the part that changes from moment to moment.

    Args:
        node: only memory of this node counts.
        root: as for `read_machine`.
    """
    available = _fields(root / "proc/meminfo", 1024).get("MemAvailable")
    rooms = [limit - used for limit, used in _groups(root)]
    if available is not None:
        rooms.append(available)
    if node is not None:
        rooms += _node_room(root, node)
    return max(0, min(rooms)) if rooms else None


def _node_room(root: Path, node: int) -> Iterator[int]:
    """Bytes of a node that are free, or page cache that would be given up first; nothing if unknown."""
    text = _text(root / f"sys/devices/system/node/node{node}/meminfo") or ""
    names = "MemFree", r"Inactive\(file\)"
    found = [re.search(rf"{name}:\s+(\d+) kB", text) for name in names]
    if all(found):
        yield sum(int(one.group(1)) * 1024 for one in found if one)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else None


def _fields(path: Path, factor: int) -> dict[str, int]:
    """Lines such as `MemTotal:  24 kB`, in bytes."""
    found = re.findall(r"^([\w()]+):\s+(\d{1,19}) kB$", _text(path) or "", re.MULTILINE)
    return {name: int(value) * factor for name, value in found}


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of every control group around this process that has a limit."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mount, limit, used, idle = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit = "memory", "memory.limit_in_bytes"
            used, idle = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        home = root / "sys/fs/cgroup" / mount
        # In a container the path may be that of the outside, and the group itself is the mount.
        ways = PurePosixPath(path.lstrip("/"))
        for place in {home / part for part in (ways, *ways.parents)} | {home}:
            most, taken = _number(place / limit), _number(place / used)
            if most is not None and taken is not None:
                yield most, taken - _stat(place / "memory.stat", idle)


def _stat(path: Path, name: str) -> int:
    """One value of a control group's statistics: page cache that would be given up first."""
    found = re.search(rf"^{name} (\d+)$", _text(path) or "", re.MULTILINE)
    return int(found.group(1)) if found else 0


def _huge(root: Path) -> HugePages | None:
    home = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    total, free = _number(home / "nr_hugepages"), _number(home / "free_hugepages")
    reserved = _number(home / "resv_hugepages") or 0
    return None if total is None or free is None else HugePages(total, max(0, free - reserved))


def _nodes(root: Path) -> tuple[int, ...]:
    """Reads a list such as `0-1,4`."""
    nodes: list[int] = []
    for part in (_text(root / "sys/devices/system/node/has_memory") or "").split(","):
        first, _, last = part.partition("-")
        ends = [end for end in (first, last) if end.isdecimal() and len(end) < 5]
        if ends:
            nodes += range(int(ends[0]), int(ends[-1]) + 1)
    return tuple(nodes)


def _memlock(root: Path) -> int | None:
    """None when locking is free: no limit, or the capability to lock."""
    status = _text(root / "proc/self/status") or ""
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    users = _text(root / "proc/self/uid_map")
    # In a namespace of users (a container without root) the kernel does not honour the capability.
    real = users is None or users.split() == ["0", "0", str(2**32 - 1)]
    if real and capable and int(capable.group(1), 16) >> _CAP_IPC_LOCK & 1:
        return None
    found = re.search(
        r"^Max locked memory\s+(\d+)", _text(root / "proc/self/limits") or "", re.MULTILINE
    )
    return int(found.group(1)) if found else None


def _free_in(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
