"""What a model needs to compute one step over the pool: a plain record that it indexes itself.

Owns: the packing of a ragged batch. Must not know: pages, keys. Everything in it is an array of the
library that owns the buffers: torch tensors on their device, or numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.cache.pool import buffers as storage
from stepwell.cache.pool.buffers import KVBuffers
from stepwell.cache.pool.table import RequestTable


@dataclass(frozen=True, slots=True)
class KVView:
    """One step of n requests that compute T tokens in all, packed one after the other.

    Attributes:
        buffers: K and V of each group.
        table: from (row, position) to slot, -1 where there is none; shape [rows, positions], int32; to be
            read only: on the CPU it is the pool's own.
        rows: row of each request; shape [n], int32.
        starts: tokens of each request whose KV is there already; shape [n], int32.
        lengths: the same after the step; shape [n], int32.
        query_starts: where each request's tokens begin among the T; shape [n + 1], int32.
        write_slots: where the KV of each computed token goes; shape [T], int64.
        positions: position of each computed token in its request; shape [T], int64.
        batch: row in `table`, start and count of each request, as plain numbers: on a
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
    buffers: tuple[KVBuffers, ...], table: RequestTable, batch: list[tuple[int, int, int]]
) -> KVView:
    """Packs one step into arrays; costs what it computes, not what it reads.

    Args:
        buffers: of the pool.
        table: from (row, position) to slot.
        batch: row, tokens there already and tokens to compute, for each request; not empty.
    """
    rows, starts, counts = np.ascontiguousarray(np.array(batch, np.int32).T)
    query_starts = np.zeros(len(batch) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    positions = np.arange(query_starts[-1], dtype=np.int64)
    positions += np.repeat(starts - query_starts[:-1], counts)
    return KVView(
        buffers,
        table=table.slots,
        rows=rows,
        starts=starts,
        lengths=starts + counts,
        query_starts=query_starts,
        write_slots=table.slots[np.repeat(rows, counts), positions].astype(np.int64),
        positions=positions,
        batch=tuple(batch),
        spans=tuple(table.span(row, start + count) for row, start, count in batch),
    )


def send(view: KVView, device: str) -> KVView:
    """The same step with its arrays where the buffers are.

    On the CPU they share memory with the request table; any other device gets a copy of the rows that the
    step reads, no longer than they are used, numbered from 0.
    """
    if device in (storage.NUMPY, storage.NONE):
        return view
    import torch

    rows, table, batch = view.rows, view.table, view.batch
    if device != "cpu":
        table = np.ascontiguousarray(table[rows, : int(view.lengths.max())])
        rows = np.arange(len(batch), dtype=np.int32)
        batch = tuple((number, start, count) for number, (_, start, count) in enumerate(batch))

    def there(array: npt.NDArray[Any]) -> Any:
        return torch.from_numpy(array).to(device)

    return replace(
        view,
        table=there(table),
        rows=there(rows),
        starts=there(view.starts),
        lengths=there(view.lengths),
        query_starts=there(view.query_starts),
        write_slots=there(view.write_slots),
        positions=there(view.positions),
        batch=batch,
    )
