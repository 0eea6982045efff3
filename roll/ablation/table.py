"""Rows of a grid as means over seeds, and those as a Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from roll.ablation.grid import exact
from roll.ablation.rows import Row


@dataclass(frozen=True)
class Column:
    """One measure of the table: its name in `Row`, its heading, and how many decimals are shown."""

    name: str
    title: str
    decimals: int


COLUMNS = (
    Column("final_score", "final score", 3),
    Column("best_score", "best score", 3),
    Column("area_under_curve", "area under curve", 3),
    Column("steps_to_target", "steps to target", 1),
    Column("staleness", "staleness, versions", 2),
    Column("ess", "ESS, share", 3),
    Column("wall_s", "wall time, s", 1),
)
"""Measures in the order of the table."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over the seeds that have the measure; `deviation` is None for one of them."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Line:
    """One variant at one ratio, over its finished seeds."""

    variant: str
    ratio: float
    finished: int
    seeds: int
    measures: dict[str, Spread | None]


def aggregate(rows: Sequence[Row]) -> list[Line]:
    """One line for each variant and ratio, in the order of the rows; only finished runs count in the measures."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.ratio, row.variant), []).append(row)
    lines = []
    for (ratio, variant), group in groups.items():
        finished = [row for row in group if row.status == "finished"]
        measures = {column.name: spread([getattr(row, column.name) for row in finished]) for column in COLUMNS}
        lines.append(Line(variant, ratio, len(finished), len(group), measures))
    return lines


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and deviation of those that are there; None when none is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else None, len(there))


def markdown(rows: Sequence[Row], config: str, target: float | None) -> str:
    """The page `ablation.md`: the table, what its columns mean, and why runs failed."""
    columns = [column for column in COLUMNS if target is not None or column.name != "steps_to_target"]
    parts = [
        f"# Ablation of {config}\n",
        "| " + " | ".join(["variant", "ratio", "seeds", *(column.title for column in columns)]) + " |",
        "|" + "---|" * (3 + len(columns)),
        *(_row(line, columns) for line in aggregate(rows)),
        "\nScores are `val/score`; area under curve is the mean height of its curve over steps; wall time is the sum "
        "of `time/step`. Mean ± standard deviation over finished seeds."
        + (f" The target is {target:g}; in brackets, the seeds that reached it." if target is not None else ""),
    ]
    open_runs = [_name(row) for row in rows if row.status == "open"]
    if open_runs:
        parts.append(f"\nNot finished: {', '.join(open_runs)}.")
    for row in rows:
        if row.status == "failed":
            parts.append(f"\n## Failed: {_name(row)}\n\n```\n{row.cause}\n```")
    return "\n".join(parts) + "\n"


def _row(line: Line, columns: Sequence[Column]) -> str:
    seeds = str(line.seeds) if line.finished == line.seeds else f"{line.finished} of {line.seeds}"
    cells = [line.variant, exact(line.ratio), seeds]
    cells += [_cell(line, column) for column in columns]
    return "| " + " | ".join(cells) + " |"


def _cell(line: Line, column: Column) -> str:
    value = line.measures[column.name]
    if value is None:
        return "never" if column.name == "steps_to_target" and line.finished else "-"
    text = f"{value.mean:.{column.decimals}f}"
    if value.deviation is not None:
        text += f" ± {value.deviation:.{column.decimals}f}"
    if column.name == "steps_to_target" and line.finished > 1:
        text += f" ({value.count} of {line.finished})"
    return text


def _name(row: Row) -> str:
    return f"{row.variant}, ratio {row.ratio:g}, seed {row.seed}"
