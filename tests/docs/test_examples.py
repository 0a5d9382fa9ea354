"""Every example runs as it stands, and says what it is to show."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: pathlib.Path) -> None:
    SAYS[path.stem](run(path))


def run(path: pathlib.Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def reuses(lines: list[str]) -> None:
    reused = [line.split()[1] for line in lines]
    assert reused[0] == "0"
    assert "0" not in reused[1:]


def shares(lines: list[str]) -> None:
    assert lines == [
        "frames: 16",
        *(f"filled with {value} {value}" for value in (1, 2, 3)),
        "late: ['slow'] ('slow',)",
        "free while it lasts: 13",
        "free afterwards: 16",
    ]


SAYS = {"decode_loop": reuses, "byte_engine": reuses, "shared_frames": shares}
