"""The seam to a device: lanes in which it works in order, and fences over what it has been given.

The only module of `move` that knows torch's CUDA (or HIP) runtime; torch is imported when a device is made. Must not know:
pages, rows. Neighbours: `device_copy` launches into lanes; tests give lanes of their own.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.errors import RefusedError
from stepwell.core.frames import FrameIds
from stepwell.move.fence import Fence

POLL_S = 50e-6
"""Between two looks at an event: CUDA has no wait with a deadline. A page takes about as long."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """What is given to a device, for messages.

    Attributes:
        name: of the kernel or copy.
        frames: of the device's memory; shape [n].
        layers: first, and one behind the last.
    """

    name: str
    frames: FrameIds | Sequence[int]
    layers: tuple[int, int]

    def __str__(self) -> str:
        frames = ", ".join(str(int(frame)) for frame in self.frames[:8]) or "none"
        more = f" and {len(self.frames) - 8} more" if len(self.frames) > 8 else ""
        return (
            f"{self.name}, frames {frames}{more}, layers {self.layers[0]} to {self.layers[1] - 1}"
        )


class Lane(Protocol):
    """Work of a device that is done in order; lanes among each other have none."""

    def launch(self, launch: Launch, call: Callable[[], object]) -> None:
        """Gives the device what `call` asks of it; does not wait."""
        ...

    def mark(self) -> Fence:
        """The end of what was launched so far."""
        ...

    def synchronise(self) -> None:
        """Waits for all that was launched.

        Raises:
            RuntimeError: the device failed, now or before.
        """
        ...


class Device(Protocol):
    """Where the frames are.

    Attributes:
        kernels: whether Triton is there for it.
    """

    kernels: bool

    def lane(self) -> Lane:
        """A new lane."""
        ...

    def empty(self, size_bytes: int) -> Any:
        """Memory of the device that nothing uses any more: a torch tensor, uint8, aligned to 8 bytes or more."""
        ...

    def upload(self, array: Any) -> Any:
        """A copy of a numpy array in memory of the device, for the lane that it is called in."""
        ...


class Watched:
    """A lane that waits for each launch and says which one failed; slow, for debugging."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def launch(self, launch: Launch, call: Callable[[], object]) -> None:
        try:
            self._lane.launch(launch, call)
            self._lane.synchronise()
        except RuntimeError as error:
            raise RefusedError(
                f"the device failed in {launch}: {str(error).partition(chr(10))[0]}",
                remedy="look whether all rows are registered with the device",
            ) from error

    def mark(self) -> Fence:
        return self._lane.mark()

    def synchronise(self) -> None:
        self._lane.synchronise()


class EventFence:
    """A fence over an event of torch.

    Args:
        event: has `query()`, and was recorded.
        clock: for deadlines.
    """

    def __init__(self, event: Any, clock: Clock | None = None) -> None:
        self._event = event
        self._clock = clock or SystemClock()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self, within_s: float) -> bool:
        end_s = self._clock.now_s() + within_s
        pause = threading.Event()
        while not self.done():
            if self._clock.now_s() >= end_s:
                return False
            pause.wait(POLL_S)
        return True


def recorded() -> Fence:
    """The end of all that was launched so far on torch's current stream of the current CUDA device."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return EventFence(event)


class AllOf:
    """A fence behind all others of a set."""

    def __init__(self, fences: Sequence[Fence], clock: Clock | None = None) -> None:
        self._fences = fences
        self._clock = clock or SystemClock()

    def done(self) -> bool:
        return all(fence.done() for fence in self._fences)

    def wait(self, within_s: float) -> bool:
        end_s = self._clock.now_s() + within_s
        return all(fence.wait(max(0.0, end_s - self._clock.now_s())) for fence in self._fences)


class CudaLane:
    """A stream of torch's CUDA runtime.

    Args:
        device: such as `"cuda:0"`.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda
        self._stream = torch.cuda.Stream(device)

    def launch(self, launch: Launch, call: Callable[[], object]) -> None:  # noqa: ARG002
        with self._cuda.stream(self._stream):
            call()

    def mark(self) -> Fence:
        return EventFence(self._stream.record_event())

    def synchronise(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    """A device of torch's CUDA runtime.

    Args:
        name: such as `"cuda:0"`.
    """

    def __init__(self, name: str) -> None:
        import torch

        self._torch = torch
        self._name = name
        self.kernels = importlib.util.find_spec("triton") is not None

    def lane(self) -> Lane:
        return CudaLane(self._name)

    def empty(self, size_bytes: int) -> Any:
        memory = self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self._name)
        # torch gives memory out again while the stream that freed it still writes there.
        self._torch.cuda.synchronize(self._name)
        return memory

    def upload(self, array: Any) -> Any:
        # From pageable memory, the runtime would wait for all that is in the lane.
        return self._torch.from_numpy(array).pin_memory().to(self._name, non_blocking=True)
