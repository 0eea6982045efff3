"""The batch arithmetic that only agents have: groups, environments, turns and processes."""

from __future__ import annotations

from roll.configs.agentic import AgenticConfig, EnvManagerConfig
from roll.configs.batches import requests_per_engine
from roll.configs.layouts import role_layout
from roll.configs.plan_types import Line


def agentic_lines(config: AgenticConfig) -> list[Line]:
    """From trajectories to the samples of one step, and what one validation plays."""
    manager, turns = config.train_env_manager, config.turns
    lines = [
        Line("trajectories per step", config.rollout_batch_size, "rollout_batch_size"),
        Line(
            "groups per step",
            config.groups_per_batch,
            f"{config.rollout_batch_size} trajectories / {manager.group_size} train_env_manager.group_size",
        ),
        *_manager_lines("", manager, config),
        Line("turns per trajectory, at most", turns, _of_tags("max_steps", config)),
        Line("tokens per turn, at most", _tokens(config), _of_tags("max_tokens_per_step", config)),
        Line("tokens per trajectory, at most", config.sequence_length or 0, "sequence_length"),
        _samples_line(config, turns),
        *_request_lines(config),
    ]
    if config.eval_steps:
        lines.append(Line("trajectories of a validation", config.val_batch_size or 0, "val_batch_size"))
        lines += _manager_lines(" of a validation", config.val_env_manager, config)
    return lines


def _manager_lines(suffix: str, manager: EnvManagerConfig, config: AgenticConfig) -> list[Line]:
    """Environments at a time and their processes; `suffix` tells validation's from training's."""
    members = f"({manager.group_size} group_size + {manager.group_size_redundancy} group_size_redundancy)"
    shares = ", ".join(f"{part} {tag}" for tag, part in zip(manager.tags, manager.num_groups_partition, strict=True))
    limit = manager.max_env_num_per_worker
    return [
        Line(
            f"environments at a time{suffix}",
            manager.environments,
            f"{manager.num_env_groups} num_env_groups ({shares}) x {members}",
        ),
        Line(
            f"environment processes{suffix}",
            manager.processes,
            f"{manager.environments} environments / {limit} max_env_num_per_worker, rounded up"
            if limit
            else "max_env_num_per_worker 0: all in one",
        ),
    ]


def _tokens(config: AgenticConfig) -> int:
    tags = config.playing(config.train_env_manager)
    return max((config.custom_envs[tag].max_tokens_per_step or 0 for tag in tags), default=0)


def _of_tags(key: str, config: AgenticConfig) -> str:
    """A key of the entries that are trained on, with its values."""
    tags = config.playing(config.train_env_manager)
    return f"{key} of " + ", ".join(f"{tag} ({getattr(config.custom_envs[tag], key)})" for tag in tags)


def _samples_line(config: AgenticConfig, turns: int) -> Line:
    if config.sample_by == "step":
        return Line(
            "samples per step, at most",
            config.samples_per_batch,
            f"{config.rollout_batch_size} trajectories x {turns} turns (sample_by step)",
        )
    return Line("samples per step", config.samples_per_batch, "one for each trajectory (sample_by traj)")


def _request_lines(config: AgenticConfig) -> list[Line]:
    engines, limit = role_layout(config.actor_infer).data, config.actor_infer.max_running_requests
    share = requests_per_engine(config)
    playing = config.train_env_manager.environments
    return [
        Line(
            "requests at a time on one engine",
            min(share, limit),
            f"{playing} environments / {engines} engines, rounded up; max_running_requests {limit}",
        )
    ]
