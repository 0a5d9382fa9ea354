"""What is in each frame of an index: its key, its tokens and what else it depends on.

Owns: the map from keys to frames and the columns that prove a match. Must not know: the tree, leases,
statuses. Neighbours: `index` writes a record when it seals a page and forgets it when the page leaves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stepwell.core.chain import TOKEN, Pages
from stepwell.core.check import Findings
from stepwell.core.excerpt import Excerpt
from stepwell.core.frames import FrameIds

_SHARDS = 256


class Contents:
    """Keys, tokens and extras of the indexed pages.

    The map is cut into 256 dicts by the first byte of the key: one dict of a million keys stops for
    up to half a second when it grows, these for a few milliseconds.

    Args:
        count: frames.
        page_tokens: tokens of one page.
    """

    def __init__(self, count: int, page_tokens: int) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._keys: list[bytes | None] = [None] * count
        self._tokens: npt.NDArray[np.uint32] = np.zeros((count, page_tokens), TOKEN)
        self._extras: dict[int, bytes] = {}
        self._marked: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)  # has an entry in _extras

    def find(self, key: bytes) -> int | None:
        """The frame of the page with this key."""
        return self._shards[key[0]].get(key)

    def has(self, frame: int) -> bool:
        """Whether the frame's page can be found."""
        return self._keys[frame] is not None

    def gallop(self, key: Callable[[int], bytes], limit: int) -> int:
        """How many of keys 0, 1, ... `limit` - 1 are here before the first that is not.

        Relies on closure: a key can only be here if all before it are. Probes 1, 2, 4, ... and then
        halves, so a first key that is absent costs one probe and one hash.
        """
        known, step = 0, 1
        while known < limit:
            probe = min(known + step, limit)
            if self.find(key(probe - 1)) is None:
                break
            known, step = probe, step * 2
        else:
            return known
        absent = probe
        while absent - known > 1:
            probe = (known + absent) // 2
            if self.find(key(probe - 1)) is None:
                absent = probe
            else:
                known = probe
        return known

    def claim(self, keys: list[bytes], frames: FrameIds) -> int:
        """Notes keys for frames until one is taken; returns how many were free."""
        for count, (key, frame) in enumerate(zip(keys, frames.tolist(), strict=True)):
            if self._shards[key[0]].setdefault(key, frame) != frame:
                return count
            self._keys[frame] = key
        return len(keys)

    def write(self, frames: FrameIds, chain: Pages, first: int) -> None:
        """Notes tokens and extras of a chain's pages, from page `first` on."""
        last = first + len(frames)
        self._tokens[frames] = chain.page_rows(first, last)
        for page in chain.extra_pages(first, last):
            frame = int(frames[page - first])
            self._extras[frame] = chain.extras_of(page)
            self._marked[frame] = True

    def equal(self, frames: FrameIds, chain: Pages, first: int) -> int:
        """How many leading frames have the tokens and extras of the chain from page `first` on."""
        rows = chain.page_rows(first, first + len(frames))
        mine = self._tokens.take(frames, axis=0)
        count = len(frames)
        if not np.array_equal(mine, rows):
            count = int(np.argmax((mine != rows).any(axis=1)))
        touched = set(np.flatnonzero(self._marked[frames[:count]]).tolist())
        touched.update(page - first for page in chain.extra_pages(first, first + count))
        for page in sorted(touched):
            if self._extras.get(int(frames[page]), b"") != chain.extras_of(first + page):
                return page
        return count

    def forget_all(self, frames: FrameIds) -> list[bytes]:
        """No lookup finds these pages from now on; returns the keys by which one found them before."""
        keys, shards = self._keys, self._shards
        gone: list[bytes] = []
        for frame in frames.tolist():
            key = keys[frame]
            if key is not None:
                del shards[key[0]][key]
                keys[frame] = None
                gone.append(key)
        if self._extras:
            for frame in frames[self._marked[frames]].tolist():
                del self._extras[frame]
            self._marked[frames] = False
        return gone

    def keys_of(self, frames: list[int]) -> list[bytes]:
        """The keys of those of these frames that can be found."""
        keys = (self._keys[frame] for frame in frames)
        return [key for key in keys if key is not None]

    def excerpt(self, frames: FrameIds, root: bytes, first: int) -> Excerpt:
        """What is in these frames, as pages from `first` on; all of them can be found."""
        keys = tuple(self.keys_of(frames.tolist()))
        rows = self._tokens.take(frames, axis=0)
        extras = {
            first + int(at): self._extras[int(frames[at])]
            for at in np.flatnonzero(self._marked[frames])
        }
        return Excerpt(rows.shape[1], root, first, None, keys, rows, extras)

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of map and columns."""
        mapped = sorted((key, frame) for shard in self._shards for key, frame in shard.items())
        noted = sorted((key, f) for f, key in enumerate(self._keys) if key is not None)
        findings.expect(mapped == noted, "keys and frames disagree")
        marked = np.flatnonzero(self._marked).tolist()
        findings.expect(marked == sorted(self._extras), "extras and their marks disagree")
        findings.expect(
            all(self._keys[frame] is not None for frame in self._extras),
            "extras of a page that cannot be found",
        )
