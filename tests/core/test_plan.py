"""Plans, reports and new frames as plain values: what comes back is what went, and anything else is an `InputError`."""

import collections
import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.core.plan import (
    KEY_BYTES,
    MAX_PLAN_FRAMES,
    Grown,
    Outcome,
    Plan,
    Report,
    Verb,
)

numbers = st.integers(0, 2**53 - 1)
ids = st.integers(0, 2**31 - 1)


def array(values, dtype=np.int32):
    return np.array(values, dtype)


@st.composite
def plans(draw):
    inside = draw(st.lists(ids, max_size=5, unique=True))
    n = len(inside)
    verb = draw(st.sampled_from(Verb))
    outside = draw(st.lists(ids, min_size=n, max_size=n, unique=True))
    which = draw(st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n))
    return Plan(
        number=draw(numbers),
        verb=verb,
        place=draw(numbers),
        outside=array([] if verb is Verb.WIPE else outside),
        inside=array(inside),
        keys=draw(st.binary(min_size=n * KEY_BYTES, max_size=n * KEY_BYTES)),
        which=array(which, np.uint32),
        within_ms=draw(numbers),
    )


@st.composite
def reports(draw):
    outcomes = draw(st.none() | st.lists(st.sampled_from(Outcome), max_size=5))
    return Report(
        draw(numbers),
        draw(numbers),
        None if outcomes is None else array(outcomes, np.uint8),
        draw(st.booleans()),
        draw(st.booleans()),
    )


growths = st.builds(lambda mover, frames: Grown(mover, array(frames)), numbers, st.lists(ids))
records = plans() | reports() | growths

PLAN = Plan(
    7,
    Verb.LOAD,
    1,
    array([3, 4]),
    array([5, 5]),
    bytes(range(32)) + bytes(range(1, 33)),
    array([1 << 16, 2], np.uint32),
    250,
)
REPORT = Report(7, 0, array([Outcome.OK, Outcome.CORRUPT], np.uint8), released=True, clear=False)
GROWN = Grown(2, array([0, 9]))
RECORDS = [PLAN, REPORT, GROWN]
FIELDS = [(record, name) for record in RECORDS for name in record.plain()]


def same(one, other):
    """Equal in every field, types and number formats included; records with arrays have no `==`."""
    assert type(one) is type(other)
    for name in one.__slots__:
        first, second = getattr(one, name), getattr(other, name)
        assert type(first) is type(second), name
        if isinstance(first, np.ndarray):
            assert first.dtype == second.dtype, name
            assert np.array_equal(first, second), name
        else:
            assert first == second, name


@given(records)
def test_what_is_read_equals_what_was_told(record):
    same(type(record).from_plain(record.plain()), record)


@given(records)
def test_the_plain_form_is_numbers_and_bytes_only(record):
    plain = record.plain()
    assert {type(value) for value in plain.values()} <= {int, bytes}
    assert {type(name) for name in plain} == {str}
    texts = {n: v.hex() if isinstance(v, bytes) else v for n, v in plain.items()}
    back = {n: bytes.fromhex(v) if isinstance(v, str) else v for n, v in texts.items()}
    same(type(record).from_plain(json.loads(json.dumps(texts)) | back), record)


def test_arrays_that_are_read_are_somebodys_own():
    """Those over the bytes of a message could not be written, and would keep all of it."""
    for name in ("outside", "inside", "which"):
        assert getattr(Plan.from_plain(PLAN.plain()), name).flags.writeable
    assert Report.from_plain(REPORT.plain()).outcomes.flags.writeable
    assert Grown.from_plain(GROWN.plain()).frames.flags.writeable


def test_a_plan_tells_its_length_and_its_keys():
    assert len(PLAN) == 2
    assert PLAN.key(0) == bytes(range(32))
    assert PLAN.key(1) == bytes(range(1, 33))


def test_bytes_are_little_endian():
    plain = PLAN.plain()
    assert plain["outside"] == bytes([3, 0, 0, 0, 4, 0, 0, 0])
    assert plain["which"] == bytes([0, 0, 1, 0, 2, 0, 0, 0])
    assert GROWN.plain()["frames"] == bytes([0] * 4 + [9, 0, 0, 0])


def test_reports_before_the_end_and_of_nothing_differ():
    before = Report(1, 0, None, released=True, clear=False)
    empty = Report(1, 0, array([], np.uint8), released=True, clear=False)
    assert Report.from_plain(before.plain()).outcomes is None
    assert Report.from_plain(empty.plain()).outcomes.shape == (0,)


NESTED = functools.reduce(lambda inner, _: [inner], range(10_000))
"""Lists in lists: nobody can make its text."""
WRONG = [
    *(None, True, False, -1, 2**53, 10**5000, -(10**5000), 1.0, float("nan"), 1j),
    *("", "1", "x" * 8, [], [0, 0], NESTED, {}, (1,), Verb.SAVE, Outcome.OK, np.int64(1)),
    *(b"\0", b"\0" * 3, b"\xff" * 8, b"\0" * 64, b"\xff" * 2, bytearray(8), memoryview(b"\0" * 8)),
    *(np.zeros(2, np.int32), object(), int, 0, 1, 2, 3, 4, 255),
]


@pytest.mark.parametrize(("record", "name"), FIELDS, ids=lambda value: str(value)[:12])
def test_every_field_with_every_wrong_value_is_refused_or_read_as_it_is(record, name):
    """What is taken is a record that is told in the same words again."""
    refused = 0
    for value in WRONG:
        plain = record.plain() | {name: value}
        try:
            read = type(record).from_plain(plain)
        except InputError:
            refused += 1
        else:
            assert read.plain() == plain
    assert refused >= len(WRONG) - 8


@pytest.mark.parametrize(("record", "name"), FIELDS, ids=lambda value: str(value)[:12])
def test_a_field_too_few_or_too_many_is_refused(record, name):
    plain = record.plain()
    value = plain.pop(name)
    for wrong in (plain, plain | {name.encode(): value}, plain | {name: value, "more": 0}):
        with pytest.raises(InputError):
            type(record).from_plain(wrong)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("wrong", [None, 0, b"", "plan", [], [("number", 1)], object(), {}, NESTED])
def test_what_is_no_mapping_is_refused(record, wrong):
    with pytest.raises(InputError):
        type(record).from_plain(wrong)


def test_another_mapping_is_read():
    same(Plan.from_plain(collections.ChainMap(PLAN.plain())), PLAN)


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=500)
@given(st.sampled_from(RECORDS), st.data())
def test_any_fields_changed_raise_nothing_but_an_input_error(record, data):
    plain = record.plain()
    for name in data.draw(st.lists(st.sampled_from(sorted(plain)), max_size=3)):
        plain[name] = data.draw(garbage | st.binary(max_size=80))
    for name in data.draw(st.lists(st.sampled_from(sorted(plain)), max_size=1)):
        if isinstance(plain[name], bytes):
            plain[name] = plain[name][: data.draw(st.integers(0, len(plain[name])))]
    try:
        read = type(record).from_plain(plain)
    except InputError:
        return
    assert read.plain() == plain


@pytest.mark.parametrize("name", ["outside", "inside"])
def test_a_negative_frame_is_refused(name):
    """It would be counted from the end of whatever array it meets."""
    plain = PLAN.plain() | {name: array([1, -1], "<i4").tobytes()}
    with pytest.raises(InputError, match="negative"):
        Plan.from_plain(plain)
    with pytest.raises(InputError, match="negative"):
        Grown.from_plain(GROWN.plain() | {"frames": array([-1], "<i4").tobytes()})


@pytest.mark.parametrize("verb", Verb)
def test_a_frame_that_is_filled_twice_is_refused(verb):
    """Two threads would write it at once, and seal a mixture under sums that hold."""
    once, twice = array([1, 2]).tobytes(), array([1, 1]).tobytes()
    read = once if verb is not Verb.WIPE else b""
    plain = PLAN.plain() | {"verb": int(verb), "outside": read, "inside": once}
    Plan.from_plain(plain)
    filled, source = ("outside", "inside") if verb is Verb.LOAD else ("inside", "outside")
    with pytest.raises(InputError, match="twice"):
        Plan.from_plain(plain | {filled: twice})
    if read:
        assert Plan.from_plain(plain | {source: twice}).plain()[source] == twice


@pytest.mark.parametrize("name", ["outside", "inside", "keys", "which"])
def test_arrays_of_different_lengths_are_refused(name):
    plain = PLAN.plain()
    for cut in (4, len(plain[name])):
        with pytest.raises(InputError):
            Plan.from_plain(plain | {name: plain[name][:-cut]})
        with pytest.raises(InputError):
            Plan.from_plain(plain | {name: plain[name] + b"\1" * cut})


def test_a_wipe_has_no_frames_outside():
    plain = PLAN.plain() | {"verb": int(Verb.WIPE), "inside": array([1, 2]).tobytes()}
    with pytest.raises(InputError, match="outside"):
        Plan.from_plain(plain)
    assert len(Plan.from_plain(plain | {"outside": b""})) == 2


def test_an_outcome_that_does_not_exist_is_refused():
    for value in Outcome:
        Report.from_plain(REPORT.plain() | {"outcomes": bytes([value])})
    with pytest.raises(InputError, match="outcomes"):
        Report.from_plain(REPORT.plain() | {"outcomes": bytes([0, max(Outcome) + 1])})


def test_outcomes_before_the_end_are_refused():
    with pytest.raises(InputError, match="outcomes"):
        Report.from_plain(REPORT.plain() | {"ended": 0})


@pytest.mark.parametrize("name", ["ended", "released", "clear"])
def test_a_flag_is_0_or_1(name):
    with pytest.raises(InputError, match="flag"):
        Report.from_plain(REPORT.plain() | {name: 2})


def test_an_array_has_a_largest_length():
    largest = REPORT.plain() | {"outcomes": bytes(MAX_PLAN_FRAMES)}
    assert len(Report.from_plain(largest).outcomes) == MAX_PLAN_FRAMES
    with pytest.raises(InputError, match="outcomes"):
        Report.from_plain(largest | {"outcomes": bytes(MAX_PLAN_FRAMES + 1)})


@pytest.mark.parametrize("value", [10**5000, NESTED], ids=["digits", "nested"])
def test_a_value_whose_text_cannot_be_made_is_refused_all_the_same(value):
    with pytest.raises(InputError, match="number"):
        Plan.from_plain(PLAN.plain() | {"number": value})


def test_the_numbers_of_a_channel_never_change_their_meaning():
    """Both sides of it run one release, but reports are read by people, too."""
    assert [int(verb) for verb in (Verb.SAVE, Verb.LOAD, Verb.WIPE)] == [1, 2, 3]
    assert [outcome.name for outcome in sorted(Outcome)] == [
        *("OK", "MISS", "CORRUPT", "TIMEOUT", "REFUSED", "FULL", "UNAVAILABLE"),
    ]
