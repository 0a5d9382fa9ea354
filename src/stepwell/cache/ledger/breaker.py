"""Stops asking a tier that fails, and asks again after a rest.

Source: the circuit breaker, M. Nygard, "Release It!" (2007).
"""

from __future__ import annotations


class Breaker:
    """Counts faults in a row. Not thread-safe.

    Closed: everything passes. After `faults` in a row it opens, and nothing passes for `rest_s`; then one movement passes,
    whose outcome closes it or opens it again.

    Args:
        faults: in a row, 1 or more.
        rest_s: seconds without a call.
    """

    def __init__(self, faults: int, rest_s: float) -> None:
        self._faults = faults
        self._rest_s = rest_s
        self._row = 0
        self._until_s: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the tier has failed and not been well since."""
        return self._until_s is not None

    def passes(self, now_s: float) -> bool:
        """Whether a movement may begin; the caller tells its outcome, or that there was none."""
        if self._until_s is None:
            return True
        if self._trying or now_s < self._until_s:
            return False
        self._trying = True
        return True

    def unused(self) -> None:
        """What passed has not begun after all."""
        self._trying = False

    def note(self, *, well: bool, now_s: float) -> bool:
        """The outcome of a movement; whether it opened the breaker."""
        self._trying = False
        if well:
            self._row, self._until_s = 0, None
            return False
        self._row += 1
        if self._row < self._faults:
            return False
        opened = self._until_s is None
        self._until_s = now_s + self._rest_s
        return opened
