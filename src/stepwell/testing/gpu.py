"""A GPU runtime that is none: it remembers what it was asked, and refuses where a test says so.

For tests of whatever registers host memory or waits for a device, on machines without one.
"""

from __future__ import annotations

from typing import Any


class FakeGpu:
    """See `stepwell.memory.gpu.Gpu`.

    Args:
        device: its name.
        nearest: its memory node; None: it does not say.
        most_bytes: that it registers; more is refused.

    Attributes:
        calls: what was asked, in order: name, then arguments.
        registered: address to bytes of what is registered now.
    """

    def __init__(
        self, device: str = "cuda:0", nearest: int | None = 0, most_bytes: int | None = None
    ) -> None:
        self.device = device
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self._nearest = nearest
        self._most_bytes = most_bytes

    def node(self) -> int | None:
        return self._nearest

    def register(self, address: int, size_bytes: int) -> None:
        self.calls.append(("register", address, size_bytes))
        overlaps = any(
            first < address + size_bytes and address < first + size
            for first, size in self.registered.items()
        )
        if overlaps:
            raise OSError(712, "part of it is registered already")
        most = self._most_bytes
        if most is not None and sum(self.registered.values()) + size_bytes > most:
            raise OSError(2, "out of memory")
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))
        del self.registered[address]

    def synchronise(self) -> None:
        self.calls.append(("synchronise",))

    def allocate(self, size_bytes: int) -> Any:
        """Host memory that stands for the device's."""
        import torch  # noqa: PLC0415

        self.calls.append(("allocate", size_bytes))
        if self._most_bytes is not None and size_bytes > self._most_bytes:
            raise OSError(12, "out of device memory")
        return torch.empty(size_bytes, dtype=torch.uint8)
