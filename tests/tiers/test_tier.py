"""Sums of frames: whatever is changed, exactly what it touches does not hold any more."""

import itertools
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from stepwell.tiers.tier import holds, layer_sums, named

names = st.binary(min_size=66, max_size=66)


@st.composite
def frames(draw):
    """Bytes of a frame, its bounds, its name and its sums."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    bounds = tuple(np.cumsum([0, *sizes]).tolist())
    row = np.frombuffer(draw(st.binary(min_size=bounds[-1], max_size=bounds[-1])), np.uint8).copy()
    name = draw(names)
    sums = np.zeros(len(bounds), np.uint64)
    layer_sums(row, bounds, sums, name)
    return row, bounds, name, sums


def held(row, bounds, sums):
    return [holds(row, bounds, sums, layer) for layer in range(len(bounds) - 1)]


@given(frames())
def test_a_frame_that_nobody_changed_holds(frame):
    row, bounds, name, sums = frame
    assert named(sums, name)
    assert all(held(row, bounds, sums))


@given(frames(), st.data())
def test_one_bit_of_the_bytes_breaks_its_layer_and_no_other(frame, data):
    row, bounds, name, sums = frame
    bit = data.draw(st.integers(0, 8 * len(row) - 1))
    row[bit // 8] ^= 1 << bit % 8
    torn = [first <= bit // 8 < last for first, last in itertools.pairwise(bounds)]
    assert [not holding for holding in held(row, bounds, sums)] == torn
    assert named(sums, name)


@given(frames(), st.data())
def test_one_bit_of_the_sums_breaks_the_digest(frame, data):
    _, _, name, sums = frame
    index, bit = data.draw(st.integers(0, len(sums) - 1)), data.draw(st.integers(0, 63))
    sums[index] ^= np.uint64(1 << bit)
    assert not named(sums, name)


@given(frames(), st.data())
def test_one_bit_of_the_name_breaks_the_digest(frame, data):
    *_, name, sums = frame
    bit = data.draw(st.integers(0, 8 * len(name) - 1))
    other = bytearray(name)
    other[bit // 8] ^= 1 << bit % 8
    assert not named(sums, bytes(other))


@given(frames(), frames())
def test_sums_of_another_frame_do_not_belong(one, other):
    assume(one[2] != other[2])
    assert not named(other[3], one[2])


@given(frames(), st.data())
def test_sums_of_two_layers_cannot_change_places(frame, data):
    """Else bytes of one layer, read where another belongs, would hold together with their sum."""
    _, bounds, name, sums = frame
    layers = st.integers(0, len(bounds) - 2)
    one, other = data.draw(layers), data.draw(layers)
    assume(sums[one] != sums[other])
    sums[[one, other]] = sums[[other, one]]
    assert not named(sums, name)


@given(frames())
def test_zeros_are_no_sums(frame):
    """Memory that nobody has written must not look like a frame."""
    _, bounds, name, _ = frame
    assert not named(np.zeros(len(bounds), np.uint64), name)


@given(frames())
def test_sums_are_xxh3_of_each_layer_and_then_of_name_and_sums(frame):
    """What is written down, in every release: little-endian, the name first."""
    row, bounds, name, sums = frame
    each = [
        xxhash.xxh3_64_intdigest(bytes(row)[first:last])
        for first, last in itertools.pairwise(bounds)
    ]
    over = xxhash.xxh3_64_intdigest(name + struct.pack(f"<{len(each)}Q", *each))
    assert sums.tolist() == [*each, over]


@given(frames())
def test_all_old_sums_are_replaced(frame):
    row, bounds, name, sums = frame
    again = np.full_like(sums, 7)
    layer_sums(row, bounds, again, name)
    assert np.array_equal(again, sums)


@pytest.mark.parametrize("bounds", [(0, 5000), (0, 1, 2500, 5000)])
def test_rows_may_lie_inside_of_larger_memory(bounds):
    memory = np.random.default_rng(0).integers(0, 256, (3, 5000), np.uint8)
    sums, again = np.zeros(len(bounds), np.uint64), np.zeros((3, len(bounds)), np.uint64)
    layer_sums(memory[1].copy(), bounds, sums, b"n")
    layer_sums(memory[1], bounds, again[1], b"n")
    assert np.array_equal(again[1], sums)
    assert all(held(memory[1], bounds, again[1]))
    assert not held(memory[2], bounds, again[1])[0]
    assert not again[[0, 2]].any()
