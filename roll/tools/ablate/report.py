"""What one run came to, from the lines of its metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from roll.tools.ablate.grid import Cell, exact
from roll.trackers.curves import INK, dress

Status = Literal["finished", "failed", "open"]
"""How far a run of a grid is; `open` is not run yet, or cut off."""

Lines = Sequence[Mapping[str, float | None]]
"""The lines of a metrics.jsonl."""


@dataclass(frozen=True)
class Row:
    """One run of a grid; measures are None where the run has not logged what they are made of.

    Attributes:
        variant: `actor_train.pg_variant`.
        ratio: `async_generation_ratio`.
        seed: of the run.
        status: how far it is.
        cause: last lines of its output, when it failed.
        curve: steps and `val/score`.
        final_score: at the end of the curve.
        best_score: of the curve.
        area_under_curve: by trapezoids over steps, divided by the steps it spans: the mean height of the curve.
        steps_to_target: first step of the curve at or above the target; None also when it was never reached.
        staleness: mean of `staleness/mean` over steps, in versions.
        ess: mean of `correction/ess` over steps, a share.
        wall_s: sum of `time/step`; the start of processes is not in it, so a resumed run counts like any other.
    """

    variant: str
    ratio: float
    seed: int
    status: Status
    cause: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)
    final_score: float | None = None
    best_score: float | None = None
    area_under_curve: float | None = None
    steps_to_target: float | None = None
    staleness: float | None = None
    ess: float | None = None
    wall_s: float | None = None


def make_row(cell: Cell, status: Status, lines: Lines, target: float | None = None, cause: str = "") -> Row:
    """The row of a run.

    Args:
        cell: which run.
        status: how it ended.
        lines: of its metrics.jsonl; none before it starts.
        target: validation score whose first step is looked for.
        cause: why it failed.
    """
    curve = [(int(line["step"] or 0), score) for line in lines if (score := line.get("val/score")) is not None]
    scores = [score for _, score in curve]
    seconds = _values(lines, "time/step")
    return Row(
        variant=cell.variant,
        ratio=cell.ratio,
        seed=cell.seed,
        status=status,
        cause=cause,
        curve=curve,
        final_score=scores[-1] if scores else None,
        best_score=max(scores, default=None),
        area_under_curve=area_under(curve),
        steps_to_target=None if target is None else next((step for step, score in curve if score >= target), None),
        staleness=_mean(_values(lines, "staleness/mean")),
        ess=_mean(_values(lines, "correction/ess")),
        wall_s=sum(seconds) if seconds else None,
    )


def area_under(curve: Sequence[tuple[int, float]]) -> float | None:
    """Trapezoids under the curve, divided by the steps it spans; None for an empty one."""
    if not curve:
        return None
    span = curve[-1][0] - curve[0][0]
    if span == 0:
        return curve[-1][1]
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(curve)) / span


def _values(lines: Lines, name: str) -> list[float]:
    return [value for line in lines if (value := line.get(name)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


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


COLORS = ("#2563a8", "#e76f51", "#2a9d8f", "#b5651d", "#9d4edd", "#8ab17d", "#d1495b", "#5b6770")
"""Of the variants, in their order; as many as there are policy losses."""

Band = tuple[list[int], list[float], list[float], list[float]]
"""Steps, and over seeds the least, mean and largest score at each of them."""


def draw_ablation(rows: Sequence[Row], out_png: Path) -> Path | None:
    """Draws the curves of finished runs; returns the path, or None when there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = [row for row in rows if row.curve and row.status == "finished"]
    if not rows:
        return None
    ratios, variants = sorted({row.ratio for row in rows}), list(dict.fromkeys(row.variant for row in rows))
    spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(4.6 * len(ratios) + 1.4, 3.6), dpi=160, layout=spacing)
    FigureCanvasAgg(figure)
    shared = None
    for number, ratio in enumerate(ratios):
        axes = shared = figure.add_subplot(1, len(ratios), number + 1, sharey=shared)
        dress(axes, f"Validation score, ratio {exact(ratio)}")
        for index, variant in enumerate(variants):
            group = [row for row in rows if (row.ratio, row.variant) == (ratio, variant)]
            if not group:
                continue
            steps, low, middle, high = band(group)
            color = COLORS[index % len(COLORS)]
            axes.plot(steps, middle, color=color, linewidth=2.0, marker="o", markersize=3.5, label=variant)
            if len(group) > 1:
                axes.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    named = [variant for variant in variants if variant in lines]
    handles = [lines[variant] for variant in named]
    figure.legend(handles, named, loc="outside right upper", fontsize=9, frameon=False, labelcolor=INK)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, facecolor="white")
    return out_png


def band(rows: Sequence[Row]) -> Band:
    """Over the steps that all rows have; a run that was cut short shortens the band."""
    curves = [dict(row.curve) for row in rows]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return (
        steps,
        [min(column) for column in columns],
        [statistics.fmean(column) for column in columns],
        [max(column) for column in columns],
    )
