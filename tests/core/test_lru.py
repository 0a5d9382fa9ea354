"""LRU: the order in which pages leave."""

import random

import numpy as np
import pytest

from stepwell.base.errors import InvariantError
from stepwell.core.check import Findings
from stepwell.core.evict.lru import Lru
from stepwell.core.evict.policy import Policy


def ids(*frames):
    return np.array(frames, np.int32)


def check(lru, offered):
    findings = Findings()
    lru.check(findings, lambda frame: frame in offered)
    findings.raise_if_any()


def drained(lru):
    """The order in which all offered pages leave."""
    order = []
    while (frame := lru.victim()) is not None:
        order.append(frame)
        lru.withdraw(frame)
    return order


def filled(count, offered=None):
    """Frames 0, 1, ... sealed one after the other, and offered."""
    lru: Policy = Lru(count)
    for frame in range(count):
        lru.reset(ids(frame))
    for frame in range(count) if offered is None else offered:
        lru.offer(frame)
    return lru


def test_what_was_used_longest_ago_goes_first():
    assert drained(filled(5)) == [0, 1, 2, 3, 4]


def test_the_order_of_offers_does_not_matter():
    assert drained(filled(5, [3, 1, 4, 0, 2])) == [0, 1, 2, 3, 4]


def test_a_use_puts_a_page_last():
    lru = filled(4)
    lru.touch(1)
    lru.touch(0)
    check(lru, range(4))
    assert drained(lru) == [2, 3, 1, 0]


def test_nothing_offered_nothing_leaves():
    assert Lru(3).victim() is None
    lru = filled(3)
    for frame in range(3):
        lru.withdraw(frame)
    check(lru, ())
    assert lru.victim() is None


def test_a_victim_stays_offered():
    lru = filled(2)
    assert [lru.victim(), lru.victim()] == [0, 0]
    check(lru, range(2))


def test_what_is_withdrawn_does_not_leave():
    lru = filled(3)
    lru.withdraw(0)
    lru.withdraw(0)
    check(lru, (1, 2))
    assert lru.victim() == 1


def test_what_is_offered_again_comes_back_at_its_last_use():
    lru = filled(3)
    lru.withdraw(0)
    assert lru.victim() == 1
    lru.touch(0)
    lru.offer(0)
    lru.offer(0)
    check(lru, range(3))
    assert drained(lru) == [1, 2, 0]


def test_a_new_page_in_an_old_frame_is_new():
    """The entry of the frame's earlier page still lies in the heap."""
    lru = filled(3)
    lru.withdraw(0)
    lru.reset(ids(0))
    lru.offer(0)
    check(lru, range(3))
    assert drained(lru) == [1, 2, 0]


def test_pages_sealed_together_are_used_at_one_time():
    """Sealing a batch is one use: what is used after it is younger than all of it."""
    lru = Lru(4)
    lru.reset(ids(2, 0))
    lru.touch(1)
    lru.reset(ids(3))
    for frame in range(4):
        lru.offer(frame)
    order = drained(lru)
    assert set(order[:2]) == {0, 2}
    assert order[2:] == [1, 3]


def test_a_parent_inherits_the_last_use_of_what_leaves():
    lru = filled(4, [1, 2, 3])
    lru.touch(1)
    lru.withdraw(1)
    lru.inherit(ids(1), 0)
    lru.offer(0)
    check(lru, (0, 2, 3))
    assert drained(lru) == [2, 3, 0]


def test_a_parent_inherits_the_latest_of_several():
    lru = filled(5, [4])
    lru.touch(2)
    lru.inherit(ids(1, 2, 3), 0)
    lru.offer(0)
    assert drained(lru) == [4, 0]


def test_a_parent_keeps_its_own_use_if_that_is_later():
    lru = filled(3, [2])
    lru.touch(0)
    lru.inherit(ids(1), 0)
    lru.offer(0)
    assert drained(lru) == [2, 0]


def test_pages_go_in_a_row_as_long_as_no_other_is_older():
    lru = filled(5, [2, 4])
    lru.touch(4)
    assert lru.in_a_row(ids(2, 1, 0)) == 3


def test_a_row_ends_where_another_page_is_older():
    lru = filled(5, [0, 4])
    lru.touch(1)
    lru.touch(2)
    # 0 goes first, then 4 is older than 1 and 2, which was used after it.
    assert lru.in_a_row(ids(0, 1, 2)) == 1
    check(lru, (0, 4))


def test_a_row_ends_before_a_page_that_was_used_after_the_rival():
    lru = filled(4, [1, 3])
    lru.touch(3)
    assert lru.in_a_row(ids(1, 2, 0)) == 3
    lru.touch(0)
    assert lru.in_a_row(ids(1, 2, 0)) == 2
    lru.touch(2)
    assert lru.in_a_row(ids(1, 2, 0)) == 1
    check(lru, (1, 3))


def test_a_row_without_rivals_is_whole():
    lru = filled(3, [2])
    assert lru.in_a_row(ids(2, 1, 0)) == 3
    assert lru.in_a_row(ids(2)) == 1
    check(lru, (2,))


def test_the_heap_never_holds_more_than_the_frames():
    """Without it a busy pool would grow a heap of stale entries until somebody rebuilds it."""
    rng = random.Random(3)
    lru = filled(16)
    offered = set(range(16))
    uses = {frame: frame for frame in range(16)}
    for now in range(16, 4000):
        frame = rng.randrange(16)
        action = rng.randrange(4)
        if action == 0:
            lru.touch(frame)
            uses[frame] = now
        elif action == 1:
            lru.offer(frame)
            offered.add(frame)
        elif action == 2:
            lru.withdraw(frame)
            offered.discard(frame)
        else:
            lru.reset(ids(frame))
            uses[frame] = now
        assert lru.victim() == min(offered, key=uses.get, default=None)
        assert len(lru._heap) <= 16
    check(lru, offered)


def _twice(lru):
    lru._heap.append(lru._heap[0])


def _unmarked(lru):
    lru._queued[1] = 0


def _future(lru):
    lru._last_use[1] = 0


def _lost(lru):
    lru._heap.pop()


@pytest.mark.parametrize("damage", [_twice, _unmarked, _future, _lost])
def test_the_checker_finds_broken_books(damage):
    lru = filled(4)
    check(lru, range(4))
    damage(lru)
    with pytest.raises(InvariantError):
        check(lru, range(4))


def test_the_checker_compares_with_what_the_index_says():
    with pytest.raises(InvariantError, match="frame 2"):
        check(filled(4), (0, 1, 3))
