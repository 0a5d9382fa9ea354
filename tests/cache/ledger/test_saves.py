"""What is sent into the tier, what waits for what, and what becomes of it when something fails."""

import itertools

import numpy as np
import pytest

from stepwell.base.errors import InputError
from stepwell.cache.ledger.records import Released
from stepwell.cache.ledger.saves import Carried, Offer
from stepwell.core.chain import Chain, Extra
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.plan import Outcome, Verb

OK, CORRUPT, TIMEOUT = Outcome.OK, Outcome.CORRUPT, Outcome.TIMEOUT


def sent(world, number):
    """Keys of the pages of a plan, by their number in the chain that begins with page 1, 2, 3, ..."""
    return (
        []
        if number is None
        else [world.plans[number].key(n) for n in range(len(world.plans[number]))]
    )


def longest(world, chain):
    closed = world.stock.prefixes.closed
    return closed.longest(chain, chain.pages)


# What is sent


def test_a_page_is_found_once_it_has_come_and_not_before(make_world, closed_model, movers):
    world = make_world(closed_model, movers)
    chain = world.chain(1, 2, 3)
    number = world.save(chain)
    assert world.plans[number].verb is Verb.SAVE
    for mover in range(movers):
        assert world.found(chain) == 0
        world.run(number, movers=[mover])
    assert world.found(chain) == 3
    assert world.news == [Released(number)]
    world.idle()


def test_only_what_is_missing_is_sent(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3, 4, 5)
    world.put(chain, last=2)
    assert sent(world, world.save(chain, last=4)) == chain.keys(2, 4)
    assert sent(world, world.save(chain)) == chain.keys(4, 5)
    assert world.save(chain) is None


def test_what_is_here_is_asked_of_the_device_by_its_pages(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3, 4)
    world.put(chain, last=1)
    asked = []

    def frames(first, last):
        asked.append((first, last))
        return np.arange(first, last, dtype=np.int32) + 70

    number = world.ledger.save(Offer(chain, 4, frames))
    world.fetch()
    assert asked == [(1, 4)]
    assert world.plans[number].outside.tolist() == [71, 72, 73]


def test_h13_pages_on_their_way_are_not_sent_again_by_another_prompt(make_world, closed_model):
    world = make_world(closed_model, frames=24)
    one, other = world.chain(1, 2, 3, 4), world.chain(1, 2, 9, 8)
    first = world.save(one, records=())
    second = world.save(other, records=())
    assert sent(world, first) == one.keys(0, 4)
    assert sent(world, second) == other.keys(2, 4)
    assert world.save(world.chain(1, 2), records=()) is None
    world.run(second)
    assert longest(world, other) == 0
    world.run(first)
    assert longest(world, other) == longest(world, one) == 4
    assert world.count("pages_duplicate") == 0


def test_the_same_key_of_another_namespace_is_another_page(make_world):
    world = make_world()
    mine, theirs = world.chain(1, 2), world.chain(1, 2, space=Namespace(4, model="m", tenant="t"))
    world.save(mine)
    assert sent(world, world.save(theirs)) == theirs.keys(0, 2)


def test_extras_are_part_of_what_is_sealed(make_world):
    """A page is sealed long after its chain has gone on: what it depends on has to come along."""
    world = make_world()
    seen, unseen = (world.chain(1, 2, extras=[Extra(5, 2, "media", d)]) for d in (b"a", b"b"))
    number = world.save(seen)
    seen.truncate(0)
    world.run(number)
    assert world.found(world.chain(1, 2, extras=[Extra(5, 2, "media", b"a")])) == 2
    assert (world.found(unseen), world.found(world.chain(1, 2))) == (1, 1)
    assert world.count("key_collisions") == 0


def test_what_is_sealed_is_what_the_chain_was_when_it_was_saved(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3)
    number = world.save(chain)
    chain.truncate(4)
    chain.append([9] * 8)
    world.run(number)
    assert world.found(world.chain(1, 2, 3)) == 3
    assert world.found(chain) == 1


def test_digests_of_a_foreign_engine_are_saved_like_tokens(make_world, any_model):
    world = make_world(any_model)
    digests = [bytes([n]) * 32 for n in range(3)]
    space = world.chain(1).namespace
    world.put(Chain.foreign(space, digests))
    assert world.found(Chain.foreign(space, digests)) == 3
    assert world.found(Chain.foreign(space, [*digests[:2], b"x"])) == (
        2 if any_model == "full" else 0
    )
    assert world.found(Chain.foreign(space, digests[1:])) == 0


# What waits for what


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
def test_the_order_of_reports_does_not_matter(make_world, order):
    world = make_world(frames=24, movers=2)
    chain, branch = world.chain(1, 2, 3, 4, 5, 6), world.chain(1, 2, 3, 8, 9)
    numbers = [world.save(chain, last=2), world.save(chain, last=4)]
    numbers += [world.save(branch), world.save(chain)]
    for n in order:
        world.run(numbers[n], movers=[0])
    assert longest(world, chain) == 0
    for n in reversed(order):
        world.run(numbers[n], movers=[1])
    assert (world.found(chain), world.found(branch)) == (6, 5)
    assert world.sums() == {"cached": 8, "free": 16}
    world.idle()


def test_children_are_lost_with_the_page_that_they_hang_on(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3, 4, 5, 6)
    first, second, third = (world.save(chain, last=last) for last in (2, 4, 6))
    world.run(third)
    world.run(second)
    world.run(first, {1: CORRUPT})
    assert world.found(chain) == 1
    assert world.sums() == {"cached": 1, "free": 15}
    assert world.count("pages_saved") == 1
    assert world.count("pages_unsaved") == 5
    world.idle()


def test_what_hangs_on_good_pages_of_a_save_that_failed_behind_them_arrives(make_world):
    world = make_world()
    trunk = world.save(world.chain(1, 2, 3))
    branch = world.save(world.chain(1, 2, 7, 8))
    world.run(branch)
    world.run(trunk, {2: CORRUPT})
    assert world.found(world.chain(1, 2, 7, 8)) == 4
    assert world.found(world.chain(1, 2, 3)) == 2


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_pages_below_a_lost_save_can_be_sent_again_at_once(make_world, order):
    """The keys of all that hangs on it are free, not only those of its children: none is in flight twice."""
    world = make_world(frames=24)
    chain = world.chain(1, 2, 3, 4, 5, 6)
    numbers = [world.save(chain, last=last) for last in (2, 4, 6)]
    world.run(numbers[0], {0: CORRUPT})
    again = world.save(chain)
    assert sent(world, again) == chain.keys(0, 6)
    for n in order:
        world.run([again, *numbers[1:]][n])
    assert world.found(chain) == 6
    assert world.sums() == {"cached": 6, "free": 18}
    world.idle()


def test_a_page_found_wrong_ends_what_hangs_on_it_and_all_can_be_sent_again(make_world):
    world = make_world(frames=24)
    chain = world.chain(1, 2, 3, 4, 5, 6)
    world.put(chain, last=2)
    load = world.load(chain)
    below = world.save(chain, last=4)
    deeper = world.save(chain)
    world.run(load, {0: CORRUPT})
    again = world.save(chain)
    assert sent(world, again) == chain.keys(0, 6)
    world.run(below)
    world.run(deeper)
    assert world.found(chain) == 0
    world.run(again)
    assert world.found(chain) == 6
    world.idle()


def test_a_parent_that_was_dropped_meanwhile_takes_its_children_along(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3, 4)
    world.put(chain, last=2)
    number = world.save(chain)
    assert world.ledger.drop(world.chain(1)) == 2
    world.settle()
    world.run(number)
    world.settle()
    assert world.found(chain) == 0
    assert world.sums() == {"free": 16}


def test_a_page_that_a_save_hangs_on_is_not_evicted(make_world):
    world = make_world(frames=4)
    chain = world.chain(1, 2, 3)
    world.put(chain, last=2)
    number = world.save(chain)
    noise = world.save(world.chain(7, 8, 9))
    assert len(world.plans[noise]) == 1
    world.run(number)
    assert world.found(chain) == 3


@pytest.mark.parametrize("what", ["root", "everything", "prefix", "rank"])
def test_what_is_in_flight_is_lost_by_a_drop_and_can_be_sent_again(make_world, any_model, what):
    world = make_world(any_model, frames=32)
    chain = world.chain(1, 2, 3)
    number = world.save(chain)
    if what == "rank":
        world.ledger.lose(0)
        world.grow(0, range(32))
    elif what == "prefix":
        world.ledger.drop(world.chain(1))
    else:
        world.ledger.drop_root(chain.root if what == "root" else None)
    again = world.save(chain)
    if what != "rank":
        world.run(number)
    assert world.found(chain) == 0
    world.settle()
    world.run(again)
    assert world.found(chain) == 3
    world.settle()
    world.idle()


# What fails


@pytest.mark.parametrize("bad", [OK, *Outcome])
@pytest.mark.parametrize("page", range(5))
def test_f002_pages_before_the_one_that_fails_are_kept_and_none_behind(make_world, page, bad):
    world = make_world(movers=2)
    chain = world.chain(1, 2, 3, 4, 5)
    number = world.save(chain)
    outcomes = [OK] * 5
    outcomes[page] = bad
    world.run(number, movers=[0])
    world.say(number, 1, outcomes, released=True, clear=True)
    kept = 5 if bad is OK else page
    assert longest(world, chain) == kept
    assert (world.count("pages_saved"), world.count("pages_unsaved")) == (kept, 5 - kept)
    expected = {"cached": kept, "free": 16 - kept}
    assert world.sums() == {name: n for name, n in expected.items() if n}


def test_frames_of_a_late_save_are_nobodys_until_it_is_clear(make_world, movers):
    world = make_world(movers=movers, frames=4)
    chain = world.chain(1, 2, 3, 4)
    number = world.save(chain)
    world.run(number, {2: TIMEOUT}, clear=False)
    assert world.sums() == {"cached": 2, "out": 2}
    assert world.found(chain) == 2
    more = world.save(world.chain(8, 9, 7, 6))
    assert sorted(world.plans[more].inside.tolist()) == sorted(
        world.plans[number].inside[:2].tolist()
    )
    for mover in range(movers):
        assert "free" not in world.sums()
        world.say(number, mover, clear=True)
    assert world.sums() == {"filling": 2, "free": 2}
    world.run(more)
    assert world.found(world.chain(8, 9)) == 2
    world.idle()


def test_a_late_save_frees_its_own_frames_and_no_others(make_world):
    """What it has sealed may have been evicted since, and be another's that is late too."""
    world = make_world(frames=2)
    one, other = world.chain(1, 2), world.chain(8)
    first = world.save(one)
    world.run(first, {1: TIMEOUT}, clear=False)
    second = world.save(other)
    frame = int(world.plans[second].inside[0])
    assert frame == world.plans[first].inside[0]
    world.run(second, {0: TIMEOUT}, clear=False)
    assert world.sums() == {"out": 2}
    world.say(first, clear=True)
    assert world.status(Status.QUARANTINED) == [frame]
    world.say(second, clear=True)
    assert world.sums() == {"free": 2}


def test_f009_late_outcomes_never_seal(make_world, movers):
    world = make_world(movers=movers)
    chain = world.chain(1, 2)
    number = world.save(chain)
    world.clock.advance_s(2.1)
    world.ledger.step()
    assert world.ledger.poll() == [Released(number)]
    assert world.sums() == {"out": 2, "free": 14}
    world.run(number)
    assert world.found(chain) == 0
    assert world.sums() == {"free": 16}
    world.idle()


def test_h06_a_save_that_raises_leaves_nothing_behind(make_world, closed_model):
    world = make_world(closed_model)
    chain = world.chain(1, 2, 3)
    world.put(chain, last=1)
    before, longer = world.sums(), world.chain(1, 2, 3, 4)

    def raises(_first, _last):
        raise InputError("the device has lost them")

    broken = [
        (Offer(chain, 3, raises), "lost them"),
        (Offer(chain, 3, lambda *_: np.arange(1, dtype=np.int32)), "shape"),
        (Offer(chain, 3, lambda *_: np.array([4, -1], np.int32)), "least -1"),
        (Offer(chain, 4, lambda first, last: np.arange(first, last, dtype=np.int32)), "page 3"),
        (Offer(longer, 4, raises, world.offer(longer).records), "lost them"),
        (Offer(world.chain(1, space=Namespace(8, model="m")), 1, raises), "8 tokens"),
    ]
    for offer, text in broken:
        with pytest.raises(InputError, match=text):
            world.ledger.save(offer)
        assert world.sums() == before
        assert world.ledger.in_flight == 0
        world.ledger.check()
    world.put(longer)
    assert world.found(longer) == 4


@pytest.mark.parametrize(
    ("group", "page", "frames"),
    [(-1, 0, 1), (9, 0, 1), (0, 0, 0), (0, 0, 2), (0, 3, 1), (0, -1, 1)],
)
def test_a_record_that_is_none_of_the_model_or_prompt_is_refused(make_world, group, page, frames):
    for model in ("full and window", "no full"):
        world = make_world(model)
        offer = world.offer(world.chain(1, 2, 3), records=[])
        record = Carried(group, page, np.arange(frames, dtype=np.int32))
        with pytest.raises(InputError):
            world.ledger.save(Offer(offer.chain, offer.last, offer.frames, [record]))
        assert world.sums() == {"free": 16}
        world.put(world.chain(1, 2, 3))
        assert world.found(world.chain(1, 2, 3)) == 3


# Room


@pytest.mark.parametrize("n", range(1, 8))
def test_h02_tails_leave_before_heads(make_world, n):
    world = make_world(frames=8)
    chain = world.chain(*range(1, 9))
    world.put(chain)
    world.put(world.chain(*range(200, 200 + n)))
    assert longest(world, chain) == world.found(chain) == 8 - n


def test_h03_a_prompt_never_evicts_its_own_head_for_its_tail(make_world, movers):
    world = make_world(movers=movers, frames=20)
    chain = world.chain(*range(1, 33))
    world.put(chain, last=12)
    world.put(chain)
    assert world.found(chain) == 20
    assert world.count("pages_evicted") == 0
    assert world.count("frames_without_room") == 12
    assert world.save(chain) is None
    assert world.found(chain) == 20


def test_h03_nor_while_its_head_is_still_on_its_way(make_world):
    world = make_world(frames=6)
    chain = world.chain(*range(1, 13))
    world.put(chain, last=2)
    numbers = [world.save(chain, last=last) for last in (4, 8, 12)]
    assert numbers[2] is None
    for number in numbers[:2]:
        world.run(number)
    assert world.found(chain) == 6


def test_h03_a_record_evicts_neither_its_own_page_nor_the_records_beside_it(make_world):
    """The tier is full of this very prompt: for a record more it would lose what the record is worth something with."""
    world = make_world("full and window", frames=5)
    chain = world.chain(1, 2, 3)
    world.put(chain, records=[(0, 1)])
    assert world.sums() == {"cached": 4, "free": 1}
    world.put(world.chain(9), records=[])
    assert world.sums() == {"cached": 5}
    world.found(world.chain(9))
    number = world.save(chain, records=[(0, 1), (0, 2)])
    world.run(number)
    assert longest(world, world.chain(9)) == 0
    assert world.found(chain) == 3


def test_a_record_without_room_is_left_out(make_world):
    world = make_world("full and window", frames=4)
    chain = world.chain(1, 2, 3)
    world.put(chain, records=[(0, 1)])
    assert world.save(chain, records=[(0, 1), (0, 2)]) is None
    assert world.count("frames_without_room") == 1
    assert longest(world, chain) == 3
    assert world.stock.prefixes.walked[0].has(chain.key(1))


def test_a_prompt_larger_than_the_tier_saves_its_head(make_world):
    world = make_world(frames=5)
    world.put(world.chain(7, 8))
    number = world.save(world.chain(*range(1, 10)))
    assert sent(world, number) == world.chain(*range(1, 6)).keys(0, 5)
    assert world.sums() == {"filling": 5}
    assert world.save(world.chain(50)) is None
    world.run(number)
    assert world.found(world.chain(*range(1, 10))) == 5


def test_h17_room_that_cannot_be_made_evicts_nothing(make_world):
    world = make_world(frames=4)
    world.put(world.chain(1, 2))
    world.match(world.chain(1, 2), "holds")
    number = world.save(world.chain(5, 6))
    assert world.save(world.chain(8)) is None
    assert world.sums() == {"held": 2, "filling": 2}
    assert world.count("pages_evicted") == 0
    world.run(number)


def test_f086_all_frames_are_counted_at_every_step(make_world, any_model):
    """Three times the limit, in pieces that overlap in flight."""
    world = make_world(any_model, frames=12, movers=2)
    chains = [world.chain(*range(n, n + 6)) for n in range(100, 700, 100)]
    flying = []
    for chain, last in itertools.product(chains, (2, 4, 6)):
        flying.append(world.save(chain, last))
        world.sums()
        if len(flying) > 3 and (number := flying.pop(0)) is not None:
            world.run(number, {0: TIMEOUT} if number % 3 == 0 else {}, clear=number % 6 != 0)
            world.sums()
            if number % 6 == 0:
                for mover in range(2):
                    world.say(number, mover, clear=True)
                    world.sums()
    for number in flying:
        if number is not None:
            world.run(number)
    assert world.sums().keys() <= {"free", "cached"}
    world.idle()


# Records


def test_records_are_found_with_their_pages(make_world, any_model, movers):
    world = make_world(any_model, movers, frames=32)
    chain = world.chain(1, 2, 3, 4)
    world.put(chain)
    match = world.match(chain)
    assert match.pages == 4
    assert match.records == tuple(min(4, cut.reach) for cut in world.ledger.shape.walked)


def test_a_record_is_sealed_only_with_its_page(make_world):
    world = make_world("full and window")
    chain = world.chain(1, 2, 3, 4)
    number = world.save(chain, records=[(0, page) for page in range(4)])
    world.run(number, {2: CORRUPT})
    (index,) = world.stock.prefixes.walked
    assert [index.has(key) for key in chain.keys(0, 4)] == [True, True, False, False]
    assert world.found(chain) == 2
    assert world.count("records_saved") == 2
    assert world.sums() == {"cached": 4, "free": 12}


def test_a_record_whose_page_is_not_coming_is_not_sent(make_world):
    world = make_world("full and window", frames=3)
    chain = world.chain(1, 2, 3, 4, 5)
    number = world.save(chain)
    assert sent(world, number) == chain.keys(0, 3)
    world.run(number)
    assert world.save(chain, last=0, records=[(0, 4)]) is None
    assert world.save(world.chain(8, 9), last=0, records=[(0, 1)]) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)], ids=str)
def test_records_of_pages_in_flight_wait_for_them(make_world, order):
    world = make_world("all", frames=32)
    chain = world.chain(1, 2, 3, 4)
    numbers = [world.save(chain, last=2, records=()), world.save(chain, records=())]
    # The deepest comes first: it is not the last record that says for what all of them wait.
    numbers.append(world.save(chain, records=[(1, 3), (0, 2), (0, 3), (0, 1)]))
    assert len(world.plans[numbers[2]]) == 2 + 3
    for n in order:
        assert world.count("records_saved") == 0
        world.run(numbers[n])
    assert world.count("records_saved") == 4
    assert world.found(chain) == 4
    world.idle()


def test_records_of_pages_that_do_not_come_are_not_sealed(make_world):
    world = make_world("full and window")
    chain = world.chain(1, 2, 3)
    pages = world.save(chain, records=())
    records = world.save(chain)
    world.run(records)
    world.run(pages, {2: CORRUPT})
    (index,) = world.stock.prefixes.walked
    assert [index.has(key) for key in chain.keys(0, 3)] == [False, True, False]
    assert world.sums() == {"cached": 3, "free": 13}
    world.put(chain)
    assert world.found(chain) == 3


def test_a_record_that_two_boundaries_need_is_sent_once(make_world, any_model):
    world = make_world(any_model, frames=32)
    chain = world.chain(1, 2, 3, 4)
    both = world.boundary(3) + world.boundary(4)
    number = world.save(chain, records=both)
    frames = sum(world.ledger.shape.walked[group].frames for group, _ in set(both))
    assert len(world.plans[number]) == frames + (4 if world.stock.prefixes.closed else 0)
    assert world.save(chain, records=both) is None
    world.run(number)
    assert world.save(chain, records=both) is None
    assert (world.found(chain), world.found(chain, 3)) == (4, 3)
    assert world.count("records_duplicate") == 0


def test_which_bytes_of_a_key_are_meant_is_said_by_group_and_frame(make_world):
    world = make_world("all")
    chain = world.chain(1, 2)
    plan = world.plans[world.save(chain)]
    which = [(int(one) >> 16, int(one) & 0xFFFF) for one in plan.which]
    assert which == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 1)]
    assert [plan.key(n) for n in range(6)] == [chain.key(n) for n in (0, 1, 0, 1, 1, 1)]
    world = make_world("no full")
    plan = world.plans[world.save(chain)]
    assert [int(one) >> 16 for one in plan.which] == [0, 0, 1, 1]


def test_one_frame_of_a_record_that_fails_loses_the_record(make_world):
    world = make_world("full and states")
    chain = world.chain(1, 2)
    world.run(world.save(chain), {3: CORRUPT})
    assert world.count("records_saved") == 0
    assert world.found(chain) == 0
    assert longest(world, chain) == 2
    assert world.sums() == {"cached": 2, "free": 14}


def test_pages_of_an_evicted_path_are_saved_by_what_the_index_spells(make_world):
    """A pool that saves what it evicts has no chain any more, but an excerpt of what its index knows."""
    world = make_world("full and window")
    chain = world.chain(1, 2, 3, extras=[Extra(4, 4, "media", b"d")])
    excerpt = chain.excerpt(0, 3)
    world.put(excerpt)
    assert world.found(chain) == 3
    assert world.found(world.chain(1, 2, 3)) == 0
    assert longest(world, chain) == 3


# Cost


class Counted(Chain):
    """Counts the pages that anybody looks for."""

    __slots__ = ("asked",)

    def key(self, page):
        self.asked = getattr(self, "asked", 0) + 1
        return super().key(page)


@pytest.mark.parametrize("flying", [False, True], ids=["sealed", "in flight"])
def test_h01_a_page_more_of_a_long_prompt_costs_the_same_few_probes(make_world, flying):
    """Also while all of the prompt before it is on its way."""
    cost = {}
    for pages in (64, 4096):
        world = make_world(frames=pages + 8, debug=False)
        chain = world.chain(*range(pages + 4), kind=Counted)
        numbers = [world.save(chain, last=pages // 2), world.save(chain, last=pages)]
        for number in numbers:
            if not flying:
                world.run(number)
        chain.asked = 0
        for last in range(pages + 1, pages + 5):
            numbers.append(world.save(chain, last=last))
            assert len(world.plans[numbers[-1]]) == 1
        cost[pages] = chain.asked / 4
    assert cost[4096] < cost[64] + 2 * 7
    assert cost[4096] < 50


def test_thousands_of_saves_that_hang_on_each_other_settle_at_once(make_world):
    """An answer that is saved page by page while its first page is late."""
    world = make_world(frames=2000, debug=False)
    chain = world.chain(*range(2000))
    numbers = [world.save(chain, last=last) for last in range(1, 2001)]
    for number in numbers[:0:-1]:
        world.say(number, 0, [OK], released=True, clear=True)
    assert longest(world, chain) == 0
    world.run(numbers[0])
    assert longest(world, chain) == 2000
    world.idle()


def test_thousands_of_saves_that_hang_on_each_other_are_lost_at_once(make_world):
    world = make_world(frames=2001, debug=False)
    chain = world.chain(*range(2000))
    numbers = [world.save(chain, last=last) for last in range(1, 2001)]
    world.run(numbers[0], {0: CORRUPT})
    assert sent(world, world.save(chain)) == chain.keys(0, 2)
    for number in numbers[1:]:
        world.say(number, 0, [OK], released=True, clear=True)
    assert longest(world, chain) == 0
    world.ledger.check()
