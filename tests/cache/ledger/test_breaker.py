"""When a tier is left alone, and when it is asked again."""

import itertools

import pytest

from stepwell.cache.ledger.breaker import Breaker


def failing(breaker, times, now_s=0.0):
    return [breaker.note(well=False, now_s=now_s) for _ in range(times)]


@pytest.mark.parametrize("faults", [1, 2, 3])
def test_it_opens_after_so_many_faults_in_a_row(faults):
    breaker = Breaker(faults, 10.0)
    assert failing(breaker, faults) == [False] * (faults - 1) + [True]
    assert breaker.is_open
    assert not breaker.passes(9.9)


def test_h08_faults_that_are_not_in_a_row_never_open_it():
    breaker = Breaker(3, 10.0)
    for _ in range(50):
        assert failing(breaker, 2) == [False, False]
        assert not breaker.note(well=True, now_s=0.0)
    assert not breaker.is_open
    assert breaker.passes(0.0)


def test_after_its_rest_one_movement_passes():
    breaker = Breaker(1, 10.0)
    failing(breaker, 1, now_s=5.0)
    assert not breaker.passes(14.99)
    assert breaker.passes(15.0)
    assert [breaker.passes(now_s) for now_s in (15.0, 16.0, 1e9)] == [False] * 3
    assert breaker.is_open


def test_a_success_closes_it_and_the_count_begins_anew():
    breaker = Breaker(2, 10.0)
    failing(breaker, 2)
    assert breaker.passes(10.0)
    assert not breaker.note(well=True, now_s=11.0)
    assert not breaker.is_open
    assert all(breaker.passes(11.0) for _ in range(5))
    assert failing(breaker, 2, 11.0) == [False, True]


def test_a_failure_opens_it_for_another_rest_and_is_no_opening():
    breaker = Breaker(2, 10.0)
    failing(breaker, 2)
    assert breaker.passes(12.0)
    assert failing(breaker, 1, 13.0) == [False]
    assert not breaker.passes(22.9)
    assert breaker.passes(23.0)


def test_what_passed_and_was_not_begun_lets_another_pass():
    breaker = Breaker(1, 10.0)
    failing(breaker, 1)
    assert breaker.passes(10.0)
    breaker.unused()
    assert breaker.passes(10.0)
    assert not breaker.passes(10.0)


def test_one_that_is_closed_stays_so_whatever_is_unused():
    breaker = Breaker(2, 10.0)
    failing(breaker, 1)
    breaker.unused()
    assert breaker.passes(0.0)
    assert failing(breaker, 1) == [True]


def test_h08_it_always_closes_again_when_the_tier_is_well():
    """However many faults there were, and in whatever order."""
    for story in itertools.product([True, False], repeat=6):
        breaker, now_s = Breaker(2, 1.0), 0.0
        for well in story:
            breaker.note(well=well, now_s=now_s)
        now_s += 1.0
        assert breaker.passes(now_s)
        breaker.note(well=True, now_s=now_s)
        assert not breaker.is_open
