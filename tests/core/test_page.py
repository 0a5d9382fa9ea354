"""The life of a page as a picture: what can follow what."""

from stepwell.core.page import LEGAL, Status


def reachable(start, without=()):
    found, todo = set(), [start]
    while todo:
        before = todo.pop()
        for one, after in LEGAL:
            if one is before and after not in found and after not in without:
                found.add(after)
                todo.append(after)
    return found


def test_statuses_are_the_rows_of_numpy_tables():
    assert [int(status) for status in Status] == list(range(len(Status)))
    assert Status.FREE == 0


def test_every_status_can_be_reached_and_left_again():
    """A status without a way back would leak frames."""
    for status in Status:
        assert reachable(status) == set(Status)


def test_only_a_reservation_takes_a_free_frame():
    assert {after for before, after in LEGAL if before is Status.FREE} == {Status.FILLING}


def test_a_page_is_sealed_only_after_it_was_filled():
    assert {before for before, after in LEGAL if after is Status.SEALED} == {Status.FILLING}


def test_a_sealed_page_is_never_freed_without_leaving():
    """Whoever still reads it would read the next page's bytes."""
    after = {after for before, after in LEGAL if before is Status.SEALED}
    assert after == {Status.LEAVING, Status.QUARANTINED}
    assert Status.FREE not in reachable(Status.SEALED, without={Status.LEAVING, Status.QUARANTINED})


def test_a_leaving_page_never_comes_back():
    assert (Status.LEAVING, Status.SEALED) not in LEGAL
    assert Status.SEALED not in reachable(Status.LEAVING, without={Status.FREE})


def test_whatever_is_in_use_can_be_quarantined():
    into = {before for before, after in LEGAL if after is Status.QUARANTINED}
    assert into == {Status.FILLING, Status.SEALED, Status.LEAVING}


def test_quarantine_ends_in_freedom_only():
    out = {after for before, after in LEGAL if before is Status.QUARANTINED}
    assert out == {Status.FREE}


def test_nothing_becomes_what_it_is():
    """A second free of a free frame is a fault, not a step."""
    assert all(before is not after for before, after in LEGAL)
