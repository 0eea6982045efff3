"""What is too large to be simulated."""

from __future__ import annotations

from roll.configs.asynchronous import versions_ahead
from roll.configs.errors import ConfigError, Problem
from roll.configs.pipeline import RLConfig

MOST_SAMPLES = 100_000
"""Samples of a batch that are simulated; a third of them took two minutes."""

MOST_SAMPLES_AHEAD = 2_000_000
"""Samples generated before training is in its stride that are simulated; near it that takes more than two minutes."""

MOST_DEVICES = 10_000
"""Devices that are simulated; 4,100 took half a minute."""


def check_size(config: RLConfig) -> None:
    """Asks that simulating the configuration ends in minutes.

    Raises:
        ConfigError: its batch, ratio or devices are too many for that.
    """
    prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
    samples, devices = prompts * group, len(devices_of(config))
    problems = []
    if samples > MOST_SAMPLES:
        problems.append(
            Problem(
                "rollout_batch_size",
                f"{prompts} prompts x num_return_sequences_in_group {group} = {samples} samples of a batch take too "
                f"long to simulate; use at most {MOST_SAMPLES} samples",
            )
        )
    elif samples * versions_ahead(config.async_generation_ratio) > MOST_SAMPLES_AHEAD:
        problems.append(
            Problem(
                "async_generation_ratio",
                f"{config.async_generation_ratio:g} batches ahead of {samples} samples take too long to "
                f"simulate; use at most {MOST_SAMPLES_AHEAD // samples}",
            )
        )
    if devices > MOST_DEVICES:
        problems.append(
            Problem("device_mapping", f"{devices} devices take too long to simulate; use at most {MOST_DEVICES}")
        )
    if problems:
        raise ConfigError(problems, config.source.file)


def devices_of(config: RLConfig) -> set[int]:
    """Ranks of both sides."""
    return set(config.actor_train.device_mapping) | set(config.actor_infer.device_mapping)
