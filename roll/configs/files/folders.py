"""Data files, checkpoints and folders on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from roll.base.errors import Finding, error, missing, obstacle, similar_path, unreachable, warning
from roll.base.schema import MAX_EXPLAINED
from roll.base.text import check_known
from roll.configs.arguments import DataArguments
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import EngineRoleConfig
from roll.configs.trackers import METRICS_FILE
from roll.hub.find import folder_files
from roll.hub.generated import is_generated
from roll.hub.names import CONFIG_NAME, HubError, hub_name, local_model, other_reading
from roll.hub.splits import READABLE, wanted_splits
from roll.models.families.registry import template_names

LONGEST_NAME = 200
"""Characters of an `exp_name`, which trackers use as the name of a file."""


COMPLETE = ("COMPLETE", "step-*/COMPLETE", "checkpoints/step-*/COMPLETE")
"""Files of which a checkpoint, or a folder with checkpoints, has one."""


def check_files(config: BaseConfig) -> Iterator[Finding]:
    """Names can be printed; data files have a known type and exist; a checkpoint given by path exists."""
    yield from _check_names(config)
    if "save_steps" in config.source.given and config.save_steps > config.max_steps > 0:
        yield warning(
            "save_steps", f"{config.save_steps} is above max_steps {config.max_steps}: only the last step is saved"
        )
    absent = 0
    for role in config.data_roles():
        args = getattr(config, role).data_args
        yield from check_known(f"{role}.data_args.template", args.template, template_names())
        for finding in _check_data_files(role, args, explained=MAX_EXPLAINED - absent):
            absent += finding.kind == "missing"
            yield finding
    yield from _check_folders(config)
    yield from _check_checkpoint(config.resume_from_checkpoint)


def _check_names(config: BaseConfig) -> Iterator[Finding]:
    for key in ("exp_name", "output_dir", "logging_dir", "checkpoint_dir", "rollout_dump_dir"):
        value = getattr(config, key, None)
        if isinstance(value, str) and not value.isprintable():
            yield error(key, f"{value!r} has characters that cannot be printed; remove them")
    if len(config.exp_name) > LONGEST_NAME:
        yield error("exp_name", f"has {len(config.exp_name):,} characters; use at most {LONGEST_NAME}")
    if ".." in Path(config.exp_name).parts or os.path.isabs(config.exp_name):
        yield error("exp_name", f"{config.exp_name} leads out of the folder of the run; use a name without ..")


def _check_data_files(role: str, args: DataArguments, explained: int) -> Iterator[Finding]:
    """The files of a role; similar names are looked for where `explained` files or fewer are not there."""
    path = f"{role}.data_args.file_name"
    given = [os.path.realpath(name) for name in args.file_name]
    if twice := next((name for name in given if given.count(name) > 1), None):
        yield warning(path, f"lists {twice} twice, so its rows count twice; list it once")
    for name in args.file_name:
        if hub_name(name, "dataset") is not None or is_generated(name):
            continue  # `roll.plan.inputs` looks it up
        if os.path.isdir(name):
            try:
                folder_files(Path(name), args.subset, wanted_splits(role, args.split))
            except HubError as reason:
                yield missing(path, str(reason))
        elif not name.endswith(READABLE):
            kinds = f"use a file that ends in {' or '.join(READABLE)}{other_reading(name, 'dataset')}"
            yield error(path, f"{name} has an unknown file type; {kinds}")
        elif not os.path.isfile(name) or unreachable(name):
            absent = "is not a file on this machine"
            yield missing(path, f"{name} {absence(name, absent, _is_data) if explained > 0 else absent}")
            explained -= 1


def _check_checkpoint(checkpoint: bool | str) -> Iterator[Finding]:
    if not isinstance(checkpoint, str):
        return
    if not os.path.isdir(checkpoint) or unreachable(checkpoint):
        otherwise = "is not a folder; use a checkpoint's path, or true for the newest one of output_dir"
        yield missing("resume_from_checkpoint", f"{checkpoint} {absence(checkpoint, otherwise, Path.is_dir)}")
    elif not any(next(Path(checkpoint).glob(each), None) for each in COMPLETE):
        yield missing("resume_from_checkpoint", f"{checkpoint} holds no complete checkpoint")


def absence(name: str, otherwise: str, fits: Callable[[Path], bool]) -> str:
    """Why nothing can be read at a path; if it is not there, with the most similar name in its folder that fits."""
    why = unreachable(name)
    if why:
        return f"cannot be read: {why}"
    like = similar_path(Path(name), fits)
    if like:
        return f"{otherwise}; did you mean {like}?"
    return otherwise if Path(name).is_absolute() else f"{otherwise}; relative paths start in {Path.cwd()}"


def _is_data(path: Path) -> bool:
    return path.suffix in READABLE and path.is_file()


def _check_folders(config: BaseConfig) -> Iterator[Finding]:
    reported: set[str] = set()
    models = {
        local_model(name).resolve(): role
        for role, worker in reversed(config.device_roles().items())
        if (name := worker.model_args.model_name_or_path) and os.path.isfile(local_model(name) / CONFIG_NAME)
    }
    checkpoints = Path(config.checkpoint_dir or Path(config.output_dir, "checkpoints")).resolve()
    folders = {key: getattr(config, key, None) for key in ("output_dir", "logging_dir", "checkpoint_dir")}
    folders["rollout_dump_dir"] = getattr(config, "rollout_dump_dir", None)
    for tracker in sorted({*config.track_with} & {*config.tracker_kwargs}):
        for option in ("log_dir", "logdir"):
            folders[f"tracker_kwargs.{tracker}.{option}"] = config.tracker_kwargs[tracker].get(option)
    for role, worker in config.device_roles().items():
        if isinstance(worker, EngineRoleConfig):
            key = f"{role}.strategy_args.strategy_config.crash_dump_folder"
            folders[key] = worker.strategy_args.strategy_config.get("crash_dump_folder")
    for key, folder in folders.items():
        if folder is None:
            continue
        why, place = obstacle(Path(folder)), Path(folder).resolve()
        if why is not None and why not in reported:
            yield missing(key, f"{folder} {why}; use another")
            reported.add(why)
        inside = next((model for model in models if place.is_relative_to(model)), None)
        if str(folder).startswith("~"):
            if (user := Path(folder).parts[0]) not in reported:
                yield error(key, f"{folder} is of a user that this machine does not have; use another folder")
            reported.add(user)
        elif "://" in str(folder):
            yield error(key, f"{folder} is an address; use a folder of this machine")
        elif place == Path("/"):
            yield error(key, f"{folder} is the root folder; use a folder of its own")
        elif inside is not None:
            if str(inside) not in reported:
                yield error(key, f"{folder} is inside {inside}, the model of {models[inside]}; use a folder of its own")
            reported.add(str(inside))
        elif Path.cwd().is_relative_to(place):
            yield warning(key, f"{folder} contains the current folder; use a folder of its own, such as output/my_run")
        elif key not in ("output_dir", "checkpoint_dir") and place.is_relative_to(checkpoints):
            if any(part.startswith("step-") for part in place.relative_to(checkpoints).parts[:1]):
                yield error(key, f"{folder} is inside a checkpoint, which a run renames and deletes; use another")
            elif not Path(config.output_dir).resolve().is_relative_to(checkpoints):
                yield warning(key, f"{folder} is among the checkpoints in {checkpoints}; use another")
    if config.resume_from_checkpoint is False and os.path.isfile(os.path.join(config.output_dir, METRICS_FILE)):
        yield warning(
            "output_dir",
            f"{config.output_dir} has an earlier run, whose metrics and samples a new run replaces; use another "
            "folder, or continue it with resume_from_checkpoint=true",
        )
