"""Who relies on the bytes of a region: named users, and views.

Neighbours: `region` has one of these, and closes only when nobody is left.
"""

from __future__ import annotations

from collections import Counter, deque

from stepwell.base.errors import MisuseError
from stepwell.memory.view import ViewBooks


class Users:
    """The users of one region. Not thread-safe: the region has the lock.

    Args:
        what: the region, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._named: Counter[str] = Counter()
        self._alone: str | None = None
        self._views: dict[int, ViewBooks] = {}
        self.ended: deque[ViewBooks] = deque()
        """Views that the collector has seen the end of; appending needs no lock."""

    def begin(self, who: str, *, alone: bool) -> None:
        """Somebody relies on the bytes; nobody else may do so `alone` at the same time."""
        if alone and self._alone is not None:
            raise MisuseError(f"{self._what} is part of {self._alone}", limit="one arena")
        self._named[who] += 1
        self._alone = who if alone else self._alone

    def end(self, who: str) -> None:
        """The counterpart of `begin`."""
        if not self._named[who]:
            raise MisuseError(f"{who} does not use {self._what}")
        self._named[who] -= 1
        if who == self._alone:
            self._alone = None

    def begin_view(self, books: ViewBooks) -> None:
        """A view begins."""
        self._forget_ended()
        self._views[id(books)] = books

    def _forget_ended(self) -> None:
        while self.ended:
            self._views.pop(id(self.ended.popleft()), None)

    def names(self) -> list[str]:
        """All of them, in words."""
        self._forget_ended()
        named = [who for who, count in self._named.items() if count]
        return named + [f"a view taken at {books.place}" for books in self._views.values()]
