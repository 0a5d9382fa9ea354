"""Keeping boundaries: their window pages are wanted, and a state is sealed where the request just is.

Owns: nothing; it works on the rows of one request. Neighbours: `boundaries` chooses the positions, `holdings`
says when, and has the frames; `core.walked` remembers what is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.observe import Counters
from stepwell.cache.pool.boundaries import Boundaries
from stepwell.cache.pool.request import Kept, OpenRequest, Wish
from stepwell.cache.pool.states import StateGroup, StateRow
from stepwell.cache.pool.supply import Supply
from stepwell.cache.pool.windows import WindowGroup
from stepwell.core.chain import Chain
from stepwell.core.frames import FrameIds, Frames
from stepwell.core.walked import WalkedIndex


@dataclass(frozen=True, slots=True)
class Keeping:
    """Keeps boundaries in the window and state groups of a pool.

    Attributes:
        boundaries: where they can be, and how many are kept.
        windows: the window groups.
        states: the state groups.
        frames: of all groups.
        supply: has frames for the state after the next step, or none.
        counters: counts what happens.
    """

    boundaries: Boundaries
    windows: tuple[WindowGroup, ...]
    states: tuple[StateGroup, ...]
    frames: Frames
    supply: Supply
    counters: Counters

    def passed(self, opened: OpenRequest, before: int, last: int) -> None:
        """Keeps the boundaries of the prompt that were passed, and the last few of the answer.

        Args:
            opened: the request, with its tokens committed and its pages sealed.
            before: tokens that were committed before.
            last: tokens up to which pages are sealed.
        """
        if not (self.windows or self.states):
            return
        for position in opened.boundaries:
            if before < position <= min(opened.committed, last):
                opened.unsaved.append((self._page(opened, position), self._keep(opened, position)))
        latest = self.boundaries.of_answer(max(before, opened.prompt_tokens), last)
        if latest is None:
            return
        kept = self._keep(opened, latest)
        if kept:
            opened.recent.append((self._page(opened, latest), kept))
        if len(opened.recent) > self.boundaries.count:
            for index, records, generations in opened.recent.popleft()[1]:
                index.unwant(records, generations)

    @staticmethod
    def _page(opened: OpenRequest, position: int) -> int:
        return position // opened.chain.namespace.page_tokens

    def _keep(self, opened: OpenRequest, position: int) -> Kept:
        """Keeps a boundary in the window groups, and in the state groups if the request is just there."""
        page = self._page(opened, position)
        kept: Kept = []
        for window, row in zip(self.windows, opened.windows, strict=True):
            records = window.before(row, page)
            if records is None:
                # Without its window a state would be of no use.
                return kept
            kept.append(self._want(window.index, records))
        if opened.committed == position:
            for group, state in zip(self.states, opened.states, strict=True):
                kept += self._keep_state(group, state, opened.chain, page)
        return kept

    def _want(self, index: WalkedIndex, records: FrameIds) -> Wish:
        index.want(records)
        return index, records, self.frames.generation[records]

    def _keep_state(
        self, group: StateGroup, state: StateRow, chain: Chain, page: int
    ) -> list[Wish]:
        index = group.index
        if index.has(chain.key(page - 1)):
            if index.boundary(chain, page) < page:
                return []
            # It is kept for this prompt too, and was used last by it.
            there = index.hold(chain, page - 1, page)
            wish = self._want(index, there)
            index.release(there)
            return [wish]
        spare = self.supply.take(group.cut.frames)
        if spare is None:
            self.counters.add("states_skipped")
            return []
        try:
            group.seal(state, chain, page, spare)
        finally:
            if state.own is not spare:
                self.supply.give_back(spare)
        return [self._want(index, state.held)]
