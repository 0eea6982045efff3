"""Reads the speed of a run from its folder."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from roll.configs.errors import ConfigError, Problem
from roll.pipeline.simulate.measured import Batch, Measured, Shape, Times
from roll.trackers.files import METRICS_FILE, RUN_FILE, read_metrics

WARM_UP_STEPS = 3
"""Steps left out at the start, in which engines warm up; of a run of few steps, a third."""

NEEDED = ("time/step", "time/train", "rollout/response_length_mean", "rollout/response_length_max")


def read_run(folder: Path, flag: str) -> Measured:
    """Shape, median times and responses of a run.

    Args:
        folder: its output_dir, with metrics.jsonl and run.json.
        flag: option that named it, for errors.

    Raises:
        ConfigError: the folder is not that of a reinforcement learning run with at least one step.
    """
    try:
        shape = Shape.of_record(json.loads((folder / RUN_FILE).read_text())["config"])
    except (FileNotFoundError, NotADirectoryError):
        raise _wrong(flag, f"{folder} has no {RUN_FILE}; give the output_dir of a run") from None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise _wrong(
            flag, f"{folder / RUN_FILE} is not the record of an RL run: {type(error).__name__} {error}"
        ) from None
    try:
        lines = [line for line in read_metrics(folder / METRICS_FILE) if line.get("step", 0) > 0]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _wrong(flag, f"{folder / METRICS_FILE} does not hold the steps of a run: {error}") from None
    if not lines:
        raise _wrong(flag, f"{folder / METRICS_FILE} holds no step; let the run make some, for example max_steps=20")
    lines = lines[min(WARM_UP_STEPS, len(lines) // 3) :]
    missing = [name for name in NEEDED if any(not isinstance(line.get(name), int | float) for line in lines)]
    if missing:
        raise _wrong(flag, f"{folder / METRICS_FILE} has steps without {', '.join(missing)}; give a run of `roll run`")
    if _median(lines, "rollout/response_length_mean") < 1:
        raise _wrong(flag, f"{folder / METRICS_FILE} has responses of less than 1 token; give a run that answers")
    return Measured(
        shape=shape,
        times=_times(lines),
        mean_length=_median(lines, "rollout/response_length_mean"),
        longest=_median(lines, "rollout/response_length_max"),
        batches=[
            Batch(line["time/generate"], line["rollout/response_length_mean"], line["rollout/response_length_max"])
            for line in lines
            if line.get("time/generate", 0) > 0
        ],
    )


def synchronous(measured: Measured, folder: Path) -> Measured:
    """The run, if its parts were measured one at a time.

    Raises:
        ConfigError: it lacks the time of generation, or both sides went on at once: then times hold a slowdown that
            cannot be taken apart.
    """
    if measured.shape.ratio > 0:
        raise _wrong(
            "--from",
            f"{folder} ran with async_generation_ratio {measured.shape.ratio:g}; give a run with 0, in which every "
            f"part is measured alone, and name this one with --overlap",
        )
    if measured.times.generate <= 0:
        raise _wrong("--from", f"{folder / METRICS_FILE} says of no step how long generation took (time/generate)")
    return measured


def overlapping(measured: Measured, folder: Path) -> Measured:
    """The run, if generation went on beside training in it.

    Raises:
        ConfigError: it did not.
    """
    if measured.shape.ratio <= 0:
        raise _wrong("--overlap", f"{folder} ran with async_generation_ratio 0; give a run with more, or leave it out")
    return measured


def _times(lines: list[dict[str, float]]) -> Times:
    return Times(
        generate=_median(lines, "time/generate"),
        train=_median(lines, "time/train"),
        log_probs=_median(lines, "time/old_log_probs"),
        reward=_median(lines, "time/reward"),
        publish=_median(lines, "time/publish"),
        publish_pause=_median(lines, "time/publish_pause"),
        step=statistics.median(
            line["time/step"] - line.get("time/val", 0.0) - line.get("time/checkpoint", 0.0) for line in lines
        ),
    )


def _median(lines: list[dict[str, float]], name: str) -> float:
    return statistics.median(line.get(name) or 0.0 for line in lines)


def _wrong(flag: str, message: str) -> ConfigError:
    return ConfigError([Problem(flag, message)])
