"""Memory calls of the kernel that Python does not have: a thin layer, numbers in and OSError out.

Must not know what regions are. All calls release the interpreter lock. Neighbours: `mapping`, `prepare`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from functools import cache
from typing import Any

HUGE_BYTES = 2 << 20
PAGE_BYTES = mmap.PAGESIZE

_MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
_MAP_HUGETLB = 0x40000
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_HUGE_2MB = 21 << 26
_POPULATE_WRITE = 23
_WIPEONFORK = 18
_MLOCK_ONFAULT = 1
_MPOL_BIND = 2
_MPOL_F_NODE_ADDR = 3
_NUMBERS = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239},
    "aarch64": {"mbind": 235, "get_mempolicy": 236},
}
"""glibc has no wrapper of these two; libnuma has, but is one more package for two calls."""


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = (pointer, size, integer, integer, integer, ctypes.c_long)
    libc.munmap.argtypes = libc.mlock.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, integer)
    if hasattr(libc, "mlock2"):
        libc.mlock2.argtypes = (pointer, size, integer)
    libc.syscall.restype = ctypes.c_long
    return libc


def _check(result: int, what: str) -> None:
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def map_memory(size_bytes: int, descriptor: int | None = None, *, huge: bool = False) -> int:
    """Maps memory that can be read and written; the address.

    Args:
        size_bytes: a multiple of the page size.
        descriptor: of a file or shared memory; None maps memory of this process only.
        huge: in 2 MiB pages, for memory without a descriptor.
    """
    if descriptor is not None:
        flags = mmap.MAP_SHARED
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # Reserved huge pages are ours from here on; small ones are counted as they are touched.
        flags |= _MAP_HUGETLB | _HUGE_2MB if huge else _MAP_NORESERVE
    return _map(None, size_bytes, flags, -1 if descriptor is None else descriptor)


def map_zeros(address: int, size_bytes: int) -> None:
    """Maps fresh zeros at an address where nothing is mapped."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    _map(address, size_bytes, flags, -1)


def _map(address: int | None, size_bytes: int, flags: int, descriptor: int) -> int:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc().mmap(address, size_bytes, access, flags, descriptor, 0)
    if found in (None, _MAP_FAILED):
        _check(-1, f"mmap of {size_bytes} bytes")
    return int(found)


def unmap(address: int, size_bytes: int) -> None:
    """Gives a mapping back."""
    _check(_libc().munmap(address, size_bytes), "munmap")


def advise_huge(address: int, size_bytes: int) -> None:
    """Asks for transparent huge pages; a kernel without them says no, and nothing is lost."""
    _libc().madvise(address, size_bytes, mmap.MADV_HUGEPAGE)


def keep_from_children(address: int, size_bytes: int, *, wipe: bool) -> None:
    """A forked child does not get these bytes.

    Args:
        wipe: it finds zeros there, else nothing at all; only memory of this process can be wiped.
    """
    advice = _WIPEONFORK if wipe else mmap.MADV_DONTFORK
    _check(_libc().madvise(address, size_bytes, advice), "madvise")


def populate(address: int, size_bytes: int, *, fresh: bool) -> None:
    """Touches every page for writing without changing it, so that missing memory is an OSError, no signal.

    Args:
        address: of its first page.
        size_bytes: whole pages.
        fresh: nobody else has bytes there. Kernels before 5.14 cannot touch without writing, so there other
            memory is left as it is.
    """
    result = _libc().madvise(address, size_bytes, _POPULATE_WRITE)
    if result == -1 and ctypes.get_errno() == errno.EINVAL:
        for at in range(address, address + size_bytes, PAGE_BYTES) if fresh else ():
            ctypes.c_ubyte.from_address(at).value = 0
        return
    _check(result, f"touching {size_bytes} bytes")


def lock(address: int, size_bytes: int) -> None:
    """Locks a mapping in memory, at once for the limit and page by page as it is touched."""
    libc = _libc()
    if hasattr(libc, "mlock2"):
        result = libc.mlock2(address, size_bytes, _MLOCK_ONFAULT)
    else:
        result = libc.mlock(address, size_bytes)  # musl: touches all of it here
    _check(result, f"mlock of {size_bytes} bytes")


def bind(address: int, size_bytes: int, node: int) -> None:
    """Pages of this mapping that are not touched yet come from one memory node."""
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    size = ctypes.c_ulong(size_bytes)
    _syscall("mbind", ctypes.c_void_p(address), size, _MPOL_BIND, mask, ctypes.c_ulong(1025), 0)


def node_of(address: int) -> int:
    """The memory node on which a touched page lies."""
    node = ctypes.c_int(-1)
    none = ctypes.c_void_p(None)
    nothing = ctypes.c_ulong(0)
    where = ctypes.c_void_p(address)
    _syscall("get_mempolicy", ctypes.byref(node), none, nothing, where, _MPOL_F_NODE_ADDR)
    return node.value


def _syscall(name: str, *arguments: Any) -> None:
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None or platform.system() != "Linux":
        raise OSError(38, f"{name} is not known for {platform.system()} on {platform.machine()}")
    _check(_libc().syscall(ctypes.c_long(number), *arguments), name)
