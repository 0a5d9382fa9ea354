"""What fits into a pool: frames out of bytes, groups into frames, and the requests that never fit.

All groups share one set of frames, so pages and states share one budget. A frame holds one page of the full
group (of the first window group where there is none). A page of another group takes as many frames as it
has times as many layers, and a state as many as its bytes need.

Source: groups that share frames by being cut into equal numbers of layers are vLLM's hybrid KV cache (2025).

Neighbours: `pool` is made to these sizes and asks before it takes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.errors import InputError
from stepwell.base.settings import PoolSettings
from stepwell.cache.pool.answer import NeverFits
from stepwell.cache.store import StoreModel
from stepwell.core.cut import Cut
from stepwell.core.geometry import ITEM_BYTES, Geometry, Group, Rule
from stepwell.core.key import MAX_PAGE_TOKENS
from stepwell.core.part import Part

_MAX_SLOTS = 2**31 - 1
"""Slots are int32 in the request tables."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a pool.

    Attributes:
        page_tokens: tokens of one page.
        frames: in all.
        positions: tokens of one request.
        remainder_bytes: of the capacity, what makes no whole frame.
        frame_bytes: of one frame.
        frame_layers: layers whose K and V of a page one frame holds.
        row_k: elements of K of one token in one layer, the widest group's.
        row_v: elements of V, likewise.
        full: the full group, if there is one.
        windows: the window groups.
        states: the state groups.
        ahead_tokens: how far before a request its window groups have room.
        contiguous: every request has all its frames from the start, and shares none.
    """

    page_tokens: int
    frames: int
    positions: int
    remainder_bytes: int
    frame_bytes: int
    frame_layers: int
    row_k: int
    row_v: int
    full: Cut | None
    windows: tuple[Cut, ...]
    states: tuple[Cut, ...]
    ahead_tokens: int
    contiguous: bool

    @classmethod
    def of(cls, geometry: Geometry, settings: PoolSettings) -> Limits:
        """Cuts a capacity into frames.

        Raises:
            InputError: a size out of range, groups that cannot share frames, a capacity below one frame.
        """
        _check(settings)
        size = settings.page_tokens
        main = _main_group(geometry)
        paged = [group for group in geometry.groups if group.rule is not Rule.STATE]
        row_k = max(group.kv_heads * group.head_size_k for group in paged)
        row_v = max(group.kv_heads * group.head_size_v for group in paged)
        layers = len(main.layers)
        frame_bytes = size * layers * (row_k + row_v) * ITEM_BYTES[main.dtype]
        frames, remainder_bytes = divmod(settings.capacity_bytes, frame_bytes)
        if frames == 0:
            raise InputError(
                f"capacity is {settings.capacity_bytes} bytes",
                limit=f"at least one page of {size} tokens, {frame_bytes} bytes",
                remedy="raise pool.capacity_bytes or lower pool.page_tokens",
            )
        if frames * size > _MAX_SLOTS:
            raise InputError(
                f"{frames} pages of {size} tokens were asked for",
                limit=f"{_MAX_SLOTS} slots",
                remedy="lower pool.capacity_bytes",
            )

        def cuts(rule: Rule) -> tuple[Cut, ...]:
            return tuple(
                _cut(group, size, layers, frame_bytes)
                for group in geometry.groups
                if group.rule is rule
            )

        return cls(
            page_tokens=size,
            frames=frames,
            positions=settings.positions,
            remainder_bytes=remainder_bytes,
            frame_bytes=frame_bytes,
            frame_layers=layers,
            row_k=row_k,
            row_v=row_v,
            full=next(iter(cuts(Rule.FULL)), None),
            windows=cuts(Rule.WINDOW),
            states=cuts(Rule.STATE),
            ahead_tokens=settings.ahead_tokens,
            contiguous=settings.contiguous,
        )

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """All groups: the full one, the window groups, the state groups."""
        return (*(() if self.full is None else (self.full,)), *self.windows, *self.states)

    def model(self, geometry: Geometry) -> StoreModel:
        """What the tiers have to know: frames are theirs as they are here, whatever is in them."""
        layers = (0, sum(len(group.layers) for group in geometry.groups))
        layout = f"frame {self.frame_layers}.{self.page_tokens}.{self.row_k}.{self.row_v}"
        parts = tuple(
            Part(cut.group.name, f"{layout} {cut.group.dtype}", layers, (0, cut.group.kv_heads))
            for cut in self.cuts
        )
        return StoreModel(self.page_tokens, self.cuts, tuple(part.digest() for part in parts))

    def pages(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.page_tokens)

    def span_frames(self) -> int:
        """Frames of one request of a contiguous pool."""
        pages = self.pages(self.positions)
        each = sum(cut.frames for cut in (self.full, *self.windows) if cut is not None)
        return pages * each + sum(cut.frames for cut in self.states)

    def rows(self, requests: int) -> int:
        """Requests that can be open at once, of so many that were asked for."""
        return min(requests, self.frames // self.span_frames()) if self.contiguous else requests

    def request_frames(self, tokens: int) -> int:
        """Frames that a request of so many tokens needs at most at one time, if it shares none."""
        if self.contiguous:
            return self.span_frames()
        pages = self.pages(tokens)
        count = 0 if self.full is None else pages
        for cut in self.windows:
            assert cut.group.window is not None, "a window group has a window"
            count += (
                min(pages, self.pages(cut.group.window - 1 + self.ahead_tokens) + 1) * cut.frames
            )
        # Of a state the one that a step reads, when it was kept or is another's, and the one it writes.
        return count + 2 * sum(cut.frames for cut in self.states)

    def refusal(self, tokens: int) -> NeverFits | None:
        """Why an empty pool could not take so many tokens, if it could not."""
        if tokens > self.positions:
            return NeverFits(
                f"{tokens} tokens; allowed: {self.positions} positions a request; "
                "remedy: shorten it, or raise pool.positions as far as the model was made for"
            )
        needed = self.request_frames(tokens)
        if needed > self.frames:
            what = "pages" if self.full and not (self.windows or self.states) else "frames"
            return NeverFits(
                f"{tokens} tokens need {needed} {what}; allowed: {self.frames} {what} in "
                "all; remedy: raise pool.capacity_bytes"
            )
        return None


def _check(settings: PoolSettings) -> None:
    for name in (
        "page_tokens",
        "capacity_bytes",
        "requests",
        "positions",
        "ahead_tokens",
        "boundaries",
        "minimum_hit_tokens",
    ):
        value = getattr(settings, name)
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value!r}", limit="a whole number of 1 or more")
    size, grid = settings.page_tokens, settings.state_tokens
    if size > MAX_PAGE_TOKENS:
        raise InputError(f"page_tokens is {size}", limit=f"{MAX_PAGE_TOKENS}")
    if type(grid) is not int or grid < 0 or grid % size:
        raise InputError(
            f"state_tokens is {grid!r}", limit=f"a multiple of page_tokens, {size}; or 0"
        )


def _main_group(geometry: Geometry) -> Group:
    """The group whose page is one frame."""
    full = [group for group in geometry.groups if group.rule is Rule.FULL]
    windows = [group for group in geometry.groups if group.rule is Rule.WINDOW]
    if len(full) > 1:
        raise InputError(
            f"groups {[group.name for group in full]} are full",
            limit="one full group",
            remedy="give layers with the same heads and sizes as one group",
        )
    if not full and not windows:
        raise InputError(
            "no group has pages: a model of states alone",
            limit="at least one full or window group",
        )
    dtypes = sorted({group.dtype for group in (*full, *windows)})
    if len(dtypes) > 1:
        raise InputError(f"the groups have dtypes {dtypes}", limit="one dtype for K and V")
    return (*full, *windows)[0]


def _cut(group: Group, page_tokens: int, layers: int, frame_bytes: int) -> Cut:
    if group.rule is Rule.STATE:
        return Cut(group, -(-group.state_bytes // frame_bytes), 1)
    frames = -(-len(group.layers) // layers)
    if group.rule is Rule.FULL:
        return Cut(group, frames, 0)
    assert group.window is not None, "a window group has a window"
    return Cut(group, frames, -(-(group.window - 1) // page_tokens))
