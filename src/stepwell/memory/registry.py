"""Every mapping of this process: what a forked child must not use, and what the exit must not leave behind.

Holds mappings strongly, so that losing a `Region` frees nothing: the collector only queues, and the next call
of `collect` closes and reports. Neighbours: `mapping` and `region` enter and leave.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

from stepwell.base.errors import MisuseError


class Entry(Protocol):
    """What the registry knows of a mapping."""

    place: str

    def busy(self) -> list[str]:
        """Who relies on it, in words."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...

    def leave(self) -> None:
        """In a forked child: lets go of what belongs to the parent."""
        ...

    def unname(self) -> None:
        """At exit: takes its name away, if it has one."""
        ...


_entries: dict[int, Entry] = {}
_lost: deque[Entry] = deque()
_reports: deque[str] = deque()
_held: dict[object, object] = {}
_window: Any = threading.RLock()


class _Family:
    """Forks that lie between the first process and this one."""

    forks = 0


def enter(entry: Entry) -> None:
    """From now on the entry is looked after."""
    _entries[id(entry)] = entry


def remove(entry: Entry) -> None:
    """The entry was closed."""
    _entries.pop(id(entry), None)


def lose(entry: Entry) -> None:
    """Its region was lost without being closed; called by the collector, so it only queues."""
    _lost.append(entry)


def report(text: str) -> None:
    """Something was forgotten; told by the next `collect`. Called by the collector, so it only queues."""
    _reports.append(text)


def collect() -> None:
    """Closes what was lost, and reports where it came from."""
    with contextlib.suppress(IndexError):  # another thread had the last one
        while _lost:
            entry = _lost.popleft()
            if id(entry) in _entries:
                what = f"a region was lost, not closed; it was opened at {entry.place}"
                users = entry.busy()  # a finalizer may have brought it back to life
                try:
                    if not users:
                        entry.close()
                except OSError as error:
                    users = [str(error)]
                _reports.append(what + (f"; it stays mapped: {', '.join(users)}" if users else ""))
        while True:  # where warnings are errors, the others wait
            warnings.warn(_reports.popleft(), ResourceWarning, stacklevel=3)


def hold(key: object, what: object) -> None:
    """Keeps something alive that a transfer may touch, whoever loses it."""
    _held[key] = what


def unhold(key: object) -> None:
    """The transfer has ended."""
    _held.pop(key, None)


def no_fork() -> AbstractContextManager[Any]:
    """Forks wait: between mapping memory and telling the registry, a child would have it for ever."""
    window: AbstractContextManager[Any] = _window
    return window


def forks() -> int:
    """How many forks lie between the first process and this one; whoever was born before has another number."""
    return _Family.forks


def require_own(born: int, what: str) -> None:
    """Refuses to use in a forked child what belongs to its parent.

    Raises:
        MisuseError: `born`, the number of forks when it was made, is not the number now.
    """
    if born != _Family.forks:
        raise MisuseError(
            f"{what} belongs to the parent of this forked process",
            remedy="open another one here; to share a SHARED region, duplicate its descriptor before the fork "
            "(os.dup) or send it over a socket, and attach",
        )


def _in_child() -> None:
    _Family.forks += 1
    for entry in list(_entries.values()):
        with contextlib.suppress(OSError):  # one that cannot be left keeps no other one
            entry.leave()
    for forgotten in (_entries, _lost, _reports, _held):
        forgotten.clear()
    _window.release()


def _at_exit() -> None:
    for entry in list(_entries.values()):
        entry.unname()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_window.acquire, after_in_parent=_window.release, after_in_child=_in_child
    )
atexit.register(_at_exit)
