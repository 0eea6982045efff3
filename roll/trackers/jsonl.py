"""metrics.jsonl: the full record of a run, one JSON object per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from roll.trackers.base import Tracker

FILE_NAME = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends `{"step": 3, "actor/loss": ..., ...}` lines, names sorted, so that equal runs write equal files.

    A line is one write to a file opened for appending: a reader sees whole lines, and a killed run loses at most the
    last one. A run that starts anew empties the file; a resumed one keeps the lines up to its step. NaN and infinity
    have no place in JSON and are written as null.
    """

    every_step = True

    def __init__(self, path: Path) -> None:
        """Writes to `path`; its folder is made with the first line."""
        self._path = path
        self._descriptor: int | None = None
        self._kept: list[str] = []

    def resume(self, step: int) -> None:
        """Keeps the complete lines of steps up to and including `step`."""
        self._kept = [line for line in _lines(self._path) if _step(line) <= step]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the step's line and hands it to the operating system before returning."""
        if self._descriptor is None:
            self._descriptor = self._begin()
        rest = {name: _number(value) for name, value in sorted(metrics.items()) if name != "step"}
        os.write(self._descriptor, (json.dumps({"step": step, **rest}) + "\n").encode())

    def close(self) -> None:
        """Makes sure that the file is on disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".partial")
        aside.write_text("".join(f"{line}\n" for line in self._kept))
        os.replace(aside, self._path)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The complete lines of a metrics.jsonl, in file order; a line cut short by a kill is left out."""
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """Complete lines: those that end in a newline."""
    if not path.exists():
        return []
    return path.read_text().split("\n")[:-1]


def _step(line: str) -> int:
    return int(json.loads(line)["step"])


def _number(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
