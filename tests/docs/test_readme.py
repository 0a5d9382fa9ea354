"""The README's Python examples run as they stand, in a fresh interpreter, and print what they say."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pool_example_reuses_two_pages() -> None:
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 12
    printed = run("import sys; sys.modules['torch'] = None\n" + EXAMPLES[0]).splitlines()
    assert [line.partition(",")[0] for line in printed] == ["Ready(cached=0", "Ready(cached=8"]


def test_the_engine_example_reuses_its_prompt() -> None:
    cold, warm = run(EXAMPLES[1]).splitlines()
    assert "reused_tokens=0," in cold
    assert "reused_tokens=16," in warm
    answers = [re.search(r"tokens=(\([\d, ]+\))", line).group(1) for line in (cold, warm)]
    assert answers[0] == answers[1]


def test_the_sampling_example_says_the_same_every_time_and_stops() -> None:
    printed = run(EXAMPLES[2])
    answer, samples = printed.rsplit("[", 1)
    assert answer
    assert "3." not in answer
    assert samples.count(", ") >= 2
    assert run(EXAMPLES[2]) == printed


def test_the_host_example_gets_its_first_prompt_back() -> None:
    first, _, again, _stats = run(EXAMPLES[4]).splitlines()
    assert first.startswith("0 reused, 0 of them")
    reused, loaded = (int(word) for word in again.split() if word.isdigit())
    assert reused == 96
    assert loaded > 0


def test_the_memory_example_frees_frames_only_after_the_transfer() -> None:
    frames, *refusals, during, after = run(EXAMPLES[5]).splitlines()
    assert frames.partition(";")[0] == "16 frames"
    assert bool(refusals) is frames.endswith("False")
    assert during == "13 free while the transfer reads"
    assert after == "16 free"


def test_a_model_of_ones_own_says_how_much_was_reused() -> None:
    assert run(EXAMPLES[3]).startswith("0 of 100 not_sealed (")
