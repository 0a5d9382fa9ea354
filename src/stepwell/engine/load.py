"""Loads a decoder and its tokenizer from a folder, and converts one that a package ships as GGUF.

Owns: what is asked of transformers when it loads. Must not know: the demo, the cache. Nothing here
reaches for a network: a folder is complete, or the error says what is missing.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from stepwell.base.errors import InputError


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run, with its tokenizer."""

    model: Any
    tokenizer: Any


def load_model(folder: Path, dtype: str = "float32") -> LoadedModel:
    """Loads a folder that `save_pretrained` wrote.

    Args:
        folder: with `config.json`, weights and tokenizer.
        dtype: of the weights in memory.

    Raises:
        InputError: the folder is not there, or not complete.
    """
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json",
            limit="a folder with a Hugging Face model",
            remedy="pass the folder that holds config.json, weights and tokenizer files",
        )
    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(
            f"the model in {folder} cannot be loaded: {error}",
            remedy="the folder may be damaged or incomplete: remove it and fetch or convert it again",
        ) from error
    return LoadedModel(model.eval(), tokenizer)


def convert_gguf(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Writes a GGUF model as a folder that `load_model` reads: whole, or not at all.

    The folder is written beside the target and renamed when complete, so a conversion that is killed
    leaves nothing under the target's name, and of two at once the second finds the first's.

    Args:
        source: the GGUF file.
        target: folder to make; its parent is created.
        progress: told what begins; reading the weights also shows transformers' own bar.

    Raises:
        InputError: the file cannot be read, or the disk is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        making = Path(tempfile.mkdtemp(prefix=_making(target), dir=target.parent))
        making.chmod(0o755)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{target.parent} cannot be written: {error}",
            remedy="set cache_dir to a folder that can",
        ) from error
    try:
        progress("1 of 3: reading the packaged weights, about 20 s")
        options = {"gguf_file": source.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(
            str(source.parent), dtype=torch.float32, **options
        )
        # transformers marks the weights as quantised although it has unpacked them, and would then
        # refuse to save them.
        del model.config.quantization_config
        del model.hf_quantizer
        model.is_quantized = False
        progress("2 of 3: writing them as float32, about 540 MB")
        model.save_pretrained(str(making))
        progress("3 of 3: converting the tokenizer, about 5 s")
        AutoTokenizer.from_pretrained(str(source.parent), **options).save_pretrained(str(making))
        try:
            making.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{source} could not be converted into {target}: {error}",
            remedy="it needs about 600 MB of disk and 2 GB of memory; set cache_dir to another disk",
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _making(target: Path) -> str:
    """How the names of folders begin that conversions on this machine write: up to the process id."""
    return f"{target.name}.making-{platform.node() or 'here'}-{os.getpid()}-"


def _remove_stale(target: Path) -> None:
    """Removes what killed conversions of this machine left; others may still be at work."""
    begin = _making(target).rsplit("-", 2)[0] + "-"
    for left in target.parent.glob(f"{target.name}.making-*"):
        process = left.name.removeprefix(begin).split("-")[0]
        if left.name.startswith(begin) and process.isdigit() and not _alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
