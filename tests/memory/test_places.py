"""Where frames lie: apart, aligned, whole in one piece of one region."""

import itertools

import numpy as np
import pytest

from stepwell.base.errors import InputError, InvariantError, MisuseError
from stepwell.core.check import Findings
from stepwell.memory.places import Places

PAGE = 4096


def check(places):
    findings = Findings()
    places.check(findings)
    findings.raise_if_any()


def entered(places, region):
    places.enter(region)
    return region


@pytest.mark.parametrize(
    ("frame_bytes", "align_bytes", "stride_bytes"),
    [(1, 1, 1), (100, 1, 100), (101, 4, 104), (4096, 4096, 4096), (4097, 4096, 8192), (1, 64, 64)],
)
def test_frames_lie_a_stride_apart_and_begin_at_multiples(
    make_region, frame_bytes, align_bytes, stride_bytes
):
    places = Places(frame_bytes, 10**5, align_bytes)
    region = entered(places, make_region(4 * PAGE))
    frames = places.extend(region, region.size_bytes)
    begins = places.addresses(frames).astype(np.int64) - region.address
    assert places.stride_bytes == stride_bytes
    assert begins.tolist() == list(range(0, 4 * PAGE - stride_bytes + 1, stride_bytes))
    assert not (places.addresses(frames) % np.uint64(align_bytes)).any()
    check(places)


@pytest.mark.parametrize(
    ("frame_bytes", "piece_bytes"),
    list(itertools.product([1, 700, 2048, 3000, 4096, 5000, 8192], [PAGE, 2 * PAGE, 5 * PAGE])),
)
def test_no_frame_lies_in_two_pieces(make_region, frame_bytes, piece_bytes):
    """A copy of one frame is one transfer, which the GPU runtime refuses across registered pieces."""
    places = Places(frame_bytes, 10**5, 1)
    region = entered(places, make_region(13 * PAGE, piece_bytes=piece_bytes))
    frames = places.extend(region, region.size_bytes)
    assert len(frames) == places.capacity(region)
    begins = places.addresses(frames).astype(np.int64) - region.address
    assert (begins // piece_bytes == (begins + frame_bytes - 1) // piece_bytes).all()
    assert (begins + frame_bytes <= region.size_bytes).all()
    ends = sum(
        min(piece_bytes, region.size_bytes - first) // frame_bytes
        for first in range(0, region.size_bytes, piece_bytes)
    )
    assert len(frames) == ends, "all that fit are there"
    check(places)


@pytest.mark.parametrize("step_bytes", [PAGE, 2 * PAGE, 3 * PAGE])
def test_a_region_that_becomes_ready_step_by_step_has_the_same_frames(make_region, step_bytes):
    region = make_region(12 * PAGE, piece_bytes=4 * PAGE)
    at_once, in_steps = Places(1500, 100, 1), Places(1500, 100, 1)
    at_once.enter(region)
    in_steps.enter(region)
    whole = at_once.extend(region, region.size_bytes)
    parts = [
        in_steps.extend(region, ready)
        for ready in range(step_bytes, region.size_bytes + 1, step_bytes)
    ]
    parts.append(in_steps.extend(region, region.size_bytes))
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert in_steps.addresses(whole).tolist() == at_once.addresses(whole).tolist()


def test_only_what_is_ready_has_a_number(make_region):
    places = Places(PAGE, 8, 1)
    region = entered(places, make_region(4 * PAGE))
    assert places.extend(region, PAGE - 1).tolist() == []
    assert places.extend(region, 2 * PAGE + 5).tolist() == [0, 1]
    assert places.extend(region, 2 * PAGE + 5).tolist() == []
    assert places.of(region).tolist() == [0, 1]
    assert places.absent.tolist() == [False] * 2 + [True] * 6


def test_a_region_gets_as_many_frames_as_there_are_numbers(make_region):
    places = Places(PAGE, 3, 1)
    one, two = (entered(places, make_region(2 * PAGE)) for _ in range(2))
    assert places.extend(one, 2 * PAGE).tolist() == [0, 1]
    assert places.extend(two, 2 * PAGE).tolist() == [2]
    with pytest.raises(InputError, match=r"no room.*3 frames"):
        places.enter(make_region(PAGE))
    assert places.regions == (one, two)


def test_the_numbers_of_a_region_that_left_are_given_to_the_next(make_region):
    places = Places(PAGE, 4, 1)
    one, two, three = (make_region(2 * PAGE) for _ in range(3))
    for region in (one, two):
        places.enter(region)
        places.extend(region, 2 * PAGE)
    places.leave(one)
    assert places.absent.tolist() == [True, True, False, False]
    places.enter(three)
    assert places.extend(three, 2 * PAGE).tolist() == [0, 1]
    assert set(places.regions) == {two, three}
    assert places.place(1) == (three, PAGE)
    assert places.place(3) == (two, PAGE)
    assert places.address(0) == three.address
    check(places)


def test_frames_of_several_regions_are_told_apart(make_region):
    places = Places(PAGE, 6, 1)
    one, two = (entered(places, make_region(3 * PAGE)) for _ in range(2))
    places.extend(one, PAGE)
    places.extend(two, 2 * PAGE)
    places.extend(one, 3 * PAGE)
    assert places.of(one).tolist() == [0, 3, 4]
    assert places.of(two).tolist() == [1, 2]
    mixed = np.array([4, 1, 0], np.int32)
    assert places.within(mixed, one).tolist() == [True, False, True]
    assert places.addresses(mixed).tolist() == [
        one.address + 2 * PAGE,
        two.address,
        one.address,
    ]


def test_a_region_is_here_once_or_not_at_all(make_region):
    places = Places(PAGE, 8, 1)
    region = make_region(PAGE)
    for call in (places.of, places.leave, lambda one: places.extend(one, PAGE)):
        with pytest.raises(MisuseError, match="not part"):
            call(region)
    places.enter(region)
    with pytest.raises(MisuseError, match="already"):
        places.enter(region)
    assert places.regions == (region,)


@pytest.mark.parametrize(
    ("shift", "found"), [(-1, "overlap"), (2 * PAGE, "leaves the region"), (-2 * PAGE, "leaves")]
)
def test_the_checker_finds_frames_that_are_out_of_place(make_region, shift, found):
    places = Places(PAGE, 8, 1)
    region = entered(places, make_region(3 * PAGE))
    places.extend(region, 3 * PAGE)
    check(places)
    places._address[1] = np.uint64(int(places._address[1]) + shift)
    with pytest.raises(InvariantError, match=found):
        check(places)
