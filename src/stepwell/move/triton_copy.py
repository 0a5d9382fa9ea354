"""The kernel that copies between device memory and mapped host memory, a page list at a time.

Must not know: tensors, stacks: it is given addresses. Triton is imported with this module, which is therefore imported
when used. Neighbours: `device_copy` makes the tables and launches it. With TRITON_INTERPRET=1 in the environment before
the first import, it runs on the CPU, on addresses of CPU memory.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PROGRAMS = 32
"""Of one launch: 8 KB in flight each are more than PCIe holds (64 GB/s · 2 µs = 128 KB), and most of the device is left
to whoever computes."""

_WORDS = tl.constexpr(1024)
_DTYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_COLUMNS = tl.constexpr(10)


@triton.jit(do_not_specialize=["tasks", "entries"])  # type: ignore[untyped-decorator]
def _copy_words(pages, table, tasks, entries, WORD: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    size = WORD.primitive_bitwidth // 8
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        page = pages + task // entries * 2
        entry = table + task % entries * _COLUMNS
        frame = tl.load(entry) + tl.load(page + 1) * tl.load(entry + 1)
        row = (tl.load(page) + tl.load(entry + 2)).to(tl.pointer_type(WORD))
        # Lengths as 32 bits: a device divides 64 bits by software, and this is done for every word.
        words, first = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
        second, third = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        step0, step1, step2 = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)
        for begin in range(0, words, _WORDS):
            word = begin + tl.arange(0, _WORDS)
            there = word < words
            run = word // third
            steps = run // second // first * step0 + run // second % first * step1
            steps += run % second * step2
            device = frame.to(tl.pointer_type(WORD)) + (steps // size + word % third)
            if OUT:
                tl.store(row + word, tl.load(device, mask=there), mask=there)
            else:
                tl.store(device, tl.load(row + word, mask=there), mask=there)


def copy_words(pages: Any, table: Any, word_bytes: int, *, out: bool) -> None:
    """Copies each entry of the table for each page; with no page, only compiles what copies.

    Args:
        pages: address of the row, frame; int64, shape [n, 2], in memory of the device.
        table: for a layer of a stack: address in frame 0, bytes from frame to frame, offset in a row in bytes, words,
            then elements of the second, third and last of four axes and bytes from one element of the first, second
            and third to the next; the last is a run of words. int64, shape [entries, 10], in memory of the device.
        word_bytes: 1, 2, 4 or 8; all addresses, offsets and steps are multiples of it.
        out: from frames into rows, or back.
    """
    entries = table.shape[0]
    tasks = pages.shape[0] * entries
    # Nothing here is a float; Triton warns where nothing is said about fusing them.
    fixed = {"WORD": _DTYPES[word_bytes], "OUT": out, "enable_fp_fusion": False}
    grid = (min(PROGRAMS, tasks) or 1,)
    _copy_words[grid](pages, table, tasks, entries, **fixed)
