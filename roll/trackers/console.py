"""Console output: a live progress bar on a terminal, otherwise one plain line per step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from roll.configs.pipeline import BaseConfig
from roll.trackers.base import Tracker, register_tracker

SHOWN = (
    ("time/step", "step", "{:.1f} s"),
    ("rollout/reward_mean", "reward", "{:.3f}"),
    ("actor/loss", "loss", "{:.4f}"),
    ("rollout/response_length_mean", "length", "{:.1f}"),
    ("val/score", "validation", "{:.3f}"),
    ("val/loss", "validation loss", "{:.4f}"),
)
"""Metrics the console shows if the run has them: name, label, format. Validation metrics keep their last value."""


class ConsoleTracker(Tracker):
    """Shows progress and the most important metrics.

    Args:
        name: of the run, at the start of the line.
        total_steps: length of the bar.
        stream: output, by default standard output; on a terminal a bar is drawn.
    """

    def __init__(self, name: str, total_steps: int, stream: IO[str] | None = None) -> None:
        self._name = name
        self._total_steps = total_steps
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._last: dict[str, float] = {}

    def resume(self, step: int) -> None:
        self._console.print(f"{self._name}: resumes after step {step}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the bar, or prints a line."""
        self._last.update(metrics)
        if self._console.is_terminal:
            self._bar().update(self._task, completed=step, values=format_metrics(self._last, dim="[dim]", end="[/]"))
        else:
            line = format_metrics({**_validations(self._last), **metrics})
            self._console.print(f"{self._name} {step}/{self._total_steps}  {line}", markup=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _bar(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[values]}"),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task(self._name, total=self._total_steps, values="")
            self._progress.start()
        return self._progress


def format_metrics(metrics: Mapping[str, float], dim: str = "", end: str = "") -> str:
    """The present SHOWN metrics as `label value`, with `dim` and `end` around each label."""
    parts = []
    for name, label, form in SHOWN:
        value = metrics.get(name)
        if value is not None:
            shown = form.format(value) if math.isfinite(value) else str(value)
            parts.append(f"{dim}{label}{end} {shown}")
    return "  ".join(parts)


def _validations(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("val/")}


@register_tracker("stdout")
def _make(config: BaseConfig, output_dir: Path, options: dict[str, Any]) -> Tracker:
    return ConsoleTracker(config.exp_name, config.max_steps, **options)
