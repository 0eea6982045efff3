"""The folder of a trial: its lock, and the progress of its run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from roll.configs.pipeline import RLConfig
from roll.pipeline import checkpoint
from roll.tools.terminal import option_error
from roll.trackers.files import RUN_FILE, FolderInUseError, locked, without_secrets

NOT_COMPARED = ("source", "resume_from_checkpoint")
"""Keys of a configuration that do not change what is learned."""

Progress = Literal["finished", "resumable", "new"]
"""State of a trial's folder; `resumable` has a complete checkpoint of the same configuration."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Locks an output folder and yields the file descriptor of the lock.

    A subprocess that inherits the descriptor keeps the lock if it outlives its `roll ablate`, so that no other one
    starts in the same folder.

    Raises:
        ConfigError: the folder cannot be written, or is locked by another process.
    """
    with ExitStack() as held:
        try:
            descriptor = held.enter_context(locked(folder))
        except FolderInUseError:
            message = (
                f"{folder} is in use by another `roll ablate`, or by a run that it left behind; wait until it ends, "
                "or use another folder"
            )
            raise option_error("--out", message) from None
        except OSError as error:
            raise option_error("--out", f"{folder} cannot be written: {error.strerror}; use another folder") from None
        yield descriptor


def read_progress(folder: Path, config: RLConfig) -> Progress:
    """Progress of the run in `folder`; `new` if its run.json has another configuration."""
    record = read_run_json(folder)
    if record is None or _compared(record["config"]) != _compared(without_secrets(dataclasses.asdict(config))):
        return "new"
    if (record.get("summary") or {}).get("status") == "finished":
        return "finished"
    return "resumable" if checkpoint.CheckpointManager(folder / checkpoint.FOLDER, 0).complete() else "new"


def read_run_json(folder: Path) -> dict[str, Any] | None:
    """The run.json of a run; None if it is missing or invalid."""
    try:
        record = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NOT_COMPARED}
