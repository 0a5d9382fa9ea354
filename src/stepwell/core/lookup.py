"""What the closed index can be asked without changing it.

Owns: which key is where, and the tokens of every indexed page. Must not know: leases, the order in which pages leave.
Neighbours: `index` adds what changes it; `contents` has keys and tokens, `paths` the tree.
"""

from __future__ import annotations

import numpy as np

from stepwell.base.observe import Counters
from stepwell.core.chain import Chain, Pages
from stepwell.core.contents import Contents
from stepwell.core.excerpt import Excerpt
from stepwell.core.frames import FrameIds, Frames, joined
from stepwell.core.paths import Paths
from stepwell.core.reasons import Reason

_NONE: FrameIds = np.empty(0, np.int32)


class Lookup:
    """Keys, tokens and the tree of one place.

    Args:
        frames: the place.
        page_tokens: tokens of one page.
        counters: counts what happens.
    """

    def __init__(self, frames: Frames, page_tokens: int, counters: Counters) -> None:
        self.page_tokens = page_tokens
        self._frames = frames
        self._counters = counters
        self._paths = Paths(frames.count)
        self._contents = Contents(frames.count, page_tokens)

    def longest(self, chain: Pages, limit: int) -> int:
        """How many leading pages of a chain have their key here; changes nothing, compares no tokens.

        Args:
            chain: the prompt.
            limit: pages to look at, at most its full pages.
        """
        chain.require(self.page_tokens)
        return self._contents.gallop(chain.key, min(limit, chain.pages))

    def find(self, chain: Chain) -> int | None:
        """The frame of the last full page of a chain, if its whole path is here with its tokens."""
        path, _ = self._longest_path(chain, chain.pages)
        return int(path[-1]) if 0 < chain.pages == len(path) else None

    def _longest_path(self, chain: Chain, limit: int) -> tuple[FrameIds, Reason]:
        """The longest sealed prefix, proved, and why it is not longer."""
        chain.require(self.page_tokens)
        limit = min(limit, chain.pages)
        claimed = self._contents.gallop(chain.key, limit)
        path = _NONE
        if claimed:
            deepest = self._contents.find(chain.key(claimed - 1))
            assert deepest is not None, "a key that was just found"
            path = self._paths.path(deepest)
            if len(path) != claimed or self._paths.root(deepest) != chain.root:
                path = _NONE
            path = path[: self._contents.equal(path, chain, 0)]
            if chain.opaque:
                # Nothing else proves the pages before the deepest one.
                keys = self._contents.keys_of(path.tolist())
                pairs = zip(keys, chain.keys(0, len(path)), strict=True)
                path = path[: next((n for n, (a, b) in enumerate(pairs) if a != b), len(path))]
        reason = Reason.NOT_SEALED
        if limit <= 0:
            reason = Reason.BELOW_A_PAGE
        elif len(path) < claimed:
            reason = Reason.TOKENS_DIFFER
            self._counters.add("key_collisions")
        elif claimed == limit:
            reason = Reason.WHOLE_PREFIX
        return path, reason

    def below(self, frame: int) -> tuple[FrameIds, list[bytes]]:
        """Frames and keys of an indexed page and of everything that continues it; the keys of what can be found."""
        frames = joined(self._paths.below(frame))
        return frames, self._contents.keys_of(frames.tolist())

    def spelled(self, frame: int) -> tuple[Excerpt, FrameIds]:
        """The path of an indexed page, as tokens and keys and as frames, from the first page on."""
        path = self._paths.path(frame)
        return self._contents.excerpt(path, self._paths.root(frame), 0), path

    def tops(self, root: bytes | None = None) -> list[int]:
        """The frames of all indexed first pages, of one root or of all: to drop them is to forget what is there."""
        tops = [frame for frame in self._paths.tops() if self._contents.has(frame)]
        return [frame for frame in tops if root is None or self._paths.root(frame) == root]

    def pages(self) -> list[int]:
        """The frames of all pages, found or held; linear."""
        return [frame for frame in range(self._frames.count) if frame in self._paths]

    def offered(self, frame: int) -> bool:
        """Whether the frame holds an indexed page that may leave now."""
        return self._contents.has(frame) and self._paths.loose(frame)

    def found(self, frame: int) -> bool:
        """Whether the frame holds a page that can be found."""
        return self._contents.has(frame)

    def frame_of(self, key: bytes) -> int | None:
        """The frame of the page that is found by this key, if there is one; nothing is proved."""
        return self._contents.find(key)
