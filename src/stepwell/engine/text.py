"""The text of an answer, token by token, and the texts that end it.

Owns: what of the text may be handed out already. Must not know: models, requests, which tokenizer it is.
Neighbours: whoever turns an engine's tokens into text.

Two things are held back: characters whose bytes have not all come, and what may become a stop text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepwell.base.errors import InputError, MisuseError

MAX_STOPS = 16
"""Every stop text costs a step for each character of the answer; more than these are a list of words."""

_REPLACEMENT = "\ufffd"
_CHARACTER_TOKENS = 4
"""UTF-8 has at most 4 bytes a character, and a token has at least one byte."""


class TextStream:
    """Hands out the text of an answer as its tokens come, never a part that could still change.

    What was handed out and `finish` give together is `decode` of all tokens, or what of it stands before
    the stop text. A character is a code point: the parts of a composed emoji come one by one.

    Only a few tokens are decoded for each one that comes. The new ones are decoded behind those that came
    last, and what is longer than the text of those alone is new: tokenizers that take a space from the start
    of a text then take it from both. That is the way of `detokenize_incrementally` in vLLM and of
    `decode_token` in Hugging Face's text-generation-inference (prefix and read offset). Different
    here: a text that ends in U+FFFD is handed out up to there, and after 4 tokens up to the last one.

    A decoder that judges a run of byte tokens as one, as that of Llama 2, may replace characters that were
    handed out when bytes behind them are invalid; then only the invalid rest comes out as U+FFFD.

    The answer ends with the first character that completes a stop text, wherever the borders of tokens are:
    of `"bcd"` and `"abcde"`, the first ends `abcde`. Of those that are complete at once it is the longest.

    Args:
        decode: token ids to text, without cleaning up spaces; bytes that are no character become U+FFFD. May
            leave out special tokens.
        stop: texts that end the answer and are not part of it.

    Raises:
        InputError: too many stop texts, an empty one, or one that is no text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._watches = [_Watch(text) for text in _checked(stop)]
        # The last tokens, of which the first `_context` were handed out whole; their text, and how many of
        # its characters were read.
        self._window: list[int] = []
        self._context = 0
        self._decoded = ""
        self._read = 0
        # How many tokens in a row the text has ended in U+FFFD.
        self._broken = 0
        self._held = ""
        self._parts: list[str] = []
        self._stopped: str | None = None
        self._ended = False

    @property
    def stopped(self) -> str | None:
        """The stop text that ended the answer."""
        return self._stopped

    @property
    def text(self) -> str:
        """Everything that was handed out; joined anew each time."""
        return "".join(self._parts)

    def push(self, token: int) -> str:
        """Takes the next token.

        Returns:
            The text that is safe to hand out now; often empty.

        Raises:
            MisuseError: a stop text has ended the answer, or `finish` has.
        """
        if self._ended:
            raise MisuseError(
                "the answer has ended already", remedy="look at `stopped` after each token"
            )
        self._window.append(token)
        text = self._decode(self._window)
        # Twice, because a lone space decodes to nothing where it starts a text, and two of them do not.
        if text == self._decoded and not self._decode([token, token]):
            self._window.pop()
            return ""
        self._decoded = text
        self._broken = self._broken + 1 if text.endswith(_REPLACEMENT) else 0
        end = self._complete(text)
        new = text[self._read : end]
        self._read = max(self._read, end)
        if end == len(text) and new:
            self._move_to(self._context)
            self._read, self._context = len(self._decoded), len(self._window)
        elif self._broken >= _CHARACTER_TOKENS:
            # An incomplete character has at most 3 bytes, so it is in the last 3 tokens.
            self._move_to(len(self._window) - _CHARACTER_TOKENS + 1)
            self._read, self._context = max(0, len(self._decoded) - 1), 0
        return self._hand_out(new)

    def finish(self) -> str:
        """Ends the answer for another reason than a stop text.

        Returns:
            What was held back, an incomplete character as U+FFFD; empty when the answer has ended before.
        """
        if self._ended:
            return ""
        out = self._hand_out(self._decoded[self._read :])
        if not self._ended:
            self._ended = True
            self._parts.append(self._held)
            out += self._held
        self._held = ""
        return out

    def _complete(self, text: str) -> int:
        """How many characters of the window's text no later byte can change."""
        # Decoders give one U+FFFD for an incomplete character, or one for each of its bytes.
        if self._broken < _CHARACTER_TOKENS:
            return len(text.rstrip(_REPLACEMENT))
        # Too many tokens for one character: the earlier ones are really invalid, or really U+FFFD.
        return len(text) - 1

    def _move_to(self, start: int) -> None:
        del self._window[:start]
        self._decoded = self._decode(self._window)

    def _hand_out(self, new: str) -> str:
        """Of what is held and new, what cannot be part of a stop text."""
        text = self._held + new
        for place, character in enumerate(new, len(self._held) + 1):
            complete = [watch.stop for watch in self._watches if watch.step(character)]
            if complete:
                self._stopped = max(complete, key=len)
                self._ended = True
                self._held = ""
                out = text[: place - len(self._stopped)]
                self._parts.append(out)
                return out
        keep = max((watch.matched for watch in self._watches), default=0)
        out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._parts.append(out)
        return out


def _checked(stop: Sequence[str]) -> list[str]:
    texts = [] if isinstance(stop, str | bytes) else list(stop)
    if isinstance(stop, str | bytes) or not all(isinstance(text, str) and text for text in texts):
        raise InputError(
            f"stop texts are {stop!r}",
            limit="a list of texts that are not empty",
            remedy="put a single one into a list",
        )
    if len(texts) > MAX_STOPS:
        raise InputError(
            f"{len(texts)} stop texts", limit=f"{MAX_STOPS}", remedy="keep the shortest ones"
        )
    return texts


class _Watch:
    """Looks for one stop text, character by character (Knuth, Morris and Pratt 1977).

    Attributes:
        stop: the text.
        matched: how many of its first characters the text read so far ends with.
    """

    __slots__ = ("_shorter", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # For each beginning of the stop text, the longest shorter one that it ends with.
        self._shorter = [0] * len(stop)
        length = 0
        for place in range(1, len(stop)):
            while length and stop[place] != stop[length]:
                length = self._shorter[length - 1]
            length += stop[place] == stop[length]
            self._shorter[place] = length

    def step(self, character: str) -> bool:
        """Reads one character; whether the stop text is complete with it."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)
