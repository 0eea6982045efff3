"""Measurements of a run: step times, responses, devices, and what a larger decode batch costs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.trackers import METRICS_FILE
from roll.pipeline.bottleneck_report import trained_seconds
from roll.tools.terminal import option_error
from roll.trackers.files import RUN_FILE, read_metrics

WARM_UP_STEPS = 3
"""First steps left out, in which engines warm up; at most a third of the run."""

REQUIRED = ("time/step", "time/train", "rollout/response_length_mean", "rollout/response_length_max")
"""Metrics that every step needs."""

BATCH = ("time/generate", "rollout/response_length_mean", "rollout/response_length_max")
"""Metrics of a `GeneratedBatch`, in the order of its fields."""

DOUBLING_BATCHES = tuple(2.0**power for power in range(13))
"""Candidates for the doubling batch, 1 to 4096."""

MAX_ERROR_RATIO = 0.7
"""The best candidate counts only if its error is below this fraction of the worst candidate's error. If lengths are
similar in every step, all candidates explain the times equally well."""

MIN_BATCHES = 8
"""Steps needed to fit the doubling batch."""


@dataclass(frozen=True)
class RunShape:
    """Devices and batch of a run.

    Attributes:
        slots: requests that one engine runs at a time.
        samples: per training step.
        critic_apart: a critic works at the same time as actor_train, on its own devices.
        chunks: equal parts that context parallelism pads every sample to, or 1.
    """

    train_devices: int
    engines: int
    slots: int
    samples: int
    ratio: float
    critic_apart: bool = False
    chunks: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunShape:
        """The shape of a configuration, as its `asdict` or as a run.json has it.

        Raises:
            KeyError: a key is missing, because the run was not a reinforcement learning run.
        """
        train, infer = config["actor_train"]["device_mapping"], config["actor_infer"]
        critic = config.get("critic", {}).get("device_mapping", [])
        return cls(
            train_devices=len(train),
            engines=max(1, len(infer["device_mapping"]) // infer["num_gpus_per_worker"]),
            slots=infer["max_running_requests"],
            samples=config["rollout_batch_size"] * config["num_return_sequences_in_group"],
            ratio=config["async_generation_ratio"],
            critic_apart=bool(critic) and set(critic).isdisjoint(train),
            chunks=ParallelLayout(context=_context_size(config["actor_train"])).chunks,
        )


def _context_size(role: Mapping[str, Any]) -> int:
    options = role.get("strategy_args", {}).get("strategy_config", {})
    return int(options.get("context_parallel_size", 1))


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of the parts of a step.

    `step` is the whole step without validation and checkpoints, or None if it was not measured. `weight_update`
    includes `weight_update_pause`, during which engines generate nothing.
    """

    generate: float
    train: float
    log_probs: float = 0.0
    reward: float = 0.0
    weight_update: float = 0.0
    weight_update_pause: float = 0.0
    step: float | None = None


@dataclass(frozen=True)
class GeneratedBatch:
    """Seconds to generate one batch, and the mean and largest length of its responses in tokens."""

    seconds: float
    mean_length: float
    max_length: float


@dataclass(frozen=True)
class Measurements:
    """Step times, and the devices, batch and responses they were measured with.

    Attributes:
        shape: devices and batch.
        times: medians over steps.
        mean_length: median over steps of the mean response length, in tokens.
        max_length: median over steps of the largest response length, in tokens.
        batches: single steps, to fit the doubling batch; may be empty.
    """

    shape: RunShape
    times: StepTimes
    mean_length: float
    max_length: float
    batches: Sequence[GeneratedBatch] = ()


def read_measurements(folder: Path, option: str) -> Measurements:
    """Reads the measurements of a run from its metrics.jsonl and run.json; errors name the `option` with its folder.

    Raises:
        ConfigError: the folder is not that of a reinforcement learning run with at least one step, or the run does not
            measure what the option needs: --from each part of a step alone, --overlap a step of both sides at once.
    """
    shape = _read_shape(folder, option)
    lines = _read_lines(folder / METRICS_FILE, option)
    measured = Measurements(
        shape=shape,
        times=_step_times(lines, shape.critic_apart),
        mean_length=_median(lines, "rollout/response_length_mean"),
        max_length=_median(lines, "rollout/response_length_max"),
        batches=[GeneratedBatch(*(line[name] for name in BATCH)) for line in lines if line.get("time/generate", 0) > 0],
    )
    problem = ""
    if measured.mean_length < 1:
        problem = f"{folder / METRICS_FILE} has a mean response length below 1 token; give a run with longer responses"
    elif option == "--overlap" and shape.ratio <= 0:
        problem = f"{folder} ran with async_generation_ratio 0; give a run with a larger one, or omit --overlap"
    elif option == "--from" and shape.ratio > 0:
        problem = (
            f"{folder} ran with async_generation_ratio {shape.ratio:g}; give a run with 0, which measures each part "
            "alone, and give this run to --overlap"
        )
    elif option == "--from" and measured.times.generate <= 0:
        problem = f"{folder / METRICS_FILE} has no generation times (time/generate)"
    if problem:
        raise option_error(option, problem)
    return measured


def _read_shape(folder: Path, option: str) -> RunShape:
    file = folder / RUN_FILE
    try:
        return RunShape.of(json.loads(file.read_text())["config"])
    except (FileNotFoundError, NotADirectoryError):
        raise option_error(option, f"{folder} has no {RUN_FILE}; give the output_dir of a run") from None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        message = f"{file} is not the run.json of a reinforcement learning run: {type(error).__name__} {error}"
        raise option_error(option, message) from None


def _read_lines(file: Path, option: str) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl after those in which engines warm up."""
    try:
        lines = [line for line in read_metrics(file) if line.get("step", 0) > 0]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise option_error(option, f"{file} cannot be read: {error}") from None
    if not lines:
        raise option_error(option, f"{file} has no steps; let the run train, for example with max_steps=20")
    lines = lines[min(WARM_UP_STEPS, len(lines) // 3) :]
    missing = [name for name in REQUIRED if any(not isinstance(line.get(name), int | float) for line in lines)]
    if missing:
        raise option_error(option, f"{file} has steps without {', '.join(missing)}; give a run of `roll run`")
    return lines


def fit_doubling_batch(run: Measurements) -> float | None:
    """The batch at which a decode iteration takes twice as long as with an empty batch; None if steps are too similar.

    The seconds of a batch are proportional to iterations + tokens per engine / doubling batch. An engine that runs all
    requests at once needs as many iterations as its longest response has tokens; with fewer slots it needs more.
    """
    if len(run.batches) < MIN_BATCHES:
        return None
    errors = {doubling: _fit_error(run, doubling) for doubling in DOUBLING_BATCHES}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < MAX_ERROR_RATIO * max(errors.values()) else None


def _fit_error(run: Measurements, doubling_batch: float) -> float:
    """Coefficient of variation of measured over predicted seconds."""
    factors = []
    for batch in run.batches:
        tokens = batch.mean_length * run.shape.samples / run.shape.engines
        iterations = max(batch.max_length, tokens / run.shape.slots + batch.max_length - batch.mean_length)
        factors.append(batch.seconds / (iterations + tokens / doubling_batch))
    return statistics.pstdev(factors) / statistics.fmean(factors)


def _step_times(lines: list[dict[str, float]], critic_apart: bool) -> StepTimes:
    def trained(name: str) -> float:
        return statistics.median(trained_seconds(line, name, critic_apart) for line in lines)

    return StepTimes(
        generate=_median(lines, "time/generate"),
        train=trained("time/train"),
        log_probs=trained("time/old_log_probs"),
        reward=_median(lines, "time/reward"),
        weight_update=_median(lines, "time/weight_update"),
        weight_update_pause=_median(lines, "time/weight_update_pause"),
        step=statistics.median(
            line["time/step"] - line.get("time/val", 0.0) - line.get("time/checkpoint", 0.0) for line in lines
        ),
    )


def _median(lines: list[dict[str, float]], name: str) -> float:
    return statistics.median(line.get(name) or 0.0 for line in lines)
