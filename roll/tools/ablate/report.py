"""Results of trials: measures of each, a Markdown table of means over seeds, and a plot of validation curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from roll.tools.ablate.grid import Trial, format_exact
from roll.trackers.curves import INK, RUN_COLORS, dress, new_figure

Status = Literal["finished", "failed", "unfinished"]
"""State of a trial; `unfinished` is interrupted or not started."""

MetricLines = Sequence[Mapping[str, float | None]]
"""Lines of a metrics.jsonl."""

Band = tuple[list[int], list[float], list[float], list[float]]
"""Steps, and the minimum, mean and maximum score over seeds at each."""


@dataclass(frozen=True)
class TrialResult:
    """Measures of one trial; None if the metrics that a measure needs were not logged.

    Attributes:
        cause: last lines of output of a failed trial.
        curve: (step, `val/score`) of each validation.
        area_under_curve: mean height of the curve: trapezoids over steps, divided by the steps between first and last.
        steps_to_target: first step with a score of at least the target; None if no score reached it.
        staleness: mean of `staleness/mean` over steps, in versions.
        ess: mean of `correction/ess` over steps, a fraction.
        wall_s: sum of `time/step`, in seconds; start-up is not included, so resumed trials are comparable.
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


def summarize_trial(
    trial: Trial, status: Status, lines: MetricLines, target: float | None = None, cause: str = ""
) -> TrialResult:
    """Measures of a trial from the lines of its metrics.jsonl."""
    curve = [(int(line["step"] or 0), score) for line in lines if (score := line.get("val/score")) is not None]
    scores = [score for _, score in curve]
    seconds = _values(lines, "time/step")
    return TrialResult(
        variant=trial.variant,
        ratio=trial.ratio,
        seed=trial.seed,
        status=status,
        cause=cause,
        curve=curve,
        final_score=scores[-1] if scores else None,
        best_score=max(scores, default=None),
        area_under_curve=area_under_curve(curve),
        steps_to_target=None if target is None else next((step for step, score in curve if score >= target), None),
        staleness=_mean(_values(lines, "staleness/mean")),
        ess=_mean(_values(lines, "correction/ess")),
        wall_s=sum(seconds) if seconds else None,
    )


def area_under_curve(curve: Sequence[tuple[int, float]]) -> float | None:
    """Trapezoids under the curve, divided by the steps between its ends; None for an empty curve."""
    if not curve:
        return None
    steps = curve[-1][0] - curve[0][0]
    if steps == 0:
        return curve[-1][1]
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(curve)) / steps


def _values(lines: MetricLines, name: str) -> list[float]:
    return [value for line in lines if (value := line.get(name)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Column:
    """A measure in the table: attribute of TrialResult, heading, number of decimals."""

    name: str
    title: str
    decimals: int


MEASURES_SHOWN = (
    Column("final_score", "final score", 3),
    Column("best_score", "best score", 3),
    Column("area_under_curve", "area under curve", 3),
    Column("steps_to_target", "steps to target", 1),
    Column("staleness", "staleness, versions", 2),
    Column("ess", "ESS, fraction", 3),
    Column("wall_s", "wall time, s", 1),
)
"""Measures in the order of the table."""


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation of `count` values; `std` is None for one value."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class TableRow:
    """Measures of one variant at one ratio over its finished seeds."""

    variant: str
    ratio: float
    finished: int
    seeds: int
    measures: dict[str, MeanStd | None]


def aggregate_trials(results: Sequence[TrialResult]) -> list[TableRow]:
    """One row per variant and ratio, in the order of the results; only finished trials count in the measures."""
    groups: dict[tuple[float, str], list[TrialResult]] = {}
    for result in results:
        groups.setdefault((result.ratio, result.variant), []).append(result)
    rows = []
    for (ratio, variant), group in groups.items():
        finished = [result for result in group if result.status == "finished"]
        measures = {
            column.name: mean_std([getattr(result, column.name) for result in finished]) for column in MEASURES_SHOWN
        }
        rows.append(TableRow(variant, ratio, len(finished), len(group), measures))
    return rows


def mean_std(values: Sequence[float | None]) -> MeanStd | None:
    """Mean and standard deviation of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return MeanStd(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def markdown_report(results: Sequence[TrialResult], config: str, target: float | None) -> str:
    """The text of `ablation.md`: the table, a legend, unfinished trials, and the output of failed ones."""
    columns = [column for column in MEASURES_SHOWN if target is not None or column.name != "steps_to_target"]
    legend = (
        "\nScores are `val/score`; the area under the curve is its mean height over steps; wall time is the sum of "
        "`time/step`. Values are mean ± standard deviation over finished seeds."
    )
    if target is not None:
        legend += f" The target is {target:g}; brackets give the number of seeds that reached it."
    parts = [
        f"# Ablation of {config}\n",
        "| " + " | ".join(["variant", "ratio", "seeds", *(column.title for column in columns)]) + " |",
        "|" + "---|" * (3 + len(columns)),
        *(_markdown_row(row, columns) for row in aggregate_trials(results)),
        legend,
    ]
    unfinished = [_label(result) for result in results if result.status == "unfinished"]
    if unfinished:
        parts.append(f"\nNot finished: {'; '.join(unfinished)}.")
    for result in results:
        if result.status == "failed":
            parts.append(f"\n## Failed: {_label(result)}\n\n```\n{result.cause}\n```")
    return "\n".join(parts) + "\n"


def _markdown_row(row: TableRow, columns: Sequence[Column]) -> str:
    seeds = str(row.seeds) if row.finished == row.seeds else f"{row.finished} of {row.seeds}"
    cells = [row.variant, format_exact(row.ratio), seeds, *(_markdown_cell(row, column) for column in columns)]
    return "| " + " | ".join(cells) + " |"


def _markdown_cell(row: TableRow, column: Column) -> str:
    value = row.measures[column.name]
    if value is None:
        return "never" if column.name == "steps_to_target" and row.finished else "-"
    text = f"{value.mean:.{column.decimals}f}"
    if value.std is not None:
        text += f" ± {value.std:.{column.decimals}f}"
    if column.name == "steps_to_target" and row.finished > 1:
        text += f" ({value.count} of {row.finished})"
    return text


def _label(result: TrialResult) -> str:
    return f"{result.variant}, ratio {result.ratio:g}, seed {result.seed}"


def plot_curves(results: Sequence[TrialResult], out_png: Path) -> Path | None:
    """Plots validation curves: a panel per ratio, a color per variant, a band over seeds.

    Returns None if no trial with a curve has finished.
    """
    results = [result for result in results if result.curve and result.status == "finished"]
    if not results:
        return None
    ratios = sorted({result.ratio for result in results})
    variants = list(dict.fromkeys(result.variant for result in results))
    figure = new_figure(4.6 * len(ratios) + 1.4, 3.6)
    axes = None
    for panel, ratio in enumerate(ratios):
        axes = figure.add_subplot(1, len(ratios), panel + 1, sharey=axes)
        dress(axes, f"Validation score, ratio {format_exact(ratio)}")
        for index, variant in enumerate(variants):
            group = [result for result in results if (result.ratio, result.variant) == (ratio, variant)]
            if not group:
                continue
            steps, low, mean, high = seed_band(group)
            color = RUN_COLORS[index % len(RUN_COLORS)]
            axes.plot(steps, mean, color=color, linewidth=2.0, marker="o", markersize=3.5, label=variant)
            if len(group) > 1:
                axes.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    labels = [variant for variant in variants if variant in lines]
    handles = [lines[variant] for variant in labels]
    figure.legend(handles, labels, loc="outside right upper", fontsize=9, frameon=False, labelcolor=INK)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, facecolor="white")
    return out_png


def seed_band(results: Sequence[TrialResult]) -> Band:
    """Minimum, mean and maximum over seeds, at the steps that all curves have."""
    curves = [dict(result.curve) for result in results]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return (
        steps,
        [min(column) for column in columns],
        [statistics.fmean(column) for column in columns],
        [max(column) for column in columns],
    )
