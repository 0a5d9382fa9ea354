"""Quantities as people write them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.base.units import format_bytes, format_seconds, parse_bytes

POWERS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(("suffix", "factor"), [*POWERS.items(), *BINARY.items(), ("B", 1)])
def test_every_suffix_means_its_factor_in_any_case(suffix, factor):
    for written in (suffix, suffix.lower(), suffix.upper()):
        assert parse_bytes(f"3{written}") == 3 * factor
        assert parse_bytes(f" 3 {written} ") == 3 * factor


def test_binary_and_decimal_suffixes_are_not_the_same():
    assert parse_bytes("1MiB") - parse_bytes("1MB") == 48_576


@pytest.mark.parametrize("count", [0, 1, 2**63])
def test_a_plain_count_is_bytes(count):
    assert parse_bytes(count) == parse_bytes(str(count)) == count


def test_large_counts_lose_no_byte():
    """A float between text and count would round above 2**53."""
    assert parse_bytes(f"{2**60 + 1}") == 2**60 + 1
    assert parse_bytes(f"{2**40 + 1}KiB") == (2**40 + 1) * 1024


@given(
    thousandths=st.integers(0, 10**7),
    suffix=st.sampled_from([*POWERS, *BINARY]),
)
def test_a_fraction_is_read_exactly(thousandths, suffix):
    """Floats call 2.3 TB a broken byte, or hide one."""
    text = f"{thousandths // 1000}.{thousandths % 1000:03}"
    exact = Decimal(text) * (POWERS | BINARY)[suffix]
    if exact == int(exact):
        assert parse_bytes(f"{text} {suffix}") == int(exact)
    else:
        with pytest.raises(InputError, match=text):
            parse_bytes(f"{text} {suffix}")


@pytest.mark.parametrize(
    "bad",
    ["", "MiB", "-1", "1 XB", "1e3", "1,5 MB", "0x10", "1 MiB extra", "1.", ".5MB", "nan", "٣"],
)
def test_what_is_no_quantity_is_refused_by_name(bad):
    with pytest.raises(InputError, match="MiB") as caught:
        parse_bytes(bad)
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("bad", [True, None, 1.5])
def test_what_is_neither_text_nor_count_is_refused(bad):
    with pytest.raises(InputError):
        parse_bytes(bad)


def test_a_negative_count_is_refused():
    with pytest.raises(InputError, match="-1"):
        parse_bytes(-1)


def test_part_of_a_byte_is_refused():
    with pytest.raises(InputError, match="whole number"):
        parse_bytes("0.5B")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (2**60, "1048576.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_printed_in_the_largest_unit_that_fits(count, text):
    assert format_bytes(count) == text


@given(st.integers(0, 2**50))
def test_printed_bytes_read_back_to_about_the_same(count):
    number, unit = format_bytes(count).split()
    factor = BINARY.get(unit, 1)
    assert abs(float(number) * factor - count) <= 0.05 * factor + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (12e-6, "12 µs"),
        (0.0125, "12 ms"),
        (1.0, "1.00 s"),
        (119.0, "119.00 s"),
        (120.0, "2.0 min"),
    ],
)
def test_durations_are_printed_in_a_unit_that_shows_them(seconds, text):
    assert format_seconds(seconds) == text
