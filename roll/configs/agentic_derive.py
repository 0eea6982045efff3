"""Values of the agentic pipeline that follow from others."""

from __future__ import annotations

from roll.configs.agentic import AgenticConfig, CustomEnvConfig, EnvManagerConfig
from roll.configs.errors import Problem

SINGLE_TURN_KEYS = ("prompt_length", "response_length")
"""Lengths of a prompt and its one response; a trajectory has several."""


def derive_agentic(config: AgenticConfig) -> list[Problem]:
    """Fills in what a file leaves open; returns what contradicts itself or cannot be filled in.

    Afterwards every entry of `custom_envs` has `max_steps` (in `env_config` too), `max_tokens_per_step` and
    `env_manager_cls`; managers have `tags`, `num_env_groups` and `num_groups_partition`; `response_length` is the
    longest text of a turn and `prompt_length` what is left of `sequence_length`.
    """
    problems = _lengths(config) + _samples(config)
    for tag, entry in config.custom_envs.items():
        problems += _steps(f"custom_envs.{tag}", entry, config.max_actions_per_traj)
    if problems:
        return problems
    if config.val_batch_size is None:
        config.val_batch_size = config.rollout_batch_size
    config.num_return_sequences_in_group = config.train_env_manager.group_size
    _fill(config.train_env_manager, config, config.rollout_batch_size)
    _fill(config.val_env_manager, config, config.val_batch_size)
    return []


def _lengths(config: AgenticConfig) -> list[Problem]:
    """The longest text of a turn, and what it leaves of the trajectory."""
    given = set(config.source.given)
    problems = [
        Problem(key, "a trajectory has several turns; write sequence_length for all of it and max_tokens_per_step")
        for key in SINGLE_TURN_KEYS
        if key in given
    ]
    sampling = config.actor_infer.generating_args
    if config.sequence_length is None:
        problems.append(
            Problem("sequence_length", "is not given; write the longest trajectory in tokens, such as 8192")
        )
    limits = [entry.max_tokens_per_step for entry in config.custom_envs.values()]
    if config.max_tokens_per_step is None:
        config.max_tokens_per_step = sampling.max_new_tokens
    if config.max_tokens_per_step is None and (None in limits or not limits):
        advice = "write the longest text of one turn in tokens, such as 128"
        other = "actor_infer.generating_args.max_new_tokens"
        problems.append(Problem("max_tokens_per_step", f"is not given, and neither is {other}; {advice}"))
    if problems:
        return problems
    assert config.sequence_length is not None
    for entry in config.custom_envs.values():
        if entry.max_tokens_per_step is None:
            entry.max_tokens_per_step = config.max_tokens_per_step
    longest = max([entry.max_tokens_per_step or 0 for entry in config.custom_envs.values()] or [1])
    if sampling.max_new_tokens is None:
        sampling.max_new_tokens = longest
    if config.validation.generating_args.max_new_tokens is None:
        config.validation.generating_args.max_new_tokens = longest
    config.response_length = longest
    config.prompt_length = max(1, config.sequence_length - longest)
    return []


def _samples(config: AgenticConfig) -> list[Problem]:
    """`sample_by` and every entry's `env_manager_cls`, which agree; and one sample per request."""
    problems = []
    named = {
        f"custom_envs.{tag}.env_manager_cls": entry.env_manager_cls
        for tag, entry in config.custom_envs.items()
        if entry.env_manager_cls is not None
    }
    wanted = config.sample_by or next(iter(named.values()), "traj")
    first = "sample_by" if config.sample_by else next(iter(named), "")
    for path, value in named.items():
        if value != wanted:
            problems.append(Problem(path, f"{value} contradicts {first} {wanted}; all samples are of one kind"))
    config.sample_by = wanted
    for entry in config.custom_envs.values():
        entry.env_manager_cls = wanted
    group = config.train_env_manager.group_size
    if "num_return_sequences_in_group" in config.source.given and config.num_return_sequences_in_group != group:
        message = f"{config.num_return_sequences_in_group} is not train_env_manager.group_size {group}; leave it out"
        problems.append(Problem("num_return_sequences_in_group", message))
    for role in ("actor_infer", "validation"):
        sampling = getattr(config, role).generating_args
        if sampling.num_return_sequences not in (None, 1):
            problems.append(
                Problem(
                    f"{role}.generating_args.num_return_sequences",
                    f"{sampling.num_return_sequences} is not 1: a turn has one text; "
                    f"write {'train' if role == 'actor_infer' else 'val'}_env_manager.group_size",
                )
            )
        sampling.num_return_sequences = 1
    return problems


def _steps(path: str, entry: CustomEnvConfig, default: int) -> list[Problem]:
    """The entry's `max_steps` and that of its options, which are one number."""
    inner = entry.env_config.get("max_steps")
    if entry.max_steps is not None and inner is not None and inner != entry.max_steps:
        return [Problem(f"{path}.max_steps", f"{entry.max_steps} is not env_config.max_steps {inner}; keep one")]
    if inner is None:
        entry.env_config["max_steps"] = entry.max_steps = entry.max_steps or default
    elif isinstance(inner, int):
        entry.max_steps = inner
    return []


def _fill(manager: EnvManagerConfig, config: AgenticConfig, trajectories: int) -> None:
    """Tags, groups and their shares, as far as they divide."""
    manager.tags = manager.tags or list(config.custom_envs)
    partition = manager.num_groups_partition
    if manager.num_env_groups is None:
        manager.num_env_groups = max(1, sum(partition) or trajectories // manager.group_size)
    if not partition and manager.tags and manager.num_env_groups % len(manager.tags) == 0:
        manager.num_groups_partition = [manager.num_env_groups // len(manager.tags)] * len(manager.tags)
