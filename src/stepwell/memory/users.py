"""Who relies on the bytes of a region: named users, and views.

Neighbours: `region` has one of these, and closes only when nobody is left.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

from stepwell.base.errors import MisuseError
from stepwell.memory.view import ViewBooks


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Use:
    """One reason not to close a region; whoever loses it relies on nothing any more.

    Attributes:
        who: relies on it.
        alone: nobody else may do so alone at the same time.
    """

    who: str
    alone: bool


class Users:
    """The users of one region. Not thread-safe, but for the two queues: the region has the lock.

    Uses and views end by entering a queue, which needs no lock: an arena ends them under its own, and the
    collector at any moment.

    Args:
        what: the region, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        self._views: dict[int, ViewBooks] = {}
        self.ended: deque[Use] = deque()
        self.views_ended: deque[ViewBooks] = deque()

    def begin(self, use: Use) -> None:
        """Somebody relies on the bytes.

        Raises:
            MisuseError: somebody does so alone already.
        """
        self._settle()
        alone = [other.who for other in self._uses if other.alone and use.alone]
        if alone:
            raise MisuseError(
                f"{self._what} is part of {alone[0]}",
                limit="one arena",
                remedy="drain it there, or close that arena, first",
            )
        self._uses.add(use)

    def begin_view(self, books: ViewBooks) -> None:
        """A view begins."""
        self._settle()
        self._views[id(books)] = books

    def _settle(self) -> None:
        while self.ended:
            self._uses.discard(self.ended.popleft())
        while self.views_ended:
            self._views.pop(id(self.views_ended.popleft()), None)

    def names(self) -> list[str]:
        """All of them, in words."""
        self._settle()
        views = [f"a view taken at {books.place}" for books in self._views.values()]
        return [use.who for use in self._uses] + views
