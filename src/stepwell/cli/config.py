"""`stepwell config show`: every setting with its value and where that comes from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.base.settings import ReadSettings, read_settings


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and `--set`, which every verb that reads settings has."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting, such as pool.page_tokens=32; may be repeated",
    )


def read(parsed: argparse.Namespace) -> ReadSettings:
    """The settings that the arguments, the environment and the file give together."""
    overrides: dict[str, object] = {}
    for given in parsed.set:
        key, equals, value = given.partition("=")
        if not equals:
            raise ConfigError(f"--set {given!r} has no value", limit="KEY=VALUE")
        overrides[key] = value
    return read_settings(parsed.config, overrides=overrides)


def register(verbs: Any) -> None:
    """Adds the verb to the command line."""
    parser = verbs.add_parser("config", help="show the settings")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="every setting, its value and its source")
    show.add_argument("--json", action="store_true", help="one JSON object")
    add_options(show)
    show.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Prints the settings."""
    values = read(parsed).values
    if parsed.json:
        rows = {one.key: {"value": one.value, "source": one.source} for one in values}
        print(json.dumps(rows, indent=2))
        return 0
    key_width = max(len(one.key) for one in values)
    value_width = max(len(repr(one.value)) for one in values)
    for one in values:
        shown = repr(one.value)
        print(f"{one.key:{key_width}}  {shown:{value_width}}  {one.source:10}  # {one.text}")
    return 0
