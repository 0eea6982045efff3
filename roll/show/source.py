"""Where a run has written its samples, and which of its steps is meant."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigError, Problem
from roll.pipeline.rollout_dump import read_samples
from roll.show.samples import SampleGroup, groups_of
from roll.trackers.files import RUN_FILE


@dataclass(frozen=True)
class RunDump:
    """What a run's configuration says of its samples.

    Attributes:
        folder: with one file for each step.
        model: folder of the trained model, beside which the tokenizer lies; None where the configuration names none.
    """

    folder: Path
    model: str | None


def wrong(path: str, message: str) -> ConfigError:
    """One problem of what was asked for, ready to be raised."""
    return ConfigError([Problem(path, message)])


def find_dump(run: Path) -> RunDump:
    """Reads `run`/run.json, which is there from the start of a run on.

    Raises:
        ConfigError: the folder is not that of a run that writes its samples.
    """
    file = run / RUN_FILE
    try:
        config: Mapping[str, Any] = json.loads(file.read_text())["config"]
        if "rollout_dump_dir" not in config:
            raise wrong("RUN_DIR", f"{run} is a run of {config['pipeline']}, which samples nothing to show")
        dumped, output = config["rollout_dump_dir"], config["output_dir"]
        model = config["actor_train"]["model_args"]["model_name_or_path"]
    except (FileNotFoundError, NotADirectoryError):
        raise wrong("RUN_DIR", f"{run} has no {RUN_FILE}; give the output_dir of a run") from None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise wrong("RUN_DIR", f"{file} is not the record of a run: {type(error).__name__} {error}") from None
    if dumped is None:
        raise wrong(
            "rollout_dump_dir",
            f"is null in {file}, so the run kept no samples; set it to a folder, such as "
            f"rollout_dump_dir={os.path.join(output, 'samples')}, and run again",
        )
    start = started_in(run, output)
    local = None if model is None else start / model
    return RunDump(start / dumped, str(local) if local is not None and local.is_dir() else model)


def started_in(run: Path, output_dir: str) -> Path:
    """The folder that relative paths of a run's configuration are relative to.

    That is what is left of the run's folder without its `output_dir`; where they do not match, the folder we are in.
    """
    here, parts = run.resolve(), Path(output_dir).parts
    if not Path(output_dir).is_absolute() and parts and here.parts[-len(parts) :] == parts:
        return Path(*here.parts[: -len(parts)])
    return Path()


def choose_step(steps: Sequence[int], wanted: int | None, folder: Path) -> int:
    """The step to show: the last one where none is wanted.

    Args:
        steps: that are there, in order.
        wanted: by the user.
        folder: of the dump, for errors.

    Raises:
        ConfigError: there is no step yet, or not this one.
    """
    if not steps:
        raise wrong("RUN_DIR", f"{folder} holds no step yet; wait for the first one to end")
    if wanted is None or wanted in steps:
        return steps[-1] if wanted is None else wanted
    near = [max((step for step in steps if step < wanted), default=None)]
    near += [min((step for step in steps if step > wanted), default=None)]
    names = " and ".join(str(step) for step in near if step is not None)
    raise wrong("--step", f"{wanted} is not in {folder}; nearest: {names} (there are {steps[0]} to {steps[-1]})")


def read_groups(folder: Path, step: int) -> list[SampleGroup]:
    """The groups of a step.

    Raises:
        ConfigError: the file cannot be read or has other lines than a dump.
    """
    try:
        return groups_of(read_samples(folder, step))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise wrong("--step", f"{step} in {folder} cannot be shown: {type(error).__name__} {error}") from None
