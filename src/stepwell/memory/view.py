"""Bytes inside of a `with` block, and the proof that nobody uses them after it.

A view exports its bytes through an object of its own. Everything made from it (slices, arrays, tensors)
keeps that object alive, so its end is the end of the last use, whatever the block did. Neighbours: `buffer` and
`region` give views; their owners protect the bytes from the beginning to the last use.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import weakref
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any, Protocol

from stepwell.base.errors import MisuseError

_REFERENCES = 3
"""To the memoryview when its block ends: the block's name, our own, and the argument of the question."""


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
        # Only the block's own name may have it: torch.frombuffer keeps the object itself, unnoticed by release.
        # What an exception carries along are frames, in which a released memoryview does no harm.
        others = sys.getrefcount(memory) - _REFERENCES
        if others > 0 and error is not None:
            others -= sum(isinstance(one, FrameType) for one in gc.get_referrers(memory))
        if others <= 0:
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
                remedy="copy what you need out of the block; the bytes stay out of use until then",
            )
