"""Validation curves of a grid: one panel for each ratio, one colour for each variant, a band over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from roll.ablation.grid import exact
from roll.ablation.rows import Row
from roll.trackers.curves import INK, dress

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
