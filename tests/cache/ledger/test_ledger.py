"""The whole of the deciding half: deadlines, the breaker, ranks that come and go, drops, news and numbers."""

import dataclasses
import threading

import numpy as np
import pytest

from stepwell.base.errors import InputError, InvariantError, MisuseError
from stepwell.base.observe import METRICS
from stepwell.cache.ledger.loads import Loaded
from stepwell.cache.ledger.records import Cleared, Released, Shape
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.plan import Grown, Outcome, Report, Verb
from stepwell.core.reasons import Reason

OK, CORRUPT, TIMEOUT, UNAVAILABLE = (
    *(Outcome.OK, Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.UNAVAILABLE),
)
TENANT = Namespace(4, model="m", tenant="t")


def wipes(world):
    """Numbers of the plans that overwrite and are not clear."""
    world.fetch()
    return [
        number
        for number, plan in world.plans.items()
        if plan.verb is Verb.WIPE and world.ledger._plans.find(number) is not None
    ]


def fail(world, times, page=1000):
    """So many saves that fail."""
    for n in range(times):
        world.run(world.save(world.chain(page + n)), {0: UNAVAILABLE})


# The breaker


def test_a_tier_that_fails_is_left_alone_and_asked_again_after_its_rest(make_world):
    world = make_world(breaker_faults=3, breaker_rest_ms=500)
    chain = world.chain(1, 2)
    world.put(chain)
    world.match(chain, "waits")
    fail(world, 3)
    assert (world.count("breaker_opened"), world.count("breaker_open")) == (1, 1)
    match = world.match(chain, "r")
    assert (match.pages, match.records, match.reason) == (0, (), Reason.TIER_DOWN)
    assert world.save(world.chain(5)) is None
    assert world.count("saves_refused") == 1
    world.clock.advance_s(0.5)
    trial = world.save(world.chain(6))
    assert world.save(world.chain(7)) is None
    assert world.match(chain, "r").reason is Reason.TIER_DOWN
    world.run(trial)
    assert world.count("breaker_open") == 0
    assert world.match(chain, "r").pages == 2
    assert world.count("breaker_opened") == 1


def test_a_match_ends_when_its_request_asks_a_tier_that_is_down(make_world):
    """And what nobody but it held is free in the same call."""
    world = make_world(breaker_faults=1)
    chain = world.chain(1, 2)
    world.put(chain)
    world.match(chain, "r")
    world.run(world.load(chain), {0: CORRUPT})
    fail(world, 1)
    assert world.sums() == {"held": 2, "free": 14}
    assert world.match(chain, "r").reason is Reason.TIER_DOWN
    assert world.sums() == {"out": 1, "free": 15}


def test_a_movement_that_was_not_begun_leaves_the_trial_to_the_next(make_world):
    """Nothing to save, an error of the caller, a match: none of them tells how the tier is."""
    world = make_world(breaker_faults=1, breaker_rest_ms=100)
    chain = world.chain(1, 2)
    world.put(chain)
    fail(world, 1)
    world.clock.advance_s(0.1)
    assert world.save(chain) is None
    assert world.count("saves_refused") == 0

    def raises(_first, _last):
        raise InputError("no such pages")

    offer = world.offer(world.chain(8))
    with pytest.raises(InputError, match="no such pages"):
        world.ledger.save(type(offer)(offer.chain, 1, raises))
    assert world.match(chain, "r").pages == 2
    world.run(world.load_match(world.match(chain, "r")))
    assert world.count("breaker_open") == 0


def test_h08_faults_far_between_disable_nothing(make_world):
    world = make_world(breaker_faults=2)
    for n in range(20):
        fail(world, 1, 100 + n)
        world.put(world.chain(500 + n))
    assert world.count("breaker_opened") == 0
    assert world.count("pages_saved") == 20


def test_wrong_bytes_open_no_breaker(make_world):
    world = make_world(breaker_faults=1)
    chain = world.chain(1)
    for _ in range(3):
        world.put(chain)
        world.run(world.load(chain), {0: CORRUPT})
    assert world.count("breaker_open") == 0


def test_a_rank_that_fails_behind_one_that_refuses_is_a_fault_all_the_same(make_world):
    world = make_world(movers=2, breaker_faults=1)
    number = world.save(world.chain(1))
    world.say(number, 0, [TIMEOUT], released=True, clear=True)
    world.say(number, 1, [Outcome.REFUSED], released=True, clear=True)
    assert world.count("breaker_open") == 1


# Deadlines


def test_a_rank_that_never_speaks_costs_twice_the_time_that_movers_have(make_world, any_model):
    world = make_world(any_model, 2, 20, within_ms=300)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    save = world.save(world.chain(8, 9))
    for one in (number, save):
        world.run(one, movers=[0])
    world.clock.advance_s(0.599)
    world.ledger.step()
    assert world.ledger.poll() == []
    world.clock.advance_s(0.001)
    world.ledger.step()
    loaded, released = world.ledger.poll()
    assert (loaded.plan, loaded.pages, loaded.clear) == (number, 0, False)
    assert released == Released(save)
    assert world.ledger.in_flight == 2
    for one in (number, save):
        world.run(one, movers=[1])
    assert world.found(chain) == 3
    assert world.found(world.chain(8, 9)) == 0
    world.idle()


def test_time_for_bytes_is_added_to_the_deadline(make_world):
    """1,024 bytes a frame, at 10,240 bytes a second."""
    world = make_world(within_ms=500, slowest_bytes=10_240)
    number = world.save(world.chain(1, 2, 3, 4, 5))
    assert world.plans[number].within_ms == 500 + 500
    world.clock.advance_s(1.99)
    world.ledger.step()
    assert world.ledger.poll() == []
    world.clock.advance_s(0.02)
    world.ledger.step()
    assert world.ledger.poll() == [Released(number)]


def test_a_small_plan_behind_a_large_one_is_late_at_its_own_time(make_world):
    world = make_world(within_ms=100, slowest_bytes=1024)
    large, small = world.save(world.chain(*range(1, 11))), world.save(world.chain(50))
    world.clock.advance_s(2.2)
    world.ledger.step()
    assert world.ledger.poll() == [Released(small)]
    world.clock.advance_s(18.0)
    world.ledger.step()
    assert world.ledger.poll() == [Released(large)]


def test_what_has_ended_is_late_no_more(make_world):
    world = make_world(breaker_faults=1)
    chain = world.chain(1, 2)
    number = world.save(chain)
    world.run(number, clear=False)
    world.clock.advance_s(100.0)
    world.ledger.step()
    assert world.count("breaker_open") == 0
    assert world.found(chain) == 2
    world.say(number, clear=True)
    assert world.news == [Released(number)]
    world.ledger.step()
    world.idle()


def test_a_rank_that_is_clear_and_says_no_more_ends_at_the_deadline(make_world, any_model):
    """What it touched is free then, and not before: nobody knows what became of it."""
    world = make_world(any_model)
    number = world.save(world.chain(1, 2))
    world.say(number, clear=True)
    assert world.ledger.in_flight == 1
    before = world.sums()
    assert "filling" in before
    world.clock.advance_s(2.0)
    world.ledger.step()
    assert world.sums() == {"free": 16}
    world.idle()


# Reports of whoever


def test_reports_that_fit_no_plan_are_refused_and_change_nothing(make_world, any_model):
    world = make_world(any_model, 2, 20)
    chain = world.chain(1, 2)
    number = world.save(chain)
    n = len(world.plans[number])
    before = world.sums()
    good = [OK] * n
    for wrong, mover, outcomes in (
        *((0, 0, good), (number + 1, 0, good), (2**53 - 1, 0, None)),
        *((number, 2, good), (number, 2**40, good), (number, 0, good[1:]), (number, 0, [*good, 0])),
    ):
        with pytest.raises(InputError, match=r"reports|outcomes"):
            world.say(wrong, mover, outcomes, released=True, clear=True)
        assert world.sums() == before
        assert world.ledger.poll() == []
    world.run(number)
    with pytest.raises(InputError, match=f"rank 0 reports on plan {number}"):
        world.run(number)
    assert world.found(chain) == 2
    world.idle()


@pytest.mark.parametrize("frames", [[20], [-1], [3, 3], [0]])
def test_frames_that_cannot_have_grown_are_refused(make_world, frames):
    world = make_world(frames=20)
    with pytest.raises(InputError):
        world.ledger.report(Grown(0, np.array(frames, np.int32)))
    assert world.sums() == {"free": 20}


def test_a_report_twice_is_heard_once(make_world, movers):
    world = make_world(movers=movers)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    for mover in range(movers):
        for _ in range(2):
            world.say(number, mover, [OK, OK, CORRUPT], released=True)
        for _ in range(2 if mover < movers - 1 else 1):
            world.say(number, mover, clear=True)
    assert [type(one) for one in world.news] == [Released, Loaded, Cleared]
    assert world.loaded(number).pages == 2
    world.idle()


# Ranks that come and go


def test_frames_are_of_use_once_all_ranks_have_them(make_world):
    world = make_world(movers=3, frames=9)
    for rank in range(3):
        world.ledger.lose(rank)
    world.grow(0, range(9))
    world.grow(1, range(6))
    assert world.save(world.chain(1)) is None
    world.grow(2, range(3, 9))
    assert world.sums() == {"free": 3, "out": 6}
    number = world.save(world.chain(1, 2, 3, 4))
    assert sorted(world.plans[number].inside.tolist()) == [3, 4, 5]
    world.run(number)
    world.grow(1, range(6, 9))
    assert world.sums() == {"cached": 3, "free": 3, "out": 3}


def test_f027_a_rank_that_is_gone_takes_everything_along(make_world, any_model, movers):
    """Its memory is new when it comes back; whatever the index believed of the old is wrong."""
    world = make_world(any_model, movers, 24, keep_percent=100)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    world.ledger.keep("k", chain)
    world.match(chain, "waits")
    number, save = world.load(chain), world.save(world.chain(7, 8))
    world.lose(movers - 1)
    assert world.found(chain) == 0
    for one in (number, save):
        world.run(one, movers=range(movers - 1))
    world.ledger.give_up("waits")
    assert world.sums() == {"out": 24}
    world.grow(movers - 1, range(24))
    assert world.found(chain) == world.found(world.chain(7, 8)) == 0
    assert world.loaded(number).pages == 0
    assert world.sums() == {"free": 24}
    world.put(chain)
    again = world.load(chain)
    world.run(again)
    assert all(all(oks) for oks in world.loaded(again).records)
    world.idle()


def test_f010_a_rank_that_comes_back_frees_no_frame_that_others_still_fill(make_world):
    world = make_world(movers=2, frames=8)
    chain = world.chain(1, 2, 3)
    world.put(world.chain(5))
    load, save = world.load(world.chain(5)), world.save(chain)
    late = world.save(world.chain(9))
    world.run(late, {0: TIMEOUT}, movers=[0], clear=False)
    world.ledger.lose(1)
    world.grow(1, range(8))
    assert world.sums() == {"held": 1, "filling": 3, "out": 1, "free": 3}
    flying = {f for n in (load, save, late) for f in world.plans[n].inside.tolist()}
    again = world.save(world.chain(1, 2, 3, 4))
    assert not flying & set(world.plans[again].inside.tolist())
    world.say(late, 0, clear=True)
    world.run(load, movers=[0])
    world.run(save, movers=[0])
    assert world.sums() == {"filling": 3, "free": 5}
    world.run(again)
    assert world.found(world.chain(1, 2, 3, 4)) == 3
    world.idle()


def test_a_plan_that_nobody_has_got_is_not_sent_to_who_comes_after(make_world):
    """It names frames that are another's by then."""
    world = make_world(movers=2, frames=4)
    chain = world.chain(1, 2, 3, 4)
    number = world.ledger.save(world.offer(chain))
    world.ledger.lose(0)
    world.grow(0, range(4))
    again = world.ledger.save(world.offer(chain))
    assert [plan.number for plan in world.fetch()] == [again]
    assert Released(number) in world.ledger.poll()
    world.run(again)
    assert world.found(chain) == 4
    world.idle()


@pytest.mark.parametrize("mover", [-1, 2, 99])
def test_a_rank_that_does_not_exist_cannot_be_lost(make_world, mover):
    world = make_world(movers=2)
    chain = world.chain(1)
    world.put(chain)
    with pytest.raises(InputError, match=f"rank {mover} is lost"):
        world.ledger.lose(mover)
    assert world.found(chain) == 1


def test_a_rank_can_be_lost_twice(make_world):
    world = make_world(movers=2)
    world.put(world.chain(1))
    for _ in range(2):
        world.ledger.lose(1)
    assert world.sums() == {"out": 16}
    world.grow(1, range(16))
    assert world.sums() == {"free": 16}


# Drops


def test_a_drop_overwrites_exactly_its_frames_and_frees_them_after_it(
    make_world, closed_model, movers
):
    world = make_world(closed_model, movers, 32)
    chain, branch, other = world.chain(1, 2, 3), world.chain(1, 8), world.chain(7)
    for one in (chain, branch, other):
        world.put(one)
    free = world.sums()["free"]
    frames = set(world.plans[world.load(chain, "a", first=2)].inside.tolist())
    world.run(max(world.plans))
    assert world.ledger.drop(world.chain(1, 2)) == 2
    (number,) = wipes(world)
    plan = world.plans[number]
    assert frames <= set(plan.inside.tolist())
    assert len(plan.outside) == 0
    assert sorted(plan.inside.tolist()) == world.status(Status.LEAVING)
    assert world.sums()["free"] == free
    for mover in range(movers):
        assert world.status(Status.LEAVING) == sorted(plan.inside.tolist())
        world.run(number, movers=[mover])
    assert world.sums()["free"] == free + len(plan)
    assert world.found(branch) == 2
    assert world.found(other) == 1
    assert world.found(chain) <= 1
    for rank in world.ranks:
        assert not {rank.names.get(frame) for frame in plan.inside.tolist()} - {None}


def test_a_drop_leaves_no_name_of_its_own_on_any_rank(make_world, any_model, movers):
    """Pages that are here, held, evicted, on their way, late, and found wrong: none stays readable."""
    world = make_world(any_model, movers, 40)
    mine = [world.chain(n, n + 1, n + 2, space=TENANT) for n in range(10, 70, 10)]
    theirs = world.chain(1, 2, 3)
    for chain in (theirs, *mine[:3]):
        world.put(chain)
    held = world.load(mine[0])
    wrong = world.load(mine[1], "wrong")
    world.run(wrong, {0: CORRUPT})
    flying, late = world.save(mine[3]), world.save(mine[4])
    world.run(late, {0: TIMEOUT}, clear=False)
    world.run(flying, {1: CORRUPT}, movers=range(movers - 1))
    world.ledger.drop_root(mine[0].root)
    world.settle()
    world.run(flying, movers=[movers - 1])
    world.run(held)
    for mover in range(movers):
        world.say(late, mover, clear=True)
    world.settle()
    keys = {key for chain in mine for key in chain.keys(0, 3)}
    for rank in world.ranks:
        assert not [name for name in rank.names.values() if name[0] in keys]
    assert world.found(theirs) == 3
    assert [world.found(chain) for chain in mine] == [0] * 6
    world.ledger.drop_root(None)
    world.settle()
    assert not any(rank.names for rank in world.ranks)
    assert world.sums() == {"free": 39, "out": 1}
    world.idle()


def test_a_drop_overwrites_what_was_evicted_and_is_free(make_world, any_model):
    world = make_world(any_model, 1, 24)
    mine = world.chain(1, 2, 3, space=TENANT)
    world.put(mine)
    for n in range(8):
        world.put(world.chain(10 * n + 10, 10 * n + 11, 10 * n + 12))
    assert world.found(mine) == 0
    world.ledger.drop_root(world.chain(1).root)
    world.settle()
    left = {name[0] for name in world.ranks[0].names.values()}
    world.ledger.drop_root(mine.root)
    world.settle()
    assert not {name[0] for name in world.ranks[0].names.values()} & set(mine.keys(0, 3))
    assert left <= set(mine.keys(0, 3))


def test_what_is_held_is_overwritten_when_it_is_given_back(make_world, any_model):
    world = make_world(any_model, frames=24)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    frames = set(world.plans[number].inside.tolist())
    world.ledger.drop_root(chain.root)
    for one in wipes(world):
        assert not frames & set(world.plans[one].inside.tolist())
    world.run(number)
    assert frames == {f for one in wipes(world) for f in world.plans[one].inside.tolist()}
    assert frames <= set(world.status(Status.LEAVING))
    world.settle()
    assert world.sums() == {"free": 24}


def test_what_could_not_be_overwritten_is_tried_again_and_never_used_before(make_world, movers):
    """With the patience with which the tier is asked for anything else."""
    world = make_world(movers=movers, frames=3, breaker_faults=2, breaker_rest_ms=100)
    world.put(world.chain(1, 2, 3))
    world.ledger.drop_root(None)
    (number,) = wipes(world)
    world.run(number, {1: UNAVAILABLE})
    assert world.sums() == {"free": 2, "out": 1}
    for _ in range(2):
        assert wipes(world) == []
        assert not world.ledger.settled(0)
        world.ledger.step()
        (number,) = wipes(world)
        world.ledger.step()
        assert wipes(world) == [number]
        assert len(world.plans[number]) == 1
        world.run(number, {0: TIMEOUT})
        assert world.count("breaker_open") == 1
        world.ledger.step()
        assert wipes(world) == []
        assert world.save(world.chain(7)) is None
        world.clock.advance_s(0.1)
    world.ledger.step()
    world.settle()
    assert world.sums() == {"free": 3}
    assert world.ledger.settled(0)
    assert world.count("breaker_open") == 0
    world.idle()


def test_a_drop_counts_what_nobody_finds_any_more(make_world):
    world = make_world(frames=24)
    for pages in ((1, 2, 3), (1, 2, 4), (5,)):
        world.put(world.chain(*pages))
    world.put(world.chain(1, 2, space=TENANT))
    assert world.ledger.drop(world.chain()) == 0
    assert world.ledger.drop(world.chain(1, 9)) == 0
    assert world.ledger.drop(world.chain(1, 2)) == 3
    assert world.ledger.drop(world.chain(1, 2)) == 0
    assert world.ledger.drop_root(b"nobody" * 6) == 0
    assert world.ledger.drop_root(world.chain(1).root) == 2
    assert world.ledger.drop_root(None) == 2
    world.settle()
    assert world.sums() == {"free": 24}


def test_without_a_full_group_a_drop_is_of_the_whole_namespace(make_world):
    world = make_world("windows", frames=24)
    for pages in ((1, 2, 3), (4, 5)):
        world.put(world.chain(*pages))
    world.put(world.chain(1, 2, space=TENANT))
    assert world.ledger.drop(world.chain(1)) == 6
    world.settle()
    assert world.found(world.chain(4, 5)) == 0
    assert world.found(world.chain(1, 2, space=TENANT)) == 2


# News


def test_news_comes_in_order_and_once(make_world, movers):
    world = make_world(movers=movers)
    chain = world.chain(1, 2)
    number = world.save(chain)
    for mover in range(movers):
        assert world.news == []
        world.say(number, mover, released=True)
    assert world.news == [Released(number)]
    world.run(number)
    load = world.load(chain)
    world.run(load, clear=False)
    for mover in range(movers):
        world.say(load, mover, clear=True)
    assert world.news == [
        Released(number),
        Loaded("loads", load, 2, (), clear=False),
        Cleared(load),
    ]
    assert world.ledger.poll() == []


def test_waiting_ends_with_news_or_with_nothing_to_wait_for(make_world):
    world = make_world()
    assert world.ledger.wait(0)
    assert world.ledger.settled(0)
    number = world.save(world.chain(1))
    assert not world.ledger.wait(0)
    assert not world.ledger.settled(0)
    rank, plan = world.ranks[0], world.plans[number]
    outcomes = rank.does(plan, {})
    told = threading.Thread(
        target=world.ledger.report, args=(Report(number, 0, outcomes, released=True, clear=True),)
    )
    told.start()
    assert world.ledger.wait(30)
    assert world.ledger.settled(30)
    told.join()
    assert world.ledger.poll() == [Released(number)]
    world.match(world.chain(1), "r")
    world.ledger.drop_root(None)
    world.settle()
    world.ledger.load("r", 0, world.device(1))
    assert world.ledger.wait(0)


# Numbers


def test_f095_every_gauge_is_what_the_frames_say(make_world, any_model):
    world = make_world(any_model, frames=30, keep_percent=100)
    chain, other = world.chain(1, 2, 3), world.chain(7, 8)
    world.put(chain)
    world.put(other)
    world.match(chain, "waits")
    world.ledger.keep("k", other)
    world.save(world.chain(20, 21))
    sums = world.sums()
    census = world.stock.frames.census()
    assert sums["free"] == census[Status.FREE]
    assert sums["held"] == census[Status.SEALED] - sums.get("cached", 0)
    assert world.count("plans_open") == 1
    assert all(0 <= count <= 30 for count in sums.values())


def test_f104_every_metric_of_the_ledger_moves(make_world):
    """One that stays 0 whatever happens is read as: it does not happen."""
    world = make_world("full and window", 1, 12, match_steps=1, breaker_faults=2)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    world.run(world.load(chain))
    world.match(chain, "forgotten")
    for _ in range(3):
        world.ledger.step()
    for n in range(3):
        world.put(world.chain(*range(10 * n + 10, 10 * n + 15)))
    world.put(chain)
    world.match(chain, "holds")
    world.save(world.chain(*range(60, 80)))
    world.ledger.drop_root(None)
    world.settle()
    world.put(chain)
    world.run(world.load(chain), {1: CORRUPT})
    fail(world, 2)
    assert world.save(world.chain(99)) is None
    stats = world.ledger.stats()
    mine = {name for name, row in METRICS.items() if row.owner == "tiers"}
    assert mine <= stats.keys() <= METRICS.keys()
    still = {name for name in stats if not stats[name]}
    # Nothing of this can happen here: twins are never sent, keys of SHA-256 do not collide, no lease is lost.
    never = {"pages_duplicate", "records_duplicate", "key_collisions", "leases_lost"}
    assert still - never <= {"plans_open", "frames_held", "frames_cached"}
    world.save(world.chain(98))
    world.clock.advance_s(1.0)
    world.save(world.chain(97))
    assert world.count("plans_open") >= 1


def test_counts_add_up_with_the_plans(make_world, any_model, movers):
    world = make_world(any_model, movers, 24, debug=False, breaker_faults=1000)
    chains = [world.chain(*range(n, n + 4)) for n in range(10, 50, 10)]
    asked = {Verb.SAVE: 0, Verb.LOAD: 0}
    for n in range(60):
        chain = chains[n % 4]
        number = world.save(chain)
        if number is None:
            number = world.load(chain)
        plan = world.plans[number]
        asked[plan.verb] += len(plan)
        bad = {n % len(plan): (OK, TIMEOUT, CORRUPT, UNAVAILABLE)[n // 4 % 4]}
        world.run(number, {} if n % 3 else bad)
    stats, first = world.ledger.stats(), len(world.cuts) > len(world.ledger.shape.walked)
    saved = [p for p in world.plans.values() if p.verb is Verb.SAVE]
    pages = sum(int((p.which >> 16 == 0).sum()) for p in saved) if first else 0
    assert stats["pages_saved"] + stats["pages_unsaved"] == pages
    assert stats["pages_sealed"] == stats["pages_saved"]
    assert stats["records_sealed"] == stats["records_saved"]
    got = sum(one.pages for one in world.news if isinstance(one, Loaded))
    assert stats["pages_loaded"] == got
    assert stats["frames_failed"] + got <= asked[Verb.LOAD]
    if any_model == "full":
        census = world.stock.frames.census()
        gone = stats["pages_evicted"] + stats["pages_dropped"]
        assert stats["pages_sealed"] - gone == census[Status.SEALED]
    world.sums()
    world.idle()


# The lock


def test_a_ledger_whose_books_are_broken_refuses_every_call(make_world):
    world = make_world(debug=False)
    world.put(world.chain(1, 2))
    world.stock._busy[0] = True
    with pytest.raises(InvariantError, match="touched late"):
        world.ledger.check()
    for call in (
        lambda: world.match(world.chain(1)),
        lambda: world.save(world.chain(5)),
        lambda: world.ledger.drop_root(None),
        world.ledger.step,
        world.ledger.plans,
    ):
        with pytest.raises(InvariantError, match="torn"):
            call()


def test_an_interrupt_between_pages_and_plan_is_looked_over(make_world):
    world = make_world()

    def interrupts(_first, _last):
        raise KeyboardInterrupt

    offer = world.offer(world.chain(1, 2))
    with pytest.raises(KeyboardInterrupt):
        world.ledger.save(type(offer)(offer.chain, 2, interrupts))
    assert world.sums() == {"free": 16}
    world.put(world.chain(1, 2))
    assert world.found(world.chain(1, 2)) == 2


def test_a_call_from_inside_a_call_is_refused(make_world):
    world = make_world()

    def calls(_first, _last):
        world.ledger.step()

    offer = world.offer(world.chain(1))
    with pytest.raises(MisuseError, match="inside"):
        world.ledger.save(type(offer)(offer.chain, 1, calls))
    world.idle()


# What cannot be


@pytest.mark.parametrize("place", [-1, 1 << 16, 2**53])
def test_a_place_that_no_plan_can_name_is_refused(make_world, place):
    world = make_world()
    world.put(world.chain(1))
    match = world.match(world.chain(1), "r")
    with pytest.raises(InputError, match="device memory"):
        world.ledger.save(world.offer(world.chain(2)), place)
    with pytest.raises(InputError, match="device memory"):
        world.ledger.load("r", 0, world.device(1), place=place)
    assert world.ledger.in_flight == 0
    world.run(world.load_match(match))
    number = world.ledger.save(world.offer(world.chain(2)), 65_535)
    world.run(number)
    assert world.plans[number].place == 65_535
    world.idle()


def test_a_model_that_cannot_be_is_refused(make_world):
    full, window = make_world("full and window").cuts
    many = dataclasses.replace(window, frames=(1 << 16) + 1)
    for cuts, movers, text in (
        ((), 1, "groups are"),
        ((window, full), 1, "groups are"),
        ((full, full), 1, "groups are"),
        ((full,), 0, "0 ranks"),
        ((full,), -1, "-1 ranks"),
        ((full, many), 1, "65537"),
    ):
        with pytest.raises(InputError, match=text):
            Shape(4, cuts, 8, 1024, movers)
    assert Shape(4, (full, window), 8, 1024).walked == (window,)
