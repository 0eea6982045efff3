"""Agents: environments, groups of trajectories, turns, deadlines and messages that fit together."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from roll.base.errors import ConfigError, Report
from roll.configs.agentic import AgenticConfig, EnvManagerConfig
from roll.configs.suggestions import nearest

SIMILAR_NAMES = ("sokoban_sandbox", "sokoban_mcp")
"""Environments of other projects whose names look like misspelled names of built-in ones."""

REGISTRY = "roll.envs.registry"
"""Module of `make_env`, imported by name because environments import this folder."""


GEM_NAMESPACES = ("code", "eval", "game", "logic", "math", "qa", "rg")
"""First parts of the ids of GEM, such as `game:GuessTheNumber-v0`."""


def names_class(env_type: str) -> bool:
    """Whether an `env_type` is `module:Class`, and not an id of another library that has a colon too."""
    module, colon, name = env_type.partition(":")
    if module in GEM_NAMESPACES and (module in sys.stdlib_module_names or find_spec(module) is None):
        return False
    return (bool(colon) or env_type.endswith(".py")) and not re.fullmatch(r".+-v\d+", name)


def check_environments(config: AgenticConfig, report: Report) -> None:
    """Creates one environment of each entry, which is cheap, and reports its errors.

    A name that is not similar to a known one is taken for an environment of another project: `roll plan` works without
    it. A class of the user, `module:Class`, is not created here: it is tried in a process of its own, which may hang or
    die (`roll.envs.self_test`).
    """
    if not config.custom_envs:
        report.error("custom_envs", "is empty, so there is no environment; describe one, such as Lake: {}")
        return
    registry: Any = import_module(REGISTRY)
    for tag, entry in config.custom_envs.items():
        if names_class(entry.env_type):
            continue
        misspelled = nearest(entry.env_type, registry.BUILT_IN) and entry.env_type not in SIMILAR_NAMES
        if not registry.is_known(entry.env_type) and not misspelled:
            report.missing_resource(
                f"custom_envs.{tag}.env_type",
                f"{entry.env_type} is not an environment of this project; known: {', '.join(registry.BUILT_IN)}, or "
                "write env_type: module:Class, one of your own (docs/environments.md)",
            )
            continue
        try:
            registry.make_env(entry.env_type, entry.env_config, f"custom_envs.{tag}")
        except ConfigError as error:
            for problem in error.problems:
                report.error(problem.path, problem.message)


def check_groups(config: AgenticConfig, report: Report) -> None:
    """Batches are whole groups, tags exist, and their shares add up; for validation too if there is one."""
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
            report.error(f"{name}.tags", f"contains {tag} twice; list it once, with its share in num_groups_partition")


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
            path, f"{parts} has {len(parts)} part(s) for {len(tags)} tag(s), {', '.join(tags)}; write one part for each"
        )
    elif min(parts) < 1:
        report.error(path, f"{parts} leaves a tag without groups; use at least 1 each, or remove the tag from tags")
    elif sum(parts) != groups:
        report.error(path, f"{parts} adds up to {sum(parts)}, but num_env_groups is {groups}; use the same for both")


def _check_unused(config: AgenticConfig, report: Report) -> None:
    used = {*config.train_env_manager.tags, *(config.val_env_manager.tags if config.eval_steps else [])}
    for tag in config.custom_envs:
        if tag not in used:
            report.warn(f"custom_envs.{tag}", "has no effect: no env_manager has it in its tags")


def _check_ahead(config: AgenticConfig, report: Report) -> None:
    limits = {"train_env_manager": (config.groups_admitted, "async_generation_ratio and rollout_batch_size admit")}
    if config.eval_steps and config.val_batch_size:
        limits["val_env_manager"] = (config.val_batch_size // config.val_env_manager.group_size, "val_batch_size has")
    for name, (limit, why) in limits.items():
        groups = getattr(config, name).num_env_groups
        if groups > max(limit, 1):
            report.warn(f"{name}.num_env_groups", f"{groups} groups never run at a time: {why} {limit}; use that")


def _check_greedy(config: AgenticConfig, report: Report) -> None:
    group = config.val_env_manager.group_size
    if config.eval_steps and group > 1 and config.validation.generating_args.temperature == 0:
        report.warn(
            "val_env_manager.group_size",
            f"{group} runs each task {group} times identically, since validation.generating_args.temperature is 0; "
            "use 1",
        )


def check_agentic(config: AgenticConfig, report: Report) -> None:
    """Trajectories have room for their turns; deadlines, messages and schedules are consistent."""
    _check_lengths(config, report)
    _check_deadlines(config, report)
    _check_template(config, report)
    _check_schedule(config, report)


def _check_lengths(config: AgenticConfig, report: Report) -> None:
    """Each limit of a turn is checked once, at the key that sets it, for the entry with the most turns."""
    given, sampling = set(config.source.given), "actor_infer.generating_args.max_new_tokens"
    common = "max_tokens_per_step" if "max_tokens_per_step" in given else sampling
    turns: dict[tuple[str, int], int] = {}
    for tag, entry in config.custom_envs.items():
        own = f"custom_envs.{tag}.max_tokens_per_step"
        limit = (own if own in given else common, entry.max_tokens_per_step or 0)
        turns[limit] = max(turns.get(limit, 1), entry.max_steps or 1)
    for (path, tokens), most in turns.items():
        _check_turns(path, tokens, most, config, report)
    for role in ("actor_infer", "validation"):
        path, longest = f"{role}.generating_args.max_new_tokens", getattr(config, role).generating_args.max_new_tokens
        if path in given and longest > (config.response_length or 0):
            report.warn(path, f"{longest} is never reached: max_tokens_per_step ends turns at {config.response_length}")


def _check_turns(path: str, tokens: int, turns: int, config: AgenticConfig, report: Report) -> None:
    whole, longest = config.sequence_length or 0, config.actor_infer.generating_args.max_new_tokens or 0
    if tokens >= whole:
        report.error(
            path,
            f"{tokens} tokens for one turn leave no room for an observation in sequence_length {whole}; use less, such "
            f"as {max(1, whole // (2 * turns))}",
        )
    elif tokens > longest:
        report.warn(
            path, f"{tokens} is never reached: actor_infer.generating_args.max_new_tokens ends turns at {longest}"
        )
    elif turns * tokens >= whole:
        report.warn(
            path,
            f"{turns} turns of up to {tokens} tokens fill sequence_length {whole} without any observation: long "
            "trajectories are cut there",
        )


def _check_deadlines(config: AgenticConfig, report: Report) -> None:
    whole = config.trajectory_timeout_s
    parts = {
        "env_step_timeout_s": config.env_step_timeout_s,
        "actor_infer.generation_timeout_s": config.actor_infer.generation_timeout_s,
    }
    for path, part in parts.items():
        if part > whole:
            report.error(
                path, f"{part:g} is never reached: trajectory_timeout_s {whole:g} ends it first; use at most that"
            )
    deadline = config.async_training.batch_deadline_s
    if deadline < whole:
        report.warn(
            "async_training.batch_deadline_s",
            f"{deadline:g} ends the run before a trajectory that hangs has failed, at trajectory_timeout_s {whole:g}; "
            "use more than that",
        )


def _check_template(config: AgenticConfig, report: Report) -> None:
    if config.actor_train.data_args.template == "none":
        report.error(
            "actor_train.data_args.template",
            "none cannot separate the messages of a trajectory; use native, or a chat template by name",
        )
    for key in ("template", "template_kwargs"):
        path, used = f"validation.data_args.{key}", getattr(config.actor_train.data_args, key)
        if path in config.source.given and getattr(config.validation.data_args, key) != used:
            report.error(path, f"has no effect: training and validation both use actor_train.data_args.{key} {used}")


def _check_schedule(config: AgenticConfig, report: Report) -> None:
    kind = config.actor_train.training_args.lr_scheduler_type
    if config.sample_by == "step" and kind != "constant":
        report.warn(
            "actor_train.training_args.lr_scheduler_type",
            f"{kind} is computed for the largest possible number of turns; trajectories that end early leave it "
            "unfinished",
        )
