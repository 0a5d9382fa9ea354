"""Places of tensors and of packed frames: what they refuse, which way they copy, and what order a device keeps."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from stepwell.base.errors import InputError, RefusedError
from stepwell.core.layout import AXES, LAYER_FIRST_NHD, PAGE_FIRST_NHD, Layout
from stepwell.move.copy import StackPlace
from stepwell.move.device_copy import (
    LAUNCH_BYTES,
    DeviceCopies,
    EngineCopies,
    KernelCopies,
    engine_pays,
)
from stepwell.move.fence import PASSED
from stepwell.move.lane import AllOf, EventFence, Launch
from stepwell.move.packed import PackedPlace
from stepwell.move.stack import Stack, lay_out
from stepwell.move.staging import SLOTS, Staging
from stepwell.testing.clock import FakeClock


def sizes(layers=2, frames=6, tokens=4, heads=1, dim=8):
    return dict(zip(AXES, (layers, frames, tokens, heads, dim), strict=True))


def numbers(kind="uint16", **lengths):
    """Every element another one; shape [layers, frames, tokens, heads, dim]."""
    found = sizes(**lengths)
    count = int(np.prod([*found.values()]))
    return np.arange(count).astype(kind).reshape(tuple(found.values()))


def stack(kind="float16", first_layer=0, **lengths):
    bits = numbers(f"u{np.dtype(kind).itemsize}", **lengths)
    return Stack(bits.view(kind), sizes(**lengths), first_layer=first_layer)


def torch_stack(**lengths):
    import torch

    return Stack(
        torch.from_numpy(numbers("int16", **lengths)).view(torch.bfloat16), sizes(**lengths)
    )


def ids(*frames):
    return np.array(frames, np.int32)


def rows_for(place, count):
    return [np.zeros(place.frame_bytes, np.uint8) for _ in range(count)]


def bits_of(tensor):
    import torch

    return tensor.view(torch.int16).numpy().copy()


class Queue:
    """A lane that does nothing until a test lets it."""

    def __init__(self):
        self.waiting, self.done, self.failing = [], [], None

    def launch(self, launch, call):
        self.waiting.append((launch, call))

    def step(self):
        launch, call = self.waiting.pop(0)
        if launch.name == self.failing:
            raise RuntimeError("an illegal address\nand more")
        call()
        self.done.append(launch.name)

    def synchronise(self):
        while self.waiting:
            self.step()

    def mark(self):
        return Reached(self, len(self.done) + len(self.waiting))


class Reached:
    def __init__(self, lane, count):
        self.lane, self.count = lane, count

    def done(self):
        return len(self.lane.done) >= self.count

    def wait(self, within_s):
        return self.done()


class HeldDevice:
    """The CPU as a device whose lanes a test holds."""

    def __init__(self, *, kernels=False):
        self.kernels, self.lanes, self.empties = kernels, [], []

    def lane(self):
        self.lanes.append(Queue())
        return self.lanes[-1]

    def empty(self, size_bytes):
        import torch

        self.empties.append(size_bytes)
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def upload(self, array):
        import torch

        return torch.from_numpy(array)

    def run(self, order):
        """Everything that waits: in each lane in order, the lanes among each other at random."""
        while busy := [lane for lane in self.lanes if lane.waiting]:
            order.choice(busy).step()


@pytest.fixture
def held():
    return HeldDevice()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda: Stack([1, 2], sizes()), "a list"),
        (lambda: Stack(np.zeros(384, "u2"), sizes()), "dtype uint16"),
        (lambda: Stack(np.zeros(384, ">f2"), sizes()), "dtype >f2"),
        (lambda: Stack(np.zeros(383, "f2"), sizes()), "383"),
        (lambda: Stack(np.zeros(0, "f2"), sizes(frames=0)), "the sizes"),
        (lambda: Stack(np.zeros(384, "f2"), {"page": 384}), "the sizes"),
        (lambda: Stack(np.zeros(384, "f2"), sizes(), row=LAYER_FIRST_NHD), "page and layer first"),
        (lambda: stack(first_layer=-1), "first layer is -1"),
        (lambda: Stack.of_slots(np.zeros((2, 24, 1, 8), "f2"), 5), "pages of 5 tokens"),
        (lambda: Stack.of_slots(np.zeros((2, 24, 8), "f2"), 4), "pages of 4 tokens"),
        (lambda: StackPlace([]), "0 stacks"),
        (lambda: StackPlace([stack(), stack(frames=5)]), r"2 stacks have \[5, 6\] frames"),
        (lambda: StackPlace([stack(first_layer=1)]), "no stack has layer 0"),
        (lambda: StackPlace([stack(), stack(first_layer=3)]), "no stack has layer 2"),
        (lambda: StackPlace([Stack(np.zeros((24, 16), "f2").T, sizes())]), "is no view"),
        (lambda: StackPlace([stack("int8", tokens=1, dim=3), stack("float32")]), "at byte 3 "),
        (lambda: StackPlace([stack("float32"), stack("int8", tokens=1, dim=3)]), "every 131 bytes"),
    ],
)
def test_stacks_that_mean_nothing_are_refused(broken, why):
    with pytest.raises(InputError, match=why):
        broken()


def test_tensors_of_torch_are_refused_for_the_same_reasons():
    import torch

    with pytest.raises(InputError, match="dtype complex64"):
        Stack(torch.zeros(384, dtype=torch.complex64), sizes())
    with pytest.raises(InputError, match="is no view"):
        StackPlace([Stack(torch.zeros(24, 16).T, sizes())])
    with pytest.raises(InputError, match="the stacks are on cpu, meta"):
        StackPlace([torch_stack(), Stack(torch.zeros(384, device="meta"), sizes())])


@pytest.mark.parametrize(
    ("frames", "count", "why"),
    [
        (ids(0, 6), 2, "frame 6 is not there; allowed: 0 to 5"),
        (ids(3, -1), 2, "frame -1 is not there"),
        (ids(0, 1), 3, "3 rows for frames of shape"),
        (ids(), 1, "1 rows for frames of shape"),
        (ids(0).reshape(1, 1), 1, "1 rows for frames of shape"),
    ],
)
def test_frames_that_are_not_there_are_refused_before_anything_is_copied(frames, count, why):
    place = StackPlace([stack()])
    rows = rows_for(place, count)
    with pytest.raises(InputError, match=why):
        place.copy_out(frames, rows)
    with pytest.raises(InputError, match=why):
        place.copy_in(rows, frames)
    assert not any(row.any() for row in rows)


@pytest.mark.parametrize(
    "row", [np.zeros(127, np.uint8), np.zeros(256, np.uint8)[::2], np.zeros((1, 128), np.uint8)]
)
def test_rows_of_another_size_are_refused(row):
    place = StackPlace([stack()])
    assert place.frame_bytes == 128
    with pytest.raises(InputError, match="128 bytes each"):
        place.copy_out(ids(0, 1), [*rows_for(place, 1), row])


def test_a_row_that_cannot_be_written_is_read_only():
    place = StackPlace([stack()])
    (row,) = rows_for(place, 1)
    row.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        place.copy_out(ids(0), [row])
    assert place.copy_in([row], ids(0)).done()


@pytest.mark.parametrize("layers", [(0, 3), (-1, 1), (1, 1), (2, 1)])
def test_layers_that_are_not_there_are_refused(layers):
    place = StackPlace([stack()])
    with pytest.raises(InputError, match="0 to 2"):
        place.copy_in(rows_for(place, 1), ids(0), layers)


def test_no_frames_are_no_work(held):
    for place in (StackPlace([stack()]), StackPlace([torch_stack()], device=held)):
        assert place.copy_out(ids(), []) is PASSED
        assert place.copy_in([], ids()) is PASSED
    assert not any(lane.waiting for lane in held.lanes)


# --- how a row is laid out -------------------------------------------------------------------------------------------


def test_a_row_is_page_first_and_has_the_stacks_of_a_layer_in_their_order():
    k, v = stack(layers=3), stack(layers=3, dim=4)
    scale = stack("int8", layers=1, first_layer=1, tokens=2)
    place = StackPlace([k, v, scale])
    assert place.bounds == (0, 96, 96 + 112, 96 + 112 + 96)
    assert (place.frame_bytes, place.frames) == (304, 6)
    (row,) = rows_for(place, 1)
    place.copy_out(ids(2), [row])
    expected = b"".join(
        part.tensor[layer - part.first_layer, 2].tobytes()
        for layer in range(3)
        for part in ([k, v, scale] if layer == 1 else [k, v])
    )
    assert row.tobytes() == expected


def test_a_buffer_of_the_pool_has_a_page_in_neighbouring_slots():
    buffer = numbers("float32").reshape(2, 24, 1, 8)
    place = StackPlace([Stack.of_slots(buffer, 4)])
    (row,) = rows_for(place, 1)
    place.copy_out(ids(5), [row])
    assert row.tobytes() == buffer[:, 20:24].tobytes()
    place.copy_in([row], ids(1), (1, 2))
    assert (buffer[1, 4:8] == buffer[1, 20:24]).all()
    assert (buffer[0, 4:8] != buffer[0, 20:24]).all()


def test_parameters_are_tensors_too():
    import torch

    parameter = torch.nn.Parameter(torch.arange(384.0))
    place = StackPlace([Stack(parameter, sizes())])
    (row,) = rows_for(place, 1)
    place.copy_out(ids(1), [row])
    place.copy_in([row], ids(0))
    assert torch.equal(parameter[:32], parameter[32:64])


def test_other_orders_inside_of_a_page_are_orders_too():
    order = Layout(("page", "layer", "dim", "head", "slot"))
    tensor = numbers("int64", heads=2)
    place = StackPlace([Stack(tensor, sizes(heads=2), row=order)])
    (row,) = rows_for(place, 1)
    place.copy_out(ids(3), [row])
    assert row.tobytes() == tensor[:, 3].transpose(0, 3, 2, 1).tobytes()


def test_arrays_are_copied_without_torch():
    code = """
        import sys, numpy as np
        from stepwell.move.copy import StackPlace
        from stepwell.move.stack import Stack
        place = StackPlace([Stack.of_slots(np.ones((2, 8, 1, 4), "f4"), 4)])
        row = np.zeros(place.frame_bytes, np.uint8)
        place.copy_out(np.array([1], np.int32), [row])
        print(row.any(), "torch" in sys.modules, "triton" in sys.modules)
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


# --- which way -------------------------------------------------------------------------------------------------------


def way(place, layers=(0, 2)):
    return type(place._through(layers))


def large_stack(frame_bytes, layers=2):
    """Two layers of so many bytes together, in one frame."""
    return torch_stack(layers=layers, frames=1, tokens=1, dim=frame_bytes // 2 // layers)


@pytest.mark.parametrize(
    ("kernels", "rows_mapped", "expected"),
    [(True, True, KernelCopies), (True, False, EngineCopies), (False, True, EngineCopies)],
)
def test_a_kernel_copies_small_pages_if_it_is_there_and_reaches_the_rows(
    kernels, rows_mapped, expected
):
    pytest.importorskip("triton")
    device = HeldDevice(kernels=kernels)
    place = StackPlace([torch_stack()], device=device, rows_mapped=rows_mapped)
    assert way(place) is expected
    staged = 0 if expected is KernelCopies else 2 * SLOTS
    assert device.empties == [place.frame_bytes] * staged


def test_the_copy_engine_copies_pages_that_are_worth_its_launches():
    pytest.importorskip("triton")
    enough = large_stack(2 * LAUNCH_BYTES)
    device = HeldDevice(kernels=True)
    place = StackPlace([enough], device=device, rows_mapped=True)
    assert way(place) is EngineCopies
    assert way(place, (0, 1)) is KernelCopies  # half of the bytes for as many launches
    less = StackPlace([large_stack(2 * LAUNCH_BYTES - 4)], device=device, rows_mapped=True)
    assert way(less) is KernelCopies


def test_each_strip_is_one_launch_more():
    one = lay_out([large_stack(2 * LAUNCH_BYTES)])
    two = lay_out([large_stack(LAUNCH_BYTES), large_stack(LAUNCH_BYTES)])
    assert engine_pays(one.band(0, 2))
    assert not engine_pays(two.band(0, 2))


def test_the_kernel_is_compiled_before_the_first_copy():
    pytest.importorskip("triton")
    device = HeldDevice(kernels=True)
    DeviceCopies(lay_out([torch_stack()]), device, rows_mapped=True, debug=False)
    assert not any(lane.waiting for lane in device.lanes)
    StackPlace([torch_stack()], device=device, rows_mapped=True)
    waiting = [str(launch) for lane in device.lanes for launch, _ in lane.waiting]
    assert waiting == ["gather, frames none, layers 0 to 1", "scatter, frames none, layers 0 to 1"]


@pytest.mark.parametrize(("shift", "word_bytes"), [(0, 8), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_the_kernel_copies_words_that_are_aligned_in_the_rows_too(shift, word_bytes):
    pytest.importorskip("triton")
    place = StackPlace([torch_stack()], device=HeldDevice(kernels=True), rows_mapped=True)
    memory = np.zeros((2, 256), np.uint8)
    memory = memory[:, -memory.ctypes.data % 8 :]
    place.copy_out(ids(0, 1), [memory[0, :128], memory[1, shift : shift + 128]])
    assert set(place._through((0, 2))._tables) == {8, word_bytes}


def test_the_kernel_compiles_for_devices_that_are_not_here(tmp_path):
    pytest.importorskip("triton")
    code = """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile
        from stepwell.move import triton_copy
        for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
            for word_bytes, out in ((1, True), (8, False)):
                fixed = {"WORD": triton_copy._DTYPES[word_bytes], "OUT": out}
                kinds = {"pages": "*i64", "table": "*i64", "tasks": "i32", "entries": "i32"}
                kinds |= dict.fromkeys(fixed, "constexpr")
                source = ASTSource(triton_copy._copy_words, kinds, fixed)
                made = compile(source, target=target, options={"enable_fp_fusion": False})
                print(*{"cubin", "hsaco"} & set(made.asm))
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", lines],
        env={"TRITON_CACHE_DIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cubin", "cubin", "hsaco", "hsaco"]


# --- what order a device keeps ---------------------------------------------------------------------------------------


def test_nothing_is_overwritten_too_early_however_lanes_overtake_each_other(held):
    held_stack = torch_stack(frames=9)
    before = bits_of(held_stack.tensor)
    place = StackPlace([held_stack], device=held)
    for seed in range(20):
        order = random.Random(seed)
        frames = ids(*order.sample(range(9), 8))
        rows = rows_for(place, 8)
        out = place.copy_out(frames, rows)
        assert not out.done()
        assert not any(row.any() for row in rows)
        held.run(order)
        assert out.done()
        for frame, row in zip(frames, rows, strict=True):
            assert row.tobytes() == before[:, frame].tobytes()
        held_stack.tensor.zero_()
        back = place.copy_in(rows, frames)
        assert not back.done()
        held.run(order)
        assert back.done()
        (left,) = set(range(9)) - set(frames.tolist())
        after = bits_of(held_stack.tensor)
        assert (after[:, frames] == before[:, frames]).all()
        assert not after[:, left].any()
        held_stack.pages().numpy()[:] = before.swapaxes(0, 1)


@pytest.mark.parametrize("order", [1, -1])
def test_a_copy_ends_with_the_last_of_its_lanes(held, order):
    place = StackPlace([torch_stack()], device=held)
    end = place.copy_out(ids(0, 1), rows_for(place, 2))
    first, second = [lane for lane in held.lanes if lane.waiting][::order]
    first.synchronise()
    assert not end.done()
    second.synchronise()
    assert end.done()


def test_only_the_bytes_of_the_layers_pass(held):
    one = torch_stack()
    place = StackPlace([one], device=held)
    before = bits_of(one.tensor)
    (row,) = rows_for(place, 1)
    row[:] = 0xAB
    place.copy_in([row], ids(4), (1, 2))
    held.run(random.Random(0))
    after = bits_of(one.tensor)
    assert (after[1, 4].view("u1") == 0xAB).all()
    before[1, 4] = after[1, 4]
    assert (after == before).all()


def test_nothing_is_in_flight_behind_an_error(held):
    def pack(frame, row):
        row[:] = frame

    place = PackedPlace(pack, pack, 8, (0, 8), 6, Staging(held, 8))
    rows = [*rows_for(place, 2), np.zeros(8, np.uint8)]

    def refuse(launch, call):
        raise RefusedError("no")

    held.lanes[2].launch = refuse
    with pytest.raises(RefusedError, match="no"):
        place.copy_out(ids(3, 4, 5), rows)
    assert [row.tolist() for row in rows] == [[3] * 8, [4] * 8, [0] * 8]


@pytest.mark.parametrize(
    ("failing", "call"),
    [
        ("pack", "copy_out"),
        ("copy to host", "copy_out"),
        ("copy from host", "copy_in"),
        ("unpack", "copy_in"),
    ],
)
def test_debug_names_the_launch_that_failed(held, failing, call):
    place = StackPlace([torch_stack()], device=held, debug=True)
    for lane in held.lanes:
        lane.failing = failing
    frames, rows = ids(5), rows_for(place, 1)
    told = f"the device failed in {failing}, frames 5, layers 0 to 1: an illegal address;"
    with pytest.raises(RefusedError, match=told):
        place.copy_out(frames, rows) if call == "copy_out" else place.copy_in(rows, frames)


def test_debug_names_the_kernel_too():
    pytest.importorskip("triton")
    device = HeldDevice(kernels=True)
    device.lane = failing_lane
    with pytest.raises(
        RefusedError, match="failed in gather, frames none, layers 0 to 1: an illegal"
    ):
        StackPlace([torch_stack()], device=device, rows_mapped=True, debug=True)


def failing_lane():
    lane = Queue()
    lane.failing = "gather"
    return lane


def test_without_debug_nothing_waits(held):
    place = StackPlace([torch_stack()], device=held)
    assert not place.copy_out(ids(0), rows_for(place, 1)).done()


def test_a_launch_names_its_first_frames():
    many = Launch("gather", ids(*range(4, 14)), (2, 5))
    assert str(many) == "gather, frames 4, 5, 6, 7, 8, 9, 10, 11 and 2 more, layers 2 to 4"


# --- fences ----------------------------------------------------------------------------------------------------------


class Event:
    """Is over when it has been asked so often; each time costs a second."""

    def __init__(self, clock, queries):
        self.clock, self.queries = clock, queries

    def query(self):
        self.clock.advance_s(1)
        self.queries -= 1
        return self.queries <= 0


def test_a_fence_over_an_event_waits_until_it_is_over_or_until_too_late():
    clock = FakeClock()
    fence = EventFence(Event(clock, 4), clock)
    assert not fence.done()
    assert not fence.wait(1)
    assert clock.now_s() == 2
    assert fence.wait(10)
    assert clock.now_s() == 4
    assert fence.wait(0)


def test_all_fences_share_one_deadline():
    clock = FakeClock()
    events = [Event(clock, 3), Event(clock, 3)]
    both = AllOf([EventFence(event, clock) for event in events], clock)
    assert not both.done()
    assert not both.wait(3)
    assert clock.now_s() == 4
    assert both.wait(3)
    assert both.done()
    assert AllOf([]).done()


# --- packed frames ---------------------------------------------------------------------------------------------------


class States:
    """An engine's states, which it packs backwards."""

    def __init__(self, frames=6, frame_bytes=8):
        rng = np.random.default_rng(1)
        self.memory = rng.integers(0, 256, (frames, frame_bytes), np.uint8)

    def pack(self, frame, row):
        if isinstance(row, np.ndarray):
            row[:] = self.memory[frame][::-1]
            return
        import torch

        row.copy_(torch.from_numpy(self.memory[frame][::-1].copy()))

    def unpack(self, row, frame):
        self.memory[frame] = np.asarray(row)[::-1]

    def place(self, staging=None):
        return PackedPlace(self.pack, self.unpack, 8, (0, 3, 8), 6, staging)


@pytest.mark.parametrize("staged", [False, True])
def test_packed_frames_come_back_as_they_were(held, staged):
    states = States()
    before = states.memory.copy()
    place = states.place(Staging(held, 8) if staged else None)
    assert (place.frame_bytes, place.bounds, place.frames) == (8, (0, 3, 8), 6)
    frames, rows = ids(5, 0, 3, 2, 4), rows_for(place, 5)
    end = place.copy_out(frames, rows)
    assert end.done() is not staged
    held.run(random.Random(2))
    assert end.done()
    assert (np.stack(rows) == before[frames][:, ::-1]).all()
    states.memory[:] = 0
    end = place.copy_in(rows, frames, (0, 2))
    held.run(random.Random(3))
    assert end.done()
    assert (states.memory[frames] == before[frames]).all()
    assert not states.memory[1].any()


def test_packing_and_copying_overlap(held):
    states = States()
    place = states.place(Staging(held, 8))
    place.copy_out(ids(0, 1), rows_for(place, 2))
    first, second = [lane for lane in held.lanes if lane.waiting]
    first.step()
    second.step()  # the second page is packed while the first is not copied yet
    assert (first.done, second.done) == (["pack"], ["pack"])


def test_packed_frames_are_loaded_as_a_whole():
    place = States().place()
    with pytest.raises(InputError, match="load all layers at once"):
        place.copy_in(rows_for(place, 1), ids(0), (0, 1))


def test_packed_frames_are_checked_as_others_are():
    place = States().place()
    with pytest.raises(InputError, match="frame 6"):
        place.copy_out(ids(6), rows_for(place, 1))
    with pytest.raises(InputError, match="8 bytes each"):
        place.copy_in([np.zeros(7, np.uint8)], ids(0))


@pytest.mark.parametrize("bounds", [(), (0,), (0, 7), (1, 8), (0, 5, 5, 8), (0, 9, 8), (0, 4, 9)])
def test_bounds_that_are_not_those_of_a_frame_are_refused(bounds):
    with pytest.raises(InputError, match="from 0 to 8"):
        PackedPlace(States().pack, States().unpack, 8, bounds, 6)


# --- a real device ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows_mapped", [False, True])
def test_copies_of_a_device_end_with_their_fence(rows_mapped):
    import torch

    lengths = sizes(layers=4, frames=64, tokens=16, heads=8, dim=128)
    k, v = (torch.randn(*lengths.values(), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copies = [tensor.clone() for tensor in (k, v)]
    torch.cuda.synchronize()
    place = StackPlace([Stack(k, lengths), Stack(v, lengths)], rows_mapped=rows_mapped, debug=True)
    memory = torch.empty((64, place.frame_bytes), dtype=torch.uint8, pin_memory=True).numpy()
    frames = np.random.default_rng(5).permutation(64).astype(np.int32)
    assert place.copy_out(frames, list(memory)).wait(60)
    k.zero_()
    v.zero_()
    torch.cuda.synchronize()
    ends = [place.copy_in(list(memory), frames, (layer, layer + 1)) for layer in range(4)]
    assert all(end.wait(60) for end in ends)
    assert torch.equal(k, copies[0])
    assert torch.equal(v, copies[1])


@pytest.mark.gpu
def test_large_pages_of_a_device_go_by_the_copy_engine():
    import torch

    lengths = sizes(layers=2, frames=3, tokens=64, heads=32, dim=128)
    one = torch.randn(*lengths.values(), device="cuda", dtype=torch.float32)
    torch.cuda.synchronize()
    place = StackPlace([Stack(one, lengths, LAYER_FIRST_NHD, PAGE_FIRST_NHD)], rows_mapped=True)
    assert way(place) is EngineCopies
    memory = torch.empty((3, place.frame_bytes), dtype=torch.uint8, pin_memory=True).numpy()
    assert place.copy_out(ids(2, 0, 1), list(memory)).wait(60)
    for frame, row in zip((2, 0, 1), memory, strict=True):
        assert row.tobytes() == one[:, frame].cpu().numpy().tobytes()
