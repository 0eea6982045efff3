"""What one run came to, from the lines of its metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from roll.ablation.grid import Cell

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
