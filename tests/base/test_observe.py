"""Counters take names of the table only, and never go back."""

import pytest

from stepwell.base.errors import MisuseError
from stepwell.base.observe import METRICS, Counters, Kind

COUNTS = [name for name, row in METRICS.items() if row.kind is Kind.COUNT]
GAUGES = [name for name, row in METRICS.items() if row.kind is Kind.GAUGE]


def test_every_row_says_what_it_counts_in_which_unit():
    assert COUNTS
    assert GAUGES
    for name, row in METRICS.items():
        assert row.name == name
        assert row.unit
        assert row.text


def test_counters_begin_at_nothing_and_list_every_count():
    assert Counters().snapshot() == dict.fromkeys(COUNTS, 0)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_moves_alone(name):
    counters = Counters()
    counters.add(name)
    counters.add(name, 4)
    counters.add(name, 0)
    assert counters.snapshot() == dict.fromkeys(COUNTS, 0) | {name: 5}


@pytest.mark.parametrize("name", ["pages_seald", "", "opens", *GAUGES])
def test_only_counts_of_the_table_can_be_counted(name):
    counters = Counters()
    with pytest.raises(MisuseError, match=repr(name)):
        counters.add(name)
    assert counters.snapshot() == dict.fromkeys(COUNTS, 0)


def test_a_count_never_goes_back():
    counters = Counters()
    counters.add("pages_sealed", 2)
    with pytest.raises(MisuseError, match="pages_sealed would move by -1"):
        counters.add("pages_sealed", -1)
    assert counters.snapshot()["pages_sealed"] == 2


def test_a_snapshot_is_a_copy():
    counters = Counters()
    snapshot = counters.snapshot()
    snapshot["pages_sealed"] = 9
    counters.add("pages_evicted")
    assert counters.snapshot()["pages_sealed"] == 0
    assert snapshot["pages_evicted"] == 0
