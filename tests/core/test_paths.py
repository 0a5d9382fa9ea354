"""Paths: the tree read in slices, and what holds protect."""

import random

import numpy as np
import pytest

from stepwell.base.errors import InvariantError
from stepwell.core.check import Findings
from stepwell.core.paths import NO_FRAME, Paths

ROOT = bytes(32)


def ids(*frames):
    return np.array(frames, np.int32)


def check(paths):
    findings = Findings()
    paths.check(findings)
    findings.raise_if_any()


@pytest.fixture
def tree():
    """0 ─ 1 ─ 2 ─ 3 ─ 4, below 2: 5 ─ 6, below 5: 7, below 0: 8."""
    paths = Paths(12)
    paths.append(NO_FRAME, ids(0, 1, 2), ROOT)
    paths.append(2, ids(3, 4), ROOT)
    paths.append(2, ids(5, 6), ROOT)
    paths.append(5, ids(7), ROOT)
    paths.append(0, ids(8), ROOT)
    check(paths)
    return paths


PATHS = {
    0: [0],
    2: [0, 1, 2],
    4: [0, 1, 2, 3, 4],
    6: [0, 1, 2, 5, 6],
    7: [0, 1, 2, 5, 7],
    8: [0, 8],
}


@pytest.mark.parametrize("frame", PATHS)
def test_a_path_leads_from_the_first_page_to_the_frame(tree, frame):
    assert tree.path(frame).tolist() == PATHS[frame]
    for pages in range(len(PATHS[frame]) + 1):
        expected = PATHS[frame][len(PATHS[frame]) - pages :]
        assert tree.path(frame, pages).tolist() == expected


def test_a_path_is_a_copy(tree):
    tree.path(4)[:] = 9
    check(tree)
    assert tree.path(4).tolist() == PATHS[4]


@pytest.mark.parametrize(("frame", "slices"), [(0, 1), (2, 1), (4, 1), (6, 2), (7, 3), (8, 2)])
def test_a_path_costs_one_slice_per_branching_above_it(tree, frame, slices):
    assert tree.slices(frame) == slices


def test_growing_page_by_page_stays_one_slice():
    """Frame numbers that come in any order must not cut a path into pieces."""
    rng = random.Random(1)
    order = list(range(50))
    rng.shuffle(order)
    paths = Paths(50)
    above = NO_FRAME
    for frame in order:
        paths.append(above, ids(frame), ROOT)
        above = frame
    assert paths.path(above).tolist() == order
    assert paths.slices(above) == 1
    check(paths)


def test_parents_children_and_depths(tree):
    inside = range(9)
    assert [int(tree.parent[f]) for f in inside] == [NO_FRAME, 0, 1, 2, 3, 2, 5, 5, 0]
    assert [int(tree.children[f]) for f in inside] == [2, 1, 2, 1, 0, 2, 0, 0, 0]
    assert [int(tree.depth[f]) for f in inside] == [0, 1, 2, 3, 4, 3, 4, 4, 1]
    assert tree.size == 9


def test_what_is_in_the_tree_and_what_is_not(tree):
    assert [frame for frame in range(-2, 14) if frame in tree] == list(range(9))


def test_every_frame_knows_the_root_of_its_path(tree):
    other = bytes(range(32))
    tree.append(NO_FRAME, ids(9, 10), other)
    tree.append(9, ids(11), other)
    assert {tree.root(frame) for frame in range(9)} == {ROOT}
    assert {tree.root(frame) for frame in (9, 10, 11)} == {other}
    check(tree)


def test_a_tail_ends_where_another_page_continues(tree):
    assert tree.tail(4, 9).tolist() == [4, 3]
    assert tree.tail(7, 9).tolist() == [7]
    assert tree.tail(6, 9).tolist() == [6]
    assert tree.tail(4, 1).tolist() == [4]


def test_a_tail_ends_above_nothing_that_a_hold_protects(tree):
    tree.hold(3)
    assert tree.tail(4, 9).tolist() == [4]
    tree.let_go(3)
    assert tree.tail(4, 9).tolist() == [4, 3]


def test_cutting_gives_the_parent_and_shortens_the_path(tree):
    assert tree.cut(ids(4)) == 3
    assert 4 not in tree
    assert tree.cut(ids(3)) == 2
    assert int(tree.children[2]) == 1
    check(tree)
    assert tree.cut(ids(7)) == 5
    assert tree.cut(ids(6, 5)) == 2
    assert tree.cut(ids(8)) == 0
    check(tree)
    assert tree.tail(2, 9).tolist() == [2, 1, 0]
    assert tree.cut(ids(2, 1, 0)) == NO_FRAME
    assert tree.size == 0
    check(tree)


def test_a_cut_frame_can_be_used_again_elsewhere(tree):
    tree.cut(ids(4, 3))
    tree.append(8, ids(3), ROOT)
    tree.append(2, ids(4), ROOT)
    assert tree.path(3).tolist() == [0, 8, 3]
    assert tree.path(4).tolist() == [0, 1, 2, 4]
    check(tree)


def test_below_a_page_is_everything_that_continues_it(tree):
    assert [frames.tolist() for frames in tree.below(3)] == [[3, 4]]
    assert sorted(int(f) for frames in tree.below(2) for f in frames) == [2, 3, 4, 5, 6, 7]
    assert sorted(int(f) for frames in tree.below(0) for f in frames) == list(range(9))
    assert [frames.tolist() for frames in tree.below(8)] == [[8]]


def test_below_names_every_run_after_the_one_above_it(tree):
    """Whoever removes them from the last one on never removes a parent before its child."""
    for frame in (0, 2, 5):
        order = [int(one) for frames in tree.below(frame) for one in frames]
        for one in order[1:]:
            assert order.index(int(tree.parent[one])) < order.index(one)


def test_a_hold_protects_everything_above_it(tree):
    tree.hold(7)
    assert tree.guarded == 5
    assert [frame for frame in (4, 6, 7, 8) if tree.loose(frame)] == [4, 6, 8]
    check(tree)


@pytest.mark.parametrize("frame", PATHS)
def test_holds_of_one_page_are_counted(tree, frame):
    tree.hold(frame)
    tree.hold(frame)
    assert tree.let_go(frame) == []
    assert tree.guarded == len(PATHS[frame])
    check(tree)
    assert tree.let_go(frame)
    assert tree.guarded == 0
    check(tree)


def test_letting_go_names_the_last_frame_of_each_run_deepest_first(tree):
    tree.hold(7)
    assert tree.let_go(7) == [7, 6, 4]
    tree.hold(7)
    tree.hold(1)
    assert tree.let_go(7) == [7, 6, 4]
    assert tree.guarded == 2
    assert tree.let_go(1) == [4]
    check(tree)


def test_a_deeper_hold_does_not_end_with_a_higher_one(tree):
    tree.hold(4)
    tree.hold(1)
    assert tree.let_go(1) == []
    assert not tree.loose(4)
    assert tree.guarded == 5


def test_only_childless_pages_without_holds_are_loose(tree):
    assert [frame for frame in range(9) if tree.loose(frame)] == [4, 6, 7, 8]


def test_guards_are_those_of_a_plain_walk_on_random_trees():
    """The number of protected pages is kept, never counted: so compare it with counting."""
    rng = random.Random(11)
    for _ in range(60):
        count = rng.randrange(1, 30)
        paths, parents, holds = Paths(count), {}, []
        for frame in range(count):
            parents[frame] = rng.choice([NO_FRAME, *range(frame)])
            paths.append(parents[frame], ids(frame), ROOT)
        for _ in range(40):
            if holds and rng.random() < 0.45:
                paths.let_go(holds.pop(rng.randrange(len(holds))))
            else:
                holds.append(rng.randrange(count))
                paths.hold(holds[-1])
            covered = set()
            for held in holds:
                above = held
                while above != NO_FRAME:
                    covered.add(above)
                    above = parents[above]
            assert paths.guarded == len(covered)
            childless = set(range(count)) - set(parents.values())
            assert {f for f in range(count) if paths.loose(f)} == childless - covered
            check(paths)


def _child_lost(paths):
    paths.children[2] = 1


def _wrong_parent(paths):
    paths.parent[4] = 1


def _wrong_depth(paths):
    paths.depth[6] = 1


def _wrong_guard(paths):
    paths._run(0).guard = 1


def _wrong_total(paths):
    paths.guarded = 1


def _run_lost(paths):
    paths._runs.append(None)


def _branch_lost(paths):
    paths._run(0).branches.discard(1)
    paths._run(0).branches.add(2)


def _foreign_root(paths):
    paths._run(1).root = bytes(range(32))


def _size(paths):
    paths.size += 1


@pytest.mark.parametrize(
    "damage",
    [
        _child_lost,
        _wrong_parent,
        _wrong_depth,
        _wrong_guard,
        _wrong_total,
        _run_lost,
        _branch_lost,
        _foreign_root,
        _size,
    ],
)
def test_the_checker_finds_broken_books(tree, damage):
    damage(tree)
    with pytest.raises(InvariantError):
        check(tree)


def test_the_checker_finds_a_hold_without_its_mark_above(tree):
    tree.hold(7)
    tree._run(0).marks.clear()
    with pytest.raises(InvariantError):
        check(tree)
