"""`stepwell config show`, and how the command line reports what cannot be meant."""

from __future__ import annotations

import json
import pathlib

import pytest

from stepwell.cli.main import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_value_comes_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "mine.toml").write_text('[pool]\npage_tokens = 32\ncapacity_bytes = "1MiB"\n')
    monkeypatch.setenv("STEPWELL_POOL__REQUESTS", "7")
    arguments = ["config", "show", "--json", "--config", "mine.toml"]
    assert main([*arguments, "--set", "engine.step_tokens=99"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pool.page_tokens"] == {"value": 32, "source": "mine.toml"}
    assert shown["pool.capacity_bytes"]["value"] == 1 << 20
    assert shown["pool.requests"] == {"value": 7, "source": "environment STEPWELL_POOL__REQUESTS"}
    assert shown["engine.step_tokens"] == {"value": 99, "source": "override"}
    assert shown["pool.positions"]["source"] == "default"


def test_the_table_has_a_line_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["config", "show", "--json"]) == 0
    assert len(lines) == len(json.loads(capsys.readouterr().out))
    assert all("default" in line and "#" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "pool.page_tokns=3"], "did you mean 'pool.page_tokens'?"),
        (["--set", "pool.page_tokens"], "KEY=VALUE"),
        (["--set", "pool.page_tokens=none"], "pool.page_tokens is 'none'"),
        (["--set", "pool.page_tokens=0"], "1 or more"),
        (["--config", "missing.toml"], "missing.toml cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_code_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["config", "show", *arguments]) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.err.count("\n") == 1
    assert not said.out
