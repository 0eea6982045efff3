"""Datasets and checkpoints on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from roll.configs.errors import Report
from roll.configs.names import TEMPLATES
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
            elif not Path(name).is_file():
                report.absent(path, f"{name} is not a file on this machine")
    for key in ("output_dir", "logging_dir", "rollout_dump_dir"):
        folder = getattr(config, key, None)
        own = key == "output_dir" or not Path(folder or ".").is_relative_to(config.output_dir)
        if folder is not None and own:
            _check_folder(key, Path(folder), report)
    if isinstance(config.resume_from_checkpoint, str) and not Path(config.resume_from_checkpoint).is_dir():
        report.absent(
            "resume_from_checkpoint",
            f"{config.resume_from_checkpoint} is not a folder; use a checkpoint's path, or true for the newest one of "
            "output_dir",
        )


def _check_folder(key: str, folder: Path, report: Report) -> None:
    """What is there of the folder can be written to."""
    there = next(path for path in (folder, *folder.parents) if path.exists() or path == path.parent or str(path) == ".")
    if not there.is_dir():
        report.absent(key, f"{folder} cannot be a folder, since {there} is a file; name another")
    elif not os.access(there, os.W_OK | os.X_OK):
        report.absent(key, f"{folder} cannot be written, since {there} is closed to this user; name another")
