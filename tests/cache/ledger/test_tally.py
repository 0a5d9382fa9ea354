"""What ranks say of one plan, in any order, twice, too late, and wrongly."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.cache.ledger.tally import Tally
from stepwell.core.plan import KEY_BYTES, Outcome, Plan, Report, Verb

OK, MISS, CORRUPT, TIMEOUT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT, Outcome.TIMEOUT


def plan(n):
    ids = np.arange(n, dtype=np.int32)
    return Plan(1, Verb.SAVE, 0, ids, ids, bytes(n * KEY_BYTES), np.zeros(n, np.uint32), 10)


def report(mover, outcomes=None, *, released=False, clear=False):
    array = None if outcomes is None else np.array(outcomes, np.uint8)
    return Report(1, mover, array, released, clear)


def state(tally):
    return tally.released, tally.ended, tally.clear, tally.outcomes.tolist()


def test_it_is_as_far_as_the_last_rank():
    tally = Tally(plan(2), 2, 1.0)
    tally.note(report(0, released=True))
    assert state(tally)[:3] == (False, False, False)
    tally.note(report(1, [OK, OK], released=True))
    assert state(tally)[:3] == (True, False, False)
    tally.note(report(0, [OK, OK], released=True, clear=True))
    assert state(tally)[:3] == (True, True, False)
    tally.note(report(1, clear=True))
    assert state(tally) == (True, True, True, [OK, OK])


@given(st.permutations(range(6)), st.lists(st.sampled_from(Outcome), min_size=9, max_size=9))
def test_the_order_of_reports_does_not_matter(order, drawn):
    """Those of three ranks that each end and then become clear, however they overtake each other."""
    tally = Tally(plan(3), 3, 1.0)
    outcomes = [drawn[3 * rank : 3 * rank + 3] for rank in range(3)]
    told = [report(rank, outcomes[rank], released=True) for rank in range(3)]
    told += [report(rank, clear=True) for rank in range(3)]
    for n in order:
        tally.note(told[n])
    worst = [max(one) for one in zip(*outcomes, strict=True)]
    assert state(tally) == (True, True, True, worst)
    wrong = [bool({MISS, CORRUPT} & set(one)) for one in zip(*outcomes, strict=True)]
    assert tally.wrong.tolist() == wrong
    assert tally.failed == bool({TIMEOUT, Outcome.UNAVAILABLE} & set(drawn))


def test_a_rank_that_ends_twice_changes_nothing_the_second_time():
    tally = Tally(plan(2), 2, 1.0)
    tally.note(report(0, [OK, CORRUPT]))
    tally.note(report(0, [TIMEOUT, OK]))
    assert not tally.ended
    assert tally.outcomes.tolist() == [OK, CORRUPT]
    assert not tally.failed
    tally.note(report(1, [OK, OK]))
    assert tally.good(0, 2) == 1


def test_saying_clear_twice_stands_for_nobody_else():
    tally = Tally(plan(1), 2, 1.0)
    tally.note(report(0, [OK], clear=True))
    tally.note(report(0, clear=True))
    tally.note(report(0, [OK], released=True, clear=True))
    assert state(tally)[:3] == (False, False, False)


def test_a_rank_that_is_clear_before_it_has_ended_is_clear_once_it_has():
    """Otherwise the plan would be forgotten, and its frames with it, before anybody knows what they are."""
    tally = Tally(plan(1), 1, 1.0)
    tally.note(report(0, clear=True))
    assert state(tally)[:3] == (False, False, False)
    tally.note(report(0, [OK]))
    assert state(tally) == (True, True, True, [OK])


def test_one_that_is_clear_and_never_ends_is_ended_by_the_deadline():
    tally = Tally(plan(1), 1, 1.0)
    tally.note(report(0, clear=True))
    tally.expire()
    assert state(tally) == (True, True, True, [TIMEOUT])


def test_what_has_ended_is_released_whatever_it_says():
    tally = Tally(plan(1), 1, 1.0)
    tally.note(report(0, [OK], released=False))
    assert tally.released


@pytest.mark.parametrize("mover", [-1, 2, 2**53 - 1])
def test_a_rank_that_does_not_exist_is_refused(mover):
    tally = Tally(plan(1), 2, 1.0)
    with pytest.raises(InputError, match=f"rank {mover} reports"):
        tally.note(report(mover, [OK], released=True, clear=True))
    for rank in (0, 1):
        tally.note(report(rank, clear=True))
    assert state(tally)[:3] == (False, False, False)


@pytest.mark.parametrize("outcomes", [[], [0], [0] * 3, [0] * 100])
def test_another_number_of_outcomes_is_refused_and_changes_nothing(outcomes):
    tally = Tally(plan(2), 1, 1.0)
    with pytest.raises(InputError, match="outcomes"):
        tally.note(report(0, outcomes, released=True, clear=True))
    assert state(tally) == (False, False, False, [0, 0])
    tally.note(report(0, [OK, OK]))
    assert not tally.clear


@pytest.mark.parametrize("wrong", [np.zeros((2, 1), np.uint8), np.zeros(2, np.int64), np.zeros(2)])
def test_outcomes_of_another_form_are_refused(wrong):
    tally = Tally(plan(2), 1, 1.0)
    with pytest.raises(InputError, match="outcomes"):
        tally.note(Report(1, 0, wrong, released=True, clear=True))
    assert not tally.ended


def test_the_deadline_is_for_those_that_have_said_nothing():
    tally = Tally(plan(2), 3, 1.0)
    tally.note(report(1, [OK, CORRUPT], clear=True))
    tally.note(report(2, released=True))
    tally.expire()
    assert state(tally) == (True, True, False, [TIMEOUT, TIMEOUT])
    assert tally.failed
    # What they say now comes too late to be of use, but says when they are clear.
    tally.note(report(0, [OK, OK], released=True, clear=True))
    assert tally.outcomes.tolist() == [TIMEOUT, TIMEOUT]
    tally.note(report(2, clear=True))
    assert tally.clear


def test_wrong_bytes_are_known_of_a_plan_on_which_another_rank_is_late():
    """TIMEOUT is the greater number; it must not hide that one rank has found other bytes."""
    for first, second in itertools.permutations(([CORRUPT, MISS, OK], [TIMEOUT, TIMEOUT, OK])):
        tally = Tally(plan(3), 2, 1.0)
        tally.note(report(0, first))
        tally.note(report(1, second))
        assert tally.wrong.tolist() == [True, True, False]
        assert tally.failed
        assert tally.good(0, 3) == 0


def test_a_fault_is_known_of_a_plan_that_another_rank_refused():
    tally = Tally(plan(1), 2, 1.0)
    tally.note(report(0, [TIMEOUT]))
    tally.note(report(1, [Outcome.FULL]))
    assert tally.failed


@pytest.mark.parametrize("outcome", [MISS, CORRUPT, Outcome.REFUSED, Outcome.FULL])
def test_these_say_nothing_about_the_health_of_a_tier(outcome):
    tally = Tally(plan(1), 1, 1.0)
    tally.note(report(0, [outcome]))
    assert not tally.failed


def test_a_rank_that_is_gone_has_failed_and_touches_nothing():
    tally = Tally(plan(2), 2, 1.0)
    tally.lose(0)
    assert state(tally)[:3] == (False, False, False)
    tally.note(report(1, [OK, MISS], clear=True))
    assert state(tally) == (True, True, True, [Outcome.UNAVAILABLE] * 2)
    assert tally.failed
    assert tally.wrong.tolist() == [False, True]


def test_a_rank_that_ended_before_it_was_gone_keeps_what_it_said():
    tally = Tally(plan(1), 1, 1.0)
    tally.note(report(0, [OK]))
    tally.lose(0)
    assert state(tally) == (True, True, True, [OK])


@given(st.lists(st.sampled_from(Outcome), max_size=6), st.data())
def test_good_counts_up_to_the_first_that_is_not(outcomes, data):
    tally = Tally(plan(len(outcomes)), 1, 1.0)
    tally.note(report(0, outcomes))
    first = data.draw(st.integers(0, len(outcomes)))
    last = data.draw(st.integers(first, len(outcomes)))
    count = 0
    while first + count < last and outcomes[first + count] == OK:
        count += 1
    assert tally.good(first, last) == count


def test_a_plan_without_frames_ends_too():
    tally = Tally(plan(0), 1, 1.0)
    tally.note(report(0, [], clear=True))
    assert state(tally) == (True, True, True, [])
    assert not tally.failed
