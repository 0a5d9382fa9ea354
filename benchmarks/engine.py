"""The engine against transformers alone: the same weights, prompts and threads, taking turns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Candidate, interleaved
from benchmarks.rows import Row
from benchmarks.world import World
from stepwell.base.settings import EngineSettings, PoolSettings, Settings, cache_dir, read_settings

_SUFFIX = 32
_STEPS = 8
_NAMES = ("engine.cold", "engine.decode", "engine.hit")
_BARS = (1.15, 1.5, 1.3)


def rows(world: World) -> Iterator[Row]:
    """Cold prefill, decode step and device hit."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        for name, bar in zip(_NAMES, _BARS, strict=True):
            yield Row(name, "ms", None, bar=bar, note="torch and transformers are not installed")
        return
    bench = _Bench(world.quick)
    try:
        yield bench.cold()
        yield bench.decode()
        yield bench.hit()
    finally:
        bench.engine.close()


def _converted() -> Path | None:
    """The folder of the demo's model, if it was converted before; nothing is converted for a figure."""
    from stepwell.cli.demo_model import FOLDER

    folder = cache_dir(read_settings().settings) / "models" / FOLDER
    return folder if (folder / "config.json").is_file() else None


def _model() -> tuple[Any, str]:
    """A model on the CPU in float32, and what to call it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from stepwell.engine.load import load_model

    folder = _converted()
    if folder is not None:
        disable_progress_bar()
        return load_model(folder).model, "SmolLM2-135M"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49_152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval(), "random weights in the shape of SmolLM2-135M"


class _Peer:
    """transformers alone: a model and the cache that it fills.

    Args:
        model: with the attention that transformers chose for it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.cache: Any = None

    def clear(self) -> None:
        """An empty cache."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self._model.config)

    def run(self, tokens: list[int]) -> int:
        """Computes tokens after those in the cache; returns the likeliest next one."""
        import torch

        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.tensor([tokens]),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[0]
            return int(torch.argmax(logits.float(), dim=-1))


class _Bench:
    """The engine and its peer with one model each.

    Args:
        quick: shorter prompts, fewer rounds.
    """

    def __init__(self, quick: bool) -> None:
        import torch

        from stepwell.engine.engine import Engine

        self._quick = quick
        self._prompt = 256 if quick else 1_504
        model, name = _model()
        self._about = f"{name}, float32, {torch.get_num_threads()} torch threads for both"
        self._vocabulary = int(model.config.vocab_size)
        self._rng = np.random.default_rng(135)
        # The runner changes its model's attention, so the peer has a copy.
        self.peer = _Peer(copy.deepcopy(model))
        pool = PoolSettings(page_tokens=16, capacity_bytes=1 << 29, requests=8, positions=4096)
        self.engine = Engine(model, Settings(pool=pool, engine=EngineSettings(step_tokens=2048)))

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(3, self._vocabulary, count).tolist()
        return tokens

    def _first(self, prompt: list[int]) -> None:
        """The engine's way to the first token of an answer."""
        self._record = self.engine.generate(prompt, max_tokens=1)

    def cold(self) -> Row:
        """A prompt that nobody has seen, up to the first token."""
        prompts = [self._tokens(self._prompt) for _ in range(16)]
        ours, theirs = iter(prompts), iter(prompts)

        def forgetful() -> list[int]:
            self.peer.clear()
            return next(theirs)

        candidates = {
            "ours": Candidate(self._first, lambda: next(ours)),
            "theirs": Candidate(self.peer.run, forgetful),
        }
        samples = interleaved(candidates, rounds=1 if self._quick else 3)
        assert self._record.reused_tokens == 0
        note = f"{self._prompt:,} tokens never seen, to the first token, against one forward call"
        return self._row(0, samples, note)

    def decode(self) -> Row:
        """One more token of an answer."""
        prompt = self._tokens(self._prompt)
        name = self.engine.add(prompt, max_tokens=1_000)
        assert isinstance(name, str), "the only request"
        token = self.engine.step()[0].token
        assert token is not None
        self.peer.clear()
        answers = [token], [self.peer.run(prompt)]

        def step(_: object) -> None:
            for _call in range(_STEPS):
                answers[0].append(self.engine.step()[0].token or 0)

        def their_step(_: object) -> None:
            for _call in range(_STEPS):
                answers[1].append(self.peer.run(answers[1][-1:]))

        candidates = {
            "ours": Candidate(step, calls=_STEPS),
            "theirs": Candidate(their_step, calls=_STEPS),
        }
        samples = interleaved(candidates, rounds=2 if self._quick else 9)
        self.engine.cancel(name)
        same = sum(a == b for a, b in zip(*answers, strict=True))
        note = (
            f"one request, from {self._prompt:,} tokens on, against a forward call over DynamicCache; "
            f"{same} of {len(answers[0])} tokens are the same"
        )
        return self._row(1, samples, note)

    def hit(self) -> Row:
        """A prompt of which all but the end is there, up to the first token."""
        prefix = self._tokens(self._prompt)
        suffixes = [self._tokens(_SUFFIX) for _ in range(32)]
        self._first([*prefix, *self._tokens(_SUFFIX)])
        self.peer.clear()
        self.peer.run(prefix)
        ours, theirs = iter(suffixes), iter(suffixes)
        candidates = {
            "ours": Candidate(self._first, lambda: [*prefix, *next(ours)]),
            "theirs": Candidate(
                self.peer.run,
                lambda: next(theirs),
                lambda: self.peer.cache.crop(-_SUFFIX),
            ),
        }
        samples = interleaved(candidates, rounds=2 if self._quick else 9)
        assert self._record.reused_tokens == self._prompt
        note = (
            f"{self._prompt:,} tokens hit and {_SUFFIX} computed, to the first token, against a forward "
            "call of those over a ready cache"
        )
        return self._row(2, samples, note)

    def _row(self, number: int, samples: Any, note: str) -> Row:
        return Row(
            _NAMES[number],
            "ms",
            samples.median_s("ours") * 1e3,
            samples.median_s("theirs") * 1e3,
            samples.ratio("ours", "theirs"),
            bar=_BARS[number],
            note=f"{note}; {self._about}",
        )
