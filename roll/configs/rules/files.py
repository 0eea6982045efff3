"""Datasets and checkpoints on this machine."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path

from roll.configs.errors import Report
from roll.configs.names import TEMPLATES
from roll.configs.paths import unreachable
from roll.configs.pipeline import BaseConfig
from roll.configs.rules.algorithm import check_name

ENDINGS = (".jsonl", ".parquet")
"""Files prompts are read from."""


def check_files(config: BaseConfig, report: Report) -> None:
    """Data files are of a known kind and here; a checkpoint named by path is here."""
    roles = ["actor_train"] + (["validation"] if config.eval_steps else [])
    for role in roles:
        check_name(f"{role}.data_args.template", getattr(config, role).data_args.template, TEMPLATES, report)
        for name in getattr(config, role).data_args.file_name:
            path = f"{role}.data_args.file_name"
            if not name.endswith(ENDINGS):
                report.error(
                    path, f"{name} is not a file of lines or columns; use one that ends in {' or '.join(ENDINGS)}"
                )
            elif not os.path.isfile(name) or unreachable(name):
                report.absent(path, f"{name} {_absence(name, 'is not a file on this machine')}")
    _check_folders(config, report)
    checkpoint = config.resume_from_checkpoint
    if isinstance(checkpoint, str) and (not os.path.isdir(checkpoint) or unreachable(checkpoint)):
        report.absent(
            "resume_from_checkpoint",
            f"{checkpoint} {_absence(checkpoint, 'is not a folder')}; use a checkpoint's path, or true for the newest "
            "one of output_dir",
        )


def _absence(name: str, otherwise: str) -> str:
    why = unreachable(name)
    return f"cannot be read: {why}" if why else otherwise


def _check_folders(config: BaseConfig, report: Report) -> None:
    """What the run writes can be written; folders that the same thing stands in the way of are told once."""
    told: set[str] = set()
    for key in ("output_dir", "logging_dir", "rollout_dump_dir"):
        folder = getattr(config, key, None)
        why = _obstacle(Path(folder)) if folder is not None else None
        if why is not None and why not in told:
            report.absent(key, f"{folder} {why}; name another")
            told.add(why)


def _obstacle(folder: Path) -> str | None:
    """Why the folder cannot be made or written to."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path) or path == path.parent)
    if not there.is_dir():
        return f"cannot be a folder, since {there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written, since {there} is closed to this user"
    for path in (folder, *(there / name for name in folder.relative_to(there).parts)):
        if (why := unreachable(path)) is not None:
            return f"cannot be used, since {reprlib.repr(path.name)} cannot be reached: {why}"
    return None
