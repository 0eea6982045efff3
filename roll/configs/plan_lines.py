"""The batch arithmetic of a run, line by line."""

from __future__ import annotations

from roll.configs.agentic import AgenticConfig
from roll.configs.batches import requests_per_engine, training_batch
from roll.configs.layouts import role_layout
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.plan_agentic import agentic_lines
from roll.configs.plan_types import Line
from roll.configs.worker import WorkerConfig


def batch_lines(config: BaseConfig) -> list[Line]:
    """Prompts, samples, micro-batches, optimizer steps and the schedule of one run, in the order they follow."""
    batch, worker = training_batch(config), config.actor_train
    training, data = worker.training_args, role_layout(worker).data
    lines = []
    if isinstance(config, AgenticConfig):
        lines += agentic_lines(config)
    elif isinstance(config, RLConfig):
        group = config.num_return_sequences_in_group
        lines += [
            Line("prompts per step", batch.prompts, "rollout_batch_size"),
            Line("samples per step", batch.samples, f"{batch.prompts} prompts x {group} num_return_sequences_in_group"),
            *_generation_lines(config, batch.samples),
        ]
    size = training.per_device_train_batch_size
    lines += [
        Line(
            "samples per optimizer step",
            batch.samples_per_optimizer_step,
            f"{size} per_device_train_batch_size x {training.gradient_accumulation_steps} gradient_accumulation_steps "
            f"x {data} data parallel",
        ),
        Line(
            "samples per rank and optimizer step",
            batch.samples_per_rank,
            f"{batch.samples_per_optimizer_step} / {data} data parallel",
        ),
        _micro_batch_line(worker, batch.samples_per_rank),
    ]
    if isinstance(config, RLConfig):
        formula = f"{batch.samples} samples / {batch.samples_per_optimizer_step} x {config.ppo_epochs} ppo_epochs"
        if batch.samples % batch.samples_per_optimizer_step:
            formula = f"{formula}, filled up with masked samples"
        lines.append(Line("optimizer steps per batch", batch.optimizer_steps, formula))
        filled = -(-batch.samples // batch.samples_per_optimizer_step) * batch.samples_per_optimizer_step
        lines.append(_forward_line(config, filled))
    else:
        lines.append(Line("optimizer steps per batch", 1, "a batch is one optimizer step"))
    warmup = training.warmup_steps or round(training.warmup_ratio * batch.schedule_steps)
    return [
        *lines,
        Line(
            "tokens per step, at most",
            batch.samples * (config.sequence_length or 0),
            f"{batch.samples} samples x {config.sequence_length} sequence_length",
        ),
        Line(
            "learning-rate schedule",
            f"{batch.schedule_steps} steps",
            f"{config.max_steps} max_steps x {batch.optimizer_steps} optimizer steps per batch",
        ),
        Line(
            "warm-up",
            f"{warmup} steps",
            f"to {training.learning_rate:g}, then {training.lr_scheduler_type}"
            + (f" to {training.min_learning_rate:g}" if training.lr_scheduler_type != "constant" else ""),
        ),
    ]


def _generation_lines(config: RLConfig, samples: int) -> list[Line]:
    worker = config.actor_infer
    engines, limit = role_layout(worker).data, worker.max_running_requests
    share = requests_per_engine(config)
    return [
        Line("requests per engine and step", share, f"{samples} samples / {engines} engines, rounded up"),
        Line("requests at a time on one engine", min(share, limit), f"max_running_requests {limit}"),
    ]


def _micro_batch_line(worker: WorkerConfig, samples_per_rank: int) -> Line:
    if worker.use_dynamic_batching_in_train:
        tokens = worker.max_tokens_per_microbatch_in_train
        return Line(
            "micro-batches", "by tokens", f"{samples_per_rank} samples in micro-batches of at most {tokens} tokens"
        )
    count, size = worker.training_args.gradient_accumulation_steps, worker.training_args.per_device_train_batch_size
    return Line(
        "micro-batches per rank and optimizer step", count, f"{samples_per_rank} samples / {size} per micro-batch"
    )


def _forward_line(config: RLConfig, samples: int) -> Line:
    worker, data = config.actor_train, role_layout(config.actor_train).data
    name = "forward micro-batches per rank (log-probs)"
    if config.old_log_probs_source == "behavior":
        return Line(name, 0, "old_log_probs_source behavior takes the engine's log-probs")
    if worker.use_dynamic_batching_in_infer:
        return Line(name, "by tokens", f"at most {worker.max_tokens_per_microbatch_in_infer} tokens each")
    share = -(-samples // data)
    return Line(
        name,
        -(-share // worker.infer_batch_size),
        f"{share} samples / {worker.infer_batch_size} infer_batch_size, rounded up",
    )
