"""Models for the engine: tiny ones with random weights, and the real one of the demo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stepwell.base.settings import Settings
from stepwell.cli.demo_model import model_folder


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
