"""What memory needs of a GPU runtime: registering host memory, waiting, device memory, its memory node.

The only module here that knows torch, imported when used. Neighbours: `region` and `mapping` call it.
"""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from stepwell.base.errors import InputError
from stepwell.memory.ask import Refusal

_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: for all devices, and for kernels that read it."""


class Gpu(Protocol):
    """One device and its runtime."""

    device: str

    def node(self) -> int | None:
        """The memory node that the device is nearest to; None if unknown."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pins host memory.

        Raises:
            OSError: the runtime refuses.
        """
        ...

    def unregister(self, address: int) -> None:
        """Lets go of memory that was registered at this address.

        Raises:
            OSError: the runtime does not know it.
        """
        ...

    def synchronise(self) -> None:
        """Waits until the device has nothing to do."""
        ...

    def allocate(self, size_bytes: int) -> Any:
        """Device memory: a flat torch tensor of bytes.

        Raises:
            OSError: there is not enough.
        """
        ...


class CudaGpu:
    """A device of torch's CUDA (or HIP) runtime.

    Args:
        device: such as `"cuda:0"`.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.device = device
        self._torch = torch
        self._runtime = torch.cuda.cudart()

    def node(self) -> int | None:
        facts = self._torch.cuda.get_device_properties(self.device)
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        ids = [getattr(facts, name, -1) for name in names]
        path = Path("/sys/bus/pci/devices", "{:04x}:{:02x}:{:02x}.0".format(*ids), "numa_node")
        try:
            node = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def register(self, address: int, size_bytes: int) -> None:
        with self._torch.cuda.device(self.device):
            code = self._runtime.cudaHostRegister(address, size_bytes, _PORTABLE_AND_MAPPED)
        if int(code) != 0:
            raise OSError(errno.ENOMEM, f"cudaHostRegister of {size_bytes} bytes: {code}")

    def unregister(self, address: int) -> None:
        code = self._runtime.cudaHostUnregister(address)
        if int(code) != 0:
            raise OSError(errno.EINVAL, f"cudaHostUnregister: {code}")

    def synchronise(self) -> None:
        self._torch.cuda.synchronize(self.device)

    def allocate(self, size_bytes: int) -> Any:
        try:
            return self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self.device)
        except self._torch.OutOfMemoryError as error:
            raise OSError(errno.ENOMEM, str(error).partition("\n")[0]) from error


def find_gpu(device: str = "cuda:0") -> CudaGpu | None:
    """A device of this machine, if there is one and torch is installed to reach it."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    number = int(device.partition(":")[2] or 0)
    there = torch.cuda.is_available() and number < torch.cuda.device_count()
    return CudaGpu(device) if there else None


def nearest_node(gpu: Gpu, overrides: Mapping[str, int]) -> int:
    """The memory node for buffers of a device.

    Args:
        gpu: the device.
        overrides: nodes by device name, for machines that do not say it or say it wrong.

    Raises:
        RefusedError: the machine does not say, and neither do the overrides.
    """
    found = overrides[gpu.device] if gpu.device in overrides else gpu.node()
    if found is None:
        raise Refusal(
            "node",
            f"the machine does not say which memory node {gpu.device} is nearest to",
            f'say it: memory.device_nodes = "{gpu.device}=0"',
        ).error()
    return found


def read_nodes(text: str) -> dict[str, int]:
    """Reads `"cuda:0=0, cuda:1=1"`, the form of the setting `memory.device_nodes`.

    Raises:
        InputError: it has another form.
    """
    nodes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        device, _, node = (side.strip() for side in part.partition("="))
        plain = node.isdecimal() and node.isascii() and len(node) < 5
        if not device or not plain or device in nodes:
            raise InputError(
                f"device_nodes has {part!r}", limit='one "device=node" for each, with commas'
            )
        nodes[device] = int(node)
    return nodes
