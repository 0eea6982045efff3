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


MEASURES_SHOWN = {
    "final_score": ("final score", 3),
    "best_score": ("best score", 3),
    "area_under_curve": ("area under curve", 3),
    "steps_to_target": ("steps to target", 1),
    "staleness": ("staleness, versions", 2),
    "ess": ("ESS, fraction", 3),
    "wall_s": ("wall time, s", 1),
}
"""Measures in the order of the table: their heading and number of decimals."""


def markdown_report(results: Sequence[TrialResult], config: str, target: float | None) -> str:
    """The text of `ablation.md`: the table, a legend, unfinished trials, and the output of failed ones."""
    measures = [name for name in MEASURES_SHOWN if target is not None or name != "steps_to_target"]
    groups: dict[tuple[float, str], list[TrialResult]] = {}
    for result in results:
        groups.setdefault((result.ratio, result.variant), []).append(result)
    legend = (
        "\nScores are `val/score`; the area under the curve is its mean height over steps; wall time is the sum of "
        "`time/step`. Values are mean ± standard deviation over finished seeds."
    )
    if target is not None:
        legend += f" The target is {target:g}; brackets give the number of seeds that reached it."
    parts = [
        f"# Ablation of {config}\n",
        "| " + " | ".join(["variant", "ratio", "seeds", *(MEASURES_SHOWN[name][0] for name in measures)]) + " |",
        "|" + "---|" * (3 + len(measures)),
        *(_markdown_row(group, measures) for group in groups.values()),
        legend,
    ]
    unfinished = [_label(result) for result in results if result.status == "unfinished"]
    if unfinished:
        parts.append(f"\nNot finished: {'; '.join(unfinished)}.")
    for result in results:
        if result.status == "failed":
            parts.append(f"\n## Failed: {_label(result)}\n\n```\n{result.cause}\n```")
    return "\n".join(parts) + "\n"


def _markdown_row(group: Sequence[TrialResult], measures: Sequence[str]) -> str:
    """One variant at one ratio over its seeds; only finished trials count in the measures."""
    finished = [result for result in group if result.status == "finished"]
    seeds = str(len(group)) if len(finished) == len(group) else f"{len(finished)} of {len(group)}"
    cells = [measure_cell(name, [getattr(result, name) for result in finished]) for name in measures]
    return "| " + " | ".join([group[0].variant, format_exact(group[0].ratio), seeds, *cells]) + " |"


def measure_cell(name: str, values: Sequence[float | None]) -> str:
    """Mean and sample standard deviation of the values that are not None; of `steps_to_target` their number too."""
    known, decimals = [value for value in values if value is not None], MEASURES_SHOWN[name][1]
    if not known:
        return "never" if name == "steps_to_target" and values else "-"
    text = f"{statistics.fmean(known):.{decimals}f}"
    if len(known) > 1:
        text += f" ± {statistics.stdev(known):.{decimals}f}"
    if name == "steps_to_target" and len(values) > 1:
        text += f" ({len(known)} of {len(values)})"
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
