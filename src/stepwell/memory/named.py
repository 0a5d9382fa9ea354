"""Names in shared memory: one owner of a name, and what a killed owner left is recognised.

A name is taken as long as a process that created or attached it lives: each of them has a shared lock on
it, which the kernel takes back from whoever dies. Whether there is one can be asked without taking any: a
reader that looks is never mistaken for an owner. Neighbours: `mapping` maps what is opened here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from contextlib import ExitStack
from pathlib import Path

from stepwell.base.errors import RefusedError
from stepwell.memory.ask import Refusal
from stepwell.memory.machine import SHARED_FOLDER

PREFIX = "stepwell-"
_LOCK = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux: kind, whence, first byte, bytes, process (none: of the open file)."""


def path_of(name: str) -> Path:
    """Where a name lies in the file system."""
    return Path(SHARED_FOLDER, PREFIX + name)


def create(name: str, size_bytes: int) -> int:
    """A new segment under a name; the descriptor.

    The segment gets its size and its lock before it gets its name, so nobody finds a name without an owner.

    Raises:
        RefusedError: a living process has the name, or there is no shared memory here.
    """
    try:
        descriptor = os.open(SHARED_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        remedy = "use a SHARED region, which needs no name and no /dev/shm"
        reason = f"nothing can be made in {SHARED_FOLDER}: {error.strerror}"
        raise Refusal("region", reason, remedy).error() from error
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        os.ftruncate(descriptor, size_bytes)
        _lock(descriptor, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)
        while not _linked(descriptor, path_of(name)):
            _remove_if_left(name)
        undo.pop_all()
    return descriptor


def remove_left() -> dict[str, int]:
    """Removes the segments of dead owners, whose memory is lost to everybody.

    Returns:
        Bytes by name of what was removed.
    """
    removed = {}
    for path in sorted(Path(SHARED_FOLDER).glob(f"{PREFIX}*")):
        name = path.name.removeprefix(PREFIX)
        with contextlib.suppress(OSError, RefusedError):  # in use, another user's, or gone already
            size_bytes = path.lstat().st_size
            _remove_if_left(name)
            removed[name] = size_bytes
    return removed


def _linked(descriptor: int, path: Path) -> bool:
    """Gives an unnamed file its name; False if the name is there already."""
    source = f"/proc/self/fd/{descriptor}"
    try:
        # With a folder descriptor Python calls linkat, which can follow /proc to the file.
        os.link(source, path, src_dir_fd=descriptor, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def _remove_if_left(name: str) -> None:
    """Removes the segment of a dead owner; raises if anybody has it."""
    path = path_of(name)
    try:
        found = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _taken(name, f"and cannot be opened: {error.strerror}").error() from error
    try:
        if not _locked(found, fcntl.F_WRLCK):
            raise _taken(name, "by a process that lives").error()
        # Another process may have removed and made it anew between open and lock: then ours has no name.
        if _same(found, path):
            path.unlink()
    finally:
        os.close(found)


def _same(descriptor: int, path: Path) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _taken(name: str, how: str) -> Refusal:
    remedy = "choose another name, or end that process (fuser shows it)"
    return Refusal("region", f"the name {name!r} ({path_of(name)}) is taken {how}", remedy)


def attach(name: str) -> int:
    """The segment that a living process has under a name; the descriptor.

    Raises:
        RefusedError: there is none, or only one that a dead process left.
    """
    path = path_of(name)
    remedy = "create it first, and keep the process that does"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise Refusal("region", f"{path}: {error.strerror}", remedy).error() from error
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            reason = f"{path} belongs to user {owner}, who could make it shorter under its readers"
            raise Refusal("region", reason, "run both as one user").error()
        if _lock(descriptor, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) == fcntl.F_UNLCK:
            reason = f"the owner of {path} is dead; nobody can vouch for its bytes"
            raise Refusal("region", reason, remedy).error()
        if not _locked(descriptor, fcntl.F_RDLCK) or not _same(descriptor, path):
            raise Refusal("region", f"{path} was removed just now", remedy).error()
        undo.pop_all()
    return descriptor


def _lock(descriptor: int, command: int, kind: int) -> int:
    """One lock command of an open file; the kind of lock that the kernel answers with."""
    answer = fcntl.fcntl(descriptor, command, _LOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    return int(_LOCK.unpack(answer)[0])


def _locked(descriptor: int, kind: int) -> bool:
    """Takes a lock: for reading, which many can have, or for writing, which only somebody alone can."""
    try:
        _lock(descriptor, fcntl.F_OFD_SETLK, kind)
    except BlockingIOError:
        return False
    return True


def remove(name: str, descriptor: int) -> None:
    """Takes the name away, if it still names this segment; who has it mapped keeps it."""
    if _same(descriptor, path_of(name)):
        path_of(name).unlink()
