"""Bytes inside of a `with` block, and the proof that nobody uses them after it.

A view exports its bytes through an object of its own. Everything made from it (slices, arrays, tensors)
keeps that object alive, so its end is the end of the last use, whatever the block did. Neighbours: `buffer` and
`region` give views; their owners protect the bytes from the beginning to the last use.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import FrameType, TracebackType
from typing import Any, Protocol

from stepwell.base.errors import MisuseError


def _references(memory: memoryview) -> int:
    """As many as the interpreter counts from here; only differences mean anything."""
    return sys.getrefcount(memory)


def _own() -> int:
    """The count of a memoryview that only one local name has, as `View.__exit__` has it."""
    memory = memoryview(b"")
    return _references(memory)


_OWN = _own()
_SNAPSHOT = 3 if sys.version_info < (3, 13) else -1
"""References to the copy of a function's names: its frame's, ours, and the argument of the question."""


_DEPTH = 8
"""Functions between a view's end and whoever has its name: a few when a stack of contexts ends it."""


def _named(memory: memoryview, most: int, error: BaseException | None) -> int:
    """How many names of functions are this memoryview, counted up to `most`.

    Functions that run now, and those in the trace of an error: a released memoryview does no harm there.
    """
    found = 0
    for frame in _frames(error):
        names = frame.f_locals
        found += sum(value is memory for value in names.values())
        if frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(names) == _SNAPSHOT:
            # Before Python 3.13 the names of a function are a copy that its frame keeps: left full, it would
            # keep every array of the block alive. Not emptied when somebody else has it, by calling locals().
            names.clear()
        if found >= most:
            break
    return found


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    seen: set[FrameType] = set()
    running: FrameType | None = sys._getframe(3)
    while running is not None and len(seen) < _DEPTH:
        seen.add(running)
        yield running
        running = running.f_back
    trace = None if error is None else error.__traceback__
    while trace is not None:
        if trace.tb_frame not in seen:
            yield trace.tb_frame
        trace = trace.tb_next


@dataclass(slots=True, eq=False)
class ViewBooks:
    """What the owner of the bytes knows of one view; outlives it.

    Attributes:
        token: what the owner knows the bytes by.
        place: file and line that asked for the view.
        over: its block is over.
        ref: to the object that exports the bytes. Held here and not by the view: the collector calls
            nobody back for a reference that is garbage itself.
    """

    token: Any
    place: str
    over: bool = False
    ref: weakref.ref[Any] | None = None


class ViewOwner(Protocol):
    """Who protects the bytes of views."""

    def view_began(self, books: ViewBooks) -> None:
        """Protects the bytes, or raises."""
        ...

    def view_left(self, books: ViewBooks) -> None:
        """The block is over, and something still uses the bytes."""
        ...

    def view_ended(self, books: ViewBooks) -> None:
        """Nothing uses them any more. Called by the collector too, so it may only queue."""
        ...


@lru_cache(maxsize=64)
def _bytes_type(size_bytes: int) -> Any:
    """One type for each size of a frame, not one for each used length: making one costs more than a view."""
    return ctypes.c_ubyte * size_bytes


class View:
    """Bytes of one frame or region, for one `with` block.

    Args:
        owner: protects the bytes.
        token: what the owner knows them by.
        span: address and size in bytes of the whole frame or region.
        part: what of them the block gets.
        readonly: the block may not write.
        place: file and line that asked for it.
    """

    __slots__ = ("_memory", "_owner", "_span", "books")

    def __init__(
        self,
        owner: ViewOwner,
        token: Any,
        span: tuple[int, int],
        part: slice,
        readonly: bool,
        place: str,
    ) -> None:
        self._owner = owner
        self._span = (*span, part, readonly)
        self._memory: memoryview | None = None
        self.books = ViewBooks(token, place)

    def __enter__(self) -> memoryview:
        """The bytes.

        Raises:
            MisuseError: a view is for one block.
            StaleError: the bytes belong to somebody else by now.
        """
        books, owner = self.books, self._owner
        if books.ref is not None:
            raise MisuseError("a view is for one block", remedy="ask the buffer for another one")
        address, size_bytes, part, readonly = self._span
        exporter = _bytes_type(size_bytes).from_address(address)
        exporter.owner = owner  # an array that outlives everything else still has its memory
        books.ref = weakref.ref(exporter, lambda _: owner.view_ended(books))
        owner.view_began(books)
        memory = memoryview(exporter).cast("B")[part]
        self._memory = memory.toreadonly() if readonly else memory
        return self._memory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        books, memory = self.books, self._memory
        assert memory is not None, "entered"
        assert books.ref is not None, "entered"
        self._memory = None
        books.over = True
        # torch.frombuffer keeps the memoryview itself, unnoticed by release: whoever has it that is no name of a
        # frame may be such a tensor, and then it must live.
        others = _references(memory) - _OWN
        if others <= 0 or others <= _named(memory, others, error):
            with contextlib.suppress(BufferError):  # an export keeps the exporter alive
                memory.release()
        del memory
        if books.ref() is None:
            return
        self._owner.view_left(books)
        if error is None:
            raise MisuseError(
                f"the view taken at {books.place} is used after its block: a slice, array or tensor "
                "made from it is alive",
                remedy="del it before the block ends, or copy; the frame is out of use until it is gone",
            )
