"""A region that becomes ready in the background while its first frames are used already.

Neighbours: `arena` starts one for each region it adds; `region` does the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stepwell.base.errors import RefusedError
from stepwell.base.threads import Health, start
from stepwell.memory.region import Region


class Growth:
    """The preparation of one region.

    Owns one thread from `begin` to the end of the preparation. Frames are published by that thread as they
    become ready. If the machine refuses a part, growth ends there, `refused` says why, and what was
    published stays. `stop` waits for the stride in progress.

    Args:
        region: what is prepared.
        ready: called with the bytes that are ready, from this thread.
        health: told when the thread dies.
    """

    def __init__(
        self,
        region: Region,
        ready: Callable[[int], None],
        health: Health,
    ) -> None:
        self.region = region
        self.refused: RefusedError | None = None
        self._ready = ready
        self._health = health
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread."""
        self._thread = start("grow", self._run, self._health)

    def _run(self) -> None:
        try:
            self.region.prepare(self._ready, stop=self._stop)
        except RefusedError as error:
            self.refused = error
            raise  # the root of the thread turns health to degraded

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; whether it has ended.

        Raises:
            RefusedError: the machine refused a part.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self.done and self.refused is not None:
            raise self.refused
        return self.done

    def stop(self) -> None:
        """Ends it early and waits for the stride in progress."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
