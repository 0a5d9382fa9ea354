"""Calls that are torn half way, in pools of several groups: never wrong bytes, never a hidden leak."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from stepwell.base.errors import InvariantError, MisuseError

INNER_CALLS = (
    ("prefixes", "match"),
    ("prefixes", "_agree"),
    ("prefixes.closed", "match"),
    ("prefixes.closed", "_take"),
    ("prefixes.closed", "seal"),
    ("prefixes.walked.0", "hold"),
    ("prefixes.walked.0", "seal"),
    ("prefixes.walked.0", "release"),
    ("prefixes.walked.0", "want"),
    ("prefixes.walked.0._contents", "write"),
    ("prefixes.walked.1", "hold"),
    ("prefixes.walked.1", "seal"),
    ("prefixes.walked.1", "release"),
    ("prefixes.walked.1._contents", "claim"),
    ("frames", "reserve"),
    ("frames", "move"),
    ("rows", "take"),
)


def find(owner: Any, path: str) -> Any:
    def step(one: Any, name: str) -> Any:
        return one[int(name)] if name.isdigit() else getattr(one, name)

    return functools.reduce(step, path.split("."), owner)


@pytest.mark.parametrize("call", [1, 2, 3, 5])
@pytest.mark.parametrize(("home", "name"), INNER_CALLS)
def test_a6_a_torn_call_is_undone_or_seen(
    make_groups: Any, monkeypatch: pytest.MonkeyPatch, home: str, name: str, call: int
) -> None:
    """Whatever raises inside: the pool goes on soundly, or it refuses every further call.

    A request that was torn in a commit can only be closed; opened again it is answered exactly.
    """
    bench = make_groups("all", frames=60)
    prompt = list(range(26))
    bench.serve("a", prompt[:17])
    owner = find(bench.pool._held, home)
    real, left = getattr(owner, name), [call]

    def tearing(*given: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return real(*given, **more)

    monkeypatch.setattr(owner, name, tearing)
    torn = False
    try:
        bench.serve("b", prompt)
        bench.serve("c", [*prompt, 7, 8, 9])
    except MemoryError:
        torn = True
    monkeypatch.undo()
    if left[0] > 0:
        assert call > 1, f"{name} is never called"
        return
    assert torn
    try:
        bench.pool.check()
    except InvariantError:
        with pytest.raises(InvariantError):
            bench.pool.stats()
        return
    for request in list(bench.pool._held.requests):
        if bench.pool._held.requests[request].torn:
            with pytest.raises(MisuseError, match="torn"):
                bench.pool.bind({request: 1})
        bench.pool.close(request)
    assert bench.pool.stats()["frames_held"] == bench.pool.stats()["frames_filling"] == 0
    bench.serve("d", [*prompt, 7, 8, 9, 10])
    bench.pool.check()


def test_an_epoch_is_above_every_namespace_that_was_seen(bench: Any) -> None:
    later = replace(bench.space, epoch=5)
    bench.serve("a", range(9), space=later)
    assert bench.pool.raise_epoch() == 6
    assert bench.cached(range(9), space=replace(later, epoch=6)) == 0


def test_records_that_come_and_go_add_up(make_groups: Any) -> None:
    bench = make_groups("all", frames=40)
    for seed in range(6):
        bench.serve("a", [seed] * 17)
    bench.pool.drop([3] * 4, bench.space)
    stats = bench.pool.stats()
    found = sum(len(index.found_keys()) for index in bench.pool._held.prefixes.walked)
    assert stats["records_evicted"] > 0
    assert stats["records_dropped"] > 0
    gone = stats["records_evicted"] + stats["records_dropped"]
    assert stats["records_sealed"] - gone == found
