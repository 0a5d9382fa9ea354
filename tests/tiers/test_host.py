"""The host tier: the contract of every tier, limits to the byte, growth, close, and bytes that are not what was sealed."""

import contextlib
import ctypes
import dataclasses
import gc
import pathlib
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError, MisuseError, RefusedError
from stepwell.base.threads import Health
from stepwell.core.frames import MAX_FRAMES
from stepwell.core.plan import Outcome
from stepwell.memory import prepare
from stepwell.memory.system import PAGE_BYTES
from stepwell.testing.contract import TierContract
from stepwell.testing.gpu import FakeGpu
from stepwell.tiers import host
from stepwell.tiers.host import NAME_BYTES, HostSize, HostTier, payloads_like, sum_up
from stepwell.tiers.tier import Entry, Payload

BOUNDS = (0, 1000, 1001, 5000)
SIZE = HostSize(5000, BOUNDS, 4)
OK, MISS, CORRUPT, REFUSED = Outcome.OK, Outcome.MISS, Outcome.CORRUPT, Outcome.REFUSED


def name(number):
    return number.to_bytes(2, "big") * (NAME_BYTES // 2)


def ready(tier):
    assert tier.wait(30)
    tier.grown()
    return tier


class TestHostTier(TierContract):
    def make_tier(self, size):
        return ready(HostTier(HostSize(size.frame_bytes, size.bounds, size.frames)))


class TestPinnedHostTier(TierContract):
    """Registered in pieces of one frame."""

    def make_tier(self, size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "PIECE_BYTES", 1)
            sizes = HostSize(size.frame_bytes, size.bounds, size.frames, pinned=True)
            return ready(HostTier(sizes, gpu=FakeGpu()))


@pytest.fixture
def tier():
    made = ready(HostTier(SIZE))
    yield made
    made.close()


def fill(tier, *frames):
    """Seals frames in place, under their numbers plus one."""
    for frame in frames:
        tier.row(frame)[:] = np.random.default_rng(frame).integers(0, 256, 5000, np.uint8)
        tier.seal(frame, name(frame + 1))


def get(tier, frame):
    (payload,) = payloads_like(SIZE, 1)
    (outcome,) = tier.get_into([Entry(name(frame + 1), frame)], [payload], 0)
    return outcome, payload


# Sizes.


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=6))
    return tuple(np.cumsum([0, *sizes]).tolist())


@given(layouts(), st.integers(0, 1 << 24))
def test_a_capacity_is_used_up_to_the_last_frame_that_fits(bounds, capacity_bytes):
    frame_bytes = bounds[-1]
    each = HostSize(frame_bytes, bounds, 1).each_bytes
    if capacity_bytes < each:
        with pytest.raises(InputError, match="capacity_bytes"):
            HostSize.within(capacity_bytes, frame_bytes, bounds)
        return
    size = HostSize.within(capacity_bytes, frame_bytes, bounds, pinned=True, node=0)
    assert size.frames * each <= capacity_bytes < (size.frames + 1) * each
    assert (size.frame_bytes, size.bounds, size.pinned, size.node) == (frame_bytes, bounds, True, 0)


@given(layouts())
def test_one_byte_less_is_one_frame_less(bounds):
    each = HostSize(bounds[-1], bounds, 1).each_bytes
    for frames in (2, 1000):
        assert HostSize.within(frames * each, bounds[-1], bounds).frames == frames
        assert HostSize.within(frames * each - 1, bounds[-1], bounds).frames == frames - 1


@given(layouts(), st.integers(1, 5000))
def test_frames_begin_at_memory_pages_and_pieces_hold_whole_ones(bounds, frames):
    size = HostSize(bounds[-1], bounds, frames)
    assert size.stride_bytes % PAGE_BYTES == 0
    assert 0 <= size.stride_bytes - size.frame_bytes < PAGE_BYTES
    assert size.piece_bytes % size.stride_bytes == 0
    assert size.region_bytes == frames * size.stride_bytes


def test_a_frame_may_be_larger_than_a_piece():
    size = HostSize(host.PIECE_BYTES + 1, (0, host.PIECE_BYTES + 1), 3)
    assert size.piece_bytes == size.stride_bytes == host.PIECE_BYTES + PAGE_BYTES


@pytest.mark.parametrize("frame_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 12345])
@pytest.mark.parametrize("frames", [1, 2, 7])
def test_the_region_has_room_for_all_frames_and_no_more(frame_bytes, frames):
    size = HostSize(frame_bytes, (0, frame_bytes), frames)
    tier = HostTier(size)
    try:
        assert tier.wait(30)
        assert sorted(tier.grown()) == list(range(frames))
        assert tier.frames == frames
        assert tier.record.size_bytes == size.region_bytes
        begin = sorted(tier.address(frame) for frame in range(frames))
        assert np.diff(begin).tolist() == [size.stride_bytes] * (frames - 1)
        assert not any(address % PAGE_BYTES for address in begin)
        for frame in range(frames):
            tier.row(frame)[:] = frame + 1
        for frame in range(frames):
            assert (
                ctypes.string_at(tier.address(frame), frame_bytes)
                == bytes([frame + 1]) * frame_bytes
            )
    finally:
        tier.close()


@pytest.mark.parametrize("layers", [1, 40])
def test_what_a_frame_costs_is_all_that_is_allocated_for_it(layers):
    """Names, sums and all books: a limit of bytes that counts rows only is none."""
    bounds = tuple(range(layers + 1))
    held = []
    for frames in (1000, 9000):
        gc.collect()
        tracemalloc.start()
        tier = ready(HostTier(HostSize(layers, bounds, frames)))
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        tier.close()
    each = (held[1] - held[0]) / 8000
    beside = tier.size.each_bytes - tier.size.stride_bytes
    assert beside - 2 < each <= beside + 0.5, "objects of the interpreter come and go"


@pytest.mark.parametrize(
    ("frame_bytes", "bounds", "frames"),
    [
        *((bad, (0, 10), 1) for bad in (0, -1, 1.0, True, "10", None)),
        *((10, (0, 10), bad) for bad in (0, -1, MAX_FRAMES + 1, 1.0, True, None)),
        *((10, bad, 1) for bad in ((), (0,), (10,), (0, 9), (0, 11), (1, 10), (0, 0, 10))),
        *((10, bad, 1) for bad in ((0, 11, 10), (0, 5, 5, 10), (0, 5.5, 10), (False, 10))),
        *((10, bad, 1) for bad in ([0, 10], None, "ab", ((0, 10),))),
    ],
)
def test_a_size_that_cannot_be_meant_is_refused(frame_bytes, bounds, frames):
    with pytest.raises(InputError):
        HostSize(frame_bytes, bounds, frames)


@pytest.mark.parametrize("capacity_bytes", [0, -1, 1.5e9, None])
def test_a_capacity_that_is_none_is_refused(capacity_bytes):
    with pytest.raises((InputError, TypeError)):
        HostSize.within(capacity_bytes, 10, (0, 10))


# Growth, refusals, close.


class GatedGpu(FakeGpu):
    """Registers a piece when the test lets it."""

    def __init__(self):
        super().__init__()
        self.gate, self.asked = threading.Semaphore(0), threading.Semaphore(0)

    def register(self, address, size_bytes):
        self.asked.release()
        assert self.gate.acquire(timeout=30)
        super().register(address, size_bytes)


@pytest.fixture
def small_pieces(monkeypatch):
    """Of two frames."""
    monkeypatch.setattr(host, "PIECE_BYTES", 2 * SIZE.stride_bytes)


@pytest.fixture
def nothing_stays():
    """Threads and descriptors afterwards are those before."""

    def all_open():
        found = set()
        for entry in pathlib.Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # of the listing itself
                found.add((entry.name, str(entry.readlink())))
        return found, set(threading.enumerate())

    before = all_open()
    yield
    assert all_open() == before


def mapped(address):
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(first <= address < last for first, last in spans)


PINNED = dataclasses.replace(SIZE, frames=5, pinned=True)


@pytest.mark.usefixtures("small_pieces", "nothing_stays")
def test_frames_become_ready_piece_by_piece_and_each_is_told_once():
    gpu = GatedGpu()
    tier = HostTier(PINNED, gpu=gpu)
    told = []
    for _ in range(3):
        assert gpu.asked.acquire(timeout=30)  # the piece before it has been given out
        told.append(sorted(tier.grown().tolist()))
        gpu.gate.release()
    assert tier.wait(30)
    told.append(tier.grown().tolist())
    assert told == [[], [0, 1], [2, 3], [4]]
    assert not len(tier.grown())
    assert tier.record.pinned
    assert sum(gpu.registered.values()) == PINNED.region_bytes
    tier.close()
    assert not gpu.registered


@pytest.mark.usefixtures("small_pieces", "nothing_stays")
def test_a_frame_that_is_not_ready_is_no_other_frame():
    """Its place is not known yet: 0 would be the place of the first one."""
    gpu = GatedGpu()
    tier = HostTier(PINNED, gpu=gpu)
    gpu.gate.release()
    for _ in range(2):
        assert gpu.asked.acquire(timeout=30)
    tier.grown()
    fill(tier, 0)
    late = Entry(name(9), 4)
    (payload,) = payloads_like(SIZE, 1)
    payload.row[:] = 1
    sum_up(payload, SIZE, late.name)
    assert tier.put_from([late], [payload], 0) == [REFUSED]
    assert tier.exists([late], 0) == tier.delete([late], 0) == [MISS]
    for use in (tier.row, tier.address, tier.wipe):
        with pytest.raises(MisuseError, match="frame 4"):
            use(4)
    with pytest.raises(MisuseError, match="frame 4"):
        tier.seal(4, late.name)
    assert get(tier, 0)[0] is OK
    gpu.gate.release(2)
    ready(tier)
    assert tier.put_from([late], [payload], 0) == [OK]
    assert get(tier, 0)[0] is OK
    tier.close()


@pytest.mark.usefixtures("small_pieces", "nothing_stays")
def test_closing_while_it_grows_leaves_nothing():
    gpu = GatedGpu()
    tier = HostTier(PINNED, gpu=gpu)
    gpu.gate.release()
    for _ in range(2):
        assert gpu.asked.acquire(timeout=30)
    tier.grown()
    address = tier.address(0)
    assert mapped(address)
    closing = threading.Thread(target=tier.close)
    closing.start()
    gpu.gate.release(2)  # the stride in progress has to end
    closing.join(30)
    assert not closing.is_alive()
    assert not gpu.registered
    assert not mapped(address)


@pytest.mark.usefixtures("nothing_stays")
def test_closing_gives_everything_back_and_answers_go_on():
    tier = ready(HostTier(SIZE))
    fill(tier, 0, 1)
    address = tier.address(0)
    tier.close()
    tier.close()
    assert not mapped(address)
    entries, payloads = [Entry(name(1), 0), Entry(name(2), 1)], payloads_like(SIZE, 2)
    assert tier.exists(entries, 0) == [MISS, MISS]
    assert tier.get_into(entries, payloads, 0) == [MISS, MISS]
    assert tier.put_from(entries, payloads, 0) == [REFUSED, REFUSED]
    assert tier.delete(entries, 0) == [MISS, MISS]
    assert list(tier.scan()) == []
    assert not len(tier.grown())
    for use in (tier.row, tier.address, tier.wipe):
        with pytest.raises(MisuseError, match="until `close`"):
            use(0)


@pytest.mark.usefixtures("nothing_stays")
def test_pinning_that_is_refused_is_noted_and_the_tier_works():
    tier = ready(HostTier(PINNED, gpu=FakeGpu(most_bytes=0)))
    (refusal,) = tier.record.refusals
    assert refusal.what == "pinned"
    assert "out of memory" in refusal.reason
    assert not tier.record.pinned
    fill(tier, 0, 4)
    assert get(tier, 4)[0] is OK
    tier.close()


@pytest.mark.usefixtures("nothing_stays")
def test_a_node_that_is_not_there_is_noted():
    tier = ready(HostTier(dataclasses.replace(SIZE, node=1023)))
    assert [refusal.what for refusal in tier.record.refusals] == ["node"]
    tier.close()


@pytest.mark.usefixtures("small_pieces", "nothing_stays")
def test_memory_that_ends_early_leaves_the_tier_at_what_it_has(monkeypatch):
    rooms = iter([1 << 40, 0])
    monkeypatch.setattr(prepare, "available_bytes", lambda _: next(rooms))
    health = Health()
    tier = HostTier(PINNED, health=health)
    with pytest.raises(RefusedError):
        tier.wait(30)
    assert health.degraded
    assert sorted(tier.grown()) == [0, 1]
    fill(tier, 0, 1)
    assert get(tier, 1)[0] is OK
    tier.close()


@pytest.mark.usefixtures("nothing_stays")
def test_more_memory_than_there_can_be_is_refused_and_leaves_nothing():
    with pytest.raises(InputError):
        HostTier(HostSize(1 << 40, (0, 1 << 40), 1 << 10))
    with pytest.raises(RefusedError):
        HostTier(HostSize(1 << 40, (0, 1 << 40), 63))


# What is in the frames.


def test_a_frame_filled_in_place_is_found_in_a_batch(tier):
    fill(tier, 2)
    outcome, payload = get(tier, 2)
    assert outcome is OK
    assert np.array_equal(payload.row, tier.row(2))
    assert tier.proves(2, name(3)) is OK
    assert all(tier.holds(2, layer) for layer in range(3))
    assert list(tier.scan()) == [Entry(name(3), 2)]


def test_what_a_batch_put_is_there_in_place(tier):
    (payload,) = payloads_like(SIZE, 1)
    payload.row[:] = 5
    assert sum_up(payload, SIZE, name(7)) is payload.sums
    assert tier.put_from([Entry(name(7), 1)], [payload], 0) == [OK]
    assert tier.proves(1, name(7)) is OK
    assert tier.row(1).tolist() == [5] * 5000
    assert all(tier.holds(1, layer) for layer in range(3))


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("end", [0, -1])
def test_one_bit_in_any_layer_is_found(tier, layer, end):
    fill(tier, 0, 1)
    first, last = BOUNDS[layer], BOUNDS[layer + 1]
    tier.row(0)[first:last][end] ^= 0x80
    assert get(tier, 0)[0] is CORRUPT
    assert [tier.holds(0, number) for number in range(3)] == [
        number != layer for number in range(3)
    ]
    assert tier.proves(0, name(1)) is OK, "which does not look at bytes"
    assert get(tier, 1)[0] is OK


def test_bytes_in_the_padding_are_nobodys(tier):
    """Device copies may write whole memory pages."""
    fill(tier, 0)
    ctypes.memset(tier.address(0) + 5000, 0xFF, SIZE.stride_bytes - 5000)
    assert get(tier, 0)[0] is OK


@pytest.mark.parametrize("changed", range(4))
def test_one_bit_of_the_sums_is_found(tier, changed):
    fill(tier, 0)
    tier._sums[0, changed] ^= np.uint64(1)
    assert tier.proves(0, name(1)) is CORRUPT
    assert tier.exists([Entry(name(1), 0)], 0) == [CORRUPT]
    assert get(tier, 0)[0] is CORRUPT


def test_sums_of_another_frame_are_found(tier):
    fill(tier, 0, 1)
    tier._sums[[0, 1]] = tier._sums[[1, 0]]
    assert [get(tier, frame)[0] for frame in (0, 1)] == [CORRUPT, CORRUPT]


def test_bytes_of_another_frame_are_found(tier):
    fill(tier, 0, 1)
    tier.row(0)[:] = tier.row(1)
    assert [get(tier, frame)[0] for frame in (0, 1)] == [CORRUPT, OK]


def test_a_wrong_name_is_a_miss(tier):
    fill(tier, 0)
    for wrong in (name(2), b"", name(1)[:-1], name(1) + b"\0", bytes(NAME_BYTES)):
        assert tier.proves(0, wrong) is MISS
        assert tier.get_into([Entry(wrong, 0)], payloads_like(SIZE, 1), 0) == [MISS]
        assert tier.delete([Entry(wrong, 0)], 0) == [MISS]
    assert get(tier, 0)[0] is OK


def test_a_corrupt_frame_can_be_deleted(tier):
    fill(tier, 0)
    tier._sums[0, 0] ^= np.uint64(1)
    assert tier.delete([Entry(name(1), 0)], 0) == [OK]
    assert get(tier, 0)[0] is MISS


def test_what_was_wiped_or_deleted_is_zeros(tier):
    fill(tier, 0, 1)
    tier.delete([Entry(name(1), 0)], 0)
    tier.wipe(1)
    for frame in (0, 1):
        assert not tier.row(frame).any()
        assert not tier._sums[frame].any()
        assert not tier._names[frame].any()
    assert list(tier.scan()) == []


def test_a_frame_that_is_filled_anew_has_no_name_until_it_is_sealed(tier):
    fill(tier, 0)
    tier.forget(0)
    assert get(tier, 0)[0] is MISS
    assert list(tier.scan()) == []
    tier.seal(0, name(5))
    assert tier.proves(0, name(5)) is OK


@pytest.mark.parametrize("wrong", [b"", b"\7", name(1)[:-1], name(1) + b"\0"])
def test_a_name_of_another_length_is_refused(tier, wrong):
    """One byte would be written 66 times."""
    fill(tier, 0)
    payloads = payloads_like(SIZE, 1)
    sum_up(payloads[0], SIZE, wrong)
    assert tier.put_from([Entry(wrong, 0)], payloads, 0) == [REFUSED]
    with pytest.raises(InputError, match="66"):
        tier.seal(0, wrong)
    assert get(tier, 0)[0] is OK


@pytest.mark.parametrize("shape", [(1,), (4999,), (5001,), (1, 5000), (2, 5000)])
def test_rows_of_another_shape_are_refused_alone(tier, shape):
    """One byte would be copied 5000 times."""
    fill(tier, 0, 1)
    (good,) = payloads_like(SIZE, 1)
    bad = Payload(np.full(shape, 9, np.uint8), good.sums)
    entries = [Entry(name(1), 0), Entry(name(2), 1)]
    assert tier.get_into(entries, [bad, good], 0) == [REFUSED, OK]
    assert (bad.row == 9).all()
    assert tier.put_from(entries, [bad, good], 0) == [REFUSED, OK]
    assert [get(tier, frame)[0] for frame in (0, 1)] == [OK, OK]


@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (1, 4)])
def test_sums_of_another_shape_are_refused(tier, shape):
    fill(tier, 0)
    bad = Payload(np.zeros(5000, np.uint8), np.zeros(shape, np.uint64))
    assert tier.get_into([Entry(name(1), 0)], [bad], 0) == [REFUSED]
    assert tier.put_from([Entry(name(1), 0)], [bad], 0) == [REFUSED]
    assert get(tier, 0)[0] is OK


def test_scanning_while_frames_leave_lists_no_frame_without_a_name(tier):
    fill(tier, 0, 1, 2)
    scan = tier.scan()
    assert next(scan) == Entry(name(1), 0)
    tier.forget(1)
    assert list(scan) == [Entry(name(3), 2)]


def test_memory_to_get_into_is_separate_for_each_frame():
    payloads = payloads_like(SIZE, 3)
    for number, payload in enumerate(payloads):
        payload.row[:], payload.sums[:] = number, number
    for number, payload in enumerate(payloads):
        assert payload.row.tolist() == [number] * 5000
        assert payload.sums.tolist() == [number] * 4


def test_traits_say_what_it_is(tier):
    assert tier.traits == dataclasses.replace(
        tier.traits, persistent=False, shared=False, slots=True, zero_copy=True, ranges=True
    )
    assert tier.traits.largest_bytes == 5000
    assert not tier.traits.lifetimes
    assert not tier.traits.secrets
