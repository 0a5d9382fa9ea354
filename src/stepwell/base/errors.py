"""The error tree, and nothing else.

Expected outcomes (a miss, a full pool) are values; an exception means that the caller asked for
something that cannot be meant. Every message names the value, the limit it broke and the remedy.

    StepwellError
    ├── InputError          a value out of range or of the wrong kind (also a ValueError)
    ├── MisuseError         a call out of order: closing twice, an unknown request (also a RuntimeError)
    │   └── StaleError      a lease or frame that belongs to an earlier life
    │       └── LateError   a transfer that missed its deadline may still touch the bytes
    ├── RefusedError        the machine does not give what was asked for (also a RuntimeError)
    ├── ConfigError         a settings file, variable or flag that cannot be read
    ├── GeometryError       a model whose KV layout we do not understand
    └── InvariantError      `check()` found the books out of order: always our own fault
"""

from __future__ import annotations

from collections.abc import Sequence


class StepwellError(Exception):
    """Root of everything Stepwell raises.

    Args:
        fact: what was given, with its value.
        limit: what would have been allowed.
        remedy: what the caller can do about it.
    """

    def __init__(self, fact: str, *, limit: str = "", remedy: str = "") -> None:
        self.fact = fact
        self.limit = limit
        self.remedy = remedy
        parts = [fact]
        if limit:
            parts.append(f"allowed: {limit}")
        if remedy:
            parts.append(f"remedy: {remedy}")
        super().__init__("; ".join(parts))


class InputError(StepwellError, ValueError):
    """A value is out of range or of the wrong kind."""


class MisuseError(StepwellError, RuntimeError):
    """A call came out of order, or names something that does not exist."""


class StaleError(MisuseError):
    """A lease or frame belongs to an earlier life of the thing it names."""


class LateError(StaleError):
    """The bytes are out of use: a transfer that missed its deadline may still touch them."""


class RefusedError(StepwellError, RuntimeError):
    """The machine does not give what was asked for: memory, huge pages, locks, a name, a device."""


class ConfigError(StepwellError, ValueError):
    """A settings source cannot be understood."""


class GeometryError(StepwellError, ValueError):
    """The KV layout of a model is not understood, so nothing of it may be cached."""


class InvariantError(StepwellError, AssertionError):
    """`check()` found broken invariants; `findings` lists all of them."""

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        listed = "\n  - ".join(self.findings)
        super().__init__(f"{len(self.findings)} broken invariants:\n  - {listed}")
