"""The only place that asks what time it is.

Everything else takes a `Clock`, so that a test decides when time passes (`testing.clock`).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the rest of Stepwell may know about time."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now_s(self) -> float:
        return time.perf_counter()
