"""What a stranger waits for: the import, and the first token of a question whose document is cached."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.rows import Row
from benchmarks.world import World


def rows(world: World) -> Iterator[Row]:
    """`import stepwell` in a fresh interpreter; `stepwell demo` as it is."""
    yield Row(
        "start.import",
        "s",
        statistics.median(_import_s() for _ in range(3 if world.quick else 9)),
        bar=0.3,
        bar_of="ours",
        note="python -X importtime -c 'import stepwell', all modules that it loads",
    )
    yield _demo()


def _import_s() -> float:
    """Seconds that the interpreter reports for `import stepwell`."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import stepwell"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"\|\s*(\d+) \| stepwell$", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    return int(found.group(1)) / 1e6


def _demo() -> Row:
    """Warm time to first token (median of the later questions) against the cold one, in one run."""
    done = subprocess.run(
        [sys.executable, "-m", "stepwell.cli.main", "demo", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return Row("start.demo_warm", "s", None, bar=0.08, note=done.stderr.strip()[-200:])
    demo = json.loads(done.stdout)
    return Row(
        "start.demo_warm",
        "s",
        demo["warm_ttft_s"],
        demo["cold_ttft_s"],
        demo["warm_ttft_s"] / demo["cold_ttft_s"],
        bar=0.08,
        note=(
            f"stepwell demo: {demo['reused_tokens']} of {demo['prompt_tokens']} tokens reused; "
            f"answers identical: {demo['identical']}"
        ),
    )
