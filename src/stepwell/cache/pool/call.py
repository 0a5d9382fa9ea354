"""One call of a pool at a time, and what an exception inside of it means.

Neighbours: `pool` wraps every public method into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from stepwell.base.errors import InvariantError, MisuseError, StepwellError


class Call:
    """The pool's lock. A call that something foreign tears (no memory, Ctrl-C) is looked over afterwards.

    Our own errors are raised before anything changes. After any other exception every invariant is
    checked: if one is broken, all later calls raise instead of working with broken books. A call from
    inside a call (a finalizer, a signal handler) raises, since it would wait for itself.

    Args:
        check: raises `InvariantError` when the books are out of order.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._torn: InvariantError | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            raise MisuseError(
                "the pool was called from inside one of its own calls",
                remedy="do not call it from finalizers or signal handlers",
            )
        taken = entered = False
        try:
            taken = self._lock.acquire()
            self._owner = me
            if self._torn is not None:
                raise self._torn
            entered = True
        finally:
            # Also when Ctrl-C comes before the body of the call: nobody would release the lock.
            if taken and not entered:
                self._owner = None
                self._lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is not None and not isinstance(error, StepwellError):
                try:
                    self._check()
                except InvariantError as broken:
                    self._torn = InvariantError(
                        [f"an earlier call was torn by {type(error).__name__}", *broken.findings]
                    )
        finally:
            self._owner = None
            self._lock.release()
