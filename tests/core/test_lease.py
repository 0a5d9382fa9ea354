"""Leases: one for each request, ended once, noticed when lost."""

import gc

import pytest

from stepwell.base.errors import MisuseError, StaleError
from stepwell.core.lease import Books, Leases
from stepwell.core.paths import NO_FRAME


def books(request="r", deepest=3):
    return Books(request, deepest, 0, 4, True, "here.py:1")


def test_a_lease_shows_what_its_books_say():
    leases = Leases()
    mine = books()
    lease = leases.take(mine)
    assert (lease.pages, lease.grows) == (4, True)
    mine.pages, mine.grows = 5, False
    assert (lease.pages, lease.grows) == (5, False)


def test_a_lease_is_found_by_its_request():
    leases = Leases()
    mine = books()
    lease = leases.take(mine)
    assert leases.of("r") is leases.own(lease) is mine
    assert leases.of("other") is None


def test_an_ended_lease_is_stale():
    leases = Leases()
    lease = leases.take(books())
    leases.end(leases.own(lease))
    with pytest.raises(StaleError, match="'r' was released already"):
        leases.own(lease)
    assert leases.of("r") is None
    assert list(leases) == []


def test_the_lease_of_another_index_is_stale():
    lease = Leases().take(books())
    with pytest.raises(StaleError, match="'r' is not of this index"):
        Leases().own(lease)


def test_stale_is_a_kind_of_misuse():
    assert issubclass(StaleError, MisuseError)


def test_a_request_has_one_lease():
    leases = Leases()
    earlier = leases.take(books())
    mine = books()
    later = leases.take(mine)
    leases.end(earlier.books)
    assert leases.of("r") is leases.own(later) is mine
    with pytest.raises(StaleError):
        leases.own(earlier)


def test_leases_that_keep_nothing_are_not_listed():
    leases = Leases()
    kept = [leases.take(books(name, deepest)) for name, deepest in (("a", 1), ("b", NO_FRAME))]
    assert [one.request for one in leases] == ["a"]
    assert leases.own(kept[1]).deepest == NO_FRAME


def test_a_lease_that_its_holder_loses_is_noticed_once():
    leases = Leases()
    lease = leases.take(books())
    assert leases.lost() == []
    del lease
    gc.collect()
    assert [one.request for one in leases.lost()] == ["r"]
    assert leases.lost() == []


def test_a_lease_that_was_ended_is_not_lost():
    leases = Leases()
    lease = leases.take(books())
    leases.end(lease.books)
    del lease
    gc.collect()
    assert leases.lost() == []


def test_a_lease_ended_after_it_was_lost_is_not_reported():
    leases = Leases()
    mine = books()
    leases.take(mine)
    gc.collect()
    leases.end(mine)
    assert leases.lost() == []
