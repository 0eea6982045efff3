"""Console output: a live progress bar on a terminal, otherwise one plain line per step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from roll.configs.trackers import TrackerOptions
from roll.trackers.base import Tracker, register_tracker

SHOWN = (
    ("rollout/reward_mean", "reward", "{:.3f}"),
    ("actor/loss", "loss", "{:.4f}"),
    ("time/step", "step", "{:.1f} s"),
    ("rollout/response_length_mean", "length", "{:.1f}"),
    ("val/score", "validation", "{:.3f}"),
    ("val/loss", "validation loss", "{:.4f}"),
)
"""Metrics the console shows where a step has them: name, label, format; the bar shows the first that fit."""

NAME_WIDTH, BAR_WIDTH, TIME_WIDTH = 16, 8, 7
"""Columns of the name at most, of the bar at least, and of the time left."""


class ConsoleTracker(Tracker):
    """Shows progress and the most important metrics on a stream, by default standard output; on a terminal as a bar."""

    def __init__(self, name: str, total_steps: int, stream: IO[str] | None = None) -> None:
        self._name = name
        self._total_steps = total_steps
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def resume(self, step: int) -> None:
        self._console.print(f"{self._name}: resumes after step {step}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the bar, above which validations stay as lines; without a terminal prints a line."""
        if not self._console.is_terminal:
            line = "  ".join(shown_values(metrics))
            self._console.print(f"{self._name} {step}/{self._total_steps}  {line}", markup=False)
            return
        bar = self._bar()
        if validation := shown_values(metrics, "val/"):
            bar.console.print(f"{self._name} {step}/{self._total_steps}  {'  '.join(validation)}", markup=False)
        bar.update(self._task, completed=step, values=self._fitting(shown_values(metrics)))

    def _fitting(self, values: Sequence[str]) -> str:
        """The first of the values that fit beside the other columns."""
        counts = 2 * len(str(self._total_steps)) + 1
        room = self._console.width - len(self._short_name()) - BAR_WIDTH - counts - TIME_WIDTH - 4
        fitting = ""
        for value in values:
            if len(longer := f"{fitting}  {value}".strip()) > room:
                break
            fitting = longer
        return fitting

    def _short_name(self) -> str:
        return self._name if len(self._name) <= NAME_WIDTH else self._name[: NAME_WIDTH - 1] + "…"

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _bar(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[values]}", markup=False),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task(self._short_name(), total=self._total_steps, values="")
            self._progress.start()
        return self._progress


def shown_values(metrics: Mapping[str, float], prefix: str = "") -> list[str]:
    """The present SHOWN metrics whose names begin with `prefix`, as `label value`."""
    return [
        f"{label} {form.format(value) if math.isfinite(value) else value}"
        for name, label, form in SHOWN
        if name.startswith(prefix) and (value := metrics.get(name)) is not None
    ]


@register_tracker("stdout")
def _make(config: TrackerOptions, output_dir: Path, options: dict[str, Any]) -> Tracker:
    return ConsoleTracker(config.exp_name, config.max_steps, **options)
