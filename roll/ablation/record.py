"""What stands in the folder of a run: whether it is done, can go on, or has to start anew."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

from roll.configs.pipeline import RLConfig
from roll.pipeline.checkpoint import CheckpointManager
from roll.trackers.files import RUN_FILE, plain

Progress = Literal["finished", "resumable", "new"]
"""`resumable` has a complete checkpoint of the same configuration."""

NOT_COMPARED = ("source", "resume_from_checkpoint")
"""Keys of a configuration that do not change what is learned: where it came from, and how it was started."""

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds them."""


def progress(folder: Path, config: RLConfig) -> Progress:
    """How far the run in `folder` is, if its run.json says that it had this configuration."""
    record = read_record(folder)
    if record is None or _compared(record["config"]) != _compared(_as_json(config)):
        return "new"
    if (record.get("summary") or {}).get("status") == "finished":
        return "finished"
    return "resumable" if CheckpointManager(folder / CHECKPOINTS, 0).complete() else "new"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The run.json of a run; None where there is none that can be read."""
    try:
        record = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None


def forget(folder: Path) -> None:
    """Removes the checkpoints of a run of another configuration, which this one must not go on from."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _as_json(config: RLConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config), default=plain))


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NOT_COMPARED}
