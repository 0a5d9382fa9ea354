"""Work that shares nothing: the engine's thread waits for nobody, whatever the tiers do."""

from __future__ import annotations

import io
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from stepwell.base.settings import EngineSettings, HostSettings, PoolSettings, Settings
from stepwell.cache.pool.limits import Limits
from stepwell.core.geometry import Geometry
from stepwell.engine.engine import Engine
from stepwell.testing.faults import FaultKind, FaultyPlace, PlannedFault

_BLOCKING = {
    time.sleep,
    select.select,
    threading.Thread.join,
    threading.Event.wait,
    threading.Condition.wait,
    threading.Condition.wait_for,
    io.open,
}
_CODES = {one.__code__ for one in _BLOCKING if hasattr(one, "__code__")}
_NAMES = {"recv", "recv_into", "recv_bytes", "send_bytes", "fsync", "fdatasync", "sendall", "poll"}


@contextmanager
def no_blocking_call() -> Iterator[list[str]]:
    """Every call of this thread that may wait is noted: of Python by its code, of C by what it is.

    A lock that is entered with `with` is not: the locks here cover books only, which tests of their own hold.
    """
    found: list[str] = []

    def watch(frame: Any, event: str, called: Any) -> None:
        if event == "call" and frame.f_code in _CODES:
            found.append(frame.f_code.co_qualname)
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            waits = called in _BLOCKING or (
                getattr(called, "__name__", "") in _NAMES and isinstance(owner, socket.socket)
            )
            lock = type(owner).__name__ in ("lock", "RLock") and called.__name__ == "acquire"
            if waits or lock:
                found.append(f"{called!r} in {frame.f_code.co_qualname}")

    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_the_hook_sees_what_waits():
    with no_blocking_call() as found:
        threading.Event().wait(0)
        select.select([], [], [], 0)
        threading.Lock().acquire()
    assert len(found) >= 3


@pytest.mark.parametrize("save", ["sealed", "second_use", "evicted"])
def test_no_call_of_the_engine_waits_while_copies_hang(llama: Any, save: str) -> None:
    """Unique prompts, a pool with room, and a host tier into which not one copy ever ends."""
    geometry = Geometry.from_hf_config(llama.config, "float32")
    frame_bytes = Limits.of(geometry, PoolSettings(4, 1 << 32, 1, 512)).frame_bytes
    settings = Settings(
        pool=PoolSettings(4, 60 * frame_bytes, 8, 512),
        engine=EngineSettings(step_tokens=64),
        host=HostSettings(capacity_bytes=8 << 20, save=save),
    )
    fault = PlannedFault(FaultKind.NEVER, "copy_out")
    with Engine(llama, settings) as engine:
        store = engine.pool.store
        assert store.ready(20)
        rank = store._joints[0].mover._rank
        object.__setattr__(rank, "places", tuple(FaultyPlace(one, [fault]) for one in rank.places))
        ended = 0
        with no_blocking_call() as found:
            for seed in range(6):
                prompt = np.random.default_rng(seed).integers(0, 199, 30).tolist()
                engine.add(prompt, max_tokens=4)
                while not engine.idle:
                    before = len(found)
                    ended += sum(event.record is not None for event in engine.step())
                    assert found[:before] == found, found
                    if save == "evicted" and engine._schedule.waiting:
                        fault.gate.set()  # frames that are read cannot be had: then it may wait
                        found.clear()
        fault.gate.set()
        assert ended == 6
        assert store.drain(20)
