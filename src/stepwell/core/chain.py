"""Content keys of a token sequence, page by page.

    root   = SHA-256("stepwell key" ‖ canonical namespace)         HMAC-SHA-256 with a secret
    key[0] = SHA-256(root     ‖ tokens of page 0 as u32 LE ‖ extras of page 0)
    key[n] = SHA-256(key[n-1] ‖ tokens of page n as u32 LE ‖ extras of page n)

Root and tokens have fixed lengths and each extra is framed, so no page can imitate another.
Neighbours: `key` gives the root; `index` asks for keys only as far as it has to look.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.core.excerpt import Excerpt, require_page_tokens
from stepwell.core.key import Namespace, framed, text_bytes

MAX_TOKEN = 2**32 - 1
MAX_EXTRA_TOKENS = 2**20

Tokens = npt.NDArray[np.uint32]
TOKEN = np.dtype("<u4")
"""How a token id enters a key: little-endian on every machine."""


@dataclass(frozen=True, slots=True)
class Extra:
    """What else than its tokens a stretch of a prompt depends on.

    Attributes:
        start: first token that depends on it.
        count: how many tokens do, at least 1.
        kind: what it is, such as `"media"` or `"tenant"`.
        digest: its content.
    """

    start: int
    count: int
    kind: str
    digest: bytes

    def __post_init__(self) -> None:
        if type(self.start) is not int or type(self.count) is not int:
            raise InputError(f"extra covers {self.count!r} tokens from {self.start!r}")
        if not 0 <= self.start < 2**63 or not 1 <= self.count <= MAX_EXTRA_TOKENS:
            raise InputError(
                f"extra covers {self.count} tokens from {self.start}",
                limit=f"a start of 0 or more and 1 to {MAX_EXTRA_TOKENS} tokens",
            )
        if not isinstance(self.kind, str) or not isinstance(self.digest, bytes):
            raise InputError(
                f"extra has kind {self.kind!r} and digest {self.digest!r}", limit="text and bytes"
            )


def _packed(tokens: list[int]) -> Tokens | None:
    """A plain list of ids in range as an array; None for everything else, which needs a closer look.

    Three times faster than numpy's own reading of a list, and it checks kind and range.
    """
    if not tokens or type(tokens[0]) is not int:
        return None
    try:
        return np.frombuffer(array("I", tokens), np.uintc).astype(TOKEN, copy=False)
    except (TypeError, OverflowError):
        return None


def as_tokens(tokens: Iterable[int] | npt.NDArray[Any]) -> Tokens:
    """Token ids as an array of u32 that the caller no longer shares.

    Args:
        tokens: a list of ints, or a one-dimensional array of an integer dtype.

    Raises:
        InputError: an id below 0 or above 2**32 - 1, or something that is no integer.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == TOKEN and tokens.ndim == 1:
        return tokens.copy()
    packed = _packed(tokens) if isinstance(tokens, list) else None
    if packed is not None:
        return packed
    try:
        ids = np.asarray(tokens if hasattr(tokens, "__array__") else list(tokens))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"tokens are no flat list: {error}", limit="one dimension of integers"
        ) from error
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, TOKEN)
    if ids.dtype == object and all(type(one) is int for one in ids.flat):
        # numpy keeps integers beyond 64 bits as objects.
        for where, one in enumerate(ids.flat):
            if not 0 <= one <= MAX_TOKEN:
                raise _out_of_range(where, one)
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(
            f"tokens have dtype {ids.dtype} and shape {ids.shape}",
            limit="one dimension of integers",
            remedy="pass a flat list of token ids",
        )
    if ids.size and (ids.min() < 0 or ids.max() > MAX_TOKEN):
        where = int(np.argmax((ids < 0) | (ids > MAX_TOKEN)))
        raise _out_of_range(where, int(ids[where]))
    return ids.astype(TOKEN, copy=True)


def _out_of_range(where: int, token: int) -> InputError:
    return InputError(
        f"token {where} is {token}",
        limit=f"0 to {MAX_TOKEN}",
        remedy="pass ids of the tokenizer, without padding markers",
    )


class Chain:
    """The content keys of a growing token sequence, computed when asked for.

    Page n covers tokens `[n * page_tokens, (n + 1) * page_tokens)`; only full pages have keys. Asking
    for key n hashes every page up to n that was not hashed before, so a prompt whose first page
    is unknown costs one hash. Not thread-safe: a chain belongs to one request; `fork` it to share.

    Args:
        namespace: what surrounds the tokens.
        tokens: the first tokens; more may be appended.
        extras: what stretches of the sequence depend on besides.
        secret: of the deployment, or None.

    A chain of a namespace that refuses to be cached has tokens but no keys; an `opaque` one has keys but no tokens.

    Source: the idea of chained page hashes is vLLM's automatic prefix caching (2024); framing,
    namespace and full-length SHA-256 are ours.
    """

    __slots__ = ("_count", "_data", "_extras", "_keys", "namespace", "opaque", "root")

    _hash: ClassVar[Any] = staticmethod(hashlib.sha256)

    def __init__(
        self,
        namespace: Namespace,
        tokens: Iterable[int] | npt.NDArray[Any] = (),
        extras: Sequence[Extra] = (),
        secret: bytes | None = None,
    ) -> None:
        self.namespace = namespace
        self.opaque = False
        self.root = b"" if namespace.refusal else namespace.root(secret)
        self._data: Tokens = as_tokens(tokens)
        self._count = len(self._data)
        self._extras: dict[int, list[Extra]] = {}
        size = namespace.page_tokens
        for extra in sorted(extras, key=lambda e: (e.start, e.count, e.kind, e.digest)):
            for page in range(extra.start // size, (extra.start + extra.count - 1) // size + 1):
                self._extras.setdefault(page, []).append(extra)
        self._keys: list[bytes] = []

    @classmethod
    def foreign(
        cls, namespace: Namespace, digests: Sequence[bytes], secret: bytes | None = None
    ) -> Self:
        """A chain of pages of which only an engine's own digests are known.

        What such digests say is believed: there are no tokens that a match could compare (`opaque` is
        True). Its keys never equal those of a chain of tokens.

            key[n] = SHA-256(foreign root ‖ framed digest n)

        Args:
            namespace: what surrounds the tokens.
            digests: of each page and all before it, as the engine makes them; distinct, 1 to 1,024 bytes each.
            secret: of the deployment, or None.

        Raises:
            InputError: a digest is none, or comes twice.
        """
        wrong = [d for d in digests if not isinstance(d, bytes) or not 1 <= len(d) <= 1024]
        if wrong or len(set(digests)) != len(digests):
            raise InputError(
                f"{len(digests)} digests, of which {len(set(map(repr, digests)))} differ",
                limit="distinct bytes, 1 to 1,024 of them each",
                remedy="give digests that cover a page and all before it",
            )
        chain = cls(namespace, (), (), secret)
        chain.opaque = True
        chain._count = len(digests) * namespace.page_tokens
        chain._data = np.zeros(chain._count, TOKEN)
        if chain.root:
            chain.root = hashlib.sha256(b"stepwell foreign key" + chain.root).digest()
            root = chain.root
            chain._keys = [hashlib.sha256(root + framed(one)).digest() for one in digests]
        return chain

    def __len__(self) -> int:
        """Tokens so far."""
        return self._count

    @property
    def tokens(self) -> Tokens:
        """All tokens so far; shape [tokens]; a view that must not be written.

        Raises:
            InputError: nobody knows them: the chain is opaque.
        """
        self._require_tokens()
        view = self._data[: self._count]
        view.flags.writeable = False
        return view

    @property
    def pages(self) -> int:
        """Full pages so far."""
        return self._count // self.namespace.page_tokens

    def require(self, page_tokens: int) -> None:
        """Checks the size of the pages.

        Raises:
            InputError: it is another one.
        """
        require_page_tokens(self.namespace.page_tokens, page_tokens)

    def _require_tokens(self) -> None:
        if self.opaque:
            raise InputError(
                "the tokens of a chain of foreign digests were asked for",
                limit="its keys",
                remedy="make the chain from token ids",
            )

    def excerpt(self, first: int, last: int) -> Excerpt:
        """What an index has to know of full pages `[first, last)`, whatever becomes of the chain.

        Costs what it covers, not what comes before.

        Raises:
            InputError: not all of them are full.
        """
        keys = self.keys(first, last)
        if len(keys) != last - first:
            raise InputError(f"pages {first} to {last} were asked for", limit=f"{self.pages} pages")
        extras = {page: self.extras_of(page) for page in self.extra_pages(first, last)}
        above = self.key(first - 1) if first else None
        rows = self.page_rows(first, last).copy()
        return Excerpt(
            self.namespace.page_tokens, self.root, first, above, tuple(keys), rows, extras
        )

    def page_rows(self, first: int, last: int) -> Tokens:
        """Tokens of full pages `[first, last)`; shape [last - first, page_tokens]; a view.

        Zeros, if the chain is opaque.
        """
        size = self.namespace.page_tokens
        return self._data[first * size : last * size].reshape(last - first, size)

    def append(self, tokens: Iterable[int] | npt.NDArray[Any]) -> None:
        """Adds tokens at the end.

        Raises:
            InputError: they are no token ids, or the chain is opaque.
        """
        self._require_tokens()
        added = as_tokens(tokens)
        need = self._count + len(added)
        if need > len(self._data):
            grown = np.empty(max(need, 2 * len(self._data)), TOKEN)
            grown[: self._count] = self._data[: self._count]
            self._data = grown
        self._data[self._count : need] = added
        self._count = need

    def truncate(self, tokens: int) -> None:
        """Forgets all tokens after the first `tokens`, and the keys of pages that lose one.

        Raises:
            InputError: less than no tokens, or no whole number.
        """
        if type(tokens) is not int or tokens < 0:
            raise InputError(f"a chain was cut to {tokens!r} tokens", limit="0 or more")
        self._count = min(self._count, tokens)
        del self._keys[self.pages :]

    def fork(self) -> Chain:
        """A chain of the same tokens that goes its own way; keys found so far are kept."""
        twin = object.__new__(type(self))
        twin.namespace = self.namespace
        twin.opaque = self.opaque
        twin.root = self.root
        twin._data = self._data[: self._count].copy()
        twin._count = self._count
        twin._extras = self._extras
        twin._keys = self._keys[:]
        return twin

    def key(self, page: int) -> bytes:
        """The key of one full page.

        Raises:
            InputError: that page is not full.
        """
        if not 0 <= page < len(self._keys):
            self._extend_keys(page + 1)
        return self._keys[page]

    def keys(self, first: int, last: int) -> list[bytes]:
        """The keys of full pages `[first, last)`."""
        if last > len(self._keys):
            self._extend_keys(last)
        return self._keys[first:last]

    def extras_of(self, page: int) -> bytes:
        """The framed extras that touch a page; empty without any."""
        begin = page * self.namespace.page_tokens
        return b"".join(
            struct.pack("<qQ", extra.start - begin, extra.count)
            + framed(text_bytes(extra.kind))
            + framed(extra.digest)
            for extra in self._extras.get(page, ())
        )

    def extra_pages(self, first: int, last: int) -> list[int]:
        """The pages of `[first, last)` that extras touch, in order."""
        return sorted(page for page in self._extras if first <= page < last)

    def _extend_keys(self, last: int) -> None:
        if not 1 <= last <= self.pages:
            raise InputError(
                f"key of page {last - 1} was asked for",
                limit=f"{self.pages} full pages of {self.namespace.page_tokens} tokens",
            )
        if not self.root:
            raise InputError(f"a chain without keys was asked for one: {self.namespace.refusal}")
        first = len(self._keys)
        width = 4 * self.namespace.page_tokens
        data = self._data[first * width // 4 : last * width // 4].tobytes()
        key = self._keys[-1] if self._keys else self.root
        sha256, keep = self._hash, self._keys.append
        if self._extras:
            for n in range(last - first):
                page = data[n * width : (n + 1) * width]
                key = sha256(key + page + self.extras_of(first + n)).digest()
                keep(key)
            return
        for begin in range(0, len(data), width):
            key = sha256(key + data[begin : begin + width]).digest()
            keep(key)


Pages = Chain | Excerpt
"""Whatever names pages by key and tokens."""
