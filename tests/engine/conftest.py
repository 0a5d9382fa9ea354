"""Models for the engine: tiny ones with random weights, and the real one of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stepwell.base.settings import EngineSettings, PoolSettings, Settings
from stepwell.cache.pool.limits import Limits
from stepwell.cli.demo_model import model_folder
from stepwell.core.geometry import Geometry
from stepwell.engine.engine import Engine
from stepwell.engine.runner import Computed


def tiny_config(**changes: Any) -> dict[str, Any]:
    # Untied embeddings: with tied ones a greedy answer repeats its input and hides even a zeroed cache.
    return {
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    } | changes


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Several workers share the machine; more threads than cores make torch crawl.
    torch.set_num_threads(1)


@pytest.fixture
def llama() -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**tiny_config())).eval()


@pytest.fixture
def qwen3() -> Any:
    # Wide weights and many words: every answer of the parity test then has ten distinct tokens and more.
    torch.manual_seed(5)
    config = Qwen3Config(**tiny_config(initializer_range=0.2, vocab_size=997))
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def smollm2() -> Any:
    folder = model_folder(Settings())
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


class Recorder:
    """Stands before the runner, asks for the logits of all positions and keeps them by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inner = engine.runner
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        engine.runner = engine._answering._runner = self

    def calls(self, counts: Any) -> Any:
        return self.inner.calls(counts)

    def fence(self) -> Any:
        return self.inner.fence()

    def run(self, view: Any, tokens: list[int], keep: Sequence[int]) -> Computed:
        computed = self.inner.run(view, tokens, range(len(tokens)))
        names = {state.row: name for name, state in self.engine.pool._held.requests.items()}
        first = 0
        for row, start, count in view.batch:
            rows = self.logits.setdefault(names[row], {})
            for offset in range(count):
                rows[start + offset] = computed.logits[first + offset].clone()
            first += count
        return Computed(computed.logits[list(keep)], computed.states)

    def close(self) -> None:
        self.inner.close()


class Parity:
    """The engine beside transformers' own attention, over one model.

    The bar is the noise of transformers itself: how much its own logits move, in the same run, when the
    same tokens pass through it in other pieces.
    """

    page_tokens = 4

    def __init__(self, model: Any) -> None:
        self.model = model
        self._truth: dict[tuple[int, ...], tuple[torch.Tensor, float]] = {}

    def engine(self, frames: int, **changes: Any) -> tuple[Engine, Recorder]:
        geometry = Geometry.from_hf_config(self.model.config, "float32")
        one = PoolSettings(self.page_tokens, 1 << 32, 1, 4096)
        frame_bytes = Limits.of(geometry, one).frame_bytes
        engine_changes = {
            name: changes.pop(name) for name in ("step_tokens", "replay_tokens") if name in changes
        }
        sizes = {"requests": 32, "positions": 512} | changes
        pool = PoolSettings(self.page_tokens, frames * frame_bytes, **sizes)
        limits = EngineSettings(**({"step_tokens": 37, "batch_requests": 16} | engine_changes))
        engine = Engine(self.model, Settings(pool=pool, engine=limits))
        # A page's frame must not say where it stands in its request: hand frames out in any order.
        np.random.default_rng(3).shuffle(engine.pool._held.frames._stack)
        return engine, Recorder(engine)

    def reference(self, tokens: list[int], pieces: Sequence[int] = ()) -> torch.Tensor:
        """Logits of transformers' own attention at every position, computed at once or in pieces."""
        cache, rows, first = DynamicCache(config=self.model.config), [], 0
        for size in pieces or [len(tokens)]:
            with torch.inference_mode():
                ids = torch.tensor([tokens[first : first + size]])
                out = self.model(ids, past_key_values=cache, use_cache=True)
            rows.append(out.logits[0].float())
            first += size
        return torch.cat(rows)

    def truth(self, tokens: Sequence[int]) -> tuple[torch.Tensor, float]:
        """What transformers says at every position, and how much it wavers."""
        key = tuple(tokens)
        if key not in self._truth:
            half = len(key) // 2
            ids = list(key)
            logits = self.reference(ids)
            again = self.reference(ids, [half] + [1] * 6 + [len(key) - half - 6])
            self._truth[key] = logits, float((again - logits).abs().max())
        return self._truth[key]

    def worst(self, recorder: Recorder, sequences: dict[str, Sequence[int]]) -> tuple[float, float]:
        """The largest difference of any logit that the engine computed, and the noise."""
        worst = noise = 0.0
        for name, tokens in sequences.items():
            truth, wavers = self.truth(tokens)
            noise = max(noise, wavers)
            for position, row in recorder.logits[name].items():
                worst = max(worst, float((row - truth[position]).abs().max()))
        return worst, noise


@pytest.fixture
def parity_of() -> type[Parity]:
    return Parity
