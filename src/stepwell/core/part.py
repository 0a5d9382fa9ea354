"""Which bytes of a page are meant: with the content key, the name of one stored object.

Neighbours: `key` names the content; `layout` gives the id of the order of the axes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from stepwell.base.errors import InputError
from stepwell.core.key import FORMAT_VERSION, field_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of a page that one rank holds; a replicated group is 0 of 1."""

    axis: str = "none"
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InputError(f"shard is rank {self.rank} of {self.size}", limit="0 <= rank < size")


@dataclass(frozen=True, slots=True)
class Part:
    """Which bytes of a page: with the content key it names one stored object.

    Attributes:
        group: the group's name.
        layout: id of the order of the axes (`layout.Layout.id`).
        layers: first layer and count.
        heads: first KV head and count.
        shard: which slice of those.
        engine: family of the engine whose bytes these are, and the version of its layout.
        isa: instruction set, where the bytes depend on it.
    """

    group: str
    layout: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    shard: Shard = field(default_factory=Shard)
    engine: tuple[str, int] = ("stepwell", 1)
    isa: str | None = None

    def digest(self) -> bytes:
        """32 bytes that no other part shares."""
        message = b"stepwell part" + b"".join(
            (
                field_bytes("format", FORMAT_VERSION),
                field_bytes("group", self.group),
                field_bytes("layout", self.layout),
                field_bytes("first_layer", self.layers[0]),
                field_bytes("layers", self.layers[1]),
                field_bytes("first_head", self.heads[0]),
                field_bytes("heads", self.heads[1]),
                field_bytes("shard_axis", self.shard.axis),
                field_bytes("shard_rank", self.shard.rank),
                field_bytes("shard_size", self.shard.size),
                field_bytes("engine", self.engine[0]),
                field_bytes("engine_layout", self.engine[1]),
                field_bytes("isa", self.isa),
            )
        )
        return hashlib.sha256(message).digest()
