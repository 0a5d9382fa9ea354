"""One call of an object at a time, and what an exception inside of it means.

Neighbours: `cache/pool` and `memory/arena` wrap their public methods into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from stepwell.base.errors import InvariantError, MisuseError, StepwellError


class Call:
    """The lock of an object with books. A call that something foreign tears (no memory, Ctrl-C) is looked over afterwards.

    Our own errors are raised before anything changes. After any other exception every invariant is
    checked: if one is broken, all later calls raise instead of working with broken books. A call from
    inside a call (a finalizer, a signal handler) raises, since it would wait for itself.

    Args:
        what: the object, for messages.
        check: raises `InvariantError` when the books are out of order.
    """

    def __init__(self, what: str, check: Callable[[], None]) -> None:
        self._what = what
        self._check = check
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._torn: InvariantError | None = None

    @property
    def inside(self) -> bool:
        """Whether this thread is inside of a call already: a finalizer or signal handler runs."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            raise MisuseError(
                f"the {self._what} was called from inside one of its own calls",
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
