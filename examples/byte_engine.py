"""An engine of its own, below which `TieredStore` keeps what it has computed: opaque blocks of bytes, and a ring.

Its "model" answers with a digest of all blocks, the ring and the last tokens: one wrong byte, another answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

import stepwell as sw

PAGE, WINDOW, BYTES, KEPT, RINGS = 4, 6, 64, 2, 12
RING = (sw.StateTensor("conv", (BYTES,), "uint8"),)
CUTS = (
    sw.Cut(sw.Group("blocks", sw.Rule.FULL, (0,), 1, 1, 1, "uint8"), frames=1, reach=0),
    sw.Cut(sw.Group("ring", sw.Rule.STATE, (1,), 0, 0, 0, "uint8", state=RING), frames=1, reach=1),
)
PARTS = tuple(sw.Part(cut.group.name, "bytes", (0, 1), (0, 1)).digest() for cut in CUTS)
MODEL = sw.StoreModel(PAGE, CUTS, PARTS)


class ByteEngine:
    """Answers one prompt after the other, and itself remembers none of them."""

    def __init__(self, settings: sw.HostSettings, blocks: int = 64, **more: object) -> None:
        self.blocks, self.rings = (
            np.zeros((blocks, BYTES), np.uint8),
            np.zeros((RINGS, BYTES), np.uint8),
        )
        sizes = {"layer": 1, "page": blocks, "slot": 1, "head": 1, "dim": BYTES}
        packed = sw.PackedPlace(
            lambda frame, row: np.copyto(row, self.rings[frame]),
            lambda row, frame: np.copyto(self.rings[frame], row),
            *(BYTES, (0, BYTES), RINGS),
        )
        self.place = sw.JoinedPlace([sw.StackPlace([sw.Stack(self.blocks, sizes)]), packed])
        self.store = sw.TieredStore.local(MODEL, [self.place], settings, **more)
        self.store.ready(10)  # memory comes in the background, and the first prompts are short
        # Frames 0, 1, ... are blocks, those behind them rings.
        self.free = {"blocks": list(range(blocks)), "rings": list(range(blocks, blocks + RINGS))}
        self._moving: dict[
            int, tuple[list[int], list[int]]
        ] = {}  # blocks and rings that a save reads
        self._came: dict[int, bool] = {}

    def take(self, kind: str, n: int) -> np.ndarray:
        """N free frames; waits for saves that still read some."""
        while len(self.free[kind]) < n:
            assert self._moving, f"{n} {kind} are more than the engine has"
            self.wait()
        mine, self.free[kind] = self.free[kind][:n], self.free[kind][n:]
        return np.array(mine, np.int32)

    def _give_back(self, blocks: list[int], rings: list[int]) -> None:
        self.free["blocks"] += blocks
        self.free["rings"] += rings

    def wait(self) -> None:
        """Waits for news of the tiers, and takes it in."""
        self.store.step()  # what is too late ends here
        self.store.wait(0.1)
        for news in self.store.poll():
            if isinstance(news, sw.Loaded):
                whole = news.pages == len(self._moving[news.plan][0])
                self._came[news.plan] = whole and all(map(all, news.records))
                if self._came[news.plan]:
                    del self._moving[news.plan]
            else:  # released or clear: only now may these bytes be overwritten
                self._give_back(*self._moving.pop(news.plan, ([], [])))

    def restore(self, name: str, chain: sw.Chain) -> tuple[np.ndarray, np.ndarray, int]:
        """Blocks and ring of the longest prefix that the tiers have, and where the prompt parts from what is known."""
        match = self.store.match(name, chain, (len(chain) - 1) // PAGE)
        if not match.pages:
            return np.empty(0, np.int32), np.zeros(BYTES, np.uint8), match.parted
        blocks, slot = self.take("blocks", match.pages), self.take("rings", 1)
        plan = self.store.load(match, 0, blocks, [slot[None]])
        self._moving[plan] = blocks.tolist(), slot.tolist()
        while plan not in self._came:
            self.wait()
        if not self._came.pop(plan):
            return self.restore(name, chain)  # what was wrong is forgotten: less may still be right
        ring = self.rings[slot[0] - len(self.blocks)].copy()
        self._give_back([], slot.tolist())
        return blocks, ring, match.parted

    def answer(
        self, name: str, prompt: Sequence[int], count: int, space: sw.Namespace
    ) -> tuple[list[int], int]:
        """Generates tokens; also says how many of the prompt's were not computed."""
        chain, tokens = sw.Chain(space, prompt), list(prompt)
        table, ring, parted = self.restore(name, chain)
        cached = done = len(table) * PAGE
        window = ring.view("<u4")[: min(WINDOW, done)].tolist()
        rings: dict[
            int, np.ndarray
        ] = {}  # at the last boundaries of prompt and answer, and where prompts part
        while True:
            while done < len(tokens):
                window, done = [*window, tokens[done]][-WINDOW:], done + 1
                if done % PAGE == 0:
                    table = np.append(table, self.fill(table, tokens[done - PAGE : done]))
                    rings[done // PAGE] = self.ring(window)
                    last = (*sorted(rings)[-KEPT:], parted, (len(prompt) - 1) // PAGE)
                    rings = {at: one for at, one in rings.items() if at in last}
            if len(tokens) == len(prompt) + count:
                break
            tokens.append(self.say(table, self.ring(window), tokens[len(table) * PAGE :]))
            chain.append(tokens[-1:])
        self.save(chain, table, rings)
        return tokens[len(prompt) :], cached

    def ring(self, window: Sequence[int]) -> np.ndarray:
        """Bytes of the last tokens."""
        return np.resize(np.array([*window, *[0] * (BYTES // 4)], "<u4").view(np.uint8), BYTES)

    def fill(self, table: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Computes one block, from the one before it as it lies in memory."""
        block, seen = self.take("blocks", 1), self.blocks[table[-1:]].tobytes()
        digest = hashlib.shake_128(seen + np.array(tokens, "<u4").tobytes()).digest(BYTES)
        self.blocks[block[0]] = np.frombuffer(digest, np.uint8)
        return block

    def say(self, table: np.ndarray, ring: np.ndarray, rest: Sequence[int]) -> int:
        """The next token."""
        seen = self.blocks[table].tobytes() + ring.tobytes() + np.array(rest, "<u4").tobytes()
        return int.from_bytes(hashlib.sha256(seen).digest()[:2], "little")

    def save(self, chain: sw.Chain, table: np.ndarray, rings: dict[int, np.ndarray]) -> None:
        """Offers everything to the tiers; blocks and rings are free when they have been read."""
        slots = self.take("rings", len(rings))
        self.rings[slots - len(self.blocks)] = list(rings.values()) or self.rings[:0]
        carried = [sw.Carried(0, at - 1, slots[n : n + 1]) for n, at in enumerate(rings)]
        plan = self.store.save(sw.Offer(chain, len(table), lambda a, b: table[a:b], carried))
        self._moving[plan or 0] = table.tolist(), slots.tolist()
        if plan is None:  # the tiers have it all, or no room
            self._give_back(*self._moving.pop(0))


if __name__ == "__main__":
    engine = ByteEngine(sw.HostSettings(capacity_bytes=1 << 20))
    space, shared = sw.Namespace(PAGE, model="digest-of-the-weights"), list(range(100, 124))
    for name, tail in {"a": [1, 2], "b": [3], "c": [4, 5, 6]}.items():
        said, cached = engine.answer(name, [*shared, *tail], 4, space)
        print(f"{name}: {cached} of {24 + len(tail)} tokens reused, answer {said}")
        engine.store.drain(10)
    engine.store.close()
