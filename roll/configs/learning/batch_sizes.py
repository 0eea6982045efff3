"""Batches: samples that fill optimizer steps, and token budgets that hold a sample."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, isqrt, lcm

from roll.base.errors import Finding, error, warning
from roll.configs.agentic import AgenticConfig
from roll.configs.arguments import OLD_LOG_PROBS, check_schedule
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig
from roll.configs.roles import MegatronRoleConfig, TrainedRoleConfig
from roll.configs.scoring.scoring_roles import RewardModelRoleConfig

MOST_PADDING = 0.02
"""Share of padding in the longest sample above which context parallelism is warned of."""

MAX_TRIES = 1_000_000
"""Numbers tried as divisors: all up to the square root of any realistic batch."""


def check_training(config: BaseConfig) -> Iterator[Finding]:
    """The optimizers' schedules and the token budgets of dynamic batching."""
    for role, worker in config.trained_roles().items():
        yield from check_schedule(worker.training_args, f"{role}.training_args")
    yield from _check_token_limits(config)


def _check_token_limits(config: BaseConfig) -> Iterator[Finding]:
    length = config.sequence_length or 0
    sample = f"one sample of sequence_length {length}"
    for role, trained in config.trained_roles().items():
        path, limit = f"{role}.max_tokens_per_microbatch_in_train", trained.training_token_limit
        layout = trained.layout
        yield from _check_chunks(role, layout, length)
        if isinstance(config, PreferenceConfig):
            rows = 1 if trained.use_sequence_packing else 2  # each padded row is rounded up
            pair = f"a pair of 2 x sequence_length {length} = {2 * length}"
            yield from _check_holds(path, limit, 2 * layout.padded(length), pair, layout, rows)
        else:
            yield from _check_holds(path, limit, length, sample, layout)
    for role, worker in config.device_roles().items():
        if isinstance(worker, MegatronRoleConfig) and OLD_LOG_PROBS.holds(config, worker):
            path, limit = f"{role}.max_tokens_per_microbatch_in_infer", worker.forward_token_limit
            has_own_tokenizer = isinstance(worker, RewardModelRoleConfig)  # then sequence_length says nothing
            tokens, what = (1, "one token") if has_own_tokenizer else (length, sample)
            yield from _check_holds(path, limit, tokens, what, worker.layout)


def _check_holds(
    path: str, limit: int | None, tokens: int, what: str, layout: ParallelLayout, rows: int = 1
) -> Iterator[Finding]:
    """A micro-batch holds `tokens` of `what`; each of its rows is rounded up."""
    round_to = rows * layout.round_to
    least = -(-tokens // round_to) * round_to
    if limit is not None and limit < least:
        split = layout.context > 1
        sizes = f"tensor parallel {layout.tensor}" + (f" x context parallel {layout.context}" if split else "")
        rounded = f", rounded up to {least} for {sizes}" if least > tokens else ""
        counts = "; it counts whole sequences over all context ranks" if split else ""
        yield error(path, f"{limit} cannot hold {what}{rounded}{counts}; use at least that")


def _check_chunks(role: str, layout: ParallelLayout, length: int) -> Iterator[Finding]:
    """Padding to equal chunks costs little: on average half of their number for each sample."""
    padding = layout.chunks / 2
    if layout.context > 1 and length and padding > MOST_PADDING * length:
        yield warning(
            f"{role}.strategy_args.strategy_config.context_parallel_size",
            f"{layout.context} pads samples to multiples of {layout.chunks} tokens, which is {padding / length:.0%} of "
            f"a sample of sequence_length {length}; use a smaller one",
        )


def check_batch(config: BaseConfig) -> Iterator[Finding]:
    """The samples of a step fill whole optimizer steps, of every trained role."""
    for role, worker in config.trained_roles().items():
        if isinstance(config, RLConfig):
            unfilled = list(_check_filled(config, role, worker))
            yield from unfilled
            if any(finding.kind == "error" for finding in unfilled):
                continue
            yield from _check_step_size(config, role, worker)
        training, steps = worker.training_args, config.schedule_steps(worker)
        if training.warmup_steps > steps:
            yield warning(
                f"{role}.training_args.warmup_steps",
                f"{training.warmup_steps} is longer than the run of {steps} optimizer steps: the peak is never reached",
            )


def _check_step_size(config: RLConfig, role: str, worker: TrainedRoleConfig) -> Iterator[Finding]:
    samples = config.samples_per_batch
    if worker.samples_per_optimizer_step == 1 and samples > 1:
        yield warning(
            f"{role}.training_args.gradient_accumulation_steps",
            f"1 with per_device_train_batch_size 1 makes {samples} optimizer steps of one sample each of every batch: "
            f"each follows the noise of its sample, and later ones learn from older samples; use {samples} for one "
            "step of the whole batch",
        )


def _check_filled(config: RLConfig, role: str, worker: TrainedRoleConfig) -> Iterator[Finding]:
    """The samples fill optimizer steps, or sizes that do are named; batches of agents are padded."""
    prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
    samples, step = config.samples_per_batch, worker.samples_per_optimizer_step
    if samples % step == 0:
        return
    if isinstance(config, AgenticConfig):
        yield from _check_padding(config, step)
        return
    training, data_parallel = worker.training_args, worker.layout.data
    size = training.per_device_train_batch_size
    product = (
        f"per_device_train_batch_size {size} x gradient_accumulation_steps "
        f"{training.gradient_accumulation_steps} x data parallel {data_parallel}"
    )
    unit = step // gcd(step, group)
    below = prompts // unit * unit
    suggestion = f"use rollout_batch_size {f'{below} or ' if below else ''}{below + unit}"
    if samples % (size * data_parallel) == 0:
        accumulation = _nearest_divisor(samples // (size * data_parallel), training.gradient_accumulation_steps)
        suggestion += f", or gradient_accumulation_steps {accumulation}"
    count = f"{prompts} prompts x num_return_sequences_in_group {group} = {samples} samples"
    steps = "optimizer steps" if role == "actor_train" else f"the {role}'s optimizer steps"
    yield error("rollout_batch_size", f"{count} do not fill {steps} of {step} ({product}); {suggestion}")


def _check_padding(config: AgenticConfig, step: int) -> Iterator[Finding]:
    trajectories, group = config.rollout_batch_size, config.train_env_manager.group_size
    if config.samples_per_batch != trajectories or trajectories % group:
        return
    empty, unit = -trajectories % step, lcm(step, group)
    yield warning(
        "rollout_batch_size",
        f"{trajectories} trajectories do not fill optimizer steps of {step}: {empty} samples of every batch are masked "
        f"padding; use {-(-trajectories // unit) * unit} to learn from all",
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, among MAX_TRIES candidates and their complements."""
    small = [n for n in range(1, min(isqrt(number), MAX_TRIES) + 1) if number % n == 0]
    return min(small + [number // n for n in small], key=lambda n: (abs(n - wanted), n))
