"""Prefixes that an operator wants retained: within a share, and no pins."""

import pytest

from stepwell.base.errors import InputError
from stepwell.core.key import Digest, Namespace
from stepwell.core.page import Status
from stepwell.core.plan import Outcome

OTHER = Namespace(4, model="m", tenant="other")


def pushed(world):
    """Ten times the tier of noise."""
    for n in range(10):
        world.put(world.chain(*range(100 * n + 100, 100 * n + 100 + world.ledger.shape.frames)))


def test_a_kept_prefix_survives_any_noise_until_it_is_kept_no_more(make_world, any_model):
    world = make_world(any_model, frames=16, keep_percent=75)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    assert world.ledger.keep("system", chain) == 3
    pushed(world)
    assert world.found(chain) == 3
    world.ledger.unkeep("system")
    world.ledger.unkeep("system")
    assert world.count("frames_held") == 0
    pushed(world)
    assert world.found(chain) == 0
    world.idle()


def test_all_keeps_together_have_one_share(make_world):
    world = make_world(frames=16, keep_percent=50)
    chains = [world.chain(n, n + 1, n + 2) for n in (10, 20, 30)]
    for chain in chains:
        world.put(chain)
    kept = [world.ledger.keep(str(n), chain) for n, chain in enumerate(chains)]
    assert kept == [3, 3, 2]
    assert world.count("frames_held") == 8
    world.ledger.unkeep("0")
    assert world.ledger.keep("2", chains[2]) == 3
    assert world.count("frames_held") == 6


def test_a_share_counts_the_records_too(make_world):
    """Two pages with a state of 3 frames fit into 6 frames; with 3 pages nothing fits but fewer of them."""
    world = make_world("full and states", frames=24, keep_percent=25)
    chain = world.chain(1, 2, 3, 4, 5)
    world.put(chain, records=[(0, 1), (0, 3), (0, 4)])
    assert world.ledger.keep("k", chain) == 2
    assert world.count("frames_held") == 2 + 3


def test_nothing_is_kept_without_a_share(make_world, any_model):
    world = make_world(any_model, keep_percent=0)
    chain = world.chain(1, 2)
    world.put(chain)
    assert world.ledger.keep("k", chain) == 0
    assert world.count("frames_held") == 0


def test_a_keep_holds_what_is_here_when_it_is_asked_for(make_world):
    world = make_world(keep_percent=100)
    chain = world.chain(1, 2, 3, 4)
    world.put(chain, last=2)
    assert world.ledger.keep("k", chain) == 2
    world.put(chain)
    assert world.count("frames_held") == 2
    assert world.ledger.keep("k", chain) == 4
    assert world.count("frames_held") == 4


def test_it_lapses_at_its_time(make_world):
    world = make_world(keep_percent=100)
    chain = world.chain(1, 2)
    world.put(chain)
    assert world.ledger.keep("k", chain, within_s=5.0) == 2
    assert world.ledger.keep("for ever", world.chain(1)) == 1
    world.clock.advance_s(4.9)
    world.ledger.step()
    assert world.count("frames_held") == 2
    world.clock.advance_s(0.1)
    world.ledger.step()
    assert world.count("frames_held") == 1


def test_keeping_anew_replaces(make_world):
    world = make_world(keep_percent=100)
    one, other = world.chain(1, 2), world.chain(3)
    world.put(one)
    world.put(other)
    world.ledger.keep("k", one, within_s=1.0)
    assert world.ledger.keep("k", other) == 1
    assert world.count("frames_held") == 1
    world.clock.advance_s(2.0)
    world.ledger.step()
    assert world.count("frames_held") == 1


def test_a_drop_takes_kept_pages_like_others(make_world, any_model):
    world = make_world(any_model, keep_percent=100)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    assert world.ledger.keep("k", chain) == 3
    world.ledger.drop(chain)
    world.settle()
    assert world.found(chain) < 3
    assert not world.status(Status.LEAVING)
    world.ledger.drop_root(chain.root)
    world.settle()
    assert world.count("frames_held") == 0
    assert world.sums() == {"free": 16}
    world.idle()


def test_after_a_drop_a_keep_has_what_is_left(make_world):
    world = make_world(keep_percent=100)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    world.put(world.chain(9, space=OTHER))
    world.ledger.keep("k", chain, within_s=7.0)
    world.ledger.keep("other", world.chain(9, space=OTHER))
    assert world.ledger.drop(world.chain(1, 2)) == 2
    world.settle()
    assert world.count("frames_held") == 1 + 1
    assert world.sums()["free"] == 14
    world.clock.advance_s(7.0)
    world.ledger.step()
    assert world.count("frames_held") == 1


def test_a_keep_holds_no_pages_that_were_found_wrong(make_world, movers):
    """They are found by nobody any more, so that to hold them keeps nothing but room."""
    world = make_world(movers=movers, keep_percent=100)
    chain = world.chain(1, 2, 3)
    world.put(chain)
    world.ledger.keep("k", chain)
    world.run(world.load(chain), {1: Outcome.CORRUPT})
    assert world.count("frames_held") == 1
    assert world.sums() == {"held": 1, "out": 1, "free": 14}


@pytest.mark.parametrize("name", [None, 1, b"k"])
def test_a_name_is_a_text(make_world, name):
    world = make_world()
    with pytest.raises(InputError, match="text"):
        world.ledger.keep(name, world.chain(1))


def test_a_keep_that_is_refused_leaves_the_earlier_one_as_it_was(make_world, any_model):
    world = make_world(any_model, keep_percent=100)
    chain = world.chain(1, 2)
    world.put(chain)
    world.ledger.keep("k", chain)
    held = world.count("frames_held")
    for space in (Namespace(8, model="m"), Namespace(4, model="m", adapter=Digest.UNKNOWN)):
        with pytest.raises(InputError):
            world.ledger.keep("k", world.chain(1, 2, space=space))
    assert world.count("frames_held") == held


def test_a_keep_and_a_request_of_one_name_are_two(make_world):
    world = make_world(keep_percent=100)
    chain = world.chain(1, 2)
    world.put(chain)
    world.ledger.keep("k", chain)
    world.match(chain, "k")
    world.match(chain, ("keep", "k"))
    world.ledger.unkeep("k")
    for request in ("k", ("keep", "k")):
        assert world.count("frames_held") == 2
        world.ledger.give_up(request)
    world.idle()
