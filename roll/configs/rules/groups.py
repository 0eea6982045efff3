"""Groups of trajectories: whole ones in a batch, dealt to tags that exist, and no more at a time than there can be."""

from __future__ import annotations

import math

from roll.configs.agentic import AgenticConfig, EnvManagerConfig
from roll.configs.errors import Report
from roll.configs.suggestions import nearest


def check_groups(config: AgenticConfig, report: Report) -> None:
    """Batches are whole groups, and managers name tags that exist and their shares; validation's where there is one."""
    managers = {"train_env_manager": config.train_env_manager}
    batches = {"rollout_batch_size": (config.rollout_batch_size, "train_env_manager")}
    if config.eval_steps:
        managers["val_env_manager"] = config.val_env_manager
        batches["val_batch_size"] = (config.val_batch_size or 0, "val_env_manager")
    for key, (size, name) in batches.items():
        _check_whole(key, size, name, managers[name].group_size, report)
    for name, manager in managers.items():
        _check_tags(name, manager, config, report)
        _check_partition(name, manager, report)
    _check_unused(config, report)
    _check_ahead(config, report)
    _check_greedy(config, report)


def _check_whole(key: str, size: int, manager: str, group: int, report: Report) -> None:
    if size % group:
        below = size // group * group
        report.error(
            key,
            f"{size} trajectories are not whole groups of {manager}.group_size {group}; "
            f"use {f'{below} or ' if below else ''}{below + group}",
        )


def _check_tags(name: str, manager: EnvManagerConfig, config: AgenticConfig, report: Report) -> None:
    for index, tag in enumerate(manager.tags):
        if tag not in config.custom_envs:
            like = nearest(tag, config.custom_envs)
            hint = f"; did you mean {like}?" if like else ""
            report.error(f"{name}.tags", f"{tag!r} is not in custom_envs; known: {', '.join(config.custom_envs)}{hint}")
        elif tag in manager.tags[:index]:
            report.error(f"{name}.tags", f"names {tag} twice; once, with its share in num_groups_partition")


def _check_partition(name: str, manager: EnvManagerConfig, report: Report) -> None:
    parts, tags, groups = manager.num_groups_partition, manager.tags, manager.num_env_groups or 1
    path = f"{name}.num_groups_partition"
    if not parts:
        below = groups // len(tags) * len(tags) if tags else 0
        sizes = f"{f'{below} or ' if below else ''}{below + len(tags)}"
        report.error(
            path,
            f"is not given, and num_env_groups {groups} does not divide into equal parts for {len(tags)} tags; "
            f"use num_env_groups {sizes}, or write the parts",
        )
    elif len(parts) != len(tags):
        report.error(
            path,
            f"{parts} has {len(parts)} part(s) for {len(tags)} tag(s), {', '.join(tags)}; write one part for each",
        )
    elif min(parts) < 1:
        report.error(path, f"{parts} leaves a tag without groups; use at least 1 each, or remove the tag from tags")
    elif sum(parts) != groups:
        report.error(path, f"{parts} adds up to {sum(parts)}, but num_env_groups is {groups}; use the same for both")


def _check_unused(config: AgenticConfig, report: Report) -> None:
    played = {*config.train_env_manager.tags, *(config.val_env_manager.tags if config.eval_steps else [])}
    for tag in config.custom_envs:
        if tag not in played:
            report.warn(f"custom_envs.{tag}", "has no effect: no env_manager has it in its tags")


def _check_ahead(config: AgenticConfig, report: Report) -> None:
    """No more groups at a time than may be submitted."""
    admitted = math.floor(round((1 + config.async_generation_ratio) * config.groups_per_batch, 6))
    limits = {"train_env_manager": (admitted, "async_generation_ratio and rollout_batch_size admit")}
    if config.eval_steps and config.val_batch_size:
        limits["val_env_manager"] = (config.val_batch_size // config.val_env_manager.group_size, "val_batch_size has")
    for name, (limit, why) in limits.items():
        groups = getattr(config, name).num_env_groups
        if groups > max(limit, 1):
            report.warn(f"{name}.num_env_groups", f"{groups} groups never play at a time: {why} {limit}; use that")


def _check_greedy(config: AgenticConfig, report: Report) -> None:
    """Greedy trajectories of one task are all the same."""
    group = config.val_env_manager.group_size
    if config.eval_steps and group > 1 and config.validation.generating_args.temperature == 0:
        report.warn(
            "val_env_manager.group_size",
            f"{group} plays each task {group} times alike, since validation.generating_args.temperature is 0; use 1",
        )
