"""What a step is told: rows, slots, spans; and the flags of a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepwell.cache.pool import Flags
from stepwell.cache.pool.buffers import KVBuffers
from stepwell.cache.pool.table import RequestTable
from stepwell.cache.pool.view import pack
from stepwell.core.reasons import Reason
from stepwell.testing.fingerprint import geometry


@pytest.mark.parametrize(
    ("frames", "span"),
    [
        ([3, 4, 5], (6, 12)),
        ([3, 5, 4], None),
        ([3, 9, 5], None),  # the ends are those of 3, 4, 5
        ([5, 4, 3], None),
        ([7], (14, 16)),
    ],
)
def test_a_span_is_claimed_only_for_consecutive_slots(
    frames: list[int], span: tuple[int, int] | None
) -> None:
    table = RequestTable(rows=2, positions=8, page_tokens=2)
    table.write(1, 0, np.array(frames, np.int32))
    buffers = KVBuffers(geometry().groups[0], (0, 1), None, None)
    view = pack([(1, 0, 2 * len(frames))], [(buffers, table)], ())
    assert view.planes[0].spans == (span,)
    piecewise = RequestTable(rows=2, positions=8, page_tokens=2)
    for page, frame in enumerate(frames):
        piecewise.write(0, page, np.array([frame], np.int32))
    assert piecewise.span(0, 0, 2 * len(frames)) == span


def test_a_span_follows_what_is_written_over_and_given_back() -> None:
    table = RequestTable(rows=1, positions=8, page_tokens=2)
    row = 0
    table.write(row, 0, np.array([3, 9, 5], np.int32))
    assert table.span(row, 0, 6) is None
    table.write(row, 1, np.array([4], np.int32))
    assert table.span(row, 0, 6) == (6, 12)
    table.write(row, 0, np.array([8], np.int32))
    assert table.span(row, 0, 6) is None
    table.clear(row)
    table.write(row, 0, np.array([2, 3], np.int32))
    assert table.span(row, 0, 3) == (4, 7)


def test_a_torch_view_says_what_a_numpy_view_says(make_bench: Any) -> None:
    import torch

    bench = make_bench()
    bench.open("a", range(10))
    bench.open("b", range(20, 23))
    counts = {"b": 3, "a": 7}
    expected = bench.pool.bind(counts)
    names = ["starts", "lengths", "query_starts", "positions"]
    bench.pool._device = "cpu"
    view = bench.pool.bind(counts)
    for name in [*names, "rows"]:
        assert torch.equal(getattr(view, name), torch.from_numpy(getattr(expected, name)))
    for name in ("table", "write_slots"):
        numpy = getattr(expected.planes[0], name)
        assert torch.equal(getattr(view.planes[0], name), torch.from_numpy(numpy))
    # Any other device gets its own copy of the rows; "cpu:0" is one without being a GPU.
    bench.pool._device = "cpu:0"
    copied = bench.pool.bind(counts)
    for name in names:
        assert torch.equal(getattr(copied, name), getattr(view, name))
    assert torch.equal(copied.planes[0].write_slots, view.planes[0].write_slots)
    assert copied.planes[0].table.shape == (2, 7)
    for number, (row, _, length) in enumerate(copied.batch):
        assert row == int(copied.rows[number]) == number
        mine = copied.planes[0].table[row, :length]
        assert torch.equal(mine, view.planes[0].table[int(view.rows[number]), :length])
    assert expected.lengths.tolist() == [3, 7]
    assert expected.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6]


def test_no_write_seals_nothing(bench: Any) -> None:
    bench.serve("a", range(9), flags=Flags.NO_WRITE)
    assert bench.pool.stats()["pages_sealed"] == 0
    assert bench.serve("b", range(9)).cached == 0


def test_no_read_reuses_nothing_and_shares_nothing(bench: Any) -> None:
    """Not even a page that became known while the request computed it itself."""
    bench.serve("a", range(9))
    answer = bench.open("b", range(9), flags=Flags.NO_READ)
    assert (answer.cached, answer.reason) == (0, Reason.NO_READ)
    own = bench.pool._held.table.frames(bench.pool._held.requests["b"].row, 0, 3)
    bench.compute("b", list(range(9)))
    assert np.array_equal(
        own, bench.pool._held.table.frames(bench.pool._held.requests["b"].row, 0, 3)
    )
    bench.pool.close("b")
    assert bench.pool.stats()["frames_free"] == 12 - 2


def test_no_read_seals_what_nobody_has(bench: Any) -> None:
    bench.serve("a", range(9), flags=Flags.NO_READ)
    assert bench.cached(range(9)) == 8


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([0, 1, 2, 3], Reason.BELOW_A_PAGE),
        (list(range(9)), Reason.WHOLE_PREFIX),
        ([*range(4), 9, 9, 9, 9, 9], Reason.NOT_SEALED),
    ],
)
def test_every_answer_says_why_no_more_was_reused(
    bench: Any, prompt: list[int], reason: Reason
) -> None:
    bench.serve("a", range(9))
    assert bench.open("b", prompt).reason is reason
