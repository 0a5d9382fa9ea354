"""What is found and held, what comes back, and what is forgotten because it did not."""

import dataclasses
import itertools

import numpy as np
import pytest

from stepwell.base.errors import InputError, MisuseError
from stepwell.cache.ledger.loads import Loaded
from stepwell.cache.ledger.records import Cleared
from stepwell.core.chain import Chain, Extra
from stepwell.core.key import Namespace
from stepwell.core.plan import Outcome, Verb
from stepwell.core.reasons import Reason

OK, MISS, CORRUPT, TIMEOUT, UNAVAILABLE = (
    *(Outcome.OK, Outcome.MISS, Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.UNAVAILABLE),
)
TENANT = Namespace(4, model="m", tenant="t")


def noise(world):
    """More than the tier has."""
    for n in range(world.ledger.shape.frames):
        world.put(world.chain(*range(1000 * n + 1000, 1000 * n + 1004)))


# Match


def test_a_match_holds_all_that_it_found(make_world, any_model, movers):
    world = make_world(any_model, movers, frames=20)
    chain = world.chain(1, 2, 3, 4)
    world.put(chain)
    match = world.match(chain, "r")
    noise(world)
    assert world.found(chain) == match.pages == 4
    assert match.reason is Reason.WHOLE_PREFIX
    number = world.load_match(match)
    world.run(number)
    loaded = world.loaded(number)
    full = world.stock.prefixes.closed is not None
    assert loaded.pages == (4 if full else 0)
    assert loaded.records == tuple((True,) * n for n in match.records)
    assert loaded.clear
    noise(world)
    assert world.found(chain) == 0
    world.idle()


def test_asking_again_replaces(make_world, any_model):
    world = make_world(any_model, frames=20)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    assert world.match(chain, "r").pages == 3
    held = world.count("frames_held")
    for _ in range(50):
        world.match(chain, "r")
        assert world.count("frames_held") == held
    assert world.match(world.chain(9), "r").pages == 0
    assert world.count("frames_held") == 0
    world.idle()


def test_f081_matches_that_nobody_loads_end_by_themselves(make_world, any_model):
    world = make_world(any_model, frames=20, match_steps=4, debug=False)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    world.ledger.step()
    for n in range(1000):
        world.match(chain, n)
    for _ in range(4):
        world.ledger.step()
        assert world.count("frames_held") > 0
    world.ledger.step()
    assert world.count("frames_held") == 0
    assert world.count("matches_expired") == 1000
    with pytest.raises(MisuseError, match="no match"):
        world.ledger.load(3, 0, world.device(3))
    world.idle()


def test_a_match_that_is_given_up_can_be_given_up_again(make_world, any_model):
    world = make_world(any_model)
    chain = world.chain(1)
    world.put(chain)
    world.match(chain, "r")
    for _ in range(3):
        world.ledger.give_up("r")
    world.ledger.give_up("nobody")
    world.idle()


@pytest.mark.parametrize("limit", [-5, -1, 0, 1, 2, 3, 9])
def test_a_limit_is_one(make_world, any_model, limit):
    world = make_world(any_model)
    chain = world.chain(1, 2, 3)
    world.put(chain, records=world.boundary(1) + world.boundary(2) + world.boundary(3))
    match = world.match(chain, "r", limit)
    assert match.pages == max(0, min(limit, 3))
    if limit < 1:
        assert match.reason is Reason.BELOW_A_PAGE
    world.ledger.give_up("r")
    world.idle()


def test_a_match_below_the_minimum_is_none_and_holds_nothing(make_world, any_model):
    world = make_world(any_model)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    match = world.match(chain, "r", minimum=4)
    assert (match.pages, match.reason) == (0, Reason.BELOW_MINIMUM)
    assert sum(match.records) == 0
    world.idle()
    assert world.match(chain, "r", minimum=3).pages == 3


def test_f008_a_prefix_ends_where_a_record_is_missing(make_world):
    world = make_world("full and window", frames=20)
    chain = world.chain(1, 2, 3, 4, 5, 6)
    world.put(chain, records=[(0, 0), (0, 1), (0, 2), (0, 4), (0, 5)])
    match = world.match(chain, "r")
    assert match.pages == 6
    world.run(world.load_match(match), {6: CORRUPT})
    match = world.match(chain, "r")
    assert (match.pages, match.parted, match.reason) == (3, 6, Reason.NO_BOUNDARY)


# Whose


def test_h12_nobody_elses_prefix_is_found(make_world, any_model):
    world = make_world(any_model)
    chain = world.chain(1, 2)
    world.put(chain)
    others = [
        *(TENANT, Namespace(4, model="n"), Namespace(4, model="m", adapter="a")),
        *(Namespace(4, model="m", revision="r"), Namespace(4, model="m", facts=(("a", "b"),))),
        Namespace.private(4),
    ]
    for space in others:
        assert world.found(world.chain(1, 2, space=space)) == 0
    assert world.found(Chain(chain.namespace, chain.tokens, secret=b"s")) == 0
    assert world.found(world.chain(1, 2, extras=[Extra(0, 1, "media", b"d")])) == 0
    assert world.found(chain) == 2


def test_f028_a_raised_epoch_finds_nothing_of_the_former_one(make_world, any_model):
    world = make_world(any_model)
    spaces = [Namespace(4, model="m", epoch=epoch) for epoch in (0, 1)]
    world.put(world.chain(1, 2, space=spaces[0]))
    assert world.found(world.chain(1, 2, space=spaces[1])) == 0
    world.put(world.chain(1, 2, space=spaces[1]))
    assert world.ledger.drop_root(world.chain(space=spaces[0]).root) > 0
    world.settle()
    assert [world.found(world.chain(1, 2, space=space)) for space in spaces] == [0, 2]


class Cut(Chain):
    """Keys of 4 bits: nearly every page has another's."""

    __slots__ = ()

    @staticmethod
    def _hash(data):
        one = Chain._hash(data)
        digest = one.digest()
        return type("Cut", (), {"digest": lambda _: bytes([digest[0] & 15]) * 32})()


def test_h04_h05_tokens_prove_a_match_when_keys_are_equal(make_world, any_model):
    """Whatever collides, nobody is given pages of other tokens, in whatever order they come."""
    world = make_world(any_model, frames=24)
    prompts = [*itertools.product((1, 2, 3), repeat=3)]
    names: dict[tuple[bytes, int], set[tuple[int, ...]]] = {}
    for prompt in prompts:
        chain = world.chain(*prompt, kind=Cut)
        number = world.save(chain)
        if number is not None:
            plan = world.plans[number]
            for n in range(len(plan)):
                names.setdefault((plan.key(n), int(plan.which[n])), set()).add(prompt)
            world.run(number)
        match = world.match(chain, "r")
        tokens = world.ledger._loads._waiting["r"].found if match.pages else None
        if tokens is not None and world.stock.prefixes.closed is not None:
            rows = world.stock.prefixes.closed._contents._tokens[tokens.frames]
            assert rows.tolist() == chain.page_rows(0, match.pages).tolist()
        for index, its in zip(
            world.stock.prefixes.walked, tokens.records if tokens else (), strict=False
        ):
            rows = index._contents._tokens[its]
            first = match.pages - len(its)
            assert rows.tolist() == chain.page_rows(first, match.pages).tolist()
        world.ledger.give_up("r")
    world.idle()


def test_h04_a_request_that_comes_back_with_other_tokens_finds_its_own(make_world, any_model):
    world = make_world(any_model)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    assert world.match(chain, "name").pages == 3
    assert world.match(world.chain(4, 2, 3), "name").pages == 0
    with pytest.raises(MisuseError, match="no match"):
        world.ledger.load("name", 0, world.device(3))


def test_h05_a_prompt_that_went_on_differently_has_what_is_common(make_world):
    world = make_world("full")
    world.put(world.chain(1, 2, 3, 4))
    chain = world.chain(1, 2)
    assert world.match(chain, "r").pages == 2
    chain.append([7] * 8)
    match = world.match(chain, "r")
    assert (match.pages, match.reason) == (2, Reason.NOT_SEALED)


def test_digests_that_do_not_cover_what_is_before_them_are_not_believed(make_world):
    """There are no tokens to compare, so every key of the path is."""
    world = make_world("full")
    space = world.chain(1).namespace
    a, b, c = (bytes([n]) * 32 for n in range(3))
    world.put(Chain.foreign(space, [a, b]))
    world.put(Chain.foreign(space, [c]))
    assert world.found(Chain.foreign(space, [c, b])) < 2
    assert world.found(Chain.foreign(space, [b])) == 0
    assert world.found(Chain.foreign(space, [a, b])) == 2


def test_pages_of_another_size_are_refused(make_world, any_model):
    world = make_world(any_model)
    other = Chain(Namespace(8, model="m"), range(16))
    for call in (
        lambda: world.ledger.match("r", other, 2),
        lambda: world.save(other),
        lambda: world.ledger.keep("k", other),
        lambda: world.ledger.drop(other),
    ):
        with pytest.raises(InputError, match="8 tokens"):
            call()
    world.idle()


# Load


def test_a_load_names_what_was_matched(make_world, any_model, movers):
    world = make_world(any_model, movers, frames=24)
    chain = world.chain(1, 2, 3, 4)
    world.put(chain)
    match = world.match(chain, "r")
    plan = world.plans[world.load_match(match, first=1)]
    assert plan.verb is Verb.LOAD
    expected = []
    if world.stock.prefixes.closed is not None:
        expected += [(chain.key(page), 0) for page in range(1, 4)]
    first = len(world.cuts) - len(world.ledger.shape.walked)
    for group, cut in enumerate(world.ledger.shape.walked):
        for page, part in itertools.product(range(4 - cut.reach, 4), range(cut.frames)):
            expected.append((chain.key(page), ((group + first) << 16) + part))
    assert [(plan.key(n), int(plan.which[n])) for n in range(len(plan))] == expected
    for rank in world.ranks:
        assert [rank.names[frame] for frame in plan.inside.tolist()] == expected
    assert world.ledger.in_flight == 1


def test_a_load_ends_the_match(make_world):
    world = make_world()
    chain = world.chain(1, 2)
    world.put(chain)
    number = world.load(chain, "r")
    with pytest.raises(MisuseError, match="'r' has no match"):
        world.ledger.load("r", 0, world.device(2))
    world.run(number)
    with pytest.raises(MisuseError):
        world.ledger.load("nobody", 0, world.device(0))
    world.idle()


@pytest.mark.parametrize("model", ["all", "no full"])
def test_frames_in_other_numbers_than_were_matched_are_refused(make_world, model):
    world = make_world(model, frames=24)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    match = world.match(chain, "r")
    full = 3 if model == "all" else 0
    records = [np.arange(100, 102).reshape(2, 1), np.arange(102, 104).reshape(1, 2)]
    pages = np.arange(full)
    assert match.records == (2, 1)
    wrong = [
        *((-1, pages, records), (4, pages[:0], records), (0, np.arange(full + 1), records)),
        *((0, pages, []), (0, pages, records[:1]), (0, pages, [*records, records[0]])),
        *((0, pages, [records[0][:1], records[1]]), (0, pages, [records[0], records[1].T])),
        (0, pages, [records[0], records[1] - 102 + 100]),
        (0, pages, [records[0], -records[1]]),
    ]
    for first, some, others in wrong:
        with pytest.raises(InputError, match="frames"):
            world.ledger.load(
                "r", first, some.astype(np.int32), [o.astype(np.int32) for o in others]
            )
        assert world.ledger.in_flight == 0
    world.run(world.load_match(match))
    world.idle()


def test_a_load_of_nothing_ends_with_nothing(make_world):
    """All of it is on the device already."""
    world = make_world()
    chain = world.chain(1, 2)
    world.put(chain)
    number = world.load_match(world.match(chain, "r"), first=2)
    assert len(world.plans[number]) == 0
    world.run(number)
    assert world.loaded(number) == Loaded("r", number, 0, (), clear=True)
    world.idle()


def test_what_is_loaded_is_held_until_nothing_touches_it(make_world, movers):
    world = make_world(movers=movers, frames=3)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    world.run(number, {2: TIMEOUT}, clear=False)
    assert world.loaded(number) == Loaded("loads", number, 2, (), clear=False)
    for mover in range(movers):
        assert world.save(world.chain(7, 8)) is None
        assert world.count("frames_held") == 3
        world.say(number, mover, clear=True)
    assert world.count("frames_held") == 0
    assert world.news[-1] == Cleared(number)
    assert world.news.count(Cleared(number)) == 1


def test_one_request_may_match_again_while_its_load_is_on_its_way(make_world, any_model):
    """It was preempted; the first load keeps what it reads."""
    world = make_world(any_model, frames=20)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    first = world.load(chain, "r")
    second = world.load(chain, "r")
    world.match(chain, "r")
    world.ledger.give_up("r")
    assert world.count("frames_held") > 0
    world.run(second)
    assert world.count("frames_held") > 0
    world.run(first)
    assert world.loaded(first).pages == world.loaded(second).pages
    world.idle()


@pytest.mark.parametrize("bad", [MISS, CORRUPT])
@pytest.mark.parametrize("page", range(4))
def test_f002_wrong_bytes_are_forgotten_with_what_continues_them(make_world, movers, bad, page):
    world = make_world(movers=movers, frames=12)
    chain, branch = world.chain(1, 2, 3, 4), world.chain(1, 8)
    world.put(chain)
    world.put(branch)
    number = world.load(chain)
    frame = int(world.plans[number].inside[page])
    world.fetch()
    for mover in range(movers):
        outcomes = [OK] * 4
        if mover == movers - 1:
            outcomes[page] = bad
        world.say(number, mover, outcomes, released=True, clear=True)
    assert world.loaded(number).pages == page
    assert world.found(chain) == page
    assert world.found(branch) == (2 if page else 0)
    assert np.flatnonzero(world.stock._wrong[0]).tolist() == [frame]
    assert world.sums()["out"] == 1
    assert world.count("frames_distrusted") == 1
    assert world.count("frames_failed") == 1
    assert world.count("pages_loaded") == page
    world.put(chain)
    assert world.found(chain) == 4
    assert frame not in world.plans[world.load(chain)].inside.tolist()


@pytest.mark.parametrize("bad", [TIMEOUT, UNAVAILABLE, Outcome.REFUSED, Outcome.FULL])
def test_what_says_nothing_about_the_bytes_forgets_nothing(make_world, any_model, bad):
    world = make_world(any_model, frames=20)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    world.run(number, {0: bad})
    assert world.loaded(number).pages == 0
    assert world.found(chain) == 3
    assert world.count("frames_distrusted") == 0
    number = world.load(chain)
    world.run(number)
    assert all(all(oks) for oks in world.loaded(number).records)


def test_wrong_bytes_on_one_rank_are_forgotten_though_another_is_late(make_world):
    world = make_world(movers=2)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    world.say(number, 0, [OK, CORRUPT, OK], released=True, clear=True)
    world.say(number, 1, [TIMEOUT] * 3, released=True, clear=True)
    assert world.loaded(number).pages == 0
    assert world.found(chain) == 1
    assert world.count("frames_distrusted") == 1


def test_only_leading_pages_came(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3, 4, 5)
    world.put(chain)
    number = world.load_match(world.match(chain, "r"), first=1)
    world.run(number, {2: TIMEOUT})
    assert world.loaded(number).pages == 2
    assert world.count("pages_loaded") == 2


@pytest.mark.parametrize("model", ["all", "no full"])
def test_records_come_or_fail_one_by_one(make_world, model):
    world = make_world(model, frames=24)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    first = 3 if model == "all" else 0
    world.run(number, {first: TIMEOUT, first + 3: CORRUPT})
    assert world.loaded(number).records == ((False, True), (False,))
    assert world.loaded(number).pages == first
    # The late one is there still, the wrong one is not.
    walked = world.stock.prefixes.walked
    assert [index.has(chain.key(2)) for index in walked] == [True, False]
    assert walked[0].has(chain.key(1))
    # Of a state of two frames one was wrong: the other is of use again.
    assert world.count("frames_distrusted") == world.sums()["out"] == 1
    assert world.count("records_loaded") == 1
    assert world.count("frames_failed") == 2


def test_records_leave_with_a_page_that_was_found_wrong(make_world):
    world = make_world("full and window", frames=20)
    chain = world.chain(1, 2, 3, 4)
    world.put(chain, records=[(0, page) for page in range(4)])
    world.run(world.load(chain), {1: MISS})
    (index,) = world.stock.prefixes.walked
    assert [index.has(key) for key in chain.keys(0, 4)] == [True, False, False, False]
    assert world.found(chain) == 1
    assert world.sums() == {"cached": 2, "out": 1, "free": 17}


def test_f024_a_window_comes_back_as_it_was_saved_each_time(make_world, movers):
    """Its bytes go down once and up twice, whatever has lain in these frames between."""
    world = make_world("full and window", movers, frames=9)
    chain = world.chain(1, 2, 3)
    for _ in range(3):
        world.put(chain)
        for _ in range(2):
            number = world.load(chain)
            world.run(number)
            assert world.loaded(number).pages == 3
            assert world.loaded(number).records == ((True, True),)
        noise(world)
        assert world.found(chain) == 0


def test_two_loads_of_one_prefix_at_once(make_world, any_model, movers):
    world = make_world(any_model, movers, frames=20)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    one, other = world.load(chain, "one"), world.load(chain, "other")
    assert world.plans[one].inside.tolist() == world.plans[other].inside.tolist()
    world.run(other)
    assert world.count("frames_held") == len(world.plans[one])
    world.run(one, {0: CORRUPT})
    assert world.loaded(other).pages == world.loaded(one).pages + (
        3 if world.stock.prefixes.closed else 0
    )
    assert world.found(chain) == 0
    world.settle()
    world.idle()


def test_a_page_found_wrong_twice_is_out_of_use_once(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3)
    world.put(chain)
    numbers = [world.load(chain, n) for n in range(3)]
    frame = int(world.plans[numbers[0]].inside[1])
    for number in numbers:
        world.run(number, {1: CORRUPT})
        assert world.loaded(number).pages == 1
    assert world.count("frames_distrusted") == 1
    assert world.sums() == {"out": 1, "cached": 1, "free": 14}
    assert world.stock._wrong[0, frame]
    world.idle()


def test_f078_half_of_a_thousand_loads_fail_and_none_is_left(make_world, any_model):
    world = make_world(any_model, frames=20, debug=False, breaker_faults=10_000)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    for n in range(1000):
        world.run(world.load(chain, n), {n % 3: UNAVAILABLE} if n % 2 else None, clear=n % 5 > 0)
        if n % 5 == 0:
            world.say(world.news[-1].plan, clear=True)
    assert world.count("plans_open") == 0
    assert len(world.ledger._loads) == 0
    world.idle()


# Dropped meanwhile


def dropped(world, chain, what):
    if what == "prefix":
        world.ledger.drop(Chain(chain.namespace, chain.tokens[:4]))
    elif what == "root":
        world.ledger.drop_root(chain.root)
    elif what == "everything":
        world.ledger.drop_root(None)
    else:
        world.ledger.lose(0)
        world.grow(0, range(world.ledger.shape.frames))
    world.fetch()
    world.news += world.ledger.poll()


DROPS = ["prefix", "root", "everything", "rank"]


@pytest.mark.parametrize("what", DROPS)
def test_a_drop_while_it_is_loaded_makes_all_of_it_a_miss(make_world, any_model, movers, what):
    world = make_world(any_model, movers, frames=20)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    number = world.load(chain)
    dropped(world, chain, what)
    assert world.found(chain) == 0
    assert world.count("frames_held") == len(world.plans[number]) or movers == 1
    world.run(number, movers=range(what == "rank", movers))
    loaded = world.loaded(number)
    assert (loaded.pages, loaded.clear) == (0, True)
    assert not any(any(oks) for oks in loaded.records)
    assert world.count("frames_failed") == len(world.plans[number])
    world.settle()
    assert world.sums() == {"free": 20}
    world.idle()


@pytest.mark.parametrize("what", DROPS)
def test_a_drop_between_match_and_load_makes_all_of_it_a_miss(make_world, any_model, movers, what):
    """Whoever matched cannot know of it: an error would be raised at whom did nothing wrong."""
    world = make_world(any_model, movers, frames=20)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    match = world.match(chain, "r")
    asked = world.count("frames_held")
    dropped(world, chain, what)
    assert world.count("frames_held") == 0
    world.settle()
    before = world.ledger.in_flight
    number = world.load_match(match)
    assert world.ledger.in_flight == before == 0
    misses = tuple((False,) * n for n in match.records)
    assert world.loaded(number) == Loaded("r", number, 0, misses, clear=True)
    assert world.news[-1] == Cleared(number)
    assert world.count("frames_failed") == asked
    with pytest.raises(InputError, match="rank 0 reports"):
        world.say(number, clear=True)
    with pytest.raises(MisuseError, match="no match"):
        world.load_match(match)
    world.put(chain)
    assert world.found(chain) == 3
    world.idle()


def test_what_was_dropped_before_its_load_is_checked_like_any_other(make_world):
    world = make_world()
    chain = world.chain(1, 2, 3)
    world.put(chain)
    match = world.match(chain, "r")
    world.ledger.drop(chain)
    with pytest.raises(InputError, match="shapes"):
        world.ledger.load("r", 0, world.device(2))
    assert world.load_match(match)


def test_a_dropped_match_ends_like_any_other(make_world):
    world = make_world(match_steps=1)
    chain = world.chain(1, 2)
    for end in (lambda: world.ledger.give_up("r"), lambda: world.match(world.chain(7), "r")):
        world.put(chain)
        world.match(chain, "r")
        world.ledger.drop(chain)
        end()
        with pytest.raises(MisuseError, match="no match"):
            world.ledger.load("r", 0, world.device(2))
        world.settle()
    world.put(chain)
    world.match(chain, "r")
    world.ledger.drop_root(None)
    world.ledger.drop_root(None)
    for _ in range(2):
        world.ledger.step()
    assert not world.ledger._loads._waiting
    world.settle()
    world.idle()


def test_a_drop_of_another_namespace_is_nobodys_miss(make_world, any_model):
    world = make_world(any_model, frames=20)
    mine, theirs = world.chain(1, 2), world.chain(1, 2, space=TENANT)
    world.put(mine)
    world.put(theirs)
    match, number = world.match(mine, "waits"), world.load(mine)
    world.ledger.drop(theirs)
    world.ledger.drop_root(theirs.root)
    world.settle()
    world.run(number)
    later = world.load_match(match)
    world.run(later)
    for one in (number, later):
        assert dataclasses.replace(world.loaded(one), request="", plan=0) == Loaded(
            "", 0, 2 if world.stock.prefixes.closed else 0, world.loaded(later).records, clear=True
        )
        assert all(all(oks) for oks in world.loaded(one).records)
