"""Pools of models with window and state groups: what is reused, what is returned, what is never mistaken.

Every step of these tests compares all KV and states that it sees with what they must be.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.base.errors import InputError
from stepwell.cache.pool import Busy, Flags, NeverFits, Ready
from stepwell.core.reasons import Reason

EVERY = ("equal", "several", "windows", "states", "all", "no full", "narrow", "latent")
WINDOWS = ("equal", "several", "windows", "all", "no full", "narrow")
STATES = ("states", "all", "no full", "latent")
PROMPT = list(range(1, 31))


def ends(count: int, *groups: str) -> list[tuple[str, int]]:
    return [(name, number) for name in groups for number in range(count)]


@pytest.mark.parametrize("groups", EVERY)
def test_every_boundary_of_a_prompt_is_restored(make_groups: Any, groups: str) -> None:
    """With as many boundaries kept as there are, a prompt that parts anywhere goes on at the page before."""
    bench = make_groups(groups, boundaries=8, positions=64)
    bench.serve("a", PROMPT)
    for length in range(1, 31):
        assert bench.cached([*PROMPT[:length], 99]) == length // 4 * 4
    for length in range(1, 31):
        assert bench.serve("b", [*PROMPT[:length], 50]).cached == length // 4 * 4
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_a_boundary_at_every_length_of_a_prompt(make_groups: Any, groups: str) -> None:
    """Each length in a pool of its own: the follow-up begins at the last boundary of what was served."""
    for length in range(1, 18):
        bench = make_groups(groups, frames=40, positions=64)
        bench.serve("a", PROMPT[:length])
        assert bench.serve("b", [*PROMPT[:length], 99]).cached == length // 4 * 4
        assert bench.serve("c", PROMPT[:length]).cached == (length - 1) // 4 * 4
        bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_h9_a_shared_system_prompt_with_different_tails_hits(make_groups: Any, groups: str) -> None:
    """200 shared tokens, tails of 40. Full and window groups hit with the second request, since their pages
    are all sealed. A state group hits with the third: the second parts from the first at 200, which is
    when that place is known, and leaves a state there.
    """
    bench = make_groups(groups, frames=512, positions=256)
    system = [(7 * n) % 31 for n in range(200)]
    tails = [[100 + n] * 40 for n in range(4)]
    cached = [bench.serve("r", [*system, *tail]).cached for tail in tails]
    first_hit = 2 if groups in STATES else 1
    assert cached == [0] * first_hit + [200] * (4 - first_hit)


@pytest.mark.parametrize("groups", EVERY)
@pytest.mark.parametrize("replay_tokens", [1, 5, 64])
def test_h10_no_follow_up_falls_into_a_dead_zone(
    make_groups: Any, groups: str, replay_tokens: int
) -> None:
    """Longer by 0, 1, 2, ... more than a page, and always at least what the prompt itself could reuse."""
    bench = make_groups(groups, frames=512, positions=256, replay_tokens=replay_tokens)
    prompt = [(5 * n) % 23 for n in range(94)]
    bench.serve("a", prompt)
    least = (len(prompt) - replay_tokens) // 4 * 4
    reused = []
    for more in range(10):
        cached = bench.cached([*prompt, *[77] * more])
        assert least <= cached <= (len(prompt) + more - replay_tokens) // 4 * 4
        reused.append(cached)
    assert reused == sorted(reused)


@pytest.mark.parametrize("groups", EVERY)
def test_h10_a_retry_of_any_length_hits_as_deep_as_it_may(make_groups: Any, groups: str) -> None:
    for length in range(5, 16):
        bench = make_groups(groups, frames=64, replay_tokens=5)
        bench.serve("a", PROMPT[:length])
        assert bench.serve("a", PROMPT[:length]).cached == (length - 5) // 4 * 4


@pytest.mark.parametrize("groups", STATES)
def test_h11_pages_and_states_share_one_budget(make_groups: Any, groups: str) -> None:
    """Room for the pages of three prompts, with their states, of ten that come in turn: the last ones hit
    all they may, and no frame is in a page or state that no lookup can use.
    """
    bench = make_groups(groups, frames=40, positions=32)
    for seed in range(10):
        bench.serve("r", [100 + seed] * 14)
    stats = bench.pool.stats()
    assert stats["records_evicted"] > 0
    recent = [bench.cached([*[100 + seed] * 14, 1]) for seed in (9, 8)]
    assert recent == [12, 12]
    # What hits nothing is not there: whoever comes last takes the whole pool again and again.
    for seed in range(30):
        bench.serve("r", [200 + seed] * 14)
        assert bench.cached([*[200 + seed] * 14, 1]) == 12
    bench.idle()


@pytest.mark.parametrize("groups", STATES)
def test_h11_a_state_never_outlives_its_page_nor_costs_the_pool_for_ever(
    make_groups: Any, groups: str
) -> None:
    """A pool of which a request needs every frame: all that is cached leaves, and it gets them."""
    bench = make_groups(groups, frames=24, positions=128)
    for seed in range(6):
        bench.serve("r", [100 + seed] * 9)
    length = max(n for n in range(1, 128) if bench.pool.limits.request_frames(n) <= 24)
    assert bench.serve("whole", [9] * length).cached == 0
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
@pytest.mark.parametrize("minimum", [1, 4, 5, 8, 9])
def test_a_hit_below_the_minimum_is_a_miss(make_groups: Any, groups: str, minimum: int) -> None:
    bench = make_groups(groups, minimum_hit_tokens=minimum, boundaries=8)
    bench.serve("a", PROMPT)
    for length in (4, 8, 12):
        answer = bench.serve("b", [*PROMPT[:length], 99, 99], flags=Flags.NO_WRITE)
        assert answer.cached == (length if length >= minimum else 0)
        assert (answer.reason is Reason.BELOW_MINIMUM) == (length < minimum)


@pytest.mark.parametrize("groups", STATES)
def test_states_are_kept_on_their_grid(make_groups: Any, groups: str) -> None:
    bench = make_groups(groups, state_tokens=12, boundaries=2)
    answer = bench.serve("a", PROMPT)
    assert answer.checkpoints == (12, 24)
    assert [bench.cached([*PROMPT[:n], 99]) for n in (11, 12, 23, 24, 30)] == [0, 12, 12, 24, 24]
    assert bench.cached(PROMPT) == 24


@pytest.mark.parametrize("groups", WINDOWS)
def test_windows_do_not_need_the_grid(make_groups: Any, groups: str) -> None:
    bench = make_groups(groups, state_tokens=12)
    bench.serve("a", PROMPT)
    assert bench.cached([*PROMPT, 99]) == (28 if groups not in STATES else 24)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("groups", STATES)
def test_so_many_last_boundaries_are_kept(make_groups: Any, groups: str, count: int) -> None:
    """Of the prompt, and of the answer: older states of the answer leave first of all."""
    bench = make_groups(groups, boundaries=count, positions=128)
    answer = bench.serve("a", PROMPT, grow=22)
    wanted = sorted({28 - 4 * n for n in range(count)} | {28})
    assert list(answer.checkpoints) == wanted
    index = bench.pool._held.states[0].index
    kept = [record for record in index.records() if index._wanted[record]]
    assert len(kept) == len(wanted) + count


@pytest.mark.parametrize("groups", EVERY)
def test_an_answer_is_reused_by_the_next_turn(make_groups: Any, groups: str) -> None:
    """F043, F056: from the last boundary of prompt and answer together, turn after turn."""
    bench = make_groups(groups, frames=200)
    history, reusable = [3, 1, 4, 1, 5], 0
    for turn in range(5):
        answer = bench.open("r", history)
        assert answer.cached == reusable
        bench.compute("r")
        bench.grow("r", 9)
        reusable = bench.done("r") // 4 * 4
        history = [*bench.tokens["r"], 60 + turn, 61]
        bench.close("r")
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_a_request_never_has_more_frames_than_it_was_said_to_need(
    make_groups: Any, groups: str
) -> None:
    """Through a long prompt in small steps and a long answer: windows do not grow with the length."""
    bench = make_groups(groups, frames=200, positions=200, ahead_tokens=6)
    bench.open("a", [n % 40 for n in range(80)])
    most = 0
    for _ in range(16):
        bench.compute("a", 5)
        most = max(most, bench.used("a"))
        assert most <= bench.pool.limits.request_frames(80)
    for length in range(81, 160):
        bench.grow("a", 1)
        assert bench.used("a") <= bench.pool.limits.request_frames(length)
    if groups == "windows":
        assert bench.used("a") <= 5
    stats = bench.pool.stats()
    assert stats["frames_filling"] + stats["frames_held"] == bench.used("a")
    bench.close("a")
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_what_fits_by_its_count_is_served_to_the_end(make_groups: Any, groups: str) -> None:
    """In a pool of exactly the frames that a request needs, it is never BUSY: cold, with a hit, growing."""
    limits = make_groups(groups, positions=64).pool.limits
    frames = limits.request_frames(33)
    bench = make_groups(groups, frames=frames, positions=64)
    for _ in range(3):
        for length in (12, 24, 30):
            bench.serve("a", PROMPT[:length], grow=33 - length)
        bench.serve("b", [*PROMPT[:20], 99], grow=12)
    assert isinstance(bench.open("a", range(60)), NeverFits) == (limits.request_frames(60) > frames)


@pytest.mark.parametrize("groups", EVERY)
@pytest.mark.parametrize("computed", [0, 1, 4, 7, 12, 29, 30])
@pytest.mark.parametrize("grown", [0, 5])
def test_a_request_comes_back_at_any_moment(
    make_groups: Any, groups: str, computed: int, grown: int
) -> None:
    """Preempted in the middle, with what it generated: it begins again at a boundary that it passed."""
    bench = make_groups(groups)
    bench.open("a", PROMPT)
    if computed:
        bench.compute("a", computed)
    grown = grown if computed == 30 else 0
    bench.grow("a", grown)
    tokens, done = bench.tokens["a"], bench.done("a")
    bench.close("a")
    bench.idle()
    answer = bench.serve("a", [*tokens, 88], grow=3)
    assert answer.cached <= done
    if groups not in STATES:
        assert answer.cached == done // 4 * 4
    if computed >= 28:
        assert answer.cached == done // 4 * 4
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_busy_takes_nothing_in_any_group(make_groups: Any, groups: str) -> None:
    """Neither an `open` that hits nor an `extend`: frames, rows, holds and what can be found stay."""
    bench = make_groups(groups, frames=40, positions=256, ahead_tokens=256)
    bench.serve("a", PROMPT[:9])
    need = bench.pool.limits.request_frames
    bench.open("holds", [99] * 4 * max(n for n in range(1, 64) if need(4 * n) <= 28))
    bench.open("also", [98])
    before, rows = bench.pool.stats(), bench.pool._held.rows.free
    room = max(n for n in range(1, 64) if need(4 * n) <= 40)
    for count in (room, room - 1):
        assert isinstance(bench.open("b", [*PROMPT[:9], *[5] * (4 * count - 9)]), Busy)
    assert isinstance(
        bench.pool.extend("holds", 4 * room + 8 - len(bench.tokens["holds"])), Busy | NeverFits
    )
    changed = {name for name, count in bench.pool.stats().items() if count != before[name]}
    assert changed == {"opens_busy"}
    assert bench.pool._held.rows.free == rows
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_a_busy_hit_leaves_the_pool_able_to_give_all_it_has(make_groups: Any, groups: str) -> None:
    """The hit of a request that did not get in counts as a use of its pages and of what hangs on them: it
    once counted as a later use of the records than of their pages, and taking a page then took more
    frames than were counted, until none were left to take.
    """
    bench = make_groups(groups, frames=40, positions=128, ahead_tokens=128)
    bench.serve("a", PROMPT[:9])
    pages = max(n for n in range(1, 33) if bench.pool.limits.request_frames(4 * n) <= 28)
    bench.open("holds", [99] * 4 * pages)
    room = max(n for n in range(1, 33) if bench.pool.limits.request_frames(4 * n) <= 40)
    assert isinstance(bench.open("b", [*PROMPT[:9], *[5] * (4 * room - 9)]), Busy)
    bench.close("holds")
    answer = bench.open("b", [7] * (4 * room))
    assert isinstance(answer, Ready)
    bench.close("b")
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
def test_no_read_computes_all_and_no_write_leaves_nothing(make_groups: Any, groups: str) -> None:
    bench = make_groups(groups)
    assert bench.serve("a", PROMPT, flags=Flags.NO_WRITE) == Ready(0, Reason.NOT_SEALED)
    assert bench.cached([*PROMPT, 99]) == 0
    bench.serve("a", PROMPT)
    answer = bench.serve("b", PROMPT, grow=3, flags=Flags.NO_READ)
    assert (answer.cached, answer.reason) == (0, Reason.NO_READ)
    assert bench.cached([*PROMPT, 99]) == 28
    assert bench.serve("b", PROMPT, flags=Flags.NO_READ | Flags.NO_WRITE).checkpoints == ()
    fresh = make_groups(groups)
    fresh.serve("a", PROMPT, flags=Flags.NO_READ)
    assert fresh.cached([*PROMPT, 99]) == 28


@pytest.mark.parametrize("groups", EVERY)
def test_who_needs_logits_computes_all_and_is_reused(make_groups: Any, groups: str) -> None:
    bench = make_groups(groups)
    for _ in range(2):
        answer = bench.serve("a", PROMPT, flags=Flags.NEEDS_LOGITS)
        assert (answer.cached, answer.reason) == (0, Reason.NEEDS_LOGITS)
        assert bench.cached([*PROMPT, 99]) == 28


@pytest.mark.parametrize("groups", EVERY)
def test_a_dropped_prefix_is_found_no_more_in_any_group(make_groups: Any, groups: str) -> None:
    """F114. Without a full group nobody knows what continues a prefix, so its whole namespace goes."""
    bench = make_groups(groups, frames=100)
    other = [88] * 14
    bench.serve("a", PROMPT)
    bench.serve("b", other)
    bench.open("holds", [*PROMPT, 99])
    bench.compute("holds")
    assert bench.pool.drop(PROMPT[:8], bench.space) > 0
    assert bench.cached([*PROMPT, 99]) == (0 if groups in ("windows", "no full") else 4) or (
        groups in STATES and bench.cached([*PROMPT, 99]) == 0
    )
    tree = groups not in ("windows", "no full")
    assert bench.cached([*other, 1]) == (12 if tree else 0)
    bench.grow("holds", 14)
    held = bench.tokens["holds"]
    bench.close("holds")
    assert bench.cached([*held, 1]) <= 4
    bench.serve("a", PROMPT)
    assert bench.cached([*PROMPT, 99]) == 28
    bench.idle()


@pytest.mark.parametrize("groups", EVERY)
@pytest.mark.parametrize("kept", [1, 2])
def test_a_drop_in_the_middle_of_an_answer_leaves_no_wish_behind(
    make_groups: Any, groups: str, kept: int
) -> None:
    """A state that the request still reads leaves with its next step, in which its boundary goes too."""
    for drop_at in range(4, 9):
        bench = make_groups(groups, boundaries=kept, frames=100)
        bench.open("a", PROMPT[:8])
        bench.compute("a")
        bench.grow("a", drop_at)
        other = [50] * 8
        assert bench.pool.drop(other, bench.space) == 0 or groups in ("windows", "no full")
        bench.pool.extend("a", 5)
        bench.tokens["a"] += [5] * 5
        bench.step("a", 5)
        bench.pool.drop(PROMPT[:4], bench.space)
        bench.grow("a", 20)
        bench.close("a")
        bench.idle()


@pytest.mark.parametrize("groups", EVERY)
@pytest.mark.parametrize("computed", [0, 3, 12, 30])
def test_after_a_new_epoch_nothing_of_before_is_hit(
    make_groups: Any, groups: str, computed: int
) -> None:
    bench = make_groups(groups, frames=100)
    bench.serve("a", PROMPT)
    bench.open("stays", [*PROMPT, 5, 6, 7])
    bench.open("cold", [77] * 30)
    if computed:
        bench.compute("cold", computed)
    bench.compute("stays")
    assert bench.pool.raise_epoch() == 1
    with pytest.raises(InputError, match="epoch 0"):
        bench.open("b", PROMPT)
    assert bench.pool.stats()["frames_cached"] == 0
    bench.compute("cold")
    for name in ("stays", "cold"):
        bench.grow(name, 9)
    held = bench.tokens["stays"]
    for name in ("stays", "cold"):
        bench.close(name)
    stats = bench.pool.stats()
    assert (stats["frames_cached"], stats["frames_free"]) == (0, 100)
    bench.space = type(bench.space)(4, model="weights", epoch=1)
    assert bench.cached([*held, 1]) == 0
    bench.serve("a", PROMPT)
    assert bench.cached([*PROMPT, 1]) == 28
    bench.idle()
