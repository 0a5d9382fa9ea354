"""What surrounds the tokens of a prompt, and the root key that it gives.

Owns: `Namespace` and the framing of its fields. Must not know: frames, tiers, requests. Neighbours:
`chain` goes on from the root, `part` says which bytes of a page are meant. Everything that changes KV
bytes is a field of one of these three; what is in none of them cannot differ.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stepwell.base.errors import InputError
from stepwell.core.reasons import Reason

FORMAT_VERSION = 1
"""Raised when equal inputs would give other keys; golden vectors hold it."""

MAX_PAGE_TOKENS = 65_536


class Digest(Enum):
    """Stands where a digest should be but is not known."""

    UNKNOWN = "unknown"


def framed(value: bytes) -> bytes:
    """Bytes with their length before them, so that neighbours cannot run together."""
    return struct.pack("<Q", len(value)) + value


def text_bytes(text: str) -> bytes:
    """A text as bytes that no other text has; half a surrogate pair is a text too."""
    return text.encode("utf-8", "surrogatepass")


def field_bytes(name: str, value: str | int | Sequence[tuple[str, str]] | None) -> bytes:
    """One field with its name, kind, presence and length."""
    head = framed(name.encode())
    if value is None:
        return head + b"-"
    if isinstance(value, int):
        return head + b"i" + struct.pack("<q", value)
    if isinstance(value, str):
        return head + b"s" + framed(text_bytes(value))
    rows = b"".join(framed(text_bytes(k)) + framed(text_bytes(v)) for k, v in value)
    return head + b"m" + struct.pack("<Q", len(value)) + framed(rows)


def _sorted_pairs(facts: object) -> bool:
    """Whether facts can be written in one way only."""
    pairs = isinstance(facts, tuple) and all(
        isinstance(one, tuple) and len(one) == 2 and all(isinstance(text, str) for text in one)
        for one in facts
    )
    return pairs and tuple(sorted(dict(facts).items())) == facts  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything around the tokens that changes KV bytes or who may share them.

    Two requests can reuse each other's pages exactly when their namespaces are equal.

    Attributes:
        page_tokens: tokens of one page, 1 to 65,536.
        model: digest of weights and configuration. None: known to this process alone (see
            `private`), which then shares with no other.
        revision: the revision that the digest belongs to, where one exists.
        adapter: digest of the adapter (LoRA) in use; None without one; `Digest.UNKNOWN` with one
            whose digest is not known, which makes the namespace refuse to be cached.
        facts: further facts that change KV values, as sorted (name, value) pairs: rope settings,
            KV dtype and scales, a lossy codec.
        tenant: who may share with whom; never taken from a request body.
        epoch: raised when weights change in place.
        process: nonce of a private namespace.
    """

    page_tokens: int
    model: str | None = None
    revision: str | None = None
    adapter: str | Digest | None = None
    facts: tuple[tuple[str, str], ...] = ()
    tenant: str | None = None
    epoch: int = 0
    process: str | None = None

    def __post_init__(self) -> None:
        if type(self.page_tokens) is not int or not 1 <= self.page_tokens <= MAX_PAGE_TOKENS:
            raise InputError(
                f"page_tokens is {self.page_tokens!r}",
                limit=f"a whole number from 1 to {MAX_PAGE_TOKENS}",
                remedy="16 suits most models",
            )
        if (self.model is None) == (self.process is None):
            raise InputError(
                f"model is {self.model!r} and process is {self.process!r}",
                limit="exactly one of them",
                remedy="give the model's digest, or use Namespace.private(page_tokens)",
            )
        if type(self.epoch) is not int or not 0 <= self.epoch < 2**63:
            raise InputError(f"epoch is {self.epoch!r}", limit="0 to 2**63 - 1")
        for name in ("model", "revision", "adapter", "tenant", "process"):
            value = getattr(self, name)
            unknown = name == "adapter" and isinstance(value, Digest)
            if value == "" or not (unknown or value is None or isinstance(value, str)):
                raise InputError(f"{name} is {value!r}", limit="a text that is not empty, or None")
        if not _sorted_pairs(self.facts):
            raise InputError(
                f"facts are {self.facts!r}",
                limit="a tuple of (name, value) pairs of texts, sorted, names distinct",
            )

    @classmethod
    def private(cls, page_tokens: int, **fields: Any) -> Namespace:
        """A namespace for a model whose digest is not known: no other process can share it."""
        return cls(page_tokens, process=secrets.token_hex(16), **fields)

    @property
    def refusal(self) -> Reason | None:
        """Why nothing under this namespace may be cached, or None if it may."""
        return Reason.ADAPTER_UNKNOWN if isinstance(self.adapter, Digest) else None

    def canonical(self) -> bytes:
        """The record as bytes that no other record shares.

        Raises:
            InputError: the namespace refuses to be cached.
        """
        if isinstance(self.adapter, Digest):
            raise InputError(
                "the digest of the adapter is unknown",
                limit="a digest of its weights",
                remedy="pass adapter=<digest>; until then the request is computed uncached",
            )
        return b"".join(
            (
                field_bytes("format", FORMAT_VERSION),
                field_bytes("model", self.model),
                field_bytes("revision", self.revision),
                field_bytes("adapter", self.adapter),
                field_bytes("facts", self.facts),
                field_bytes("page_tokens", self.page_tokens),
                field_bytes("tenant", self.tenant),
                field_bytes("epoch", self.epoch),
                field_bytes("process", self.process),
            )
        )

    def root(self, secret: bytes | None = None) -> bytes:
        """The 32 bytes that the chain starts from.

        Args:
            secret: of the deployment; whoever lacks it can compute no key.
        """
        message = b"stepwell key" + self.canonical()
        if secret is None:
            return hashlib.sha256(message).digest()
        return hmac.new(secret, message, hashlib.sha256).digest()
