"""Batches that divide, schedules that fit, and micro-batches that hold at least one sample."""

from __future__ import annotations

from math import gcd, isqrt, lcm

from roll.configs.agentic import AgenticConfig
from roll.configs.batches import samples_per_optimizer_step, training_batch
from roll.configs.errors import Report
from roll.configs.layouts import device_roles, is_megatron, role_layout
from roll.configs.pipeline import BaseConfig, RLConfig, SFTConfig

MOST_TRIES = 1_000_000
"""Numbers that are tried as divisors: all up to the square root of any batch that fits a machine."""


def check_training(config: BaseConfig, report: Report) -> None:
    """The optimizer's schedule and the token budgets of dynamic batching."""
    training = config.actor_train.training_args
    path = "actor_train.training_args"
    if isinstance(config, SFTConfig) and config.target_loss is not None and config.eval_steps == 0:
        report.error(
            "target_loss", f"{config.target_loss:g} is never measured, since eval_steps is 0; use eval_steps 10"
        )
    if training.warmup_steps and training.warmup_ratio:
        report.error(
            f"{path}.warmup_ratio",
            f"{training.warmup_ratio} and warmup_steps {training.warmup_steps} exclude each other; keep one",
        )
    if training.min_learning_rate > training.learning_rate:
        report.error(
            f"{path}.min_learning_rate",
            f"{training.min_learning_rate} is above learning_rate {training.learning_rate}; use at most that",
        )
    for beta in ("adam_beta1", "adam_beta2"):
        if getattr(training, beta) == 1:
            report.error(f"{path}.{beta}", "1 never forgets, so the optimizer never moves; use less than 1")
    for role, worker in device_roles(config).items():
        if is_megatron(worker):
            for phase in ("train", "infer"):
                _check_token_budget(config, role, phase, report)


def _check_token_budget(config: BaseConfig, role: str, phase: str, report: Report) -> None:
    worker = getattr(config, role)
    budget = getattr(worker, f"max_tokens_per_microbatch_in_{phase}")
    if not getattr(worker, f"use_dynamic_batching_in_{phase}") or (role == "reference" and phase == "train"):
        return
    if budget < (config.sequence_length or 0):
        report.error(
            f"{role}.max_tokens_per_microbatch_in_{phase}",
            f"{budget} cannot hold one sample of sequence_length {config.sequence_length}; use at least that",
        )


def check_batch(config: BaseConfig, report: Report) -> None:
    """The samples of a step fill whole optimizer steps."""
    if isinstance(config, RLConfig) and not _fills(config, report):
        return
    training, steps = config.actor_train.training_args, training_batch(config).schedule_steps
    if training.warmup_steps > steps:
        report.warn(
            "actor_train.training_args.warmup_steps",
            f"{training.warmup_steps} is longer than the run of {steps} optimizer steps: the peak is never reached",
        )


def _fills(config: RLConfig, report: Report) -> bool:
    """Whether they do; if not, the report says which sizes would. A batch of an agent is padded, so it always does."""
    prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
    samples, step = config.samples_per_batch, samples_per_optimizer_step(config)
    if samples % step == 0:
        return True
    if isinstance(config, AgenticConfig):
        _warn_of_padding(config, step, report)
        return True
    training, data_parallel = config.actor_train.training_args, role_layout(config.actor_train).data
    size = training.per_device_train_batch_size
    product = (
        f"per_device_train_batch_size {size} x gradient_accumulation_steps "
        f"{training.gradient_accumulation_steps} x data parallel {data_parallel}"
    )
    unit = step // gcd(step, group)
    below = prompts // unit * unit
    advice = f"use rollout_batch_size {f'{below} or ' if below else ''}{below + unit}"
    if samples % (size * data_parallel) == 0:
        accumulation = _nearest_divisor(samples // (size * data_parallel), training.gradient_accumulation_steps)
        advice += f", or gradient_accumulation_steps {accumulation}"
    count = f"{prompts} prompts x num_return_sequences_in_group {group} = {samples} samples"
    report.error(
        "rollout_batch_size",
        f"{count} do not fill optimizer steps of {step} ({product}); {advice}",
    )
    return False


def _warn_of_padding(config: AgenticConfig, step: int, report: Report) -> None:
    """Trajectories that leave optimizer steps unfilled, and how many would not; turns are not known before."""
    trajectories, group = config.rollout_batch_size, config.train_env_manager.group_size
    if config.sample_by == "step" or trajectories % group:
        return
    empty, unit = -trajectories % step, lcm(step, group)
    report.warn(
        "rollout_batch_size",
        f"{trajectories} trajectories do not fill optimizer steps of {step}: {empty} samples of every batch are masked "
        f"padding; use {-(-trajectories // unit) * unit} to learn from all",
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, of those that MOST_TRIES find with their partners."""
    small = [n for n in range(1, min(isqrt(number), MOST_TRIES) + 1) if number % n == 0]
    return min(small + [number // n for n in small], key=lambda n: (abs(n - wanted), n))
