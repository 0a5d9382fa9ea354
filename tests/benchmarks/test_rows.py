"""The speed table: what holds, what the record says, and when the run fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.measure import Candidate, Samples, interleaved
from benchmarks.rows import Row, exit_code, table, write_json

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"name", "ours", "against", "ratio", "bar", "bar_of", "holds", "gate", "unit", "note"}


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row("a.ratio", "ms", 3.0, 2.0, 1.5, bar=2), True),
        (Row("a.edge", "ms", 4.0, 2.0, 2.0, bar=2), True),
        (Row("a.over", "ms", 4.2, 2.0, 2.1, bar=2), False),
        (Row("a.absolute", "us", 150.0, bar=150, bar_of="ours"), True),
        (Row("a.absolute_over", "us", 151.0, bar=150, bar_of="ours"), False),
        (Row("a.no_bar", "us", 1.0, 1.0, 1.0), None),
        (Row("a.no_peer", "us", 1.0, bar=2), None),
        (Row("a.not_measured", "us", None, bar=150, bar_of="ours"), None),
        (Row("a.nan", "us", 1.0, 1.0, float("nan"), bar=2), None),
    ],
    ids=lambda value: value.name if isinstance(value, Row) else str(value),
)
def test_holds_says_yes_only_of_a_figure_within_its_bar(row, holds):
    assert row.holds is holds


@pytest.mark.parametrize(
    ("ratio", "gate", "code"),
    [(1.0, True, 0), (3.0, True, 1), (3.0, False, 0), (None, True, 1), (None, False, 0)],
)
def test_the_run_fails_when_a_gate_was_not_shown_to_hold(ratio, gate, code):
    good = Row("a.good", "us", 1.0, 1.0, 1.0, bar=2, gate=True)
    assert exit_code([good, Row("a.other", "us", 1.0, 1.0, ratio, bar=2, gate=gate)]) == code


def test_no_rows_fail_no_gate():
    assert exit_code([]) == 0


def test_the_record_has_every_field_and_null_for_unknown(tmp_path):
    path = tmp_path / "new" / "record.json"
    peerless = Row("vllm.hit", "ms", 0.5, bar=2, note="vLLM is not installed")
    write_json(path, {"cpus": 2}, [peerless])
    record = json.loads(path.read_text())
    assert record["machine"] == {"cpus": 2}
    (row,) = record["rows"]
    assert set(row) == FIELDS
    assert row["against"] is row["ratio"] is row["holds"] is None
    assert (row["ours"], row["bar"], row["gate"]) == (0.5, 2, False)


def test_a_record_with_nan_is_refused_rather_than_written_as_no_json(tmp_path):
    path = tmp_path / "record.json"
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {}, [Row("a.nan", "us", float("nan"))])
    assert not path.exists()


def test_the_table_tells_failures_unknowns_and_notes():
    text = table(
        [
            Row("a.bad", "us", 4.2, 2.0, 2.1, bar=2, gate=True, note="shared"),
            Row("a.longest", "us", 12_345.6, bar=150, bar_of="ours", note="shared"),
            Row("a.peerless", "ms", 0.0, bar=2),
        ]
    )
    lines = text.splitlines()
    assert lines[2].split() == ["a.bad", "4.20", "2.00", "us", "2.10", "2.00", "NO", "gate"]
    assert lines[3].split() == ["a.longest", "12,346", "-", "us", "-", "150", "us", "NO"]
    assert lines[4].split() == ["a.peerless", "0", "-", "ms", "-", "2.00", "-"]
    assert lines[-1] == "  a.bad, a.longest: shared"


def test_a_ratio_is_taken_round_by_round_so_that_a_busy_moment_does_not_count():
    # The machine is ten times slower in round 1: the medians say 11, the rounds say 2.
    samples = Samples({"ours": [2.0, 20.0, 22.0], "theirs": [1.0, 10.0, 1.0]})
    assert samples.ratio("ours", "theirs") == 2.0
    assert samples.median_s("ours") == 20.0


def test_candidates_take_turns_and_each_begins_some_round():
    told = []

    def candidate(name):
        return Candidate(
            lambda given: told.append((name, given)), lambda: "given", lambda: told.append(name)
        )

    samples = interleaved({"a": candidate("a"), "b": candidate("b")}, rounds=2, warmups=1)
    assert {name: len(taken) for name, taken in samples.seconds.items()} == {"a": 2, "b": 2}
    a, b = [("a", "given"), "a"], [("b", "given"), "b"]
    assert told == b + a + a + b + b + a


def test_seconds_are_of_one_call():
    samples = interleaved({"ours": Candidate(lambda _: sum(range(10_000)), calls=10**9)}, rounds=1)
    assert 0 < samples.median_s("ours") < 1e-9


def test_a_quick_run_of_one_group_writes_the_record_and_tells_its_progress(tmp_path):
    path = tmp_path / "record.json"
    command = ["-m", "benchmarks", "--quick", "--only", "chain", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["machine"]["quick"] is True
    assert record["machine"]["cpus"] >= 1
    assert record["machine"]["versions"]["numpy"]
    (row,) = record["rows"]
    assert set(row) == FIELDS
    assert row["name"] == "chain.keys_128k"
    assert row["ratio"] > 0
    assert row["holds"] is (row["ratio"] <= row["bar"])
    assert row["gate"] is False
    assert "chain.keys_128k" in done.stdout
    assert "chain.keys_128k" in done.stderr


def test_an_unknown_group_is_named_with_those_that_exist():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only", "chian"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "chian" in done.stderr
    assert "chain" in done.stderr
