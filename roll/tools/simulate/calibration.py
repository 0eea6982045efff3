"""What is known of a run's speed: seconds of each part of a step, on which devices, for which responses."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigError, Problem
from roll.configs.layouts import role_layout
from roll.configs.pipeline import RLConfig
from roll.trackers.jsonl import FILE_NAME as METRICS
from roll.trackers.jsonl import read_metrics
from roll.trackers.run_json import FILE_NAME as RUN


@dataclass(frozen=True)
class Shape:
    """Devices and batch that times were measured with."""

    train_devices: int
    engines: int
    slots: int
    """Requests that one engine runs at a time."""
    samples: int
    """Of one batch."""
    ratio: float

    @classmethod
    def of_config(cls, config: RLConfig) -> Shape:
        """The shape a configuration asks for."""
        return cls(
            train_devices=len(config.actor_train.device_mapping),
            engines=role_layout(config.actor_infer).data,
            slots=config.actor_infer.max_running_requests,
            samples=config.rollout_batch_size * config.num_return_sequences_in_group,
            ratio=config.async_generation_ratio,
        )

    @classmethod
    def of_record(cls, config: dict[str, Any]) -> Shape:
        """The shape in the `config` of a run.json.

        Raises:
            KeyError: it is not the configuration of a reinforcement learning run.
        """
        infer = config["actor_infer"]
        return cls(
            train_devices=len(config["actor_train"]["device_mapping"]),
            engines=max(1, len(infer["device_mapping"]) // infer["num_gpus_per_worker"]),
            slots=infer["max_running_requests"],
            samples=config["rollout_batch_size"] * config["num_return_sequences_in_group"],
            ratio=config["async_generation_ratio"],
        )


@dataclass(frozen=True)
class Times:
    """Median seconds of a step's parts; `step` leaves validation and checkpoints out."""

    generate: float
    train: float
    log_probs: float = 0.0
    reward: float = 0.0
    publish: float = 0.0
    publish_pause: float = 0.0
    step: float | None = None
    """None where no step was measured as a whole."""


@dataclass(frozen=True)
class Batch:
    """One generated batch: seconds, and its responses' mean and longest length in tokens."""

    seconds: float
    mean: float
    longest: float


@dataclass(frozen=True)
class Measured:
    """Times, the shape they belong to, and the responses."""

    shape: Shape
    times: Times
    mean_length: float
    longest: float
    batches: Sequence[Batch] = ()
    """Single steps, from which the cost of a larger decode batch is told; may be empty."""


DOUBLING_BATCHES = tuple(2.0**power for power in range(13))
"""Batches, 1 to 4096, at which a decode iteration may take twice as long as an empty one."""

TELLING_GAIN = 0.7
"""The best of DOUBLING_BATCHES is believed where its errors are below this part of those of the worst: with lengths
that are alike in every step all of them explain the times equally well."""

FEWEST_BATCHES = 8
"""Steps from which it is told at all."""


def doubling_batch(measured: Measured) -> float | None:
    """The batch at which a decode iteration takes twice as long as an empty one; None where the steps do not tell.

    Seconds of a batch are proportional to iterations + tokens per engine / doubling batch, where an engine with all
    requests running needs as many iterations as its longest response has tokens, and with fewer slots one more round.
    """
    if len(measured.batches) < FEWEST_BATCHES:
        return None
    errors = {doubling: _error(measured, doubling) for doubling in DOUBLING_BATCHES}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < TELLING_GAIN * max(errors.values()) else None


def _error(measured: Measured, doubling: float) -> float:
    """Spread of measured over predicted seconds, relative to its mean."""
    shape = measured.shape
    factors = []
    for batch in measured.batches:
        tokens = batch.mean * shape.samples / shape.engines
        rounds = max(batch.longest, tokens / shape.slots + batch.longest - batch.mean)
        factors.append(batch.seconds / (rounds + tokens / doubling))
    return statistics.pstdev(factors) / statistics.fmean(factors)


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
        shape = Shape.of_record(json.loads((folder / RUN).read_text())["config"])
    except (FileNotFoundError, NotADirectoryError):
        raise _wrong(flag, f"{folder} has no {RUN}; give the output_dir of a run") from None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise _wrong(flag, f"{folder / RUN} is not the record of an RL run: {type(error).__name__} {error}") from None
    try:
        lines = [line for line in read_metrics(folder / METRICS) if line.get("step", 0) > 0]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _wrong(flag, f"{folder / METRICS} does not hold the steps of a run: {error}") from None
    if not lines:
        raise _wrong(flag, f"{folder / METRICS} holds no step; let the run make some, for example max_steps=20")
    lines = lines[min(WARM_UP_STEPS, len(lines) // 3) :]
    missing = [name for name in NEEDED if any(not isinstance(line.get(name), int | float) for line in lines)]
    if missing:
        raise _wrong(flag, f"{folder / METRICS} has steps without {', '.join(missing)}; give a run of `roll run`")
    if _median(lines, "rollout/response_length_mean") < 1:
        raise _wrong(flag, f"{folder / METRICS} has responses of less than 1 token; give a run that answers")
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
        raise _wrong("--from", f"{folder / METRICS} says of no step how long generation took (time/generate)")
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
