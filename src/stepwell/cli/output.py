"""What a person is told beside the output: to stderr, and to nobody if there is none."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line for whoever watches; never into stdout, which a program may read."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)
