"""`stepwell doctor`: opens a small region of every kind, and says what the machine gave, or why not and what would help."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.base.errors import InputError, RefusedError
from stepwell.base.units import format_bytes, parse_bytes
from stepwell.cli import config
from stepwell.cli.output import say

if TYPE_CHECKING:
    from stepwell.memory.ask import Ask, RegionRecord
    from stepwell.memory.gpu import Gpu
    from stepwell.memory.machine import Machine


_SILENT_BYTES = 1 << 30
"""Touching less is done before anybody wonders."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One kind of region, tried.

    Attributes:
        name: of the kind.
        record: what was got; None if there is no region.
        reason: why not.
        remedy: what would help.
    """

    name: str
    record: RegionRecord | None
    reason: str = ""
    remedy: str = ""


def register(verbs: Any) -> None:
    """Adds the verb to the command line."""
    parser = verbs.add_parser(
        "doctor",
        help="what memory this machine gives, and what would help",
        description="Opens, touches and closes a small region of every kind. Nothing is left behind; what "
        "killed processes left in shared memory is removed.",
    )
    parser.add_argument(
        "--size", default="16MiB", metavar="BYTES", help="of each region (default: 16MiB)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    config.add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Tries every kind; refusals are findings, not failures."""
    from stepwell.memory.gpu import find_gpu
    from stepwell.memory.machine import SHARED_FOLDER, read_machine
    from stepwell.memory.named import remove_left

    settings = config.read(parsed).settings
    size_bytes = parse_bytes(parsed.size)
    left = remove_left()
    machine, gpu = read_machine(), find_gpu()
    nearest = _nearest(gpu, settings.memory.device_nodes)
    node = next(iter(machine.nodes), 0) if nearest is None else nearest
    folder = _folder(settings.cache_dir)
    probes = [_try(name, ask, gpu) for name, ask in _asks(size_bytes, node, folder)]
    if parsed.json:
        facts = _plain(machine, gpu, probes) | {"left_removed": left}
        print(json.dumps(facts, indent=2))
        return 0
    for label, text in _facts(machine, gpu, nearest):
        print(f"{label:14} {text}")
    if left:
        names, size = ", ".join(left), format_bytes(sum(left.values()))
        print(f"{'left behind':14} {names} ({size}) in {SHARED_FOLDER} by dead processes: removed")
    print()
    for probe in probes:
        print(f"{probe.name:14} {_got(probe)}")
        if probe.remedy:
            print(f"{'':14} remedy: {probe.remedy}")
    return 0


def _folder(cache_dir: str) -> str:
    """Where a file region is tried."""
    try:
        return str(Path(cache_dir or tempfile.gettempdir()).expanduser())
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"there is no folder for a file region: {error}",
            remedy="give one: --set cache_dir=FOLDER",
        ) from error


def _nearest(gpu: Gpu | None, overrides: str) -> int | None:
    """The node of the device, if there is one and it is known."""
    from stepwell.memory.gpu import nearest_node, read_nodes

    nodes = read_nodes(overrides)
    try:
        return None if gpu is None else nearest_node(gpu, nodes)
    except RefusedError:
        return None


def _asks(size_bytes: int, node: int, folder: str) -> Iterator[tuple[str, Ask]]:
    from stepwell.memory.ask import Ask, Kind

    yield "pageable", Ask(size_bytes)
    yield "pinned", Ask(size_bytes, pinned=True)
    yield "huge pages", Ask(size_bytes, huge=True)
    yield f"node {node}", Ask(size_bytes, node=node)
    yield "shared", Ask(size_bytes, Kind.SHARED)
    yield "named", Ask(size_bytes, Kind.NAMED, name=f"doctor-{os.getpid()}")
    yield "file", Ask(size_bytes, Kind.FILE, folder=folder)
    yield "device", Ask(size_bytes, Kind.DEVICE)


def _try(name: str, ask: Ask, gpu: Gpu | None) -> Probe:
    from stepwell.memory.region import Region

    try:
        with Region.open(ask, gpu=gpu) as region:
            return Probe(
                name, region.prepare(lambda ready: _progress(name, ready, region.size_bytes))
            )
    except RefusedError as error:
        return Probe(name, None, error.fact, error.remedy)


def _progress(name: str, ready_bytes: int, size_bytes: int) -> None:
    """A line for each piece of a large region."""
    if size_bytes > _SILENT_BYTES and ready_bytes % _SILENT_BYTES == 0:
        say(f"{name}: {format_bytes(ready_bytes)} of {format_bytes(size_bytes)}")


def _got(probe: Probe) -> str:
    record = probe.record
    if record is None:
        return probe.reason
    parts = [format_bytes(record.size_bytes), f"in pages of {format_bytes(record.page_bytes)}"]
    if record.node is not None:
        parts.append(f"on node {record.node}")
    if record.registered_bytes:
        parts.append("registered with the GPU runtime")
    elif record.locked:
        parts.append("locked in memory")
    elif record.ask.kind != "device":
        parts.append("not pinned")
    return ", ".join(parts)


def _facts(machine: Machine, gpu: Gpu | None, nearest: int | None) -> Iterator[tuple[str, str]]:
    from stepwell.memory.machine import SHARED_FOLDER

    def size(count: int | None) -> str:
        return "unknown" if count is None else format_bytes(count)

    yield "memory", f"{size(machine.memory_bytes)}, {size(machine.available_bytes)} available"
    group = machine.cgroup_bytes
    yield "control group", "no limit" if group is None else f"limit {format_bytes(group)}"
    locks = machine.memlock_bytes
    most = "no limit" if locks is None else f"limit {format_bytes(locks)}"
    yield "locked memory", f"{most}, {format_bytes(machine.locked_bytes)} locked by this process"
    huge = machine.huge
    yield "2 MiB pages", "none" if huge is None else f"{huge.free} of {huge.total} free"
    nodes = ", ".join(map(str, machine.nodes))
    yield "memory nodes", f"{len(machine.nodes)} (node {nodes})" if nodes else "unknown"
    yield SHARED_FOLDER, f"{size(machine.shared_free_bytes)} free"
    where = "an unknown node" if nearest is None else f"node {nearest}"
    yield "GPU", "none" if gpu is None else f"{gpu.device}, nearest to {where}"


def _plain(machine: Machine, gpu: Gpu | None, probes: list[Probe]) -> dict[str, Any]:
    return {
        "machine": asdict(machine),
        "gpu": None if gpu is None else gpu.device,
        "regions": [
            {
                "name": probe.name,
                "record": None if probe.record is None else probe.record.plain(),
                "reason": probe.reason or None,
                "remedy": probe.remedy or None,
            }
            for probe in probes
        ],
    }
