"""A model whose KV proves itself: the KV of token i is a digest of everything up to token i.

It computes over a `KVView` with the plain arrays of `device="numpy"`, reading the previous token's KV out
of the pool and never out of its own memory. So a wrong, stale, foreign, misplaced or torn page
changes every value after it, and exactness is a plain inequality. Shipped for authors of engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.cache.pool.view import KVView
from stepwell.core.geometry import Geometry

LAYERS = 2
_SEED = 0x57E9


def geometry() -> Geometry:
    """One full group of two layers with one 64-bit number for K and one for V."""
    return Geometry.full(LAYERS, kv_heads=1, head_size=1, dtype="int64")


def _mix(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def reference(tokens: Sequence[int], weights: int = 0) -> npt.NDArray[np.int64]:
    """What the KV of a sequence must be.

    Args:
        tokens: ids.
        weights: stands for the weights of the model; other weights, other KV.

    Returns:
        Shape [layers, K and V, tokens].
    """
    kv = np.empty((LAYERS, 2, len(tokens)), np.int64)
    above = _mix(_SEED, weights)
    for position, token in enumerate(tokens):
        above = _mix(above, int(token))
        for layer in range(LAYERS):
            kv[layer, 0, position] = above if layer == 0 else _mix(above, layer, -2)
            kv[layer, 1, position] = _mix(above, layer, -1)
    return kv


class Fingerprint:
    """Computes and checks KV in a pool made with `device="numpy"` and `geometry()`.

    Args:
        vocabulary: next tokens are below this.
        weights: other weights, other KV.
    """

    def __init__(self, vocabulary: int = 1000, weights: int = 0) -> None:
        self.vocabulary = vocabulary
        self.weights = weights

    def step(self, view: KVView, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Writes the KV of one step and returns the next token of each request.

        Args:
            view: of the step.
            tokens: the ids that the step computes, for each request.
        """
        plane = view.planes[0]
        k, v = plane.buffers.k, plane.buffers.v
        following: list[int] = []
        for number, computed in enumerate(tokens):
            start, first = int(view.starts[number]), int(view.query_starts[number])
            row = plane.table[view.rows[number]]
            above = int(k[0, row[start - 1], 0, 0]) if start else _mix(_SEED, self.weights)
            for offset, token in enumerate(computed):
                slot = int(plane.write_slots[first + offset])
                above = _mix(above, int(token))
                for layer in range(LAYERS):
                    k[layer, slot, 0, 0] = above if layer == 0 else _mix(above, layer, -2)
                    v[layer, slot, 0, 0] = _mix(above, layer, -1)
            seen = self.read(view, number)
            digest = hashlib.blake2b(np.ascontiguousarray(seen).tobytes(), digest_size=8).digest()
            following.append(int.from_bytes(digest, "little") % self.vocabulary)
        return following

    @staticmethod
    def read(view: KVView, number: int) -> npt.NDArray[np.int64]:
        """The KV of a request as the pool's table finds it; shape [layers, K and V, tokens]."""
        plane = view.planes[0]
        slots = plane.table[view.rows[number]][: int(view.lengths[number])]
        pair = plane.buffers
        kv: npt.NDArray[np.int64] = np.stack(
            (pair.k[:, slots, 0, 0], pair.v[:, slots, 0, 0]), axis=1
        )
        return kv
