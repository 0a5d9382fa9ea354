"""Output that nobody takes: closed pipes, full disks, no streams at all. Never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = f"{sys.executable} -m stepwell.cli.main"
# Buffered, as for everybody who did not ask otherwise: what is left is written when the program ends.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}


def run(shell: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", shell],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("verb", ["config show", "config show --json", "--help", "--version"])
def test_a_reader_that_has_left_is_no_error_of_ours(verb: str) -> None:
    done = run(f"({COMMAND} {verb}; echo code $? >&2) | true")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.strip() in ("code 141", "code 0")


def test_a_full_disk_is_one_line() -> None:
    done = run(f"{COMMAND} config show > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "stepwell: the output cannot be written: No space left on device\n"


def test_without_stderr_the_output_is_clean() -> None:
    done = run(f"{COMMAND} config show --set pool.page_tokens=0 2>&-")
    assert (done.returncode, done.stdout) == (2, "")
