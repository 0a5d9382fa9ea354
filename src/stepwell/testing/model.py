"""What a pool must answer, said with plain dicts: slow, obvious, and the judge of `PagePool`.

No frames, no keys, no runs, no heap: a page is a node with its parent and its tokens, and the page that
leaves next is found by looking at all of them. Shipped for authors of engines and pools.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from stepwell.cache.pool.answer import Answer, Busy, Flags, NeverFits, Ready
from stepwell.core.reasons import Reason


@dataclass(eq=False)
class Node:
    """One sealed page."""

    parent: Node | None
    tokens: tuple[int, ...]
    last_use: int
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)

    def path(self) -> list[Node]:
        """From the first page to this one."""
        above = [] if self.parent is None or self.parent.parent is None else self.parent.path()
        return [*above, self]


@dataclass
class _Request:
    space: Node
    tokens: list[int]
    committed: int
    deepest: Node
    sealed: int
    pages: int
    flags: Flags
    grows: bool = True


class DictPool:
    """The reference for `PagePool` with full groups and least-recently-used eviction.

    Args:
        page_tokens: tokens of one page.
        frames: pages in all.
        requests: open requests at once.
        positions: tokens of one request.
    """

    def __init__(self, page_tokens: int, frames: int, requests: int, positions: int) -> None:
        self.page_tokens = page_tokens
        self.frames = frames
        self.rows = requests
        self.positions = positions
        self.spaces: dict[Hashable, Node] = {}
        self.open_requests: dict[Hashable, _Request] = {}
        self._dropped: set[Node] = set()
        self._tick = 0

    def _now(self) -> int:
        self._tick += 1
        return self._tick

    def nodes(self) -> list[Node]:
        """All pages that can be found."""
        todo = list(self.spaces.values())
        found: list[Node] = []
        while todo:
            node = todo.pop()
            found += node.children.values()
            todo += node.children.values()
        return found

    def kept(self) -> set[Node]:
        """Pages that open requests keep, found or not."""
        return {
            node
            for state in self.open_requests.values()
            if state.sealed
            for node in state.deepest.path()
        }

    def free(self) -> int:
        """Frames that no page and no request has."""
        sealed = set(self.nodes()) | self._dropped
        own = sum(state.pages - state.sealed for state in self.open_requests.values())
        return self.frames - len(sealed) - own

    def evictable(self) -> int:
        """Pages that could leave."""
        return len(set(self.nodes()) - self.kept())

    def _make_room(self, n: int) -> bool:
        missing = n - self.free()
        if missing > self.evictable():
            return False
        for _ in range(missing):
            kept = self.kept()
            leaves = [node for node in self.nodes() if not node.children and node not in kept]
            victim = min(leaves, key=lambda node: node.last_use)
            parent = victim.parent
            assert parent is not None
            del parent.children[victim.tokens]
            parent.last_use = max(parent.last_use, victim.last_use)
        return True

    def open(
        self,
        request: Hashable,
        tokens: Sequence[int],
        space: Hashable,
        flags: Flags = Flags.NONE,
    ) -> Answer:
        """As `PagePool.open`, with any name for the namespace."""
        size = self.page_tokens
        pages = -(-len(tokens) // size)
        if len(tokens) > self.positions or pages > self.frames:
            return NeverFits("")
        if len(self.open_requests) == self.rows:
            return Busy(short_rows=1)
        root = self.spaces.setdefault(space, Node(None, (), 0))
        deepest, cached = root, 0
        limit = 0 if Flags.NO_READ in flags else (len(tokens) - 1) // size
        reason = Reason.NOT_SEALED
        while cached < limit:
            child = deepest.children.get(tuple(tokens[cached * size : (cached + 1) * size]))
            if child is None:
                break
            deepest, cached = child, cached + 1
        if Flags.NO_READ in flags:
            reason = Reason.NO_READ
        elif limit == 0:
            reason = Reason.BELOW_A_PAGE
        elif cached == limit:
            reason = Reason.WHOLE_PREFIX
        state = _Request(root, list(tokens), cached * size, deepest, cached, cached, flags)
        self.open_requests[request] = state
        if not self._make_room(pages - cached):
            short = pages - cached - self.free() - self.evictable()
            self._release(request)
            return Busy(short_frames=short)
        state.pages = pages
        return Ready(cached * size, reason)

    def extend(self, request: Hashable, tokens: int) -> bool | None:
        """As `PagePool.extend`: True for ready, False for busy, None for never."""
        state = self.open_requests[request]
        end = len(state.tokens) + tokens
        pages = -(-end // self.page_tokens)
        if end > self.positions or pages > self.frames:
            return None
        if pages > state.pages:
            if not self._make_room(pages - state.pages):
                return False
            state.pages = pages
        return True

    def commit(self, request: Hashable, tokens: Sequence[int]) -> None:
        """As `PagePool.commit`, with tokens that are known to be right."""
        size = self.page_tokens
        state = self.open_requests[request]
        last = state.committed + len(tokens)
        state.tokens += tokens[len(state.tokens) - state.committed :]
        state.committed = last
        if Flags.NO_WRITE in state.flags or not state.grows or state.sealed >= last // size:
            return
        now = 0
        while state.sealed < last // size:
            page = tuple(state.tokens[state.sealed * size : (state.sealed + 1) * size])
            child = state.deepest.children.get(page)
            if child is not None and Flags.NO_READ in state.flags:
                state.grows = False
                return
            if child is None:
                now = now or self._now()
                child = Node(state.deepest, page, now)
                state.deepest.children[page] = child
            state.deepest = child
            state.sealed += 1

    def _release(self, request: Hashable) -> None:
        state = self.open_requests.pop(request)
        if state.sealed:
            state.deepest.last_use = self._now()
        self._let_dropped_leave()

    def _let_dropped_leave(self) -> None:
        """Dropped pages that nobody keeps leave, tails first, each with its use merged upwards."""
        gone = self._dropped - self.kept()
        for node in sorted(gone, key=lambda node: -len(node.path())):
            assert node.parent is not None
            node.parent.last_use = max(node.parent.last_use, node.last_use)
        self._dropped -= gone

    def close(self, request: Hashable) -> None:
        """As `PagePool.close`."""
        self._release(request)

    def drop(self, prefix: Sequence[int], space: Hashable) -> int:
        """As `PagePool.drop`."""
        size = self.page_tokens
        node = self.spaces.get(space)
        for begin in range(0, len(prefix), size):
            if node is None:
                return 0
            node = node.children.get(tuple(prefix[begin : begin + size]))
        if node is None or node.parent is None:
            return 0
        todo, gone = [node], []
        while todo:
            one = todo.pop()
            gone.append(one)
            todo += one.children.values()
        del node.parent.children[node.tokens]
        self._dropped |= set(gone)
        for state in self.open_requests.values():
            if state.sealed and state.deepest in self._dropped:
                state.grows = False
        self._let_dropped_leave()
        return len(gone)
