"""Text of an answer token by token: borders of characters and of stop texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from stepwell.base.errors import InputError, MisuseError
from stepwell.base.settings import Settings
from stepwell.cli.demo_model import model_folder
from stepwell.engine.text import MAX_STOPS, TextStream

Decode = Callable[[list[int]], str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(model_folder(Settings())))


def toy(pieces: list[bytes]) -> Decode:
    """A byte-level decoder as SmolLM2's, without its tokenizer."""
    return lambda tokens: b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")


LETTER = {character: n for n, character in enumerate("abcdefgh ")}
SPELL = toy([character.encode() for character in LETTER])


def spelled(text: str) -> list[int]:
    return [LETTER[character] for character in text]


def run(decode: Decode, tokens: list[int], stop: list[str]) -> tuple[str, str | None]:
    """Pushes until the stream stops; checks what must hold after every token."""
    stream = TextStream(decode, stop)
    out = ""
    for token in tokens:
        out += stream.push(token)
        assert stream.text == out
        if stream.stopped is not None:
            break
    out += stream.finish()
    assert stream.text == out
    assert stream.finish() == ""
    return out, stream.stopped


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """What stands before the stop text that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


TEXTS = [
    "The quick brown fox, don't you think?  Two spaces,\n\n\tand a tab.",
    "日本語のテキスト。漢字と仮名 한국어 ไทย العربية हिन्दी",
    "🤦🏽‍♂️👨‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇯🇵 end",
    "e\u0301 n\u0303 u\u0308 Z\u0351\u036b\u0343a\u0328l\u0321go 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "a \ufffd real one \ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd and more \ufffd",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pushes_give_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer.decode)
    pushed = [stream.push(token) for token in ids]
    assert "".join(pushed) + stream.finish() == text == stream.text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in pushed)
        # Nothing is late: whatever is a complete text is out.
        for n in range(1, len(ids) + 1):
            whole = tokenizer.decode(ids[:n])
            assert "".join(pushed[:n]) == whole.rstrip("\ufffd")


@pytest.mark.parametrize("text", TEXTS[:4])
def test_every_stop_text_in_a_real_text(tokenizer: Any, text: str) -> None:
    """Of every place and length: most begin within one token and end within another."""
    ids = tokenizer.encode(text)
    for begin in range(0, len(text), 2):
        for length in (1, 3, 8):
            stop = [text[begin : begin + length], "never there"]
            assert run(tokenizer.decode, ids, stop) == expected(text, stop)


@pytest.mark.parametrize("skip", [False, True])
def test_random_tokens_of_a_real_tokenizer(tokenizer: Any, skip: bool) -> None:
    """Half of them are single bytes or special tokens, which make invalid text most of the time."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip))

    dice = random.Random(7)
    odd = [n for n in range(600) if "\ufffd" in tokenizer.decode([n])] + list(range(6)) * 10
    for _ in range(300):
        ids = [
            dice.choice(odd) if dice.random() < 0.5 else dice.randrange(len(tokenizer))
            for _ in range(dice.randrange(30))
        ]
        whole = decode(ids)
        assert run(decode, ids, []) == (whole, None)
        place = dice.randrange(len(whole) + 1)
        stop = [whole[place : place + 3], whole[place + 1 : place + 3], "e"]
        stop = [one for one in stop if one]
        assert run(decode, ids, stop) == expected(whole, stop)


PIECES = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=3),
        st.sampled_from([bytes([byte]) for byte in "é漢🤦\ufffd".encode()]),
        st.sampled_from([b"a", b"ab", b" b", b"", "é".encode(), b"a\xf0\x9f", b"\xa6b"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(
    PIECES,
    st.lists(st.integers(0, 7), max_size=30),
    st.lists(st.text("ab é漢\ufffd", min_size=1, max_size=4), max_size=3),
)
@example([b"\x80"], [0] * 30, ["\ufffd" * 20])
@example([b"\xe6", b""], [0, 1, 1, 1, 1, 0], [])
@example([b"\xf0", b"\x9f", b"\x98", b"\x80\xe6", b"\xbc", b"\xa2"], [0, 1, 2, 3, 4, 5], [])
def test_pushes_and_finish_give_what_stands_before_the_stop(
    pieces: list[bytes], tokens: list[int], stop: list[str]
) -> None:
    decode = toy(pieces)
    tokens = [token % len(pieces) for token in tokens]
    assert run(decode, tokens, stop) == expected(decode(tokens), stop)


@settings(deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_nothing_is_held_back_that_cannot_become_a_stop_text(text: str, stop: list[str]) -> None:
    """After every character exactly the longest end that begins a stop text is missing."""
    stream = TextStream(SPELL, stop)
    for n, token in enumerate(spelled(text), 1):
        stream.push(token)
        if stream.stopped is not None:
            break
        begun = text[:n]
        held = max(
            (k for one in stop for k in range(len(one)) if begun.endswith(one[:k])), default=0
        )
        assert stream.text == begun[: n - held]


def sentencepiece(pieces: list[str]) -> Decode:
    """The decoder of Llama 2: spaces are written ▁, one is taken from the start, bytes are tokens."""
    made = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return lambda tokens: made.decode([pieces[token] for token in tokens])


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["▁", "▁▁", "▁a", "a", "▁b", ".", "🤦🏽", "漢é", "▁漢"]), max_size=20),
    st.lists(st.text(" ab漢.", min_size=1, max_size=4), max_size=2),
)
@example(["a", "▁", "▁a", "▁", "b"], [])
@example(["▁", "▁a"], [])
@example(["▁", "🤦🏽"], [])
def test_spaces_that_a_decoder_takes_from_the_start_are_kept_within(
    words: list[str], stop: list[str]
) -> None:
    pieces: list[str] = []
    for word in words:
        coded = [f"<0x{byte:02X}>" for byte in word.encode()]
        pieces += [word] if "▁" in word or word.isascii() else coded
    pieces = [piece for piece in pieces if piece]
    decode = sentencepiece(pieces)
    tokens = list(range(len(pieces)))
    whole = decode(tokens)
    assert whole == "".join(words).replace("▁", " ").removeprefix(" ")
    assert run(decode, tokens, stop) == expected(whole, stop)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 40])
def test_invalid_byte_tokens_of_a_run_harm_nothing_else(count: int) -> None:
    pieces = ["▁well", "<0xE6>", "▁then", "<0xC3>", "<0xA9>"]
    text, _ = run(sentencepiece(pieces), [0, *[1] * count, 2, 3, 4], [])
    assert text == "well" + "\ufffd" * count + " thené"


def test_the_stop_text_that_is_complete_first_ends_the_answer() -> None:
    assert run(SPELL, spelled("abcdeh"), ["abcde", "bcd"]) == ("a", "bcd")
    assert run(SPELL, spelled("abcdeh"), ["bcd", "cd", "d"]) == ("a", "bcd")
    assert run(SPELL, spelled("abcdeh"), ["ab", "abc"]) == ("", "ab")
    assert run(SPELL, spelled("aaab"), ["aab"]) == ("a", "aab")
    # Within one token it is the same.
    assert run(toy([b"abcdeh"]), [0], ["abcde", "bcd"]) == ("a", "bcd")


def test_a_stop_text_is_found_before_an_incomplete_character() -> None:
    stream = TextStream(toy([b"say END\xe6"]), ["END"])
    assert stream.push(0) == "say "
    assert stream.stopped == "END"


def test_what_is_held_comes_out_at_the_end() -> None:
    stream = TextStream(toy([b"a STO", b"\xe6\xbc"]), ["STOP"])
    assert stream.push(0) == "a "
    assert stream.push(1) == ""
    assert stream.finish() == "STO\ufffd"
    # The character that never came completes a stop text.
    stream = TextStream(toy([b"ab\xe6"]), ["b\ufffd"])
    assert stream.push(0) == "a"
    assert stream.finish() == ""
    assert stream.stopped == "b\ufffd"
    assert stream.text == "a"


@pytest.mark.parametrize("piece", ["\ufffd".encode(), b"\x80", b"\xe6", b"\xff"])
def test_a_replacement_character_is_not_held_for_ever(piece: bytes) -> None:
    decode = toy([piece])
    stream = TextStream(decode)
    for n in range(1, 50):
        stream.push(0)
        assert len(stream.text) >= n - 3
    stream.finish()
    assert stream.text == decode([0] * 49)


@pytest.mark.parametrize("pieces", [[b"word "], [b"\x80"], [b"", b""], [b"\xe6", b"\xbc", b""]])
def test_the_work_is_linear(pieces: list[bytes]) -> None:
    decode = toy(pieces)
    seen = 0

    def counting(tokens: list[int]) -> str:
        nonlocal seen
        seen += len(tokens)
        return decode(tokens)

    n = 2000
    tokens = [k % len(pieces) for k in range(n)]
    assert run(counting, tokens, [])[0] == decode(tokens)
    assert seen < 16 * n


def test_a_stream_that_has_ended_takes_nothing() -> None:
    stream = TextStream(SPELL, ["b"])
    assert [stream.push(token) for token in spelled("ab")] == ["a", ""]
    with pytest.raises(MisuseError, match="ended already"):
        stream.push(0)
    assert stream.finish() == ""
    stream = TextStream(SPELL)
    stream.finish()
    with pytest.raises(MisuseError, match="ended already"):
        stream.push(0)


@pytest.mark.parametrize("stop", ["END", b"END", [""], [b"END"], [None], ["a", 1]])
def test_bad_stop_texts(stop: Any) -> None:
    with pytest.raises(InputError, match="not empty"):
        TextStream(SPELL, stop)


def test_too_many_stop_texts() -> None:
    TextStream(SPELL, ["a"] * MAX_STOPS)
    with pytest.raises(InputError, match="17 stop texts; allowed: 16"):
        TextStream(SPELL, ["a"] * (MAX_STOPS + 1))
