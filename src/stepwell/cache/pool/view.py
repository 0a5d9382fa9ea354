"""What a model needs to compute one step over the pool: a plain record that it indexes itself.

Owns: the packing of a ragged batch. Must not know: pages, keys. Everything in it is an array of the
library that owns the buffers: torch tensors on their device, or numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.cache.pool import buffers as storage
from stepwell.cache.pool.buffers import KVBuffers


@dataclass(frozen=True, slots=True)
class KVView:
    """One step of n requests that compute T tokens in all, packed one after the other.

    Attributes:
        buffers: K and V of each group.
        table: from (row, position) to slot; shape [rows, positions], int32.
        rows: row of each request; shape [n], int32.
        starts: tokens of each request whose KV is there already; shape [n], int32.
        lengths: the same after the step; shape [n], int32.
        query_starts: where each request's tokens begin among the T; shape [n + 1], int32.
        write_slots: where the KV of each computed token goes; shape [T], int64.
        positions: position of each computed token in its request; shape [T], int64.
        batch: row of the pool's own table, start and count of each request, as plain numbers: on a
            device, reading them out of the arrays would wait for it.
        spans: for each request `(first, last)` if its slots up to `lengths` are consecutive, so that
            its KV is the slice `[first:last]` of a buffer; else None.
    """

    buffers: tuple[KVBuffers, ...]
    table: Any
    rows: Any
    starts: Any
    lengths: Any
    query_starts: Any
    write_slots: Any
    positions: Any
    batch: tuple[tuple[int, int, int], ...]
    spans: tuple[tuple[int, int] | None, ...]


def pack(
    buffers: tuple[KVBuffers, ...],
    device: str,
    slots: npt.NDArray[np.int32],
    batch: list[tuple[int, int, int]],
) -> KVView:
    """Packs one step.

    Args:
        buffers: of the pool.
        device: of the buffers.
        slots: the request table; shape [rows, positions].
        batch: row, tokens there already and tokens to compute, for each request; not empty.
    """
    table = slots
    rows = np.array([row for row, _, _ in batch], np.int32)
    starts = np.array([start for _, start, _ in batch], np.int32)
    counts = np.array([count for _, _, count in batch], np.int32)
    lengths = starts + counts
    query_starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    on_host = device in (storage.NUMPY, storage.NONE) or device == "cpu"
    if not on_host:
        # A device has its own copy of the rows that this step reads, no longer than they are used.
        table = np.ascontiguousarray(slots[rows, : int(lengths.max(initial=0))])
        rows = np.arange(len(batch), dtype=np.int32)
    written = [slots[row, start : start + count] for row, start, count in batch]
    positions = [np.arange(start, start + count, dtype=np.int64) for _, start, count in batch]

    def sent(array: npt.NDArray[Any]) -> Any:
        if device in (storage.NUMPY, storage.NONE):
            return array
        import torch

        return torch.from_numpy(array).to(device)

    return KVView(
        buffers,
        table=sent(table),
        rows=sent(rows),
        starts=sent(starts),
        lengths=sent(lengths),
        query_starts=sent(query_starts),
        write_slots=sent(np.concatenate(written).astype(np.int64)),
        positions=sent(np.concatenate(positions)),
        batch=tuple(batch),
        spans=tuple(_span(slots[row, : start + count]) for row, start, count in batch),
    )


def _span(slots: npt.NDArray[np.int32]) -> tuple[int, int] | None:
    """The slice that a request's slots form, if they do."""
    first, last = int(slots[0]), int(slots[-1])
    # The ends prove nothing when frames are scrambled: 3, 9, 5 has the ends of 3, 4, 5.
    if last - first + 1 != len(slots) or not (np.diff(slots) == 1).all():
        return None
    return first, last + 1
