"""The lock of an object with books: one call at a time, whatever interrupts it."""

from __future__ import annotations

import contextlib
import random
import signal
import threading

import pytest

from stepwell.base.call import Call
from stepwell.base.errors import InvariantError, MisuseError


class Interrupted(BaseException):
    """What a signal handler raises, as Ctrl-C does."""


def use(call):
    with call.alone(), call:
        pass


def others_get_in(call):
    """Whether another thread is not kept waiting."""
    thread = threading.Thread(target=use, args=(call,), daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


@pytest.fixture
def _handler():
    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_handler")
def test_an_interrupt_at_any_moment_leaves_the_lock_free():
    """Calls without a pause, interrupted by a timer: enough moments to meet every instruction."""
    call, moments = Call("thing", lambda: None), random.Random(1)
    for _ in range(5_000):
        with contextlib.suppress(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 6e-5))
            while True:
                use(call)
        assert not call.inside
    assert others_get_in(call)


@pytest.mark.parametrize("error", [Interrupted, MemoryError])
def test_a_torn_call_is_looked_over_once(error):
    looked = []
    call = Call("thing", lambda: looked.append(1))
    with pytest.raises(error), call.alone(), call:
        raise error
    use(call)
    assert looked == [1]


def test_an_interrupted_look_is_done_again_by_the_next_call():
    outcomes = [Interrupted, InvariantError(["a frame is free and in use"])]

    def look():
        raise outcomes.pop(0)

    call = Call("thing", look)
    with pytest.raises(Interrupted), call.alone(), call:
        raise MemoryError
    for _ in range(2):
        with pytest.raises(InvariantError, match="a frame is free and in use"):
            use(call)
    assert outcomes == []


def test_an_error_of_ours_that_comes_from_a_signal_handler_is_looked_over_too():
    """It may strike in the middle of a change; whose it was cannot be told."""
    looked = []
    call = Call("thing", lambda: looked.append(1))
    with pytest.raises(MisuseError), call.alone(), call:
        use(call)  # as a handler does
    assert looked == [1]


def test_a_call_inside_of_a_call_is_refused_and_the_outer_one_goes_on():
    call = Call("thing", lambda: None)
    with call.alone(), call:
        assert call.inside
        with pytest.raises(MisuseError, match="the thing was called from inside"):
            use(call)
        assert call.inside
    assert not call.inside
    assert others_get_in(call)
