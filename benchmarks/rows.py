"""The rows of the speed table: what holds, the table as text, the record as JSON, the exit code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

HEADS = ("row", "ours", "against", "unit", "ratio", "bar", "holds", "gate")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: group, a dot, and what was measured.
        unit: of `ours` and `against`, such as `"us"`.
        ours: median over the rounds; None if it was not measured.
        against: the same of the peer, the baseline or the smaller size; None without one.
        ratio: median over the rounds of ours / against, which need not be the ratio of the medians.
        bar: the most that the figure named by `bar_of` may be; None where nothing is promised.
        bar_of: `"ratio"`, or `"ours"` for an absolute bar in `unit`.
        gate: whether the run fails when the bar does not hold.
        note: what was done, or why a figure is missing.
    """

    name: str
    unit: str
    ours: float | None
    against: float | None = None
    ratio: float | None = None
    bar: float | None = None
    bar_of: Literal["ours", "ratio"] = "ratio"
    gate: bool = False
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the bar holds; None without a bar or without the figure: unknown is never true."""
        figure = self.ratio if self.bar_of == "ratio" else self.ours
        if self.bar is None or figure is None or math.isnan(figure):
            return None
        return figure <= self.bar

    def record(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return asdict(self) | {"holds": self.holds}


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a gate was not shown to hold, else 0."""
    return int(any(row.gate and row.holds is not True for row in rows))


def _number(value: float | None) -> str:
    """Three digits that matter; `-` for unknown."""
    if value is None:
        return "-"
    if value and abs(value) < 1000:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def _cells(row: Row) -> tuple[str, ...]:
    holds = {True: "yes", False: "NO", None: "-"}[row.holds]
    bar = _number(row.bar)
    if row.bar is not None and row.bar_of == "ours":
        bar += f" {row.unit}"
    figures = (_number(row.ours), _number(row.against), row.unit, _number(row.ratio))
    return (row.name, *figures, bar, holds, "gate" if row.gate else "")


def table(rows: Sequence[Row]) -> str:
    """All rows in columns, with the notes below."""
    lines = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]

    def text(line: tuple[str, ...]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    ruled = [text(lines[0]), "-" * len(text(lines[0])), *(text(line) for line in lines[1:])]
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    told = [f"  {', '.join(names)}: {note}" for note, names in notes.items()]
    return "\n".join([*ruled, *(["", "notes", *told] if told else [])])


def write_json(path: Path, machine: Mapping[str, object], rows: Sequence[Row]) -> None:
    """Writes the record of a run; makes the folder if it is missing.

    Args:
        path: of the file; replaced if it is there.
        machine: facts about machine and run.
        rows: all that were measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": dict(machine), "rows": [row.record() for row in rows]}
    path.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n", encoding="utf-8")
