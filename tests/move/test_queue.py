"""Which piece is next: reads first, writes not kept out, and nobody waits for another job's fence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.core.plan import Plan, Verb
from stepwell.move.fence import PASSED
from stepwell.move.job import Job, cut
from stepwell.move.queue import _FLOOR, Queue

PARTS = (bytes(32),)


class Switch:
    """A fence that a test sets, and that counts who asks."""

    def __init__(self, passed=False):
        self.passed, self.asked = passed, 0

    def done(self):
        self.asked += 1
        return self.passed

    def wait(self, within_s):
        raise AssertionError("a queue never waits")


def pieces(number, verb, count=1, fence=PASSED):
    frames = np.arange(count, dtype=np.int32)
    outside = frames[:0] if verb is Verb.WIPE else frames
    plan = Plan(number, verb, 0, outside, frames, bytes(32 * count), np.zeros(count, np.uint32), 1)
    return cut(Job(plan, PARTS, fence, 1.0), 1)


def ready(job):
    return job.fence.done()


def filled(*jobs):
    queue = Queue()
    for job in jobs:
        queue.add(job)
    return queue


def order(queue, most=1000):
    """What is taken, up to the first time that nothing is: number of the plan, and frame."""
    taken = []
    while len(taken) < most and (piece := queue.take(ready)) is not None:
        taken.append((piece.job.plan.number, piece.first))
    return taken


def test_an_empty_queue_has_nothing():
    queue = Queue()
    assert queue.take(ready) is None
    assert len(queue) == 0
    assert queue.discard(lambda _: True) == []


def test_pieces_of_one_kind_come_in_their_order():
    for verb in Verb:
        queue = filled(pieces(1, verb, 3), pieces(2, verb, 2))
        assert len(queue) == 5
        assert order(queue) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
        assert len(queue) == 0


@pytest.mark.parametrize("verb", [Verb.SAVE, Verb.WIPE])
def test_reads_go_before_writes_that_came_earlier(verb):
    queue = filled(pieces(1, verb, 2), pieces(2, Verb.LOAD, _FLOOR))
    assert [number for number, _ in order(queue)] == [2] * _FLOOR + [1, 1]


def test_reads_never_keep_writes_out():
    queue = filled(pieces(1, Verb.SAVE, 3), pieces(2, Verb.LOAD, 3 * _FLOOR + 1))
    taken = [number for number, _ in order(queue)]
    assert taken == ([2] * _FLOOR + [1]) * 3 + [2]


def test_reads_without_writes_use_up_no_turn_of_theirs():
    queue = filled(pieces(1, Verb.LOAD, 3 * _FLOOR))
    assert len(order(queue)) == 3 * _FLOOR
    queue.add(pieces(2, Verb.SAVE))
    queue.add(pieces(3, Verb.LOAD, _FLOOR))
    assert [number for number, _ in order(queue)] == [3] * _FLOOR + [2]


def test_a_write_that_cannot_begin_gives_its_turn_away_and_has_it_as_soon_as_it_can():
    fence = Switch()
    queue = filled(pieces(1, Verb.SAVE, 2, fence), pieces(2, Verb.LOAD, 3 * _FLOOR))
    assert [number for number, _ in order(queue, 2 * _FLOOR)] == [2] * 2 * _FLOOR
    fence.passed = True
    assert [number for number, _ in order(queue)] == [1] + [2] * _FLOOR + [1]


@pytest.mark.parametrize("verb", Verb)
def test_a_fence_that_is_not_passed_lets_others_by(verb):
    fence = Switch()
    queue = filled(pieces(1, verb, 2, fence), pieces(2, verb, 2), pieces(3, verb))
    assert [number for number, _ in order(queue)] == [2, 2, 3]
    assert len(queue) == 2
    fence.passed = True
    assert order(queue) == [(1, 0), (1, 1)]


def test_nothing_that_cannot_begin_is_given():
    queue = filled(pieces(1, Verb.SAVE, 2, Switch()), pieces(2, Verb.LOAD, 2, Switch()))
    assert order(queue) == []
    assert len(queue) == 4


def test_a_job_is_asked_once_not_once_for_each_piece():
    fence = Switch()
    queue = filled(pieces(1, Verb.SAVE, 1000, fence), pieces(2, Verb.SAVE))
    assert queue.take(ready).job.plan.number == 2
    assert fence.asked == 1


def test_discard_takes_out_what_it_is_told_and_nothing_else():
    loads, saves = pieces(1, Verb.LOAD, 2), pieces(2, Verb.SAVE, 2)
    queue = filled(loads, saves, pieces(3, Verb.SAVE), pieces(4, Verb.LOAD))
    gone = queue.discard(lambda job: job.plan.number in (1, 2))
    assert sorted(map(id, gone)) == sorted(map(id, loads + saves))
    assert len(queue) == 2
    assert [number for number, _ in order(queue)] == [4, 3]
    assert queue.discard(lambda _: True) == []


jobs = st.tuples(st.sampled_from(Verb), st.integers(1, 6), st.booleans())


@given(st.lists(jobs, max_size=12))
def test_every_piece_is_given_once_and_no_write_waits_longer_than_the_floor(wanted):
    queue, all_pieces = Queue(), []
    for number, (verb, count, passed) in enumerate(wanted):
        all_pieces += pieces(number, verb, count, Switch(passed))
        queue.add(all_pieces[-count:])
    writes = sum(one.job.plan.verb is not Verb.LOAD for one in all_pieces if one.job.fence.passed)
    taken, row = [], 0
    while (piece := queue.take(ready)) is not None:
        assert piece.job.fence.passed
        reads = piece.job.plan.verb is Verb.LOAD
        row = row + 1 if reads else 0
        assert row <= _FLOOR or not writes
        writes -= not reads
        taken.append(piece)
    left = [one for one in all_pieces if not one.job.fence.passed]
    assert len(queue) == len(left)
    assert sorted(map(id, taken + queue.discard(lambda _: True))) == sorted(map(id, all_pieces))
