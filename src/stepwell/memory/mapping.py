"""One mapping of memory: made as it was asked for, or refused with the reason.

Owns addresses and descriptors. Must not know frames. Neighbours: `region` has one of these; `system` and `named`
do the calls; `prepare` touches and registers it later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.base.call import Call
from stepwell.base.units import format_bytes
from stepwell.memory import named, registry, system
from stepwell.memory.ask import MAX_BYTES, Ask, Kind, Refusal, Trait
from stepwell.memory.gpu import Gpu
from stepwell.memory.machine import SHARED_FOLDER, Machine
from stepwell.memory.users import Users


@dataclass(slots=True, eq=False)
class Mapping:
    """Memory that is mapped in this process.

    Attributes:
        address: of its first byte.
        size_bytes: whole memory pages.
        page_bytes: of one of them.
        place: file and line that opened it.
        descriptor: of the file or shared memory behind it.
        name: in shared memory, if this process gave it.
        tensor: the device memory behind it.
        gpu: that knows parts of it as pinned.
        registered: addresses of these parts.
        attached: another process made it.
        wiped: a forked child finds zeros here by itself.
        mapped: it has not been given back.
        users: who relies on it.
        lock: for `users`, and for giving it back.
    """

    address: int
    size_bytes: int
    page_bytes: int
    place: str
    descriptor: int | None = None
    name: str = ""
    tensor: Any = None
    gpu: Gpu | None = None
    registered: list[int] = field(default_factory=list)
    attached: bool = False
    wiped: bool = False
    mapped: bool = True
    users: Users = field(init=False)
    lock: Call = field(init=False)

    def __post_init__(self) -> None:
        """Nobody relies on it yet."""
        what = f"region opened at {self.place}"
        self.users = Users(f"the {what}")
        self.lock = Call(what, lambda: None)

    def busy(self) -> list[str]:
        """Who relies on it, in words."""
        with self.lock.alone(), self.lock:
            return self.users.names()

    def close(self) -> None:
        """Gives everything back, once."""
        if not self.mapped:
            return
        if self.gpu is not None and (self.registered or self.tensor is not None):
            self.gpu.synchronise()
            while self.registered:
                self.gpu.unregister(self.registered[-1])
                self.registered.pop()
        with registry.no_fork():
            self.mapped = False
            self.unname()
            if self.tensor is None:
                system.unmap(self.address, self.size_bytes)
            self.tensor = None
            self._close_descriptor()
            registry.remove(self)

    def unname(self) -> None:
        """Takes its name away."""
        if self.name and self.descriptor is not None:
            with contextlib.suppress(OSError):  # the folder is gone: so is the name
                named.remove(self.name, self.descriptor)
            self.name = ""

    def leave(self) -> None:
        """In a forked child: zeros instead of the parent's bytes, and none of its descriptors.

        A view that lives in the child reads zeros then, instead of ending the process.
        """
        was_mapped, self.mapped = self.mapped, False
        self.name = ""
        if was_mapped and not self.wiped and self.tensor is None:
            # Taken meanwhile: whatever is there is the child's own.
            with contextlib.suppress(OSError):
                system.map_zeros(self.address, self.size_bytes)
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def rounded(size_bytes: int, page_bytes: int) -> int:
    """Rounded up to whole memory pages."""
    return -(-size_bytes // page_bytes) * page_bytes


def open_mapping(
    ask: Ask, machine: Machine, gpu: Gpu | None, place: str
) -> tuple[Mapping, list[Refusal]]:
    """Maps what was asked for.

    Returns:
        The mapping, and the traits that were refused and may be lacking.

    Raises:
        RefusedError: it cannot be had, or not with a trait that it must not lack.
    """
    refusals: list[Refusal] = []
    if ask.kind is Kind.DEVICE:
        return _open_device(ask, gpu, place), refusals
    mapping = None
    if ask.huge:
        try:
            mapping = _open(ask, place, huge=True)
        except OSError as error:
            _lacks(ask, Trait.HUGE, _no_huge(ask, machine, error), refusals)
    if mapping is None:
        _require_room(ask, machine)
        try:
            mapping = _open(ask, place, huge=False)
        except OSError as error:
            raise _no_memory(ask, error).error() from error
    registry.enter(mapping)
    with contextlib.ExitStack() as undo:
        undo.callback(mapping.close)
        mapping.wiped = ask.kind is Kind.PRIVATE and mapping.page_bytes == system.PAGE_BYTES
        system.keep_from_children(mapping.address, mapping.size_bytes, wipe=mapping.wiped)
        if ask.node is not None:
            _bind(ask, ask.node, machine, mapping, refusals)
        undo.pop_all()
    return mapping, refusals


def lock(ask: Ask, machine: Machine, mapping: Mapping, refusals: list[Refusal]) -> bool:
    """Locks a mapping in memory; whether it is."""
    try:
        system.lock(mapping.address, mapping.size_bytes)
    except OSError as error:
        limit = machine.memlock_bytes
        most = "no limit" if limit is None else f"a limit of {format_bytes(limit)}"
        locked = format_bytes(machine.locked_bytes)
        size = format_bytes(mapping.size_bytes)
        reason = f"{size} are to be locked, under {most} with {locked} locked: {error.strerror}"
        remedy = "raise it: ulimit -l, LimitMEMLOCK= of a systemd unit, --ulimit memlock=-1 of a container"
        _lacks(ask, Trait.PINNED, Refusal(Trait.PINNED, reason, remedy), refusals)
        return False
    return True


def _lacks(ask: Ask, trait: Trait, refusal: Refusal, refusals: list[Refusal]) -> None:
    """Notes a refusal that was allowed, raises one that was not."""
    if trait not in ask.may_lack:
        raise refusal.error()
    refusals.append(refusal)


def _open(ask: Ask, place: str, *, huge: bool) -> Mapping:
    """Maps memory of the host.

    Raises:
        OSError: the kernel refuses.
    """
    page_bytes = system.HUGE_BYTES if huge else system.PAGE_BYTES
    size_bytes = rounded(ask.size_bytes, page_bytes)
    makers: dict[Kind, Callable[[], int | None]] = {
        Kind.PRIVATE: lambda: None,
        Kind.SHARED: lambda: _memory_file(size_bytes, huge=huge),
        Kind.NAMED: lambda: named.create(ask.name, size_bytes),
        Kind.FILE: lambda: _storage_file(ask.folder, size_bytes),
    }
    descriptor = makers[ask.kind]()
    try:
        address = system.map_memory(size_bytes, descriptor, huge=huge)
    except OSError:
        if descriptor is not None:
            if ask.kind is Kind.NAMED:
                named.remove(ask.name, descriptor)
            os.close(descriptor)
        raise
    if not huge:
        system.advise_huge(address, size_bytes)
    return Mapping(address, size_bytes, page_bytes, place, descriptor, ask.name)


def _memory_file(size_bytes: int, *, huge: bool) -> int:
    """Shared memory without a name, whose size nobody can change: a reader needs no fear of it."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("stepwell", flags | (_HUGE_FILE if huge else 0))
    try:
        os.ftruncate(descriptor, size_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


_HUGE_FILE = getattr(os, "MFD_HUGETLB", 0) | getattr(os, "MFD_HUGE_2MB", 0)


def _storage_file(folder: str, size_bytes: int) -> int:
    """A file without a name, so that a killed process leaves nothing; all its blocks are allocated."""
    if shutil.disk_usage(folder).free < size_bytes:
        # Before the file system tries: ext4 fills the disk to its last block until it says no.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        descriptor, path = tempfile.mkstemp(dir=folder)  # a file system without unnamed files
        Path(path).unlink()
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def require_sealed(descriptor: int) -> None:
    """Requires of somebody else's shared memory that it cannot shrink under a reader.

    Raises:
        RefusedError: it is no sealed memory file.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        reason = f"descriptor {descriptor!r} is no shared memory: {error}"
        raise Refusal("region", reason, "pass the descriptor of a SHARED region").error() from error
    if not seals & fcntl.F_SEAL_SHRINK:
        reason = f"descriptor {descriptor} could be made shorter, which would end its readers"
        raise Refusal("region", reason, "add F_SEAL_SHRINK before passing it on").error()


def attach_mapping(descriptor: int, place: str) -> Mapping:
    """Maps shared memory that another process made.

    Args:
        descriptor: the mapping's from now on, also when it fails.
        place: file and line that attaches it.

    Raises:
        RefusedError: its size is no whole number of pages, or it cannot be written.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        size_bytes = os.fstat(descriptor).st_size
        page_bytes = os.fstatvfs(descriptor).f_bsize
        if not 0 < size_bytes <= MAX_BYTES or size_bytes % page_bytes:
            reason = f"the shared memory has {size_bytes} bytes"
            remedy = f"share whole memory pages of {page_bytes} bytes"
            raise Refusal("region", reason, remedy).error()
        try:
            address = system.map_memory(size_bytes, descriptor)
        except OSError as error:
            remedy = "pass it on for reading and writing"
            raise Refusal("region", str(error.strerror), remedy).error() from error
        undo.pop_all()
        mapping = Mapping(address, size_bytes, page_bytes, place, descriptor, attached=True)
        registry.enter(mapping)
        undo.callback(mapping.close)
        system.keep_from_children(address, size_bytes, wipe=False)
        undo.pop_all()
    return mapping


def _open_device(ask: Ask, gpu: Gpu | None, place: str) -> Mapping:
    """Device memory that begins and ends with a 64 KiB page, the unit of peer-to-peer transfers."""
    if gpu is None:
        remedy = "install torch with CUDA; in code, pass find_gpu()"
        raise Refusal("region", "there is no GPU runtime", remedy).error()
    page_bytes = 1 << 16
    size_bytes = rounded(ask.size_bytes, page_bytes)
    try:
        whole = gpu.allocate(size_bytes + page_bytes - 1)
    except OSError as error:
        reason = f"{format_bytes(size_bytes)} on {gpu.device}: {error.strerror}"
        raise Refusal("region", reason, "ask for less, or free device memory").error() from error
    skip = -whole.data_ptr() % page_bytes
    mapping = Mapping(whole.data_ptr() + skip, size_bytes, page_bytes, place)
    mapping.tensor = whole[skip : skip + size_bytes]
    registry.enter(mapping)
    return mapping


def _bind(ask: Ask, node: int, machine: Machine, mapping: Mapping, refusals: list[Refusal]) -> None:
    nodes = ", ".join(map(str, machine.nodes))
    if node not in machine.nodes:
        has = f"this machine has memory on nodes {nodes}" if nodes else "this machine has no NUMA"
        remedy = "ask for one of them" if nodes else "ask without a node"
        refusal = Refusal(Trait.NODE, f"node {node} is asked for, {has}", remedy)
        _lacks(ask, Trait.NODE, refusal, refusals)
        return
    try:
        system.bind(mapping.address, mapping.size_bytes, node)
    except OSError as error:
        remedy = "allow the system call mbind (CAP_SYS_NICE in containers)"
        refusal = Refusal(Trait.NODE, f"node {node}: {error.strerror}", remedy)
        _lacks(ask, Trait.NODE, refusal, refusals)


def _require_room(ask: Ask, machine: Machine) -> None:
    """Refuses what would push this process, or another one, out of memory once it is touched."""
    if ask.kind is Kind.FILE:
        return
    room = machine.available_bytes
    if room is not None and ask.size_bytes > room:
        under = machine.cgroup_bytes
        limit = "" if under is None else f" under a control group of {format_bytes(under)}"
        reason = f"{format_bytes(ask.size_bytes)} are asked for, {format_bytes(room)} are available"
        remedy = f"ask for at most {format_bytes(machine.share(0.9))} (Machine.share(0.9))"
        raise Refusal("region", reason + limit, remedy).error()
    free = machine.shared_free_bytes
    if ask.kind is Kind.NAMED and free is not None and ask.size_bytes > free:
        size = format_bytes(ask.size_bytes)
        reason = f"{size} are asked for, {SHARED_FOLDER} has {format_bytes(free)} free"
        remedy = f"mount -o remount,size=SIZE {SHARED_FOLDER}, or --shm-size of a container"
        raise Refusal("region", reason, remedy).error()


def _no_huge(ask: Ask, machine: Machine, error: OSError) -> Refusal:
    needed = -(-ask.size_bytes // system.HUGE_BYTES)
    huge = machine.huge
    if huge is None:
        remedy = "a kernel with CONFIG_HUGETLBFS"
        return Refusal(Trait.HUGE, f"this kernel has no 2 MiB pages: {error.strerror}", remedy)
    reason = f"{needed} pages of 2 MiB are needed, {huge.free} of {huge.total} are free: {error.strerror}"
    total = huge.total + max(0, needed - huge.free)
    remedy = f"sysctl vm.nr_hugepages={total}"
    memory = machine.memory_bytes
    if memory is not None and total * system.HUGE_BYTES > memory:
        remedy = f"ask for less: the machine has {format_bytes(memory)}"
    if needed <= huge.free:
        remedy = "raise the hugetlb limit of the control group"
    return Refusal(Trait.HUGE, reason, remedy)


def _no_memory(ask: Ask, error: OSError) -> Refusal:
    size = format_bytes(ask.size_bytes)
    if ask.kind is Kind.FILE:
        try:
            free = format_bytes(shutil.disk_usage(ask.folder).free)
        except OSError:
            free = "nothing known"
        reason = f"{size} are asked for in {ask.folder!r} with {free} free: {error.strerror}"
        return Refusal("region", reason, "another folder, or less")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close descriptors, or raise ulimit -n"
        return Refusal("region", f"no descriptor is left: {error.strerror}", remedy)
    return Refusal("region", f"{size}: {error.strerror or error}", "ask for less")
