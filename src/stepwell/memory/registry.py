"""Every mapping of this process: what a forked child must not use, and what the exit must not leave behind.

Holds mappings strongly, so that losing a `Region` frees nothing: the collector only queues, and the next call
of `collect` closes and reports. Neighbours: `mapping` and `region` enter and leave.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections import deque
from typing import Protocol

from stepwell.base.errors import MisuseError


class Entry(Protocol):
    """What the registry knows of a mapping."""

    place: str

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


def collect() -> None:
    """Closes what was lost, and reports where it came from."""
    while _lost:
        try:
            entry = _lost.popleft()
        except IndexError:
            return  # another thread had the last one
        if id(entry) in _entries:
            entry.close()
            text = f"a region was lost, not closed; it was opened at {entry.place}"
            warnings.warn(text, ResourceWarning, stacklevel=3)


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
            remedy="open another one here; share a SHARED region by its descriptor",
        )


def _in_child() -> None:
    _Family.forks += 1
    for entry in list(_entries.values()):
        entry.leave()
    _entries.clear()
    _lost.clear()


def _at_exit() -> None:
    for entry in list(_entries.values()):
        entry.unname()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
