"""What fits into a pool: pages out of bytes, and the requests that no emptiness would help.

Neighbours: `pool` is made to these sizes and asks before it takes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.errors import InputError
from stepwell.base.settings import PoolSettings
from stepwell.cache.pool.answer import NeverFits
from stepwell.core.geometry import Geometry, Rule
from stepwell.core.key import MAX_PAGE_TOKENS

_MAX_SLOTS = 2**31 - 1
"""Slots are int32 in the request table."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a pool.

    Attributes:
        page_tokens: tokens of one page.
        frames: pages in all.
        positions: tokens of one request.
        remainder_bytes: of the capacity, what makes no whole page.
    """

    page_tokens: int
    frames: int
    positions: int
    remainder_bytes: int

    @classmethod
    def of(cls, geometry: Geometry, settings: PoolSettings) -> Limits:
        """Cuts a capacity into pages.

        Raises:
            InputError: a size out of range, a group that is not full, a capacity below one page.
        """
        other = [group.name for group in geometry.groups if group.rule is not Rule.FULL]
        if other:
            raise InputError(f"groups {other} are not full", limit="full groups only, so far")
        for name in ("page_tokens", "capacity_bytes", "requests", "positions"):
            value = getattr(settings, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is {value!r}", limit="a whole number of 1 or more")
        if settings.page_tokens > MAX_PAGE_TOKENS:
            raise InputError(f"page_tokens is {settings.page_tokens}", limit=f"{MAX_PAGE_TOKENS}")
        page_bytes = geometry.page_bytes(settings.page_tokens)
        frames, remainder_bytes = divmod(settings.capacity_bytes, page_bytes)
        if frames == 0:
            raise InputError(
                f"capacity is {settings.capacity_bytes} bytes",
                limit=f"at least one page of {settings.page_tokens} tokens, {page_bytes} bytes",
                remedy="raise pool.capacity_bytes or lower pool.page_tokens",
            )
        if frames * settings.page_tokens > _MAX_SLOTS:
            raise InputError(
                f"{frames} pages of {settings.page_tokens} tokens were asked for",
                limit=f"{_MAX_SLOTS} slots",
                remedy="lower pool.capacity_bytes",
            )
        return cls(settings.page_tokens, frames, settings.positions, remainder_bytes)

    def pages(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.page_tokens)

    def refusal(self, tokens: int) -> NeverFits | None:
        """Why an empty pool could not take so many tokens, if it could not."""
        if tokens > self.positions:
            return NeverFits(
                f"{tokens} tokens; allowed: {self.positions} positions a request; "
                "remedy: shorten it, or raise pool.positions as far as the model was made for"
            )
        if self.pages(tokens) > self.frames:
            return NeverFits(
                f"{tokens} tokens need {self.pages(tokens)} pages; allowed: {self.frames} pages in "
                "all; remedy: raise pool.capacity_bytes"
            )
        return None
