"""Plots a run: reward, validation score, response length and step time over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from roll.configs.trackers import METRICS_FILE
from roll.trackers.files import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, GRID = "#1f2933", "#7b8794", "#e4e7eb"
GENERATION = (
    ("time/generate", "generate", "#2a9d8f"),
    ("time/reward", "reward", "#e9c46a"),
)
"""Parts of waiting for a batch in synchronous training: metric, label, color."""

WAITING = (("time/wait_prev_gen", "wait for samples", "#2a9d8f"),)
"""The part of a step spent waiting for a batch in asynchronous training."""

LEARNING = (
    ("time/old_log_probs", "log-probs", "#8ab17d"),
    ("time/train", "train", "#2563a8"),
    ("time/weight_update", "weight update", "#e76f51"),
    ("time/checkpoint", "checkpoint", "#9d8fb0"),
)
"""The other parts of a step, in order; the rest of `time/step` without `time/val` is overhead."""

RUN_COLORS = ("#2563a8", "#e76f51", "#2a9d8f", "#b5651d", "#9d4edd", "#8ab17d", "#d1495b", "#5b6770")
"""Colors of several runs or policy losses in one picture, in order; as many as there are policy losses."""

PANELS = {
    "rollout/reward_mean": ("Reward, mean of the batch", "#2563a8"),
    "actor/loss": ("Training loss", "#2563a8"),
    "val/score": ("Validation score", "#2a9d8f"),
    "val/loss": ("Validation loss", "#2a9d8f"),
    "rollout/response_length_mean": ("Response length, tokens", "#b5651d"),
    "time/step": ("Time of a step without validation, seconds", "#2563a8"),
}
"""Metric -> title of its panel, and color of a single run; the training loss is drawn only without rewards."""

OVERLAP = 1.1
"""Generation overlapped training if its total time exceeds the total time waiting for it by this factor."""

SMOOTHING_SHARE = 0.15
"""Width of the moving average as a fraction of the run: shows trends without hiding drops."""

TIME_SMOOTHING_SHARE = 0.05
"""The same for step times, narrower because single slow steps are of interest."""

Rows = list[dict[str, float]]


def draw_curves(run_dirs: Sequence[Path], out_png: Path, title: str = "", names: Sequence[str] = ()) -> Path:
    """Plots metrics.jsonl of one run, or of several with `names` over each other, to `out_png` and returns that path.

    Raises:
        ValueError: the runs logged none of the plotted metrics.
    """
    runs = [_rows(folder / METRICS_FILE) for folder in run_dirs]
    metrics = [metric for metric in PANELS if any(series(rows, metric)[0] for rows in runs)]
    if "rollout/reward_mean" in metrics:
        metrics = [metric for metric in metrics if metric != "actor/loss"]
    if not metrics:
        raise ValueError(f"{run_dirs[0] / METRICS_FILE}: nothing to plot in {len(runs[0])} lines")
    columns, several = min(2, len(metrics)), len(runs) > 1
    lines = -(-len(metrics) // columns)
    figure = new_figure(5.2 * columns, 3.1 * lines + (0.4 if title or several else 0))
    if title:
        figure.suptitle(title, color=INK, fontsize=13, fontweight="bold", x=0.015, ha="left")
    for number, metric in enumerate(metrics):
        axes = figure.add_subplot(lines, columns, number + 1)
        name, color = PANELS[metric]
        dress(axes, name)
        if metric == "time/step" and not several:
            _time(axes, runs[0])
            continue
        for rows, run_color in zip(runs, cycle(RUN_COLORS if several else [color]), strict=False):
            _curve(axes, *series(rows, metric), run_color, validation=metric.startswith("val/"), single=not several)
    if several:
        _name_runs(figure, names)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, facecolor="white")
    return out_png


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.03)
    figure = Figure(figsize=(width, height), dpi=160, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _name_runs(figure: Figure, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=color, label=name) for name, color in zip(names, cycle(RUN_COLORS), strict=False)]
    figure.legend(handles=lines, loc="outside upper right", ncols=4, fontsize=8.5, frameon=False, labelcolor=INK)


def _rows(file: Path) -> Rows:
    """The lines of metrics.jsonl, step times without validation; line 0 is the validation before training."""
    rows = read_metrics(file)
    for row in rows:
        if (seconds := row.pop("time/step", None)) is not None and row["step"] > 0:
            row["time/step"] = seconds - (row.get("time/val") or 0.0)
    return rows


def smooth(values: list[float], share: float = SMOOTHING_SHARE) -> list[float]:
    """Centered moving average over the fraction `share` of the values, narrower at both ends."""
    reach = int(len(values) * share / 2)
    averages = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        window = values[index - near : index + near + 1]
        averages.append(sum(window) / len(window))
    return averages


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    pairs = [(int(row["step"]), row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def dress(axes: Axes, title: str) -> None:
    """Sets the title and the common style of a panel whose horizontal axis counts steps."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", color=INK, fontsize=10.5, fontweight="bold", pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=PALE, labelsize=8, length=0)
    axes.set_xlabel("step", color=PALE, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)


def _curve(axes: Axes, steps: list[int], values: list[float], color: str, validation: bool, single: bool) -> None:
    """Draws scores of validations, or pale values and their moving average; the last value is a label."""
    if not values:
        return
    line, marker = (values, "o") if validation else (smooth(values), "")
    if not validation:
        axes.plot(steps, values, color=color, alpha=0.28, linewidth=1.0)
    axes.plot(steps, line, color=color, linewidth=2.0, marker=marker, markersize=4.5, markeredgecolor="white")
    _mark_end(axes, steps[-1], line[-1], color)
    if validation and single and len(steps) > 1:
        axes.axhline(values[0], color=PALE, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(f"before: {values[0]:.2f}", (steps[-1], values[0]), (0, 4), textcoords="offset points",
                      ha="right", color=PALE, fontsize=8)  # fmt: skip


def _mark_end(axes: Axes, step: int, value: float, color: str) -> None:
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    axes.annotate(text, (step, value), (5, 0), textcoords="offset points", va="center", color=color, fontsize=8.5,
                  fontweight="bold", annotation_clip=False)  # fmt: skip


def _time(axes: Axes, rows: Rows) -> None:
    """Draws the stacked parts of every step, slightly smoothed and without validation."""
    rows = [row for row in rows if row.get("time/step") is not None]
    steps, totals = series(rows, "time/step")
    overlapped = _overlapped(rows)
    stack = (WAITING if overlapped else GENERATION) + LEARNING
    parts = [([row.get(part) or 0.0 for row in rows], label, color) for part, label, color in stack]
    parts = [part for part in parts if any(part[0])]
    spent = [sum(column) for column in zip(*(values for values, _, _ in parts), strict=True)] or [0.0] * len(rows)
    parts.append(([max(0.0, total - used) for total, used in zip(totals, spent, strict=True)], "other", "#cbd2d9"))
    areas = [smooth(values, TIME_SMOOTHING_SHARE) for values, _, _ in parts]
    axes.stackplot(steps, *areas, colors=[color for _, _, color in parts],
                   labels=[label for _, label, _ in parts], linewidth=0)  # fmt: skip
    if overlapped:
        generation = smooth([row.get("time/generate") or 0.0 for row in rows])
        axes.plot(steps, generation, color=INK, linewidth=1.2, linestyle=(0, (3, 2)), label="generation, overlapped")
    # One slow step of many must not flatten the others. The legend takes the upper third.
    axes.set_ylim(0, 1.45 * sorted(totals)[-1 - len(totals) // 20])
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="upper right", ncols=4, fontsize=7.5, frameon=False, labelcolor=INK,
                handlelength=0.9, handleheight=0.9, columnspacing=1.0, handletextpad=0.4)  # fmt: skip


def _overlapped(rows: Rows) -> bool:
    waited = sum(row.get("time/wait_prev_gen") or 0.0 for row in rows)
    generated = sum((row.get("time/generate") or 0.0) + (row.get("time/reward") or 0.0) for row in rows)
    return "time/wait_prev_gen" in rows[-1] and generated > OVERLAP * waited
