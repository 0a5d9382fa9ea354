"""The root of every thread that Stepwell starts.

One of the three places with a broad `except`: whatever escapes a thread is recorded and turns
health to degraded, so that a dead thread is seen instead of waited for.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """What a thread died of."""

    thread: str
    error: BaseException
    trace: str


class Health:
    """Whether this process does all that it should; thread-safe.

    It only ever gets worse by itself: a fault stays until someone who knows the remedy calls
    `recover`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    @property
    def degraded(self) -> bool:
        with self._lock:
            return bool(self._faults)

    @property
    def faults(self) -> tuple[Fault, ...]:
        with self._lock:
            return tuple(self._faults)

    def report(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def recover(self) -> None:
        with self._lock:
            self._faults.clear()


def start(name: str, target: Callable[[], None], health: Health) -> threading.Thread:
    """Starts a daemon thread whose faults reach `health`.

    Args:
        name: shown in traces, after `stepwell-`.
        target: runs until it returns; owns no lock when it raises.
        health: told of whatever escapes `target`.
    """

    def root() -> None:
        try:
            target()
        except BaseException as error:  # the root of a thread: nobody is above to catch it
            health.report(Fault(name, error, traceback.format_exc()))

    thread = threading.Thread(target=root, name=f"stepwell-{name}", daemon=True)
    thread.start()
    return thread
