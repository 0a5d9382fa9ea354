"""Frames gathered into rows and scattered back, on the CPU, against one memcpy of as many bytes."""  # noqa: A005 - as its rows

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Candidate, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.core.frames import FrameIds
from stepwell.move.copy import StackPlace
from stepwell.move.stack import Stack

_LAYERS = 32
_PAGE_TOKENS = 16
_HEAD_SIZE = 64
_TURN_BYTES = 32 << 20

_RUNS = {
    "128k": (128 << 10, 0.8),
    "32k": (32 << 10, 0.8),
    "12k": (12 << 10, 0.5),
    "6k": (6 << 10, 0.5),
}
"""Bytes of K or V of one layer of one page, and how much of memcpy's speed is promised for them."""

_Bytes = npt.NDArray[np.uint8]


def rows(world: World) -> Iterator[Row]:
    """Gather and scatter for each length of a run."""
    # Written once, so that all of it is there; more than the processor's caches hold.
    k, v, host = (np.full((64 if world.quick else 512) << 20, n, np.uint8) for n in range(1, 4))
    for size, (run_bytes, promise) in _RUNS.items():
        turns = _Turns(k, v, host, run_bytes)
        samples = interleaved(turns.candidates(), 9 if world.quick else 31)
        for name in ("gather", "scatter"):
            ours, memcpy = samples.median_s(name), samples.median_s("memcpy")
            ratio = samples.ratio(name, "memcpy")
            yield Row(
                f"copy.{name}_{size}",
                "ms",
                ours * 1e3,
                memcpy * 1e3,
                ratio,
                bar=1 / promise,
                gate=size
                != "6k",  # a plain loop of C is not far above it: a busy neighbour decides
                note=f"{turns.bytes >> 20} MiB of random pages, {_LAYERS} layers, against one memcpy "
                f"of them; {1 / ratio:.2f} of its speed, and {promise} is promised",
            )


class _Turns:
    """What takes turns; each turn copies other pages, so that no cache has them."""

    def __init__(self, k: _Bytes, v: _Bytes, host: _Bytes, run_bytes: int) -> None:
        self._random = random.Random(1)
        self._k, self._host = k, host
        self._place = StackPlace([_stack(half, run_bytes) for half in (k, v)])
        frame_bytes = self._place.frame_bytes
        self._rows = host[: len(host) // frame_bytes * frame_bytes].reshape(-1, frame_bytes)
        self._count = max(1, _TURN_BYTES // frame_bytes)
        self.bytes = self._count * frame_bytes

    def candidates(self) -> dict[str, Candidate]:
        return {
            "gather": Candidate(lambda drawn: self._place.copy_out(*drawn), self._draw),
            "scatter": Candidate(lambda drawn: self._place.copy_in(*drawn[::-1]), self._draw),
            "memcpy": Candidate(lambda halves: np.copyto(*halves), self._halves),
        }

    def _draw(self) -> tuple[FrameIds, list[_Bytes]]:
        frames = self._random.sample(range(self._place.frames), self._count)
        lines = self._random.sample(range(len(self._rows)), self._count)
        return np.array(frames, np.int32), [self._rows[line] for line in lines]

    def _halves(self) -> tuple[_Bytes, _Bytes]:
        begin, end = (self._random.randrange(len(self._k) - self.bytes) for _ in range(2))
        return self._host[begin : begin + self.bytes], self._k[end : end + self.bytes]


def _stack(half: _Bytes, run_bytes: int) -> Stack:
    """K or V as a pool has them: layer-first, float16."""
    heads = run_bytes // (_PAGE_TOKENS * _HEAD_SIZE * 2)
    frames = len(half) // (_LAYERS * run_bytes)
    tensor = half[: frames * _LAYERS * run_bytes].view(np.float16)
    shape = (_LAYERS, frames * _PAGE_TOKENS, heads, _HEAD_SIZE)
    return Stack.of_slots(tensor.reshape(shape), _PAGE_TOKENS)
