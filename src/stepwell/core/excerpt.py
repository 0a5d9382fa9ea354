"""Some pages of a chain, without the pages before them.

Neighbours: `chain` makes it; an index seals from it what has been on its way while the chain has gone on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """Some full pages of a chain, as an index has to know them: reads like the chain, on those pages.

    Attributes:
        page_tokens: of one page.
        root: of the chain.
        first: page with which it begins.
        above: key of the page before it; None at the beginning.
        own: keys of its pages.
        rows: their tokens; shape [pages of it, page_tokens].
        extras: framed extras of those pages that have some.
    """

    page_tokens: int
    root: bytes
    first: int
    above: bytes | None
    own: tuple[bytes, ...]
    rows: npt.NDArray[np.uint32]
    extras: Mapping[int, bytes]

    @property
    def pages(self) -> int:
        """The page behind its last one."""
        return self.first + len(self.own)

    def require(self, page_tokens: int) -> None:
        """See `Chain.require`."""
        require_page_tokens(self.page_tokens, page_tokens)

    def key(self, page: int) -> bytes:
        """See `Chain.key`; also of the page before its first."""
        if page == self.first - 1 and self.above is not None:
            return self.above
        assert self.first <= page < self.pages, "a page of the excerpt"
        return self.own[page - self.first]

    def keys(self, first: int, last: int) -> list[bytes]:
        """See `Chain.keys`."""
        assert self.first <= first, "a page of the excerpt"
        return list(self.own[first - self.first : last - self.first])

    def excerpt(self, first: int, last: int) -> Excerpt:
        """See `Chain.excerpt`."""
        assert self.first <= first <= last <= self.pages, "pages of the excerpt"
        begin, end = first - self.first, last - self.first
        above = self.above if not begin else self.own[begin - 1]
        extras = {page: one for page, one in self.extras.items() if first <= page < last}
        return Excerpt(
            self.page_tokens,
            self.root,
            first,
            above,
            self.own[begin:end],
            self.rows[begin:end],
            extras,
        )

    def page_rows(self, first: int, last: int) -> npt.NDArray[np.uint32]:
        """See `Chain.page_rows`."""
        assert self.first <= first, "a page of the excerpt"
        return self.rows[first - self.first : last - self.first]

    def extras_of(self, page: int) -> bytes:
        """See `Chain.extras_of`."""
        return self.extras.get(page, b"")

    def extra_pages(self, first: int, last: int) -> list[int]:
        """See `Chain.extra_pages`."""
        return sorted(page for page in self.extras if first <= page < last)


def require_page_tokens(mine: int, page_tokens: int) -> None:
    """Checks the size of pages.

    Raises:
        InputError: it is another one.
    """
    if mine != page_tokens:
        raise InputError(
            f"the chain has pages of {mine} tokens",
            limit=f"{page_tokens}, as this index",
            remedy="make the namespace with the page_tokens of the pool",
        )
