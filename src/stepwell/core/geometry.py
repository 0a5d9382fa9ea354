"""Shapes and reuse rules of a model's KV: a list of groups.

Owns: `Group`, `Geometry`. Must not know: tensors, devices, what a model is called by its makers; that is
in `core/hf_config.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepwell.base.errors import InputError

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by the name that torch and numpy give the dtype."""


class Rule(StrEnum):
    """What of a group must be there for a prefix to be reusable."""

    FULL = "full"
    """Every page of the prefix."""
    WINDOW = "window"
    """The pages that cover the last `window` - 1 tokens before a boundary."""
    STATE = "state"
    """One state at the boundary."""


STATE_ALIGNMENT = 16
"""Each tensor of a state begins at a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state.

    Attributes:
        name: "conv" for the last inputs of a convolution, "recurrent" for a recurrence.
        shape: for one layer of one request; no batch axis.
        dtype: as torch names it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.name not in ("conv", "recurrent"):
            raise InputError(f"a state tensor has name {self.name!r}", limit="conv, recurrent")
        if not self.shape or min(self.shape) < 1:
            raise InputError(
                f"state tensor {self.name!r} has shape {self.shape}", limit="1 or more each"
            )
        if self.dtype not in ITEM_BYTES:
            raise InputError(
                f"state tensor {self.name!r} has dtype {self.dtype!r}", limit=", ".join(ITEM_BYTES)
            )

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes, up to where the next one may begin."""
        exact = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        return -(-exact // STATE_ALIGNMENT) * STATE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one geometry and one reuse rule.

    Attributes:
        name: names the group in parts and messages.
        rule: what must be there to go on from a boundary.
        layers: numbers of the model's layers, ascending.
        kv_heads: heads of K and V; 0 for a state, as the sizes.
        head_size_k: elements of one K head.
        head_size_v: elements of one V head; 0 only if latent.
        dtype: of K and V, as torch names it.
        window: tokens that a query sees, itself included; only with `Rule.WINDOW`.
        state: tensors of one layer at one boundary; only with `Rule.STATE`.
        latent: one vector per token, equal on all ranks: K holds it, V is empty. Multi-head latent attention
            is DeepSeek-V2's (2024).
    """

    name: str
    rule: Rule
    layers: tuple[int, ...]
    kv_heads: int
    head_size_k: int
    head_size_v: int
    dtype: str
    window: int | None = None
    state: tuple[StateTensor, ...] = ()
    latent: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise InputError(f"group {self.name!r} has rule {self.rule!r}", limit="a stepwell.Rule")
        sizes = (len(self.layers), self.kv_heads, self.head_size_k, self.head_size_v)
        if self.rule is Rule.STATE:
            right, limit = (
                self.layers and not any(sizes[1:]),
                "1 or more layers, and 0 of the others",
            )
        elif self.latent:
            right, limit = min(sizes[:3]) == self.kv_heads == 1, "1 head, and V size 0 if latent"
            right = right and self.head_size_v == 0
        else:
            right, limit = min(sizes) >= 1, "1 or more of each"
        if not right:
            raise InputError(
                f"group {self.name!r} has (layers, heads, K size, V size) = {sizes}", limit=limit
            )
        if self.latent and self.rule is Rule.STATE:
            raise InputError(f"group {self.name!r} is {self.rule} and latent")
        if self.dtype not in ITEM_BYTES:
            raise InputError(
                f"group {self.name!r} has dtype {self.dtype!r}", limit=", ".join(ITEM_BYTES)
            )
        if (self.window is not None) != (self.rule is Rule.WINDOW):
            raise InputError(f"group {self.name!r} is {self.rule} with window {self.window}")
        if bool(self.state) != (self.rule is Rule.STATE):
            raise InputError(f"group {self.name!r} is {self.rule} with state {self.state}")

    @property
    def token_bytes(self) -> int:
        """K and V bytes of one token in all layers of the group; 0 for a state."""
        if self.rule is Rule.STATE:
            return 0
        per_layer = self.kv_heads * (self.head_size_k + self.head_size_v)
        return per_layer * len(self.layers) * ITEM_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all layers, a multiple of `STATE_ALIGNMENT`; 0 without a state."""
        return len(self.layers) * sum(tensor.padded_bytes for tensor in self.state)

    def state_offsets(self) -> tuple[tuple[int, StateTensor, int], ...]:
        """Where each tensor of a state begins, layer by layer: (layer, tensor, offset in bytes)."""
        offsets: list[tuple[int, StateTensor, int]] = []
        offset = 0
        for layer in self.layers:
            for tensor in self.state:
                offsets.append((layer, tensor, offset))
                offset += tensor.padded_bytes
        return tuple(offsets)


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups of a model.

    Attributes:
        groups: at least one, with distinct names.
        replay_tokens: how many tokens at the end of a prompt are always computed, at least 1.
        facts: what changes KV values besides weights and tokens, for `Namespace.facts`.
    """

    groups: tuple[Group, ...]
    replay_tokens: int = 1
    facts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise InputError(f"the groups are {names}", limit="one or more, names distinct")
        if self.replay_tokens < 1:
            raise InputError(
                f"replay_tokens is {self.replay_tokens}",
                limit="1 or more: the last token has to be computed to know the next",
            )

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one page in all groups."""
        return page_tokens * sum(group.token_bytes for group in self.groups)

    @classmethod
    def full(
        cls,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: str = "float32",
        facts: tuple[tuple[str, str], ...] = (),
    ) -> Geometry:
        """A model in which every layer sees every token and all heads have one size."""
        group = Group(
            "full", Rule.FULL, tuple(range(layers)), kv_heads, head_size, head_size, dtype
        )
        return cls((group,), facts=facts)

    @classmethod
    def from_hf_config(
        cls, config: Any, dtype: str | None = None, latent: bool = False
    ) -> Geometry:
        """Reads a Hugging Face configuration: groups "full", "window" and "state", as far as there are.

        Args:
            config: a configuration object, or its dict.
            dtype: of K and V; the one that the configuration names by default.
            latent: whether the engine keeps the one vector of each token from which a model with
                latent attention makes K and V, and not what it makes.

        Raises:
            GeometryError: a kind of layer that is not understood yet, or a missing field; the message
                names it.
        """
        from stepwell.core.hf_config import read_hf_config  # noqa: PLC0415 - it makes geometries

        return read_hf_config(config, dtype, latent)
