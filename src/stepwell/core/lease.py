"""All holds of one request as one object, and the books about everybody's.

Owns: which request has which lease. Must not know: the tree, keys. Neighbours: `index` decides what a
lease keeps and what its end means.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from stepwell.base.errors import StaleError
from stepwell.core.paths import NO_FRAME


@dataclass(slots=True)
class Books:
    """What is known of one lease; outlives the `Lease` that a caller has.

    Attributes:
        request: who took it.
        deepest: frame of the deepest page it keeps, or `NO_FRAME` for an empty prefix.
        generation: of that frame when the hold was taken.
        pages: pages of the prefix it keeps.
        grows: whether further pages may be sealed below `deepest`.
        place: file and line that took it.
        lease: the caller's object, to notice that it was lost.
        released: its holds are back.
    """

    request: Hashable
    deepest: int
    generation: int
    pages: int
    grows: bool
    place: str
    lease: weakref.ref[Lease] | None = None
    released: bool = False


def caller(depth: int) -> str:
    """File and line of the caller so many calls above."""
    frame = sys._getframe(depth + 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Lease:
    """All holds of one request, released exactly once.

    A lease that its holder loses without release is reported with the place that took it, and the
    index's next call releases it: the garbage collector only queues, it never frees.
    """

    __slots__ = ("__weakref__", "books")

    def __init__(self, books: Books) -> None:
        self.books = books

    @property
    def pages(self) -> int:
        """Pages of the prefix that this lease keeps."""
        return self.books.pages

    @property
    def grows(self) -> bool:
        """Whether further pages can be sealed under it; ends when its prefix leaves the index."""
        return self.books.grows


class Leases:
    """The leases of one index, one for each request."""

    def __init__(self) -> None:
        self._books: dict[Hashable, Books] = {}
        self._lost: deque[Books] = deque()

    def __iter__(self) -> Iterator[Books]:
        """The books of every lease that keeps at least one page."""
        return (books for books in self._books.values() if books.deepest != NO_FRAME)

    def of(self, request: Hashable) -> Books | None:
        """The books of a request's lease, if it has one."""
        return self._books.get(request)

    def take(self, books: Books) -> Lease:
        """A lease for these books, which replace the request's earlier ones."""
        lease = Lease(books)
        lost = self._lost
        books.lease = weakref.ref(lease, lambda _: lost.append(books))
        self._books[books.request] = books
        return lease

    def own(self, lease: Lease) -> Books:
        """The books of a lease that is still held here.

        Raises:
            StaleError: it was released, or is another index's.
        """
        books = lease.books
        if books.released:
            raise StaleError(f"the lease of request {books.request!r} was released already")
        if self._books.get(books.request) is not books:
            raise StaleError(f"the lease of request {books.request!r} is not of this index")
        return books

    def end(self, books: Books) -> None:
        """The lease is stale from now on."""
        books.released = True
        if self._books.get(books.request) is books:
            del self._books[books.request]

    @staticmethod
    def report(books: Books) -> None:
        """Warns about a lease that was lost, on behalf of the index that has released it."""
        warnings.warn(
            f"the lease of request {books.request!r} was lost, not released; "
            f"it was taken at {books.place}",
            ResourceWarning,
            stacklevel=4,
        )

    def lost(self) -> list[Books]:
        """Books of the leases that were lost since the last call, without being released."""
        found: list[Books] = []
        while self._lost:
            books = self._lost.popleft()
            if not books.released:
                found.append(books)
        return found
