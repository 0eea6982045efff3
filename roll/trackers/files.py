"""Files of a run: metrics.jsonl, one JSON object per step, and run.json, its configuration and result."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from roll.trackers.base import Tracker

METRICS_FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends `{"step": 3, "actor/loss": ..., ...}` lines, with sorted names, so that equal runs write equal files.

    Each line is one write to a file opened for appending: a reader sees whole lines, and a killed run loses at most the
    last one. A new run empties the file; a resumed run keeps the lines up to its step. JSON has no NaN and infinity,
    which are written as null. The folder is created with the first line.
    """

    every_step = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._kept: list[str] = []

    def resume(self, step: int) -> None:
        """Keeps the complete lines of steps up to and including `step`."""
        self._kept = [line for line in _lines(self._path) if _step(line) <= step]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the line of the step to the operating system before returning."""
        if self._descriptor is None:
            self._descriptor = self._begin()
        rest = {name: _number(value) for name, value in sorted(metrics.items()) if name != "step"}
        os.write(self._descriptor, (json.dumps({"step": step, **rest}) + "\n").encode())

    def close(self) -> None:
        """Flushes the file to disk."""
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
    """The complete lines of a metrics.jsonl in file order; skips a line that a killed process wrote partially."""
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """The lines that end in a newline."""
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
    """Writes `folder`/run.json atomically and returns its path.

    Args:
        folder: output folder of the run; created if missing.
        config: the resolved configuration, a dataclass or a mapping.
        plan: the plan of the run, a dataclass or a mapping; or None.
        versions: of Python and all dependencies; by default those of this process.
        summary: result of the run; None while it is running.
    """
    record = {
        "config": without_secrets(config),
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
    """Versions of Python and of all installed distributions, by name."""
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    ordered = dict(sorted(installed.items(), key=lambda entry: entry[0].lower()))
    return {"python": platform.python_version(), **ordered}


SECRET = re.compile(r"(api_?key|password|secret|(access|auth|hf)_token)$", re.IGNORECASE)
"""Names of keys and environment variables whose values are not shown."""


def without_secrets(config: Any) -> Any:
    """A configuration as nested mappings, with `***` for the values of keys such as api_key."""

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: "***" if item and SECRET.search(str(name)) else hide(item) for name, item in value.items()}
        return [hide(item) for item in value] if isinstance(value, list | tuple) else value

    return hide(json.loads(json.dumps(config, default=plain)))


def plain(value: Any) -> Any:
    """Converts values that `json.dump` cannot write.

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
