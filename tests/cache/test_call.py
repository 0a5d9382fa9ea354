"""What tears a call of the pool, and what the pool does afterwards."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from stepwell.base.errors import InvariantError, MisuseError


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_torn_call_that_left_broken_books_stops_the_pool(
    bench: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Working on with broken books could end in somebody else's KV."""
    bench.open("a", range(9))

    def torn(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(bench.pool._held.rows, "give_back", torn)
        with pytest.raises(error):
            bench.pool.close("a")
    for call in (bench.pool.stats, bench.pool.check, lambda: bench.open("b", [1])):
        with pytest.raises(InvariantError, match=f"torn by {error.__name__}"):
            call()


def test_a_torn_call_that_broke_nothing_is_forgotten(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.pool._held.frames, "reserve", torn)
        with pytest.raises(KeyboardInterrupt):
            bench.open("a", range(9))
    bench.serve("a", range(9))


def test_a_call_from_inside_a_call_raises_instead_of_waiting_for_itself(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a finalizer does when a collection begins at the wrong moment."""
    seen = []
    reserve = bench.pool._held.frames.reserve

    def collecting(n: int) -> Any:
        try:
            bench.pool.stats()
        except MisuseError as error:
            seen.append(str(error))
        return reserve(n)

    monkeypatch.setattr(bench.pool._held.frames, "reserve", collecting)
    bench.serve("a", range(9))
    assert "finalizers" in seen[0]


def test_errors_of_ours_do_not_stop_other_threads(bench: Any) -> None:
    with pytest.raises(MisuseError):
        bench.pool.close("never")
    done = threading.Thread(target=bench.serve, args=("a", range(9)))
    done.start()
    done.join(30)
    assert not done.is_alive()
    assert bench.cached(range(9)) == 8
