"""Contiguous pools, drafted tokens and requests that compute the same at once, for models of several groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepwell.base.errors import InputError, MisuseError
from stepwell.cache.pool import Busy, NeverFits, Ready
from stepwell.core.reasons import Reason

EVERY = ("full", "equal", "several", "windows", "states", "all", "no full", "narrow", "latent")
WITHOUT_STATES = ("full", "equal", "several", "windows", "narrow")
STATES = ("states", "all", "no full", "latent")
PROMPT = list(range(1, 31))


@pytest.mark.parametrize("groups", EVERY)
def test_spans_of_a_contiguous_pool_are_always_consecutive(make_groups: Any, groups: str) -> None:
    """Also after requests came and went in another order, in every group and every one of its tables."""
    span = make_groups(groups, positions=32, contiguous=True).pool.limits.span_frames()
    bench = make_groups(groups, frames=3 * span + 1, positions=32, contiguous=True)
    for turn, gone in enumerate(("a", "b", "a", "c", "b", "c")):
        for name in "abc":
            if name not in bench.tokens:
                answer = bench.open(name, [turn, *PROMPT[:17]])
                assert (answer.cached, answer.reason) == (0, Reason.CONTIGUOUS)
                assert answer.checkpoints == ()
                bench.compute(name, 5)
        assert bench.open("d", PROMPT) == Busy(short_rows=1)
        bench.pool.extend("a", 14)
        view = bench.pool.bind({name: 32 - bench.done(name) for name in bench.tokens})
        for plane in view.planes:
            for number, (first, pair) in enumerate(zip(plane.firsts, plane.spans, strict=True)):
                slots = plane.table[view.rows[number], first:32]
                assert (np.diff(slots) == 1).all()
                assert pair == (slots[0], slots[-1] + 1)
        for name in sorted(bench.tokens):
            bench.compute(name)
        bench.close(gone)
        bench.pool.check()
    bench.idle()
    assert bench.pool.stats()["frames_free"] == 3 * span + 1


@pytest.mark.parametrize("groups", EVERY)
def test_a_contiguous_request_has_its_whole_span_from_the_start(
    make_groups: Any, groups: str
) -> None:
    span = make_groups(groups, positions=32, contiguous=True).pool.limits.span_frames()
    bench = make_groups(groups, frames=span, positions=32, contiguous=True)
    bench.open("a", [1])
    assert bench.pool.stats()["frames_filling"] == span
    bench.compute("a")
    bench.grow("a", 31)
    assert isinstance(bench.pool.extend("a", 1), NeverFits)
    bench.pool.truncate("a", 32)
    assert bench.open("b", [1]) == Busy(short_rows=1)
    bench.close("a")
    assert bench.cached([1] * 20) == 0
    stats = bench.pool.stats()
    assert (stats["pages_sealed"], stats["records_sealed"], stats["frames_free"]) == (0, 0, span)
    short = make_groups(groups, frames=span - 1, positions=32, contiguous=True)
    assert isinstance(short.open("a", [1]), NeverFits)


@pytest.mark.parametrize("groups", WITHOUT_STATES)
@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_rejected_drafts_leave_no_trace(make_groups: Any, groups: str, accepted: int) -> None:
    """Four drafted after each token: what is not accepted is never sealed, and its frames come back."""
    bench = make_groups(groups, frames=100)
    plain = make_groups(groups, frames=100)
    for one in (bench, plain):
        one.open("a", PROMPT[:6])
        one.compute("a")
    for turn in range(8):
        known = len(bench.tokens["a"])
        right = [(turn * 5 + n) % 31 for n in range(1 + accepted)]
        wrong = [900 + n for n in range(4 - accepted)]
        assert isinstance(bench.pool.extend("a", 5), Ready)
        bench.tokens["a"] += right
        bench.step("a", len(right), wrong)
        bench.pool.truncate("a", len(bench.tokens["a"]))
        plain.pool.extend("a", len(right))
        plain.tokens["a"] += right
        plain.step("a", len(right))
        assert bench.pool.room("a") <= 3 or groups != "full"
        assert bench.pool.stats() == plain.pool.stats()
        assert known + len(right) == bench.done("a") == plain.done("a")
    following = set()
    for one in (bench, plain):
        one.pool.extend("a", 1)
        one.tokens["a"].append(5)
        following.add(one.step("a", 1))
    assert len(following) == 1
    history = bench.tokens["a"]
    bench.close("a")
    assert bench.cached([*history, 1]) == len(history) // 4 * 4
    assert bench.cached([*history[:7], *[900, 901, 902, 903], 1]) <= 7
    bench.idle()


@pytest.mark.parametrize("groups", WITHOUT_STATES)
def test_truncating_a_row_with_a_gap_keeps_its_span(make_groups: Any, groups: str) -> None:
    """Drafted pages that lie elsewhere: once they are gone the row is one span again, and is said to be."""
    bench = make_groups(groups, frames=100, ahead_tokens=64)
    bench.open("a", PROMPT[:8])
    bench.open("between", PROMPT[:3])
    bench.compute("a")
    bench.pool.extend("a", 12)
    bench.pool.truncate("a", 8)
    bench.pool.check()
    bench.pool.extend("a", 1)
    bench.pool.truncate("a", 9)
    bench.grow("a", 9)
    bench.idle()


def test_what_may_not_be_cut(make_groups: Any) -> None:
    bench = make_groups("equal")
    bench.open("a", PROMPT)
    bench.compute("a", 8)
    for tokens in (29, 8, -1, True, 30.0):
        with pytest.raises(InputError, match="30 or more"):
            bench.pool.truncate("a", tokens)
    with pytest.raises(MisuseError, match="not open"):
        bench.pool.truncate("b", 30)
    bench.pool.truncate("a", 10**9)
    bench.compute("a")


@pytest.mark.parametrize("groups", STATES)
def test_a_state_cannot_be_cut(make_groups: Any, groups: str) -> None:
    """A commit of other than what the step computed is refused, and changes nothing."""
    bench = make_groups(groups)
    bench.open("a", PROMPT)
    with pytest.raises(InputError, match="a state cannot be cut"):
        bench.pool.commit("a", PROMPT[:1])
    view = bench.pool.bind({"a": 6})
    bench.model.step(view, [PROMPT[:6]])
    before = bench.pool.stats()
    for count in (5, 7, 0):
        with pytest.raises(InputError, match="a state cannot be cut"):
            bench.pool.commit("a", PROMPT[:count])
    assert bench.pool.stats() == before
    bench.pool.commit("a", PROMPT[:6])
    with pytest.raises(InputError, match="a state cannot be cut"):
        bench.pool.commit("a", PROMPT[6:12])
    bench.compute("a")
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
@pytest.mark.parametrize("cut", [1, 4, 6, 30])
def test_requests_that_compute_the_same_at_once(make_groups: Any, groups: str, cut: int) -> None:
    """The first copy of each page and state is kept, the others are returned, and everyone goes on."""
    bench = make_groups(groups, frames=120)
    alone = make_groups(groups, frames=120)
    alone.serve("a", PROMPT, grow=9)
    names = ("a", "b", "c")
    for name in names:
        bench.open(name, PROMPT)
    for _ in range(0, 30, cut):
        for name in names:
            if missing := 30 - bench.done(name):
                bench.compute(name, min(cut, missing))
    for _ in range(9):
        for name in names:
            bench.grow(name, 1)
    bench.idle()
    for name in ("pages_sealed", "records_sealed", "frames_free"):
        assert bench.pool.stats()[name] == alone.pool.stats()[name]
    assert bench.cached([*PROMPT, 99]) == 28


@pytest.mark.parametrize("groups", EVERY)
def test_one_step_of_several_requests_mixes_nothing(make_groups: Any, groups: str) -> None:
    """Fresh ones, ones that go on from a kept state or window, and ones in the middle, in one batch."""
    bench = make_groups(groups, frames=120)
    bench.serve("x", PROMPT)
    bench.open("hit", [*PROMPT, 7, 8, 9])
    bench.open("fresh", [60] * 7)
    bench.open("middle", [70] * 12)
    bench.compute("middle", 5)
    counts = {"middle": 3, "hit": 2, "fresh": 7}
    view = bench.pool.bind(counts)
    pieces = [bench.tokens[n][bench.done(n) : bench.done(n) + c] for n, c in counts.items()]
    for number, name in enumerate(counts):
        assert bench.model.wrong(view, number, bench.tokens[name][: bench.done(name)]) == []
    bench.model.step(view, pieces)
    for number, (name, count) in enumerate(counts.items()):
        done = bench.tokens[name][: bench.done(name) + count]
        assert bench.model.wrong(view, number, done) == []
    for name, piece in zip(counts, pieces, strict=True):
        bench.pool.commit(name, piece)
    for name in counts:
        bench.compute(name)
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_the_next_token_depends_on_every_group(make_groups: Any, groups: str) -> None:
    """What the tests rest on: any one wrong number in a page or state that is seen shows."""
    bench = make_groups(groups)
    bench.open("a", PROMPT[:9])
    bench.compute("a", 8)
    view = bench.pool.bind({"a": 1})
    right = bench.model.step(view, [PROMPT[8:9]])
    where = [
        (buffer, slice(None), int(plane.table[view.rows[0], 7]))
        for plane in view.planes
        for buffer in (plane.buffers.k, plane.buffers.v)
        if buffer.size
    ]
    for buffer, layers, slot in where:
        for layer in range(len(buffer[layers])):
            buffer[layer, slot] += 1
            assert bench.model.wrong(view, 0, PROMPT[:9]) != []
            assert bench.model.step(view, [PROMPT[8:9]]) != right
            buffer[layer, slot] -= 1
    assert bench.model.step(view, [PROMPT[8:9]]) == right or groups in STATES
