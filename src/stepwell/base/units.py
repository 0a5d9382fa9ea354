"""Reading and printing quantities: bytes with binary or decimal suffixes, seconds.

Neighbours: `settings` reads capacities with `parse_bytes`; the command line prints with the rest.
"""

from __future__ import annotations

import re
from fractions import Fraction

from stepwell.base.errors import InputError

_SUFFIXES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Reads `"4GiB"`, `"1.5 MB"` or a plain count of bytes.

    Raises:
        InputError: the text is no quantity, or not a whole number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise InputError(f"capacity is {text} bytes", limit="0 or more")
        return text
    if len(str(text)) > 40:
        raise InputError(
            f"{str(text)[:40]}... is too long for an amount of bytes", limit="40 letters"
        )
    found = _QUANTITY.fullmatch(str(text))
    factor = _SUFFIXES.get(found.group(2).lower()) if found else None
    if found is None or factor is None:
        raise InputError(
            f"{text!r} is not an amount of bytes",
            limit="a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB",
            remedy='write it like "512MiB"',
        )
    amount = Fraction(found.group(1)) * factor
    if amount.denominator != 1:
        raise InputError(f"{text!r} is {float(amount)} bytes", limit="a whole number of bytes")
    return amount.numerator


def format_bytes(count: int) -> str:
    """Prints a count of bytes with the largest binary unit that keeps it at 1 or more."""
    if abs(count) < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if abs(amount) < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Prints a duration in the largest unit that keeps it at 1 or more."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min"
