"""The command `stepwell`: reads arguments, calls a verb, turns errors into one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stepwell import __version__
from stepwell.base.errors import StepwellError
from stepwell.cli import config, demo

_VERBS = (demo, config)


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
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except StepwellError as error:
        print(f"stepwell: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stepwell: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has left; a closed stdout must not raise once more at exit.
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
