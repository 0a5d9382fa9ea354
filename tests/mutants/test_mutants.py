"""Every mutant of mutants.toml dies by the test that it names."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MUTANTS = tomllib.loads((pathlib.Path(__file__).parent / "mutants.toml").read_text())
WRONG_WAYS_TO_DIE = ("ImportError", "ModuleNotFoundError", "SyntaxError", "TypeError", "NameError")


def run(test: str, source: pathlib.Path, report: pathlib.Path) -> int:
    """The exit code of one test over a source tree; its failures go to `report`."""
    environment = dict(os.environ, PYTHONPATH=str(source), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, f"--junitxml={report}", test],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=240,
        check=False,
    ).returncode


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_mutant_is_killed(name: str, tmp_path: pathlib.Path) -> None:
    mutant = MUTANTS[name]
    source = tmp_path / "src"
    # With what is compiled already, but for the file that changes: half the time of a mutant is compiling.
    stale = f"{pathlib.Path(mutant['file']).stem}.*.pyc"
    shutil.copytree(
        ROOT / "src" / "stepwell",
        source / "stepwell",
        ignore=shutil.ignore_patterns(stale, "*.pyc.*"),
    )
    file = source / "stepwell" / mutant["file"]
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant["find"]) == 1, f"{mutant['find']!r} must stand once in {file.name}"
    file.write_text(text.replace(mutant["find"], mutant["replace"]), encoding="utf-8")
    report = tmp_path / "report.xml"
    assert run(mutant["test"], source, report) == 1, f"{name} survives {mutant['test']}"
    failures = [
        f"{case.get('classname')}.{case.get('name')}: {(found.get('message') or '')[:300]}"
        for case in ET.parse(report).iter("testcase")
        for found in (*case.findall("failure"), *case.findall("error"))
    ]
    assert failures
    wrong = [line for line in failures if any(way in line for way in WRONG_WAYS_TO_DIE)]
    assert not wrong, wrong


def test_the_mutated_source_is_what_a_test_imports(tmp_path: pathlib.Path) -> None:
    """Else every mutant would be judged over the source as it is."""
    source = tmp_path / "src"
    (source / "stepwell").mkdir(parents=True)
    (source / "stepwell" / "__init__.py").write_text("MARK = 'mutated'\n")
    test = tmp_path / "test_mark.py"
    test.write_text("import stepwell\ndef test_mark(): assert stepwell.MARK == 'mutated'\n")
    assert run(str(test), source, tmp_path / "report.xml") == 0
