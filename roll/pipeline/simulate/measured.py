"""What is known of a run's speed: seconds of each part of a step, on which devices, for which responses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.configs.pipeline import RLConfig


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
            engines=config.actor_infer.layout.data,
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
