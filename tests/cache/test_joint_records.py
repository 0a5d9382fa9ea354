"""Plans and reports as bytes: what comes back is what went, and nothing else is believed."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.cache.joint import decode, encode
from stepwell.core.plan import KEY_BYTES, Grown, Outcome, Plan, Report, Verb

numbers = st.integers(0, 2**53 - 1)
ids = st.integers(0, 2**31 - 1)


@st.composite
def plans(draw):
    inside = draw(st.lists(ids, max_size=5, unique=True))
    n = len(inside)
    verb = draw(st.sampled_from(Verb))
    outside = [] if verb is Verb.WIPE else draw(st.permutations(inside))
    which = draw(st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n))
    return Plan(
        draw(numbers),
        verb,
        draw(numbers),
        np.array(outside, np.int32),
        np.array(inside, np.int32),
        draw(st.binary(min_size=n * KEY_BYTES, max_size=n * KEY_BYTES)),
        np.array(which, np.uint32),
        draw(numbers),
    )


@st.composite
def reports(draw):
    outcomes = draw(st.none() | st.lists(st.sampled_from(Outcome), max_size=5))
    array = None if outcomes is None else np.array(outcomes, np.uint8)
    return Report(draw(numbers), draw(numbers), array, draw(st.booleans()), draw(st.booleans()))


growths = st.builds(lambda one, its: Grown(one, np.array(its, np.int32)), numbers, st.lists(ids))
records = plans() | reports() | growths


@given(records)
def test_what_is_decoded_is_what_was_encoded(record):
    again = decode(encode(record))
    assert type(again) is type(record)
    assert again.plain() == record.plain()


def believed(message):
    """Reads a message as a joint does: a record, or an `InputError`, and nothing else."""
    try:
        record = decode(message)
    except InputError:
        return None
    assert isinstance(record, Plan | Report | Grown)
    assert decode(encode(record)).plain() == record.plain()
    return record


@given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_an_input_error(message):
    believed(message)
    believed(struct.pack("<I", len(message)) + message)


@given(records, st.data())
def test_a_message_that_was_changed_is_a_record_or_an_input_error(record, data):
    message = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    believed(bytes(message))


@given(records, st.integers(0, 400), st.binary(min_size=1, max_size=5))
def test_a_message_that_was_cut_or_continued_is_refused(record, at, more):
    message = encode(record)
    assert believed(message[: min(at, len(message) - 1)]) is None
    assert believed(message + more) is None


plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
heads = plain_json | st.fixed_dictionaries(
    {
        "kind": plain_json | st.sampled_from(["plan", "report", "grown"]),
        "numbers": plain_json,
        "sizes": plain_json | st.dictionaries(st.text(max_size=8), st.integers(-5, 40)),
    }
)


@given(heads, st.binary(max_size=40))
def test_any_head_is_a_record_or_an_input_error(head, rest):
    text = json.dumps(head).encode()
    believed(struct.pack("<I", len(text)) + text + rest)


HOSTILE = {
    "nothing": b"",
    "three bytes": b"abc",
    "a head of four gigabytes": struct.pack("<I", 2**32 - 1) + b"{}",
    "no text": struct.pack("<I", 2) + b"\xff\xfe",
    "a thousand lists": struct.pack("<I", 200_000) + b"[" * 100_000 + b"]" * 100_000,
    "a number of 5,000 digits": struct.pack("<I", 5000) + b"9" * 5000,
    "a number for a head": struct.pack("<I", 1) + b"1",
    "no such kind": struct.pack("<I", 40) + b'{"kind":"pool","numbers":{},"sizes":{} } ',
    "a list for a kind": struct.pack("<I", 37) + b'{"kind":[1],"numbers":{},"sizes":{} } ',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_mover_says_is_refused(what):
    with pytest.raises(InputError):
        decode(HOSTILE[what])


def test_a_field_cannot_reach_beyond_its_message():
    frames = np.array([1, 2], np.int32).tobytes()
    for size, right in (("8", True), ("9", False), ("-8", False), ("true", False), ('"8"', False)):
        text = f'{{"kind":"grown","numbers":{{"mover":0}},"sizes":{{"frames":{size}}}}}'.encode()
        record = believed(struct.pack("<I", len(text)) + text + frames)
        assert (record is not None) == right, size
