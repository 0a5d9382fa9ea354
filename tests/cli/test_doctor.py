"""`stepwell doctor`: every kind of region tried on this machine, and what it says of those that are refused."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

from stepwell.cli.main import main
from stepwell.testing.gpu import FakeGpu

pytestmark = pytest.mark.xdist_group("names")  # see tests/memory/test_named.py

KINDS = ["pageable", "pinned", "huge pages", "node", "shared", "named", "file", "device"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Where the command runs, with a folder for its files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine without one, wherever this runs."""
    monkeypatch.setattr("stepwell.memory.gpu.find_gpu", lambda: None)


def shared():
    return {path.name for path in pathlib.Path("/dev/shm").glob("stepwell-doctor*")}


def ask(capsys, *arguments):
    code = main(["doctor", "--set", "cache_dir=cache", "--size", "1MiB", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def rows(capsys, *arguments):
    """What the regions became, by name without the number of the node."""
    code, out, _ = ask(capsys, "--json", *arguments)
    assert code == 0
    return {row["name"].rstrip(" 0123456789"): row for row in json.loads(out)["regions"]}


@pytest.mark.usefixtures("no_gpu")
def test_there_is_a_row_for_each_kind_with_a_record_or_a_reason(capsys):
    found = rows(capsys)
    assert list(found) == KINDS
    for name in ("pageable", "shared", "named", "file"):
        record = found[name]["record"]
        assert (
            record["ready_bytes"] == record["size_bytes"] == record["ask"]["size_bytes"] == 1 << 20
        )
        assert record["refusals"] == []
        assert found[name]["reason"] is found[name]["remedy"] is None
    for row in found.values():
        assert (row["record"] is None) == bool(row["reason"]) == bool(row["remedy"])
    assert "no GPU runtime" in found["device"]["reason"]
    assert found["file"]["record"]["ask"]["folder"] == "cache"


@pytest.mark.usefixtures("no_gpu")
def test_the_machine_is_part_of_the_json(capsys):
    _, out, _ = ask(capsys, "--json")
    said = json.loads(out)
    assert set(said) == {"machine", "gpu", "regions", "left_removed"}
    assert said["gpu"] is None
    assert said["machine"]["memory_bytes"] >= said["machine"]["available_bytes"] > 0
    assert set(said["machine"]) >= {"huge", "nodes", "memlock_bytes", "shared_free_bytes"}


@pytest.mark.usefixtures("no_gpu")
def test_the_text_says_the_same_with_a_remedy_below_each_refusal(capsys):
    found = rows(capsys)
    code, out, err = ask(capsys)
    assert (code, err) == (0, "")
    facts, regions = out.split("\n\n")
    assert [line[:14].strip() for line in facts.splitlines()] == [
        "memory",
        "control group",
        "locked memory",
        "2 MiB pages",
        "memory nodes",
        "/dev/shm",
        "GPU",
    ]
    lines = regions.splitlines()
    names = [re.sub(r" \d+$", "", line[:14].strip()) for line in lines if line[0] != " "]
    assert names == KINDS
    assert "pageable       1.0 MiB, in pages of 4.0 KiB" in regions
    for row in found.values():
        if row["record"] is None:
            at = lines.index(f"{row['name']:14} {row['reason']}")
            assert lines[at + 1] == f"{'':14} remedy: {row['remedy']}"


def test_nothing_is_left_behind(capsys, home):
    before = shared()
    ask(capsys)
    assert shared() == before
    assert list((home / "cache").iterdir()) == []
    assert sorted(path.name for path in home.iterdir()) == ["cache"]


def test_without_a_cache_folder_the_temporary_one_is_tried_and_left_empty(
    capsys, home, monkeypatch
):
    (home / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(home / "temporary"))
    assert main(["doctor", "--json", "--size", "64KiB"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["regions"]}
    assert found["file"]["record"]["ask"]["folder"] == str(home / "temporary")
    assert list((home / "temporary").iterdir()) == []


def test_the_command_itself_answers(home):
    """In a process of its own: what it imports, how it ends, what it leaves."""
    before = shared()
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "stepwell.cli.main"]
    ran = subprocess.run(
        [*command, "doctor", "--json", "--size", "64KiB", "--set", "cache_dir=cache"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(json.loads(ran.stdout)["regions"]) == len(KINDS)
    assert shared() == before
    assert list((home / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("size", "named"),
    [
        ("many", "'many' is not an amount of bytes"),
        ("", "is not an amount of bytes"),
        ("0", "a region of 0 bytes"),
        ("-1", "-1"),
        ("1.5B", "whole number"),
        ("100TiB", "a region of"),
        ("99999999999999999999TiB", "a region of"),
    ],
)
def test_a_size_that_cannot_be_meant_is_one_line_and_code_two(capsys, size, named):
    assert main(["doctor", f"--size={size}"]) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.err.count("\n") == 1
    assert not said.out


@pytest.mark.usefixtures("no_gpu")
def test_a_size_that_the_machine_does_not_have_is_a_finding_for_each_kind(capsys):
    """Nothing is touched, so asking is safe."""
    found = rows(capsys, "--size", "60TiB")
    for name in ("pageable", "shared", "named"):
        assert "60.0 TiB are asked for" in found[name]["reason"]
        assert "ask for at most" in found[name]["remedy"]
    assert "60.0 TiB are asked for in 'cache'" in found["file"]["reason"]


@pytest.mark.parametrize("folder", ["missing", "missing/deeper", "text"])
def test_a_folder_that_is_none_is_a_row_and_no_traceback(capsys, home, folder):
    (home / "text").write_text("no folder")
    code = main(["doctor", "--json", "--size", "64KiB", "--set", f"cache_dir={folder}"])
    assert code == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["regions"]}
    assert found["file"]["record"] is None
    assert repr(folder) in found["file"]["reason"]
    assert found["file"]["remedy"]
    assert not (home / "missing").exists()


def test_a_folder_that_cannot_be_written_is_a_row_and_no_traceback(capsys):
    """`/proc` refuses everybody, root too."""
    code = main(["doctor", "--json", "--size", "64KiB", "--set", "cache_dir=/proc"])
    assert code == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["regions"]}
    assert "'/proc'" in found["file"]["reason"]


@pytest.mark.parametrize(
    ("nodes", "named"), [("cuda:0", "'cuda:0'"), ("cuda:0=x", "'cuda:0=x'"), ("=0", "'=0'")]
)
@pytest.mark.usefixtures("no_gpu")
def test_nodes_of_devices_in_another_form_are_one_line_and_code_two(capsys, nodes, named):
    code, out, err = ask(capsys, "--set", f"memory.device_nodes={nodes}")
    assert code == 2
    assert f"device_nodes has {named}" in err
    assert err.count("\n") == 1
    assert not out


def test_the_node_of_the_device_is_tried_and_the_setting_wins(capsys, monkeypatch):
    gpu = FakeGpu(nearest=0)
    monkeypatch.setattr("stepwell.memory.gpu.find_gpu", lambda: gpu)
    _, out, _ = ask(capsys)
    assert re.search(r"^node 0 ", out, re.MULTILINE)
    assert re.search(r"^GPU +cuda:0, nearest to node 0$", out, re.MULTILINE)
    _, out, _ = ask(capsys, "--set", "memory.device_nodes=cuda:1=5, cuda:0=1023")
    assert re.search(r"^node 1023 +node refused: node 1023 is asked for", out, re.MULTILINE)
    assert re.search(r"^GPU +cuda:0, nearest to node 1023$", out, re.MULTILINE)


def test_a_device_that_does_not_say_its_node_is_not_said_to_be_near_one(capsys, monkeypatch):
    monkeypatch.setattr("stepwell.memory.gpu.find_gpu", lambda: FakeGpu(nearest=None))
    code, out, _ = ask(capsys)
    assert code == 0
    assert re.search(r"^GPU +cuda:0, nearest to an unknown node$", out, re.MULTILINE)


def test_with_a_device_pinned_is_registered_and_device_memory_is_a_row(capsys, monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr("stepwell.memory.gpu.find_gpu", lambda: gpu)
    found = rows(capsys)
    assert found["pinned"]["record"]["registered_bytes"] == 1 << 20
    assert found["device"]["record"]["size_bytes"] == 1 << 20
    assert gpu.registered == {}
    _, out, _ = ask(capsys)
    assert re.search(r"^pinned +1\.0 MiB.*registered with the GPU runtime$", out, re.MULTILINE)
    assert re.search(r"^device +1\.0 MiB, in pages of 64\.0 KiB$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "cache_dir=~nosuchuser"], "no folder for a file region"),
        (["--size", "9" * 5000], "too long for an amount of bytes"),
        (["--set", "memory.device_nodes=cuda:0=" + "9" * 5000], "device_nodes has"),
        (["--set", "memory.device_nodes=cuda:0=\u0663"], "device_nodes has"),
    ],
)
def test_hostile_arguments_are_one_line_and_code_two(capsys, arguments, said):
    assert main(["doctor", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
