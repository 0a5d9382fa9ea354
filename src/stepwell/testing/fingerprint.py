"""A model whose KV and states prove themselves: those of token i are digests of everything up to token i.

It computes over a `KVView` with the plain arrays of `device="numpy"`. What is before a step it reads out of
the pool and never out of its own memory: of every plane the running value in the KV of the last token, of
every state group the state. So a wrong, stale, foreign, misplaced or torn page or state, or one that is
fresh by mistake, changes every value after it, and exactness is a plain inequality. Shipped for authors of
engines.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.cache.pool.buffers import KVBuffers
from stepwell.cache.pool.view import KVView, Plane, StateView
from stepwell.core.geometry import Geometry, Group

LAYERS = 2
_SEED = 0x57E9

Numbers = npt.NDArray[np.int64]


def geometry(groups: Sequence[Group] = (), replay_tokens: int = 1) -> Geometry:
    """A geometry that the model can compute: every element of K, V and states is a 64-bit number.

    Args:
        groups: of dtype int64; by default one full group of two layers with one number for K and one for V.
        replay_tokens: tokens of a prompt that are always computed.
    """
    groups = tuple(groups) or Geometry.full(LAYERS, kv_heads=1, head_size=1, dtype="int64").groups
    return Geometry(groups, replay_tokens)


@functools.lru_cache(1 << 17)
def _mix(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


@functools.lru_cache(1 << 15)
def _spread(number: int, count: int) -> Numbers:
    """So many numbers, of which the first is the given one and the others follow from it."""
    more = hashlib.shake_128(number.to_bytes(8, "little", signed=True)).digest(8 * (count - 1))
    return np.concatenate((np.array([number], np.int64), np.frombuffer(more, np.int64)))


def _begin(weights: int, mark: int) -> int:
    """The running value before the first token."""
    return _mix(_SEED, weights, mark) if mark else _mix(_SEED, weights)


@functools.lru_cache(1 << 15)
def _rows(above: int, layers: int, elements: int, value: bool) -> Numbers:
    """K or V of one token in each layer of a plane; shape [layers, elements]."""
    if not elements:
        return np.empty((layers, 0), np.int64)
    firsts = (
        above if layer == 0 and not value else _mix(above, layer, -1 if value else -2)
        for layer in range(layers)
    )
    return np.stack([_spread(first, elements) for first in firsts])


def reference(tokens: Sequence[int], weights: int = 0) -> Numbers:
    """What the KV of a sequence must be in the default geometry.

    Args:
        tokens: ids.
        weights: stands for the weights of the model; other weights, other KV.

    Returns:
        Shape [layers, K and V, tokens].
    """
    kv = np.empty((LAYERS, 2, len(tokens)), np.int64)
    above = _begin(weights, 0)
    for position, token in enumerate(tokens):
        above = _mix(above, int(token))
        kv[:, 0, position] = _rows(above, LAYERS, 1, False)[:, 0]
        kv[:, 1, position] = _rows(above, LAYERS, 1, True)[:, 0]
    return kv


def _elements(buffers: KVBuffers) -> tuple[int, int]:
    group = buffers.group
    return group.kv_heads * group.head_size_k, group.kv_heads * group.head_size_v


def _is_state(words: Numbers, value: int) -> bool:
    return np.array_equal(words, _spread(value, len(words)) if value else np.zeros_like(words))


class Fingerprint:
    """Computes and checks KV and states in a pool made with `device="numpy"` and `geometry(...)`.

    Args:
        vocabulary: next tokens are below this.
        weights: other weights, other KV.
    """

    def __init__(self, vocabulary: int = 1000, weights: int = 0) -> None:
        self.vocabulary = vocabulary
        self.weights = weights

    def step(self, view: KVView, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Writes KV and states of one step and returns the next token of each request.

        Args:
            view: of the step.
            tokens: the ids that the step computes, for each request.
        """
        following: list[int] = []
        for number, computed in enumerate(tokens):
            for plane in view.planes:
                self._compute(view, plane, number, computed)
            for states in view.states:
                self._advance(states, number, computed)
            digest = hashlib.blake2b(digest_size=8)
            end = int(view.lengths[number])
            for plane in view.planes:
                window = plane.buffers.group.window
                # What the last query sees, so the answer is the same however the prompt was cut.
                first = 0 if window is None else max(0, end - window)
                for part in self._seen(view, plane, number, first, end):
                    digest.update(np.ascontiguousarray(part).tobytes())
            for states in view.states:
                digest.update(self._state(states, number, after=True).tobytes())
            following.append(int.from_bytes(digest.digest(), "little") % self.vocabulary)
        return following

    def _compute(self, view: KVView, plane: Plane, number: int, computed: Sequence[int]) -> None:
        """Goes on from the running value in the last token's KV, as the pool's table finds it."""
        buffers, row = plane.buffers, plane.table[view.rows[number]]
        start, first = int(view.starts[number]), int(view.query_starts[number])
        above = _begin(self.weights, buffers.layers[0])
        if start:
            above = int(buffers.k[0, row[start - 1]].flat[0])
        for offset, token in enumerate(computed):
            slot = int(plane.write_slots[first + offset])
            above = _mix(above, int(token))
            k, v = self._token(buffers, above)
            buffers.k[:, slot] = k.reshape(buffers.k[:, slot].shape)
            buffers.v[:, slot] = v.reshape(buffers.v[:, slot].shape)

    @staticmethod
    def _token(buffers: KVBuffers, above: int) -> tuple[Numbers, Numbers]:
        elements_k, elements_v = _elements(buffers)
        layers = len(buffers.layers)
        return _rows(above, layers, elements_k, False), _rows(above, layers, elements_v, True)

    def _advance(self, states: StateView, number: int, computed: Sequence[int]) -> None:
        """Goes on from the state that it reads; one that is no whole state of anything taints all after."""
        words = self._state(states, number, after=False)
        value = int(words[0])
        if not _is_state(words, value):
            value = _mix(*words.tolist())
        mark = states.buffers.cut.group.layers[0]
        for token in computed:
            value = _mix(value, int(token), self.weights, mark)
        one = slice(number, number + 1)
        row = _spread(value, len(words))[None].view(np.uint8)
        states.buffers.write(states.writes[one], row)

    @staticmethod
    def _state(states: StateView, number: int, *, after: bool) -> Numbers:
        """The state before a step, or after it; shape [its bytes / 8]."""
        one = slice(number, number + 1)
        fresh = states.fresh[one]
        frames = states.writes[one] if after else states.reads[one]
        read = states.buffers.read(frames, np.zeros_like(fresh) if after else fresh)
        words: Numbers = read[0].view(np.int64)
        return words

    @staticmethod
    def _seen(
        view: KVView, plane: Plane, number: int, first: int, last: int
    ) -> tuple[Numbers, Numbers]:
        """K and V of positions `[first, last)`; each of shape [layers, tokens, elements]."""
        slots = plane.table[view.rows[number]][first:last]
        buffers = plane.buffers
        elements_k, elements_v = _elements(buffers)
        shape = (len(buffers.layers), len(slots))
        k: Numbers = buffers.k[:, slots].reshape(*shape, elements_k)
        v: Numbers = buffers.v[:, slots].reshape(*shape, elements_v)
        return k, v

    @staticmethod
    def read(view: KVView, number: int) -> Numbers:
        """The KV of a request as the first table finds it; shape [layers, K and V, tokens]."""
        plane = view.planes[0]
        slots = plane.table[view.rows[number]][: int(view.lengths[number])]
        pair = plane.buffers
        kv: Numbers = np.stack((pair.k[:, slots, 0, 0], pair.v[:, slots, 0, 0]), axis=1)
        return kv

    def wrong(self, view: KVView, number: int, tokens: Sequence[int]) -> list[str]:
        """Compares all that a request sees in a step with what it must be.

        Args:
            view: of the step.
            number: of the request in the step.
            tokens: all its ids: up to the step's start if the step has not run, up to its end if it has.

        Returns:
            What is wrong, place by place; empty if nothing is.
        """
        after = len(tokens) != int(view.starts[number])
        found: list[str] = []
        for plane in view.planes:
            first, layers = plane.firsts[number], plane.buffers.layers
            k, v = self._seen(view, plane, number, first, len(tokens))
            above = _begin(self.weights, layers[0])
            for position, token in enumerate(tokens):
                above = _mix(above, int(token))
                if position < first:
                    continue
                right = self._token(plane.buffers, above)
                for name, seen, expected in zip("KV", (k, v), right, strict=True):
                    if not np.array_equal(seen[:, position - first], expected):
                        found.append(f"{name} of token {position} in layers {layers}")
        for states in view.states:
            value = 0
            for token in tokens:
                value = _mix(value, int(token), self.weights, states.buffers.cut.group.layers[0])
            if not _is_state(self._state(states, number, after=after), value):
                found.append(f"the state of {states.buffers.cut.group.name!r} at {len(tokens)}")
        return found
