"""The command `stepwell`: reads arguments, calls a verb, turns errors into one line and exit code 2."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from stepwell import __version__
from stepwell.base.errors import StepwellError
from stepwell.cli import config, demo, doctor
from stepwell.cli.output import say

_VERBS = (demo, doctor, config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Returns:
        0, or 1 if the verb found something wrong, or 2 for input that cannot be meant.
    """
    parser = argparse.ArgumentParser(
        prog="stepwell", description="Keeps the KV cache of language-model prompts."
    )
    parser.add_argument("--version", action="version", version=f"stepwell {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in _VERBS:
        verb.register(verbs)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have letters that a terminal lacks
    try:
        try:
            parsed = parser.parse_args(arguments)
            code = int(parsed.run(parsed))
        finally:
            # Here and not at exit, where nobody could catch what a full disk or a closed pipe raises.
            if sys.stdout is not None:
                sys.stdout.flush()
    except StepwellError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        _silence()
        return 141
    except OSError as error:
        _silence()
        return _fail(f"the output cannot be written: {error.strerror}", 1)
    return code


def _fail(text: str, code: int) -> int:
    say(f"stepwell: {text}")
    return code


def _silence() -> None:
    """Lets what is still buffered for a stdout that cannot take it go nowhere at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
