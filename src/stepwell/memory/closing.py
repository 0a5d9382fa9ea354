"""What regions and arenas do at the end of a `with` block.

Neighbours: `region` and `arena` close themselves.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from stepwell.base.errors import MisuseError


class Closing:
    """Closes itself at the end of a block."""

    def close(self) -> None:
        """Gives everything back; each kind says when it refuses."""
        raise AssertionError("each kind closes in its own way")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except MisuseError as refused:
            if error is None:
                raise
            error.add_note(f"not closed: {refused}")  # a consequence, which must not hide its cause
