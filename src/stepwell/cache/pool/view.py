"""What a model needs to compute one step over the pool: a plain record that it indexes itself.

Owns: the packing of a ragged batch. Must not know: pages, keys. Everything in it is an array of the
library that owns the buffers: torch tensors on their device, or numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.cache.pool import buffers as storage
from stepwell.cache.pool.buffers import KVBuffers, StateBuffers
from stepwell.cache.pool.table import RequestTable


@dataclass(frozen=True, slots=True)
class Plane:
    """Layers of one group that share frames, and so a table.

    Attributes:
        buffers: K and V of these layers.
        table: from (row, position) to slot, -1 where there is none; shape [rows, positions], int32; to be
            read only: on the CPU it is the pool's own.
        write_slots: where the KV of each computed token goes; shape [T], int64.
        firsts: of each request, the first position that its first query sees: 0 but with a window.
        spans: for each request `(first, last)` if the slots of its positions from `firsts` up to
            `lengths` are consecutive, so that their KV is the slice `[first:last]` of a buffer; else None.
    """

    buffers: KVBuffers
    table: Any
    write_slots: Any
    firsts: tuple[int, ...]
    spans: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class StateView:
    """Where the states of one group are before and after a step.

    A model that keeps them itself does `raw = buffers.read(reads, fresh)`, computes on from row n of it for
    request n (`buffers.cut.group.state_offsets()` says where each tensor of each layer lies in a row), and
    then `buffers.write(writes, raw)`, once for each commit.

    Attributes:
        buffers: the memory as bytes of states.
        reads: frames of each request's state before the step; shape [n, frames of a state], int64.
        fresh: which requests have none yet, and begin with zeros; shape [n], bool.
        writes: frames for the state after it; shape [n, frames of a state], int64.
    """

    buffers: StateBuffers
    reads: Any
    fresh: Any
    writes: Any


@dataclass(frozen=True, slots=True)
class KVView:
    """One step of n requests that compute T tokens in all, packed one after the other.

    Attributes:
        rows: row of each request in the tables; shape [n], int32.
        starts: tokens of each request whose KV is there already; shape [n], int32.
        lengths: the same after the step; shape [n], int32.
        query_starts: where each request's tokens begin among the T; shape [n + 1], int32.
        positions: position of each computed token in its request; shape [T], int64.
        batch: row in the tables, start and count of each request, as plain numbers: on a
            device, reading them out of the arrays would wait for it.
        planes: the full group's, then those of the window groups.
        states: of each state group.
    """

    rows: Any
    starts: Any
    lengths: Any
    query_starts: Any
    positions: Any
    batch: tuple[tuple[int, int, int], ...]
    planes: tuple[Plane, ...]
    states: tuple[StateView, ...]

    def __repr__(self) -> str:
        tokens = sum(count for _, _, count in self.batch)
        return f"KVView({len(self.batch)} requests, {tokens} tokens, {len(self.planes)} planes)"


def pack(
    batch: list[tuple[int, int, int]],
    planes: Sequence[tuple[KVBuffers, RequestTable]],
    states: tuple[StateView, ...],
) -> KVView:
    """Packs one step into arrays; costs what it computes, not what it reads.

    Args:
        batch: row, tokens there already and tokens to compute, for each request; not empty.
        planes: buffers and table of each.
        states: of each state group.
    """
    rows, starts, counts = np.ascontiguousarray(np.array(batch, np.int32).T)
    query_starts = np.zeros(len(batch) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    positions = np.arange(query_starts[-1], dtype=np.int64)
    positions += np.repeat(starts - query_starts[:-1], counts)
    row_of_each = np.repeat(rows, counts)
    packed: list[Plane] = []
    for buffers, table in planes:
        seen = buffers.group.window
        firsts = tuple(0 if seen is None else max(0, start - seen + 1) for _, start, _ in batch)
        spans = tuple(
            table.span(row, first, start + count)
            for (row, start, count), first in zip(batch, firsts, strict=True)
        )
        slots = table.slots[row_of_each, positions].astype(np.int64)
        packed.append(Plane(buffers, table.slots, slots, firsts, spans))
    return KVView(
        rows=rows,
        starts=starts,
        lengths=starts + counts,
        query_starts=query_starts,
        positions=positions,
        batch=tuple(batch),
        planes=tuple(packed),
        states=states,
    )


def send(view: KVView, device: str) -> KVView:
    """The same step with its arrays where the buffers are.

    On the CPU they share memory with the request tables; any other device gets a copy of the rows that the
    step reads, no longer than they are used, numbered from 0.
    """
    if device in (storage.NUMPY, storage.NONE):
        return view
    import torch

    def there(array: npt.NDArray[Any]) -> Any:
        return torch.from_numpy(array).to(device)

    rows, batch = view.rows, view.batch
    longest = int(view.lengths.max())
    planes: list[Plane] = []
    for plane in view.planes:
        table = plane.table
        if device != "cpu":
            table = np.ascontiguousarray(table[rows, :longest])
        planes.append(replace(plane, table=there(table), write_slots=there(plane.write_slots)))
    if device != "cpu":
        rows = np.arange(len(batch), dtype=np.int32)
        batch = tuple((number, start, count) for number, (_, start, count) in enumerate(batch))
    return replace(
        view,
        rows=there(rows),
        starts=there(view.starts),
        lengths=there(view.lengths),
        query_starts=there(view.query_starts),
        positions=there(view.positions),
        batch=batch,
        planes=tuple(planes),
        states=tuple(
            replace(one, reads=there(one.reads), fresh=there(one.fresh), writes=there(one.writes))
            for one in view.states
        ),
    )
