"""What all rings share: the GPU marker, and the time table per folder."""

from __future__ import annotations

import collections
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parent
_seconds: collections.Counter[str] = collections.Counter()
_counts: collections.Counter[str] = collections.Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="NOT RUN: needs a CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = report.nodeid.split("/")[1] if "/" in report.nodeid else "."
    _seconds[folder] += report.duration
    _counts[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _seconds:
        return
    terminalreporter.section("time per folder")
    for folder, seconds in _seconds.most_common():
        terminalreporter.write_line(f"{folder:12} {_counts[folder]:5} tests {seconds:8.1f} s")
