"""One call of an object at a time, and what an exception inside of it means.

Neighbours: `cache/pool` and `memory/arena` wrap their public methods into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from stepwell.base.errors import InvariantError, MisuseError


class Call:
    """The lock of an object with books: `with call.alone(), call:`.

    Two contexts, because Ctrl-C can strike at the first instruction of any Python function, an `__exit__` too: the
    lock is the interpreter's own, which is taken and given back between instructions.

    A call that an exception leaves is looked over: our own errors are raised before anything changes, but a signal
    handler may raise them in the middle. If an invariant is broken, all later calls raise instead of working
    with broken books. A call from inside a call (a finalizer, a signal handler) raises, since it would wait
    for itself.

    Args:
        what: the object, for messages.
        check: raises `InvariantError` when the books are out of order.
    """

    def __init__(self, what: str, check: Callable[[], None]) -> None:
        self._what = what
        self._check = check
        # Re-entrant only because such a lock knows its owner in the same instant in which it is taken.
        self._lock: Any = threading.RLock()
        self._torn: InvariantError | None = None
        self._open = False

    @property
    def inside(self) -> bool:
        """Whether this thread is inside of a call already: a finalizer or signal handler runs."""
        return bool(self._lock._is_owned())

    def alone(self) -> AbstractContextManager[Any]:
        """The lock, to be entered before the call.

        Raises:
            MisuseError: this thread is inside of a call already.
        """
        if self._lock._is_owned():
            raise MisuseError(
                f"the {self._what} was called from inside one of its own calls",
                remedy="do not call it from finalizers or signal handlers",
            )
        lock: AbstractContextManager[Any] = self._lock
        return lock

    def __enter__(self) -> None:
        if self._open:  # the end of the last call was interrupted before it looked
            self._look("an interrupt at its end")
            self._open = False
        if self._torn is not None:
            raise InvariantError(
                self._torn.findings
            )  # a new one: each keeps the trace of its raise
        self._open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self._look(type(error).__name__)
        self._open = False

    def _look(self, why: str) -> None:
        story = f"an earlier call was torn by {why}"
        self._torn = InvariantError([story, "and looking it over was interrupted"])
        try:
            self._check()
        except InvariantError as broken:
            self._torn = InvariantError([story, *broken.findings])
        else:
            self._torn = None
