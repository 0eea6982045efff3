"""metrics.jsonl: the full record of a run, one JSON object per step."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from roll.trackers.base import Tracker

METRICS_FILE = "metrics.jsonl"


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


RUN_FILE = "run.json"


def write_run_json(
    folder: Path,
    config: Any,
    plan: Any,
    versions: Mapping[str, str] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `folder`/run.json whole or not at all, and returns its path.

    Args:
        folder: the run's output folder; made when missing.
        config: the resolved configuration, a dataclass or a mapping.
        plan: the plan of the run, a dataclass or a mapping; None when there is none.
        versions: of Python and every dependency; default those of this process.
        summary: how the run ended; None while it runs.
    """
    record = {
        "config": config,
        "versions": dict(versions or dependency_versions()),
        "plan": plan,
        "summary": summary,
    }
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / RUN_FILE
    aside = target.with_suffix(".partial")
    with aside.open("w") as file:
        json.dump(record, file, indent=2, default=plain)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, target)
    return target


@cache
def dependency_versions() -> dict[str, str]:
    """Version of Python and of every installed distribution, by name."""
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    ordered = dict(sorted(installed.items(), key=lambda entry: entry[0].lower()))
    return {"python": platform.python_version(), **ordered}


def plain(value: Any) -> Any:
    """What `json.dump` cannot write by itself, as something it can.

    Raises:
        TypeError: `value` is neither a dataclass, a path nor a number of another library.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"run.json cannot hold {value!r} of type {type(value).__name__}")
