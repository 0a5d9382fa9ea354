"""What tells that bytes are ready, or may be overwritten.

Neighbours: an engine gives one with what it wants saved; a copy on a device gives one for its own end.
"""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """A point in somebody's work."""

    def done(self) -> bool:
        """Whether the work has passed it; never waits."""
        ...

    def wait(self, within_s: float) -> bool:
        """Waits until the work has passed it, or until too late; whether it has."""
        ...


class Passed:
    """A fence that lies behind already: what a CPU has done is done."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, within_s: float) -> bool:  # noqa: ARG002 - the protocol's argument
        """At once."""
        return True


PASSED: Fence = Passed()
