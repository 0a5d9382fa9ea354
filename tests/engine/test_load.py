"""Loading and converting models: whole, or not at all."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from stepwell.base.errors import InputError
from stepwell.base.settings import Settings
from stepwell.cli.demo_model import model_folder
from stepwell.engine.load import convert_gguf, load_model


def test_a_damaged_folder_is_refused_with_a_remedy(tmp_path: pathlib.Path, llama: Any) -> None:
    llama.save_pretrained(str(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="remove it"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        load_model(tmp_path)


def test_what_cannot_be_converted_leaves_nothing(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    target = tmp_path / "cache" / "model"
    with pytest.raises(InputError, match=r"broken\.gguf could not be converted"):
        convert_gguf(source, target, print)
    assert list(target.parent.iterdir()) == []


def test_what_killed_conversions_left_is_removed(tmp_path: pathlib.Path) -> None:
    """A process that is dead left a folder; one that lives has a folder that must stay."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    here = platform.node()
    dead = tmp_path / f"model.making-{here}-{done.stdout.strip()}-x"
    elsewhere = tmp_path / f"model.making-other.{here}-{done.stdout.strip()}-x"
    alive = tmp_path / f"model.making-{here}-{os.getpid()}-y"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    with pytest.raises(InputError):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "model", print)
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()


def test_the_converted_model_is_the_packaged_one() -> None:
    """Same weights as transformers reads from the package itself, in float32, and not marked as quantised."""
    loaded = load_model(model_folder(Settings()))
    assert isinstance(loaded.model, LlamaForCausalLM)
    assert loaded.model.dtype == torch.float32
    assert not hasattr(loaded.model.config, "quantization_config")
    assert loaded.tokenizer.decode(loaded.tokenizer("stepwell").input_ids) == "stepwell"
