"""Options of the trackers that `track_with` names, and the flat spelling of `tracker_kwargs`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, Literal

from roll.base.errors import Finding, Problem, error, missing
from roll.base.schema import ConfigSource, needs, one_or_many, option
from roll.base.text import check_known
from roll.configs.run_options import ProcessOptions, StepOptions

METRICS_FILE = "metrics.jsonl"
"""File of `output_dir` with the metrics of every step, whatever `track_with` names."""


@dataclass
class TensorBoardOptions:
    """`tracker_kwargs.tensorboard`."""

    log_dir: str | None = option(None, "Folder of the event files; default: output_dir/tensorboard.")
    flush_secs: float = option(30.0, "Maximum time a point stays in memory, in seconds.", gt=0, usual=(0.1, 86400.0))


@dataclass
class ShownSamples:
    """What trackers have that show samples."""

    samples: bool = option(
        True,
        "Show at most 16 samples, of the groups with the largest share of the gradient, of the first step and of every "
        "one that rollout_dump_every keeps.",
    )


@dataclass
class WandbOptions(ShownSamples):
    """`tracker_kwargs.wandb`."""

    api_key: str | None = option(None, "Key of the server; default: what `wandb login` or WANDB_API_KEY gives.")
    project: str | None = option(None, "Project; default: roll.")
    entity: str | None = option(None, "User or team.")
    name: str | None = option(None, "Name of the run; default: exp_name.")
    group: str | None = option(None, "Group of runs.")
    job_type: str | None = option(None, "Kind of run.")
    notes: str | None = option(None, "Description.")
    tags: list[str] | None = option(None, "Tags; a single one is taken as a list of one.", parse=one_or_many)
    log_dir: str | None = option(None, "Folder of the local copy; default: output_dir.")
    mode: Literal["online", "offline", "disabled", None] = option(
        None, "offline writes files for `wandb sync`; default: online, or WANDB_MODE."
    )
    settings: dict[str, Any] = option(factory=dict, help="Further settings of wandb, such as base_url.")


@dataclass
class SwanlabOptions(ShownSamples):
    """`tracker_kwargs.swanlab`."""

    login_kwargs: dict[str, Any] = option(factory=dict, help="api_key and host of the server.")
    project: str | None = option(None, "Project; default: roll.")
    workspace: str | None = option(None, "User or organisation.")
    experiment_name: str | None = option(None, "Name of the run; default: exp_name.")
    description: str | None = option(None, "Description.")
    tags: list[str] | None = option(None, "Tags; a single one is taken as a list of one.", parse=one_or_many)
    logdir: str | None = option(None, "Folder of the local copy; default: output_dir/swanlab.")
    mode: Literal["cloud", "online", "local", "offline", "disabled", None] = option(
        None, "offline writes files for `swanlab sync`; cloud is another name of online, the default."
    )


@dataclass
class MlflowOptions(ShownSamples):
    """`tracker_kwargs.mlflow`."""

    tracking_uri: str | None = option(
        None, "Server or store; default: MLFLOW_TRACKING_URI, else files in output_dir/mlflow."
    )
    experiment_name: str | None = option(None, "Experiment; default: roll.")
    run_name: str | None = option(None, "Name of the run; default: exp_name.")
    description: str | None = option(None, "Description.")
    tags: dict[str, Any] = option(factory=dict, help="Tags and their values.")


@dataclass
class TrackioOptions(ShownSamples):
    """`tracker_kwargs.trackio`."""

    project: str | None = option(None, "Project; default: roll.")
    name: str | None = option(None, "Name of the run; default: exp_name.")
    group: str | None = option(None, "Group of runs.")
    space_id: str | None = option(None, "Space on the Hugging Face Hub that gets the run, as owner/name.")
    dataset_id: str | None = option(None, "Dataset on the Hugging Face Hub that the Space keeps the run in.")
    server_url: str | None = option(None, "Address of a Trackio server that gets the run.")
    private: bool | None = option(None, "Whether a new Space is private.")
    auto_log_gpu: bool | None = option(None, "Records the use of GPUs; default: where nvidia-ml-py finds any.")
    gpu_log_interval: float = option(10.0, "Time between two records of the use of GPUs, in seconds.", gt=0)
    log_dir: str | None = option(None, "Folder of the local database; default: TRACKIO_DIR, else output_dir/trackio.")


@dataclass
class OpenTelemetryOptions:
    """`tracker_kwargs.opentelemetry`."""

    endpoint: str | None = option(
        None, "Collector that gets the spans of the run (OTLP over HTTP); default: OTEL_EXPORTER_OTLP_ENDPOINT."
    )


@dataclass
class NoOptions:
    """`tracker_kwargs` of a tracker without options."""


TRACKER_OPTIONS: dict[str, type] = {
    "tensorboard": TensorBoardOptions,
    "wandb": WandbOptions,
    "swanlab": SwanlabOptions,
    "mlflow": MlflowOptions,
    "trackio": TrackioOptions,
    "opentelemetry": OpenTelemetryOptions,
    "stdout": NoOptions,
}
"""Options of each tracker of `track_with`; a tracker of the user adds its own."""


@dataclass
class TrackerOptions(StepOptions, ProcessOptions):
    """What trackers read."""

    track_with: list[str] = option(
        factory=lambda: ["stdout", "tensorboard"],
        parse=one_or_many,
        help="Trackers in addition to metrics.jsonl: stdout, tensorboard, wandb, swanlab, mlflow, trackio, "
        "opentelemetry, or one of `custom_modules`; a single name is taken as a list of one.",
    )
    tracker_kwargs: dict[str, dict[str, Any]] = option(
        factory=dict,
        help="Options of the trackers by name, e.g. {tensorboard: {log_dir: PATH}}; with one tracker "
        "besides stdout they may be written directly.",
    )
    logging_steps: int = option(
        1,
        "Console and tracker lines every so many steps (metrics.jsonl has every step).",
        ge=1,
        only_for=needs("track_with", "track_with is empty, and metrics.jsonl has every step"),
    )


PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "swanlab": ("swanlab", "swanlab"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
    "opentelemetry": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http"),
}
"""Tracker in a process of its own -> the module that it needs, and the package to install for it."""


def missing_package(tracker: str) -> str | None:
    """The name of the package that `tracker` needs and that is not installed; None if nothing is missing."""
    module, package = PACKAGES.get(tracker, ("", ""))
    try:
        return package if module and find_spec(module) is None else None
    except ModuleNotFoundError:  # of a package that contains the module
        return package


def nest_tracker_kwargs(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem], list[Problem]]:
    """A file that lists the options of its only tracker in `tracker_kwargs`, with these under the tracker's name.

    A `tracker_kwargs` whose keys are all names of trackers stays as it is. Otherwise its keys belong to the only
    tracker of `track_with` other than stdout.

    Returns:
        The file, notes about keys that only other trackers have, and problems.
    """
    given, chosen = tree.get("tracker_kwargs"), tree.get("track_with", ["tensorboard"])
    if not isinstance(given, Mapping) or all(name in TRACKER_OPTIONS for name in given):
        return dict(tree), [], []
    named = [chosen] if isinstance(chosen, str) else chosen if isinstance(chosen, list) else []
    trackers = [name for name in named if name in TRACKER_OPTIONS and name != "stdout"]
    if len(trackers) > 1:
        flat = next(name for name in given if name not in TRACKER_OPTIONS)
        message = (
            f"track_with has {len(trackers)} trackers; write the options by name: {{{trackers[0]}: {{{flat}: ...}}}}"
        )
        return {**tree, "tracker_kwargs": {}}, [], [Problem(f"tracker_kwargs.{flat}", message)]
    own = _keys(trackers[0]) if trackers else set()
    owners = {key: [name for name in TRACKER_OPTIONS if key in _keys(name)] for key in given}
    unused = [key for key in given if owners[key] and key not in own]
    notes = [
        Problem(f"tracker_kwargs.{key}", f"has no effect: it is an option of {owners[key][0]}, not in track_with")
        for key in unused
    ]
    nested = {key: value for key, value in given.items() if key not in unused}
    if nested and not trackers:
        message = "belongs to no tracker: track_with names none that has options"
        return {**tree, "tracker_kwargs": {}}, notes, [Problem(f"tracker_kwargs.{key}", message) for key in nested]
    return {**tree, "tracker_kwargs": {trackers[0]: nested} if nested else {}}, notes, []


def _keys(tracker: str) -> set[str]:
    return {item.name for item in fields(TRACKER_OPTIONS[tracker])}


def check_trackers(
    track_with: Sequence[str], tracker_kwargs: Mapping[str, Any], source: ConfigSource
) -> Iterator[Finding]:
    """Each tracker is named once and installed, and has the options that are given."""
    for tracker, count in Counter(track_with).items():
        if count > 1:
            yield error("track_with", f"contains {tracker} {count} times; list it once")
        yield from check_known("track_with", tracker, TRACKER_OPTIONS)
        package = missing_package(tracker)
        if package is not None:
            advice = f"install it with: {sys.executable} -m pip install {package}"
            yield missing("track_with", f"{tracker} is not installed; {advice}")
    for name in tracker_kwargs:
        if name not in track_with:
            message = f"track_with does not contain {name}; add it or remove this"
            yield source.unused(f"tracker_kwargs.{name}", message, ["track_with"])
