"""A clock that a test moves."""

from __future__ import annotations

from stepwell.base.errors import InputError


class FakeClock:
    """Time passes when `advance_s` is called, and only then."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance_s(self, seconds: float) -> None:
        """Moves time forward.

        Raises:
            InputError: backward.
        """
        if seconds < 0:
            raise InputError(f"time would move by {seconds} s", limit="0 or more")
        self._now_s += seconds
