"""The numbers of a batch that follow from a configuration, each with its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.configs.agentic import AgenticConfig
from roll.configs.environments import EnvManagerConfig
from roll.configs.learning.log_prob_passes import samples_with_own_pass, training_gives_old_log_probs
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig
from roll.configs.roles import ActorTrainConfig, TrainedRoleConfig


@dataclass(frozen=True)
class Line:
    """One number of the batch and its formula."""

    name: str
    value: int | float | str
    formula: str


def batch_lines(config: BaseConfig) -> list[Line]:
    """Prompts, samples, micro-batches, optimizer steps and the schedule of a run, each with its formula."""
    training, data = config.actor_train.training_args, config.actor_train.layout.data
    samples, step = config.samples_per_batch, config.actor_train.samples_per_optimizer_step
    size, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    lines: list[Line] = []

    def add(name: str, value: int | str, formula: str) -> None:
        lines.append(Line(name, value, formula))

    if isinstance(config, AgenticConfig):
        lines += _agentic_lines(config)
    elif isinstance(config, RLConfig):
        prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
        engines, limit = config.actor_infer.layout.data, config.actor_infer.max_running_requests
        share, responses = config.requests_per_engine, f"{samples} samples"
        if config.uses_greedy_responses:
            responses = f"({samples} samples + {prompts} greedy responses)"
        add("prompts per step", prompts, "rollout_batch_size")
        add("samples per step", samples, f"{prompts} prompts x {group} num_return_sequences_in_group")
        add("requests per engine and step", share, f"{responses} / {engines} engines, rounded up")
        ratio = config.async_generation_ratio
        admitted = math.floor((1 + ratio) * prompts) * config.responses_per_group
        of = f"of {1 + ratio:g} batches, at most " if ratio else ""
        requests = min(math.ceil(admitted / engines), limit)
        add("requests at a time on one engine", requests, f"{of}max_running_requests {limit}")
    product = f"{size} per_device_train_batch_size x {accumulation} gradient_accumulation_steps x {data} data parallel"
    unit, rows = ("pairs", 2) if isinstance(config, PreferenceConfig) else ("samples", 1)
    add(f"{unit} per optimizer step", step, product)
    add(f"{unit} per rank and optimizer step", step // data, f"{step} / {data} data parallel")
    lines.append(_micro_batch_line(config.actor_train, step // data))
    if isinstance(config, RLConfig):
        filling = ", filled up with masked samples" if samples % step else ""
        steps = f"{samples} samples / {step} x {config.ppo_epochs} ppo_epochs{filling}"
        add("optimizer steps per batch", config.optimizer_steps_per_batch, steps)
        lines.append(_forward_line(config))
    else:
        add("optimizer steps per batch", 1, "a batch is one optimizer step")
    length = config.sequence_length or 0
    formula = f"{samples} {unit} x {'2 responses x ' if rows > 1 else ''}{config.sequence_length} sequence_length"
    add("tokens per step, at most", rows * samples * length, formula)
    lines += _schedule_lines(config, config.actor_train)
    if isinstance(config, RLConfig) and config.uses_critic:
        lines += _critic_lines(config)
    return lines


def _schedule_lines(config: BaseConfig, worker: TrainedRoleConfig, of: str = "") -> list[Line]:
    training, steps = worker.training_args, config.schedule_steps(worker)
    each = config.steps_per_batch(worker)
    waits = config.max_steps - steps // each
    batches = f"({config.max_steps} max_steps - {waits} critic_warmup)" if waits else f"{config.max_steps} max_steps"
    warmup = training.warmup_steps or round(training.warmup_ratio * steps)
    end = f" to {training.min_learning_rate:g}" if training.lr_scheduler_type != "constant" else ""
    rate = f"to {training.learning_rate:g}, then {training.lr_scheduler_type}{end}"
    return [
        Line(f"{of}learning-rate schedule", f"{steps} steps", f"{batches} x {each} optimizer steps per batch"),
        Line(f"{of}warm-up", f"{warmup} steps", rate),
    ]


def _critic_lines(config: RLConfig) -> list[Line]:
    step, samples = config.critic.samples_per_optimizer_step, config.samples_per_batch
    formula = f"{samples} samples / {step} x {config.ppo_epochs} ppo_epochs"
    steps = Line("critic: optimizer steps per batch", config.steps_per_batch(config.critic), formula)
    return [steps, *_schedule_lines(config, config.critic, "critic: ")]


def _micro_batch_line(worker: ActorTrainConfig, samples_per_rank: int) -> Line:
    tokens = worker.training_token_limit
    if tokens is not None:
        split = worker.layout.context
        each = f", {-(-tokens // split)} on each of {split} context ranks" if split > 1 else ""
        formula = f"{samples_per_rank} samples in micro-batches of at most {tokens} tokens{each}"
        return Line("micro-batches", "by tokens", formula)
    count, size = worker.training_args.gradient_accumulation_steps, worker.training_args.per_device_train_batch_size
    return Line(
        "micro-batches per rank and optimizer step", count, f"{samples_per_rank} samples / {size} per micro-batch"
    )


def _forward_line(config: RLConfig) -> Line:
    worker, data = config.actor_train, config.actor_train.layout.data
    name = "forward micro-batches per rank (log-probs)"
    if config.old_log_probs_source == "behavior":
        return Line(name, 0, "old_log_probs_source behavior takes the engine's log-probs")
    if worker.forward_token_limit is not None:
        return Line(name, "by tokens", f"at most {worker.forward_token_limit} tokens each")
    share = -(-config.filled_samples_per_batch // data)
    later = ""
    if training_gives_old_log_probs(config):
        left = samples_with_own_pass(config) or "no"
        later = f"; from the second step on {left} samples: training gives the log-probs of the others"
    return Line(
        name,
        -(-share // worker.infer_batch_size),
        f"{share} samples / {worker.infer_batch_size} infer_batch_size, rounded up{later}",
    )


def _agentic_lines(config: AgenticConfig) -> list[Line]:
    manager, turns, trajectories = config.train_env_manager, config.turns, config.rollout_batch_size
    tags = config.tags_of(manager)
    only_agents = all(config.custom_envs[tag].is_agent for tag in tags)
    tokens = max((config.custom_envs[tag].max_tokens_per_step or 0 for tag in tags), default=0)
    engines, limit = config.actor_infer.layout.data, config.actor_infer.max_running_requests
    groups = f"{trajectories} trajectories / {manager.group_size} train_env_manager.group_size"
    requests = f"{manager.environments} environments / {engines} engines, rounded up; max_running_requests {limit}"
    samples = Line("samples per step", config.samples_per_batch, "one for each trajectory (sample_by traj)")
    if config.sample_by == "traj" and any(config.custom_envs[tag].is_agent for tag in tags):
        formula = f"{trajectories} trajectories x {_of_tags('branches', config)}; a session may have more or fewer"
        samples = Line("samples per step, about", config.samples_per_batch, formula)
    elif config.sample_by == "step":
        formula = f"{trajectories} trajectories x {turns} turns (sample_by step)"
        samples = Line("samples per step, at most", config.samples_per_batch, formula)
    lines = [
        Line("trajectories per step", trajectories, "rollout_batch_size"),
        Line("groups per step", config.groups_per_batch, groups),
        *_manager_lines("", manager),
        Line("turns per trajectory, at most", turns, _of_tags("max_requests" if only_agents else "max_steps", config)),
        Line("tokens per turn, at most", tokens, _of_tags("max_tokens_per_step", config)),
        Line("tokens per trajectory, at most", config.sequence_length or 0, "sequence_length"),
        samples,
        Line("requests at a time on one engine", min(config.requests_per_engine, limit), requests),
    ]
    if config.eval_steps:
        lines.append(Line("trajectories of a validation", config.val_batch_size or 0, "val_batch_size"))
        lines += _manager_lines(" of a validation", config.val_env_manager)
    return lines


def _manager_lines(suffix: str, manager: EnvManagerConfig) -> list[Line]:
    """Environments at a time and their processes; `suffix` distinguishes validation from training."""
    count, limit = manager.environments, manager.max_env_num_per_worker
    groups = ", ".join(f"{part} {tag}" for tag, part in zip(manager.tags, manager.num_groups_partition, strict=True))
    members = f"({manager.group_size} group_size + {manager.group_size_redundancy} group_size_redundancy)"
    processes = f"{count} environments / {limit} max_env_num_per_worker, rounded up"
    return [
        Line(
            f"environments at a time{suffix}", count, f"{manager.num_env_groups} num_env_groups ({groups}) x {members}"
        ),
        Line(
            f"environment processes{suffix}",
            manager.processes,
            processes if limit else "max_env_num_per_worker 0: all in one",
        ),
    ]


def _of_tags(key: str, config: AgenticConfig) -> str:
    tags = config.tags_of(config.train_env_manager)
    return f"{key} of " + ", ".join(f"{tag} ({getattr(config.custom_envs[tag], key)})" for tag in tags)
