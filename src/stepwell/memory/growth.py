"""A region that becomes ready in the background while its first frames are used already.

Neighbours: `ground` starts one for each region that grows; `region` does the work.
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
    become ready. If the machine refuses a part, or the thread dies of something else, growth ends there, `wait`
    raises, health is degraded, and what was published stays. `stop` waits for the stride in progress;
    after it, `begin` does nothing.

    Args:
        region: what is prepared.
        ready: called with the bytes that are ready, from this thread.
        health: told when the thread dies.
    """

    def __init__(self, region: Region, ready: Callable[[int], None], health: Health) -> None:
        self.region = region
        self.refused: RefusedError | None = None
        self._ready = ready
        self._health = health
        self._stop = threading.Event()
        self._gate = threading.Lock()
        self._finished = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread, unless it was stopped before."""
        with self._gate:
            if not self._stop.is_set():
                self._thread = start("grow", self._run, self._health)

    def _run(self) -> None:
        try:
            self.region.prepare(self._ready, stop=self._stop)
        except RefusedError as error:
            self.refused = error
            raise  # the root of the thread turns health to degraded
        self._finished = True

    @property
    def ready_bytes(self) -> int:
        """Of the region, from its first byte on."""
        return self.region.record.ready_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        thread = self._thread
        return self._stop.is_set() if thread is None else not thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; whether it has ended.

        Raises:
            RefusedError: the machine refused a part, or the thread died of something that health knows.
        """
        thread = self._thread
        if thread is None:
            return self.done
        thread.join(timeout_s)
        if thread.is_alive() or self._finished:
            return self._finished
        if self.refused is not None:
            raise RefusedError(self.refused.fact, remedy=self.refused.remedy) from self.refused
        raise RefusedError(
            f"growth ended after {self.region.record.ready_bytes} of {self.region.size_bytes} bytes",
            remedy="the fault is in health; drain the region, then add it again",
        )

    def stop(self) -> None:
        """Ends it early and waits for the stride in progress."""
        self._stop.set()
        with self._gate:
            thread = self._thread
        if thread is not None:
            thread.join()
