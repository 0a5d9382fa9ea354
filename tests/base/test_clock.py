"""Clocks: the machine's never goes back, the test's moves only when told."""

import time

import pytest

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.errors import InputError
from stepwell.testing.clock import FakeClock


def test_the_systems_clock_never_goes_back_and_does_move():
    clock: Clock = SystemClock()
    readings = [clock.now_s()]
    while readings[-1] == readings[0] and len(readings) < 10_000_000:
        readings.append(clock.now_s())
    assert readings == sorted(readings)
    assert readings[-1] > readings[0]


def test_the_systems_clock_counts_seconds():
    """A clock in nanoseconds would make every deadline a billion times too far."""
    resolution_s = time.get_clock_info("perf_counter").resolution
    assert resolution_s < 1
    clock = SystemClock()
    before_ns = time.perf_counter_ns()
    now_s = clock.now_s()
    after_ns = time.perf_counter_ns()
    assert before_ns / 1e9 - 1e-6 <= now_s <= after_ns / 1e9 + 1e-6


def test_time_stands_still_until_the_test_moves_it():
    clock: Clock = FakeClock(5.0)
    assert (clock.now_s(), clock.now_s()) == (5.0, 5.0)


def test_time_moves_by_what_the_test_says():
    clock = FakeClock()
    clock.advance_s(1.5)
    clock.advance_s(0.0)
    assert clock.now_s() == 1.5


def test_a_tests_clock_refuses_to_go_back():
    clock = FakeClock(2.0)
    with pytest.raises(InputError, match="-1"):
        clock.advance_s(-1)
    assert clock.now_s() == 2.0
