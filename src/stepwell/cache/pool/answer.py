"""What the pool answers when a request asks for room: values, not exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto

from stepwell.core.reasons import Reason


class Flags(Flag):
    """What a request does not want."""

    NONE = 0
    NO_READ = auto()
    """Reuse nothing: every token is computed, and no page is shared with a request that computed it too.
    What it computes becomes reusable up to the first page that is there already."""
    NO_WRITE = auto()
    """Seal nothing: no other request can reuse what this one computes."""
    NEEDS_LOGITS = auto()
    """Reuse nothing, since the logits of every token of the prompt are wanted."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The request has its frames.

    Attributes:
        cached: tokens at the start of the prompt that need no computing.
        reason: why not more of them.
        checkpoints: positions in the prompt, ascending, at which to end a step: the state there is kept if
            the request commits up to it exactly. Missing one costs reuse later, nothing else. Empty without
            state groups.
        loaded: of the cached tokens, those that a tier brought for this request.
    """

    cached: int
    reason: Reason
    checkpoints: tuple[int, ...] = ()
    loaded: int = 0


@dataclass(frozen=True, slots=True)
class Busy:
    """Not now: try again when another request has closed. Nothing was taken.

    Attributes:
        short_frames: frames that are missing even if every page that may leave did; 0 when rows are.
        short_rows: rows of the request table that are missing.
    """

    short_frames: int = 0
    short_rows: int = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """Part of the prompt is coming from a tier: open again to hear how far it is, or `give_up`.

    The frames that it comes into are taken, those for the rest of the prompt are not.

    Attributes:
        tokens: at the start of the prompt that will be cached, if all of it comes.
    """

    tokens: int


@dataclass(frozen=True, slots=True)
class NeverFits:
    """Not even an empty pool could serve it. Nothing was taken.

    Attributes:
        text: what was asked for, the limit, and the setting that raises it.
    """

    text: str


Answer = Ready | Loading | Busy | NeverFits
