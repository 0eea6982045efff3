"""The arithmetic of one training batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.agentic import AgenticConfig
from roll.configs.layouts import role_layout
from roll.configs.pipeline import BaseConfig, RLConfig


@dataclass(frozen=True)
class TrainingBatch:
    """How the samples of one step become optimizer steps; all counts are over the whole run unless they say rank.

    `optimizer_steps` counts `ppo_epochs`; `micro_batches` is None where they are formed by tokens.
    """

    prompts: int
    samples: int
    samples_per_optimizer_step: int
    optimizer_steps: int
    samples_per_rank: int
    micro_batches: int | None
    schedule_steps: int


def samples_per_optimizer_step(config: BaseConfig) -> int:
    """per_device_train_batch_size x gradient_accumulation_steps x data-parallel size of actor_train."""
    training = config.actor_train.training_args
    data_parallel = role_layout(config.actor_train).data
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * data_parallel


def training_batch(config: Any) -> TrainingBatch:
    """The batch of a run; one of an agent that does not divide is filled up with masked samples.

    SFT takes exactly one optimizer step per batch, so its batch is that product. Where a sample is one turn of a
    trajectory, samples and optimizer steps are the most there can be, since trajectories end early.
    """
    step_samples = samples_per_optimizer_step(config)
    if config.pipeline == "sft":
        prompts = samples = step_samples
        epochs = 1
    else:
        prompts, samples = config.groups_per_batch, config.samples_per_batch
        epochs = config.ppo_epochs
    optimizer_steps = -(-samples // step_samples) * epochs
    worker = config.actor_train
    return TrainingBatch(
        prompts=prompts,
        samples=samples,
        samples_per_optimizer_step=step_samples,
        optimizer_steps=optimizer_steps,
        samples_per_rank=step_samples // role_layout(worker).data,
        micro_batches=None
        if worker.use_dynamic_batching_in_train
        else worker.training_args.gradient_accumulation_steps,
        schedule_steps=config.max_steps * optimizer_steps,
    )


def max_sequence_length(config: BaseConfig) -> int:
    """Tokens of the longest sequence of a run, prompt and response.

    Raises:
        ValueError: the configuration has neither `sequence_length` nor `response_length`.
    """
    if config.sequence_length is not None:
        return config.sequence_length
    if config.response_length is None:
        raise ValueError("response_length: set it or sequence_length")
    return config.prompt_length + config.response_length


def requests_per_engine(config: RLConfig) -> int:
    """Requests that one engine may have at a time, rounded up: its share of a batch, or of the environments that play.

    An environment waits for one turn before it asks for the next.
    """
    at_a_time = config.samples_per_batch
    if isinstance(config, AgenticConfig):
        at_a_time = config.train_env_manager.environments
    return -(-at_a_time // role_layout(config.actor_infer).data)
