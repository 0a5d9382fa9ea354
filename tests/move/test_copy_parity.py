"""Every way to copy frames, against loops over single elements.

As a program it runs the cases of the kernel: with TRITON_INTERPRET=1 that needs no device. The variable has to be set before
Triton is imported, and an import lasts as long as its process, so a test starts one.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from stepwell.core.geometry import ITEM_BYTES
from stepwell.core.layout import (
    AXES,
    LAYER_FIRST_HND,
    LAYER_FIRST_NHD,
    PAGE_FIRST_HND,
    PAGE_FIRST_NHD,
    Layout,
)
from stepwell.move.copy import StackPlace
from stepwell.move.fence import PASSED
from stepwell.move.stack import Stack

LAYERS, FRAMES = 3, 5
LAYOUTS = [LAYER_FIRST_NHD, LAYER_FIRST_HND, PAGE_FIRST_NHD, PAGE_FIRST_HND]
STRANGE = Layout(("head", "layer", "dim", "page", "slot"))
SIZES = list(itertools.product((1, 3, 7, 16), (1, 3), ((8, 24), (24, 8))))
ALL = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"]
NUMPY = ["float16", "float32", "float64", "int8", "uint8", "int64"]


@dataclass(frozen=True)
class Case:
    layout: Layout
    row: Layout
    dtype: str
    tokens: int
    heads: int
    dims: tuple[int, int]  # of K and V
    spread: str  # over how many tensors the layers of K and V go
    gap: int  # elements behind each head that belong to nobody
    shift: int  # bytes by which rows miss the alignment of an item

    def __str__(self):
        layouts = f"{self.layout.id}-{self.row.id}"
        sizes = f"{self.tokens}x{self.heads}x{self.dims[0]}x{self.dims[1]}"
        return f"{layouts}-{self.dtype}-{sizes}-{self.spread}-gap{self.gap}-shift{self.shift}"


def cases(dtypes):
    """All layouts and dtypes with each other; sizes and the rest take turns, of lengths that share no divisor."""
    rows = [PAGE_FIRST_NHD, PAGE_FIRST_HND]
    strange = [*itertools.product([STRANGE], rows, dtypes)]
    turns = zip(
        [*itertools.product(LAYOUTS, rows, dtypes), *strange],
        itertools.cycle(SIZES[::3] + SIZES[1::3] + SIZES[2::3]),
        itertools.cycle(["one", "each", "mixed"]),
        itertools.cycle([0, 0, 5, 0, 0]),
        itertools.cycle([0, 0, 0, 1, 0, 0, 8]),
        strict=False,
    )
    return [Case(*orders, *sizes, *more) for orders, sizes, *more in turns]


def kernel_cases():
    """One more has pages of more words than a program copies at once."""
    large = (64, 3, (24, 72), "mixed", 0, 0)
    return [*cases(ALL), Case(LAYER_FIRST_NHD, PAGE_FIRST_NHD, "float32", *large)]


class Memory:
    """One tensor with random bits, and the bits as numpy integers."""

    def __init__(self, case, rng, dim, first, layers, device):
        lengths = (layers, FRAMES, case.tokens, case.heads, dim + case.gap)
        self.sizes = dict(zip(AXES, (*lengths[:4], dim), strict=True))
        self.case, self.first, self.layers = case, first, layers
        shape = case.layout.shape(dict(zip(AXES, lengths, strict=True)))
        kind = np.dtype(f"i{ITEM_BYTES[case.dtype]}")
        bounds = np.iinfo(kind)
        self._bits = rng.integers(bounds.min, bounds.max, shape, kind, endpoint=True)
        whole = self._bits.view(case.dtype) if device == "numpy" else self._torch(device)
        self._whole = whole
        cut = tuple(slice(dim) if axis == "dim" else slice(None) for axis in case.layout.axes)
        self.stack = Stack(whole[cut], self.sizes, case.layout, case.row, first)

    def _torch(self, device):
        import torch

        return torch.from_numpy(self._bits).view(getattr(torch, self.case.dtype)).to(device)

    def bits(self):
        """As they are now; shape of the tensor."""
        if isinstance(self._whole, np.ndarray) or self._whole.device.type == "cpu":
            return self._bits.copy()
        import torch

        kind = getattr(torch, self._bits.dtype.name)
        return self._whole.view(kind).cpu().numpy()

    def places(self, layer, frame):
        """Indices of the elements of one layer of one frame, in the order of a row."""
        inner = self.case.row.axes[2:]
        for numbers in itertools.product(*(range(self.sizes[axis]) for axis in inner)):
            at = {**dict(zip(inner, numbers, strict=True)), "page": frame}
            at["layer"] = layer - self.first
            yield tuple(at[axis] for axis in self.case.layout.axes)


def make_memories(case, device):
    """K and V; the bytes of a layer follow in this order."""
    rng = np.random.default_rng(7)
    singly = {"one": (False, False), "each": (True, True), "mixed": (False, True)}[case.spread]
    memories = []
    for dim, single in zip(case.dims, singly, strict=True):
        spans = [(n, 1) for n in range(LAYERS)] if single else [(0, LAYERS)]
        memories += [Memory(case, rng, dim, first, n, device) for first, n in spans]
    return memories


def elements(memories, frame, layers):
    """What lies in a row: (memory, index) for every element, in its order."""
    for layer in layers:
        for number, memory in enumerate(memories):
            if memory.first <= layer < memory.first + memory.layers:
                for at in memory.places(layer, frame):
                    yield number, at


def row_of(memories, bits, frame):
    found = (bits[number][at].tobytes() for number, at in elements(memories, frame, range(LAYERS)))
    return b"".join(found)


def put_row(memories, bits, row, frame, layers):
    """Writes some layers of a row, which begin behind those before them."""
    item_bytes = ITEM_BYTES[memories[0].case.dtype]
    before = len([*elements(memories, frame, range(layers[0]))]) * item_bytes
    for number, at in elements(memories, frame, range(*layers)):
        item = row[before : before + item_bytes]
        bits[number][at] = np.frombuffer(item, bits[number].dtype)[0]
        before += item_bytes


class Rows:
    """Rows with bytes of nobody around them."""

    def __init__(self, count, frame_bytes, shift, pinned):
        shape = (count, -(-frame_bytes // 8) * 8 + 24)
        self._memory = np.empty(shape, np.uint8)
        if pinned:
            import torch

            self._memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
        self._memory[:] = 0xEE
        self._inside = slice(8 + shift, 8 + shift + frame_bytes)
        self.rows = [line[self._inside] for line in self._memory]

    def around(self):
        return set(np.delete(self._memory, self._inside, axis=1).flat)


class Device:
    """The CPU as a device that is done at once."""

    def __init__(self, *, kernels):
        self.kernels = kernels

    def lane(self):
        return self

    def launch(self, launch, call):
        call()

    def mark(self):
        return PASSED

    def empty(self, size_bytes):
        import torch

        return torch.full((size_bytes,), 0xEE, dtype=torch.uint8)

    def upload(self, array):
        import torch

        return torch.from_numpy(array)


PATHS = {
    "numpy": ("numpy", {}),
    "torch": ("cpu", {}),
    "engine": ("cpu", {"device": Device(kernels=False)}),
    "kernel": ("cpu", {"device": Device(kernels=True), "rows_mapped": True}),
    "cuda engine": ("cuda", {}),
    "cuda kernel": ("cuda", {"rows_mapped": True}),
}


def check(path, case):
    """Copies out, compares; copies all layers into other frames, then one layer, and compares everything."""
    device, options = PATHS[path]
    memories = make_memories(case, device)
    place = StackPlace([memory.stack for memory in memories], **options)
    frames = np.random.default_rng(3).permutation(FRAMES)[:3].astype(np.int32)
    bits = [memory.bits() for memory in memories]
    lines = Rows(3, place.frame_bytes, case.shift, device == "cuda")

    assert place.copy_out(frames, lines.rows).wait(60)
    for frame, row in zip(frames, lines.rows, strict=True):
        assert row.tobytes() == row_of(memories, bits, frame)
    assert lines.around() == {0xEE}

    for targets, layers in ((np.roll(frames, 1), None), (frames[:1], (1, 2))):
        rows = lines.rows[: len(targets)]
        assert place.copy_in(rows, targets, layers).wait(60)
        for frame, row in zip(targets, rows, strict=True):
            put_row(memories, bits, row, frame, layers or (0, LAYERS))
        for memory, expected in zip(memories, bits, strict=True):
            np.testing.assert_array_equal(memory.bits(), expected)


@pytest.mark.parametrize("case", cases(NUMPY), ids=str)
def test_numpy_copies_what_loops_copy(case):
    check("numpy", case)


@pytest.mark.parametrize("case", cases(ALL), ids=str)
def test_torch_on_the_cpu_copies_what_loops_copy(case):
    check("torch", case)


@pytest.mark.parametrize("case", cases(ALL), ids=str)
def test_the_way_of_the_copy_engine_copies_what_loops_copy(case):
    check("engine", case)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cuda engine", "cuda kernel"])
@pytest.mark.parametrize("case", kernel_cases(), ids=str)
def test_a_device_copies_what_loops_copy(path, case):
    check(path, case)


def test_the_kernel_copies_what_loops_copy_in_the_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT RUN: needs Triton")
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["copied", str(len(kernel_cases()))]


if __name__ == "__main__":
    ran = 0
    for one in kernel_cases():
        try:
            check("kernel", one)
        except AssertionError as error:
            error.add_note(str(one))
            raise
        ran += 1
    print("copied", ran)  # noqa: T201 - its parent reads it
