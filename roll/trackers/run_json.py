"""run.json: what a run was made of and how it ended."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

FILE_NAME = "run.json"


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
    target = folder / FILE_NAME
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
