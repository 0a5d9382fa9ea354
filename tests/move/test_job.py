"""Jobs and their pieces: every frame in one piece, names that no other frame has, outcomes that are final once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.core.plan import KEY_BYTES, Outcome, Plan, Verb
from stepwell.move.fence import PASSED
from stepwell.move.job import Job, cut
from stepwell.tiers.host import NAME_BYTES

PARTS = (b"p" * 32, b"q" * 32)


def job(count, which=None, verb=Verb.LOAD):
    inside = np.arange(100, 100 + count, dtype=np.int32)
    outside = inside[:0] if verb is Verb.WIPE else inside + 1000
    keys = b"".join(bytes([n % 251]) * KEY_BYTES for n in range(count))
    which = np.zeros(count, np.uint32) if which is None else np.array(which, np.uint32)
    return Job(Plan(1, verb, 0, outside, inside, keys, which, 1), PARTS, PASSED, 1.0)


@given(st.integers(1, 300), st.integers(1, 310), st.sampled_from(Verb))
def test_pieces_cover_every_frame_once_and_in_order(count, at_once, verb):
    made = job(count, verb=verb)
    pieces = cut(made, at_once)
    assert made.left == made.uncopied == len(pieces) == -(-count // at_once)
    assert all(1 <= len(one.inside) == len(one.outcomes) <= at_once for one in pieces)
    assert np.array_equal(np.concatenate([one.inside for one in pieces]), made.plan.inside)
    assert np.array_equal(np.concatenate([one.outside for one in pieces]), made.plan.outside)
    names = [one.name(index) for one in pieces for index in range(len(one.inside))]
    assert names == [made.name(index) for index in range(count)]


def test_a_plan_without_frames_has_no_pieces():
    made = job(0)
    assert cut(made, 8) == []
    assert made.end(Outcome.REFUSED).tolist() == []


def test_a_name_is_key_part_and_number_in_its_record():
    made = job(4, [0, 1 << 16, 1 << 16 | 1, 1 << 16 | 0xFFFF])
    key = [bytes([n]) * KEY_BYTES for n in range(4)]
    assert [made.name(index) for index in range(4)] == [
        key[0] + b"p" * 32 + b"\x00\x00",
        key[1] + b"q" * 32 + b"\x00\x00",
        key[2] + b"q" * 32 + b"\x01\x00",
        key[3] + b"q" * 32 + b"\xff\xff",
    ]
    assert {len(made.name(index)) for index in range(4)} == {NAME_BYTES}


@given(st.lists(st.sampled_from(Outcome), min_size=1, max_size=8), st.data())
def test_an_end_keeps_what_is_known_and_fills_in_the_rest(known, data):
    made = job(len(known))
    which = data.draw(st.lists(st.booleans(), min_size=len(known), max_size=len(known)))
    made.outcomes[which] = np.array(known, np.uint8)[which]
    wanted = [one if here else Outcome.TIMEOUT for one, here in zip(known, which, strict=True)]
    told = made.end(Outcome.TIMEOUT)
    assert made.ended
    assert told.tolist() == wanted
    made.outcomes[:] = Outcome.OK
    assert told.tolist() == wanted, "what was told does not change afterwards"


@pytest.mark.parametrize("outcome", Outcome)
def test_nothing_is_known_of_a_frame_before_its_piece_is_done(outcome):
    assert job(3).end(outcome).tolist() == [outcome] * 3
