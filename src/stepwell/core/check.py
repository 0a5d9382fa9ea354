"""Collecting broken invariants, so that a checker reports all of them at once.

Neighbours: every object that owns books has a `check(findings)`; owners compose them.
"""

from __future__ import annotations

from stepwell.base.errors import InvariantError


class Findings:
    """What a checker found wrong so far."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def expect(self, holds: object, text: str) -> None:
        """Notes `text` unless `holds`."""
        if not holds:
            self.broken.append(text)

    def raise_if_any(self) -> None:
        """Raises one `InvariantError` with everything that was noted."""
        if self.broken:
            raise InvariantError(self.broken)
