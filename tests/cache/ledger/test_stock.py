"""Where frames are: those that ranks have, that are out of use, and that must be overwritten first."""

import numpy as np
import pytest

from stepwell.base.errors import InputError, InvariantError, MisuseError
from stepwell.base.observe import Counters
from stepwell.cache.ledger.stock import Stock
from stepwell.core.chain import Chain
from stepwell.core.check import Findings
from stepwell.core.cut import Cut
from stepwell.core.geometry import Geometry
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.plan import Outcome

SIZE = 4
FULL = (Cut(Geometry.full(1, 1, 1).groups[0], 1, 0),)
ONE, OTHER = (Namespace(SIZE, model="m", tenant=name) for name in "ab")


def ids(*frames):
    return np.array(frames, np.int32)


class Shelf(Stock):
    """A stock that is checked, and fills frames at once."""

    def __init__(self, count=8, movers=1, present=True):
        super().__init__(count, movers, SIZE, FULL, Counters("index", "tiers"))
        for mover in range(movers if present else 0):
            self.grown(mover, np.arange(count, dtype=np.int32))

    def checked(self):
        self.collect()
        findings = Findings()
        self.check(findings)
        findings.raise_if_any()

    def put(self, *pages, space=ONE):
        chain = Chain(space, [page for page in pages for _ in range(SIZE)])
        closed = self.prefixes.closed
        first = closed.longest(chain, chain.pages)
        lease = closed.hold("put", chain, first)
        frames = self.take(chain.pages - first, chain.root)
        kept = closed.seal(lease, chain, frames).kept
        self.sealed(kept, chain.root)
        closed.release(lease)
        self.checked()
        return chain, kept

    def states(self):
        return {Status(s).name: np.flatnonzero(self.frames.status == s).tolist() for s in Status}

    def wipe(self, outcome=Outcome.OK):
        frames = self.to_wipe()
        self.wiped(frames, np.full(len(frames), outcome, np.uint8))
        self.checked()
        return sorted(frames.tolist())


def test_a_frame_is_of_use_once_every_rank_has_it():
    stock = Shelf(4, 3, present=False)
    assert stock.take(1, b"r" * 32) is None
    stock.grown(0, ids(0, 1, 2))
    stock.grown(2, ids(2, 1))
    assert (stock.frames.free, stock.present) == (0, 0)
    stock.grown(1, ids(3, 2))
    assert (stock.frames.free, stock.present) == (1, 1)
    assert stock.take(1, b"r" * 32).tolist() == [2]
    stock.grown(1, ids())
    stock.grown(1, ids(1))
    assert stock.frames.free == 1
    stock.checked()


@pytest.mark.parametrize(
    ("mover", "frames", "match"),
    [
        (-1, [1], "rank -1"),
        (2, [1], "rank 2"),
        (0, [8], "frames 8 to 8"),
        (0, [1, 2**31 - 1], "frames 1 to"),
        (0, [-1], "frames -1"),
        (0, [0], "twice"),
        (0, [1, 0], "twice"),
        (0, [2, 2], "twice"),
    ],
)
def test_frames_that_cannot_have_grown_are_refused_and_change_nothing(mover, frames, match):
    stock = Shelf(8, 2, present=False)
    stock.grown(0, ids(0))
    before = stock._present.copy()
    with pytest.raises(InputError, match=match):
        stock.grown(mover, ids(*frames))
    assert np.array_equal(stock._present, before)
    assert stock.frames.free == 0
    stock.checked()


def test_all_is_taken_or_nothing():
    stock = Shelf(6)
    stock.put(1, 2, 3, 4)
    assert stock.available == 6
    assert stock.take(7, b"r" * 32) is None
    assert stock.frames.free == 2
    assert len(stock.take(5, b"r" * 32)) == 5
    assert stock.available == 1


def test_h02_room_is_made_from_the_tail():
    stock = Shelf(6)
    chain, kept = stock.put(1, 2, 3, 4)
    stock.take(4, b"r" * 32)
    assert stock.prefixes.closed.longest(chain, 4) == 2
    assert stock.states()["SEALED"] == sorted(kept[:2].tolist())


def test_what_is_retired_is_nobodys_before_it_is_free():
    stock = Shelf(4)
    frames = stock.take(2, b"r" * 32)
    stock.retire(frames)
    assert stock.states()["QUARANTINED"] == frames.tolist()
    assert stock.take(3, b"r" * 32) is None
    stock.checked()
    stock.free(frames)
    stock.checked()
    assert stock.frames.free == 4


def test_f010_a_frame_is_not_freed_twice():
    stock = Shelf(4)
    frames = stock.take(2, b"r" * 32)
    stock.free(frames)
    with pytest.raises(MisuseError, match="FREE to FREE"):
        stock.free(frames)
    assert stock.frames.free == 4


def test_f002_wrong_bytes_take_their_frame_out_of_use_when_nobody_holds_it():
    stock = Shelf(6)
    chain, kept = stock.put(1, 2, 3)
    lease = stock.prefixes.match("r", chain, 3)
    bad = int(kept[1])
    stock.distrust(ids(bad))
    stock.forget_page(bad)
    stock.forget_page(bad)
    stock.checked()
    assert stock.prefixes.closed.longest(chain, 3) == 1
    assert stock.states()["SEALED"] == sorted(kept.tolist())
    stock.prefixes.let_go(lease)
    stock.checked()
    assert stock.states()["QUARANTINED"] == [bad]
    assert stock.frames.free == 6 - 2
    assert stock._counters.snapshot()["frames_distrusted"] == 1
    stock.distrust(ids(bad))
    assert stock._counters.snapshot()["frames_distrusted"] == 1


def test_a_drop_names_its_frames_and_no_others():
    stock = Shelf(8)
    chain, kept = stock.put(1, 2, 3)
    _, others = stock.put(1, 9)
    assert stock.drop(Chain(ONE, [1] * SIZE + [2] * SIZE)) == 2
    stock.collect()
    assert stock.states()["LEAVING"] == sorted(kept[1:].tolist())
    assert sorted(stock.to_wipe().tolist()) == sorted(kept[1:].tolist())
    assert len(stock.to_wipe()) == 0
    stock.wiped(kept[1:], np.zeros(2, np.uint8))
    stock.checked()
    assert stock.states()["LEAVING"] == []
    assert stock.states()["SEALED"] == sorted([kept[0], *others])
    assert stock.prefixes.closed.longest(chain, 3) == 1


def test_what_is_held_while_dropped_is_overwritten_after_it():
    stock = Shelf(6)
    chain, kept = stock.put(1, 2, 3)
    found = stock.prefixes.match("r", chain, 2)
    assert stock.drop(chain.fork()) == 1
    stock.checked()
    assert stock.wipe() == [kept[2]]
    assert stock.drop_root(chain.root) == 2
    stock.checked()
    assert stock.wipe() == []
    stock.prefixes.let_go(found)
    stock.checked()
    assert stock.wipe() == sorted(kept[:2].tolist())
    assert stock.frames.free == 6


def test_a_drop_overwrites_bytes_of_what_was_evicted_before():
    """The frame is free, but what was in it is still there: deleting a tenant would leave it readable."""
    stock = Shelf(6)
    _, kept = stock.put(1, 2, 3)
    _, others = stock.put(7, space=OTHER)
    assert stock.prefixes.evict(3)
    stock.collect()
    assert stock.frames.free == 5
    assert stock.states()["SEALED"] == others.tolist()
    assert stock.drop_root(Chain(ONE).root) == 0
    stock.checked()
    assert stock.frames.free == 2
    assert stock.wipe() == sorted(kept.tolist())
    assert stock.drop_root(Chain(OTHER).root) == 1
    stock.checked()
    assert stock.wipe() == others.tolist()
    assert stock.frames.free == 6


def test_a_drop_of_a_prefix_overwrites_what_nobody_can_place_any_more():
    """What is evicted, or found wrong and held, might be of the prefix; what is found is known to be or not."""
    stock = Shelf(8)
    chain, kept = stock.put(1, 2, 3)
    _, found = stock.put(8, 9)
    _, others = stock.put(7, space=OTHER)
    assert stock.prefixes.evict(1)
    stock.checked()
    lease = stock.prefixes.match("r", chain, 2)
    stock.forget_page(int(kept[0]))
    stock.checked()
    assert stock.drop(Chain(ONE, [8] * SIZE + [9] * SIZE)) == 1
    stock.checked()
    assert stock.wipe() == sorted([kept[2], found[1]])
    stock.prefixes.let_go(lease)
    stock.checked()
    assert stock.wipe() == sorted(kept[:2].tolist())
    assert stock.states()["SEALED"] == sorted([found[0], *others])


def test_a_drop_overwrites_what_is_on_its_way_and_never_arrives():
    stock = Shelf(6)
    root = Chain(ONE).root
    flying, late = stock.take(2, root), stock.take(1, root)
    stock.retire(late)
    stock.drop_root(root)
    assert stock.wipe() == []
    stock.free(flying)
    stock.checked()
    assert stock.wipe() == flying.tolist()
    stock.free(late)
    assert stock.wipe() == late.tolist()
    assert stock.frames.free == 6


def test_what_a_drop_meant_is_gone_where_others_have_written_since():
    """Another's save is on its way in a frame that had bytes of what is dropped: if it arrives, they are gone."""
    stock = Shelf(2)
    stock.put(1, 2)
    chain = Chain(OTHER, [5] * SIZE + [6] * SIZE)
    lease = stock.prefixes.closed.hold("r", chain, 0)
    frames = stock.take(2, chain.root)
    assert stock.drop_root(Chain(ONE).root) == 0
    kept = stock.prefixes.closed.seal(lease, chain, frames[:1]).kept
    stock.sealed(kept, chain.root)
    stock.free(frames[1:])
    stock.prefixes.closed.release(lease)
    stock.checked()
    assert stock.wipe() == frames[1:].tolist()
    assert stock.states()["SEALED"] == frames[:1].tolist()


def test_nothing_is_overwritten_twice_for_two_drops():
    stock = Shelf(6)
    chain, kept = stock.put(1, 2)
    stock.drop_root(chain.root)
    stock.drop_root(None)
    stock.checked()
    frames = stock.to_wipe()
    assert sorted(frames.tolist()) == sorted(kept.tolist())
    stock.drop_root(None)
    assert len(stock.to_wipe()) == 0
    stock.wiped(frames, np.zeros(2, np.uint8))
    stock.drop_root(None)
    assert stock.wipe() == []
    assert stock.frames.free == 6


def test_what_could_not_be_overwritten_stays_out_of_use_until_it_is():
    stock = Shelf(6)
    chain, _ = stock.put(1, 2)
    stock.drop_root(chain.root)
    stock.collect()
    frames = stock.to_wipe()
    stock.wiped(frames, np.array([Outcome.OK, Outcome.TIMEOUT], np.uint8))
    stock.checked()
    assert (stock.frames.free, stock.wiping, stock.unwiped) == (5, True, True)
    assert len(stock.to_wipe()) == 0
    stock.wipe_again()
    assert stock.wipe() == [frames[1]]
    assert (stock.frames.free, stock.wiping, stock.unwiped) == (6, False, False)


def test_a_frame_with_wrong_bytes_is_overwritten_too_and_stays_out_of_use():
    stock = Shelf(6)
    chain, kept = stock.put(1)
    stock.distrust(kept)
    stock.forget_page(int(kept[0]))
    stock.checked()
    stock.drop_root(chain.root)
    assert stock.wipe() == kept.tolist()
    assert stock.states()["QUARANTINED"] == kept.tolist()
    stock.drop_root(chain.root)
    assert stock.wipe() == []


def test_a_rank_that_is_lost_takes_all_frames_out_of_use_until_it_has_grown():
    stock = Shelf(6, 2)
    stock.put(1, 2)
    root = Chain(ONE).root
    flying, late = stock.take(1, root), stock.take(1, root)
    stock.retire(late)
    stock.lose(0)
    stock.forget()
    stock.checked()
    assert (stock.frames.free, stock.present) == (0, 0)
    # It comes back while the other rank still touches what was on its way.
    stock.grown(0, np.arange(6, dtype=np.int32))
    stock.checked()
    assert stock.frames.free == 4
    stock.free(flying)
    stock.free(late)
    stock.checked()
    assert stock.frames.free == 6


def test_a_frame_that_comes_free_while_a_rank_is_lost_waits_for_it():
    stock = Shelf(4, 2)
    flying = stock.take(2, b"r" * 32)
    stock.lose(1)
    stock.free(flying)
    stock.checked()
    assert stock.frames.free == 0
    stock.grown(1, flying[:1])
    assert stock.frames.free == 1
    stock.checked()


def test_wrong_bytes_go_with_the_memory_of_the_rank_that_had_them():
    """Which one it was is not known: all of them have to be new."""
    stock = Shelf(4, 2)
    stock.distrust(ids(0))
    frames = stock.take(4, b"r" * 32)
    stock.free(frames)
    everything = np.arange(4, dtype=np.int32)
    assert stock.frames.free == 3
    for mover, free in ((0, 3), (1, 4)):
        stock.lose(mover)
        stock.grown(mover, everything)
        assert stock.frames.free == free
        stock.checked()


def test_what_no_rank_has_any_more_needs_no_overwriting():
    stock = Shelf(4, 2)
    chain, _ = stock.put(1, 2)
    stock.drop_root(chain.root)
    stock.collect()
    stock.lose(0)
    stock.checked()
    assert len(stock.to_wipe()) == 0
    assert stock.wiping
    stock.lose(1)
    stock.checked()
    assert not stock.wiping
    for mover in (0, 1):
        stock.grown(mover, np.arange(4, dtype=np.int32))
    stock.checked()
    assert stock.frames.free == 4
    assert stock.wipe() == []


def test_a_dropped_frame_is_overwritten_when_a_lost_rank_is_back():
    stock = Shelf(4, 2)
    chain, kept = stock.put(1, 2)
    stock.lose(0)
    stock.forget()
    stock.collect()
    stock.drop_root(chain.root)
    stock.checked()
    assert stock.wipe() == []
    stock.grown(0, kept[:1])
    assert stock.wipe() == kept[:1].tolist()
    assert stock.frames.free == 1
    stock.grown(0, ids(*(set(range(4)) - {int(kept[0])})))
    assert stock.wipe() == kept[1:].tolist()
    assert stock.frames.free == 4


BREAKS = [
    (lambda stock: stock._present.__setitem__((0, 7), False), "FREE frame is of no use"),
    (lambda stock: stock._wrong.__setitem__((0, 0), True), "found that is of no use"),
    (lambda stock: stock._doomed.__setitem__(7, True), "FREE frame is of no use"),
    (lambda stock: stock._hidden.__setitem__(7, True), "hidden unheld"),
    (lambda stock: stock._busy.__setitem__(0, True), "touched late"),
    (lambda stock: stock.frames.move(stock.take(1, b"r" * 32), Status.QUARANTINED), "no reason"),
    (lambda stock: stock._to_wipe.extend([0, 0]), "twice"),
    (lambda stock: stock._unwiped.append(0), "overwritten for no reason"),
]


@pytest.mark.parametrize(("broken", "text"), BREAKS, ids=[text for _, text in BREAKS])
def test_the_checker_finds_what_is_broken(broken, text):
    stock = Shelf(8)
    stock.put(1, 2)
    broken(stock)
    with pytest.raises(InvariantError, match=text):
        stock.checked()
