"""Fills in the keys that follow from others, once, after loading."""

from __future__ import annotations

import contextlib
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from roll.algorithms.options.policy_options import proximal_source, ratio_base, traits_of
from roll.base.errors import Problem
from roll.configs.agentic import AgenticConfig
from roll.configs.environments import MAX_REQUESTS, CustomEnvConfig, EnvManagerConfig
from roll.configs.learning.lora import fill_in_adapter
from roll.configs.learning.rounding import mismatch_bounds
from roll.configs.pipeline import BaseConfig, LearnerOptions, RLConfig, RLVRConfig
from roll.configs.roles import DEVICE_ROLES, MegatronRoleConfig, TrainedRoleConfig
from roll.configs.scoring.built_in_rewards import BUILT_IN, built_in_of, scoring_role
from roll.hub.generated import held_out, is_generated
from roll.hub.names import local_model
from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.shape import read_model_shape

UNKNOWN_SHAPE = 32, 4096
"""Layers and width of a model that is not on this machine yet."""

SLOWEST_TOKENS_PER_S = 20.0
"""Speed of one request on a GPU that many share; slower requests are considered stuck."""

MOST_BATCHES = 4
"""Batches whose environments run at a time by default, however far ahead generation may run: each costs memory."""

OWN_MODEL_ROLES = ("reward", "judge")
"""Roles whose model is never that of `pretrain`."""

SINGLE_TURN_KEYS = ("prompt_length", "response_length")
"""Lengths of a prompt and its one response; a trajectory has several."""


def fill_in_defaults(config: BaseConfig) -> list[Problem]:
    """Sets the keys that the file leaves open; returns what contradicts itself or cannot be filled in.

    Afterwards `sequence_length` = `prompt_length` + `response_length`, every role has a model, validation has the data
    and sampling of training, and no key of the policy loss is `auto`. For agents, `response_length` is the longest
    text of a turn, every entry of `custom_envs` has `max_steps` (in `env_config` too), `max_tokens_per_step` and
    `env_manager_cls`, and managers have `tags`, `num_env_groups` and `num_groups_partition`. Every reward has the
    `module:function` of the built-in one that it names.
    """
    problems = _fill_in_agents(config) if isinstance(config, AgenticConfig) else _fill_in_lengths(config)
    if problems:
        return problems
    config.logging_dir = config.logging_dir or str(Path(config.output_dir) / "logs")
    for role in DEVICE_ROLES:
        section = getattr(config, role, None)
        if section is not None and role not in OWN_MODEL_ROLES and section.model_args.model_name_or_path is None:
            section.model_args.model_name_or_path = config.pretrain
    fill_in_adapter(config)
    _inherit(config, "data_args", config.actor_train.data_args, skip=("file_name", "split"))
    validation = config.validation.data_args
    validation.file_name = [held_out(name) if is_generated(name) else name for name in validation.file_name]
    if isinstance(config, RLConfig):
        _fill_in_rl(config)
    if isinstance(config, RLVRConfig):
        _fill_in_rewards(config)
    _fill_in_forward_sizes(config)
    return []


def _fill_in_rewards(config: RLVRConfig) -> None:
    """Sets the functions of built-in rewards, and times, calls at a time and templates that the file does not set."""
    given = set(config.source.given)
    for name, reward in config.rewards.items():
        path = f"rewards.{name}"
        wanted = reward.function if f"{path}.function" in given else name
        if wanted in BUILT_IN:
            reward.function = BUILT_IN[wanted].function
        built_in = built_in_of(reward.function)
        if built_in is None:
            continue
        if f"{path}.timeout_s" not in given:
            reward.timeout_s = BUILT_IN[built_in].timeout_s
        if reward.max_concurrent_calls is None:
            reward.max_concurrent_calls = BUILT_IN[built_in].max_concurrent_calls
        role = scoring_role(reward)
        if role is not None and reward.template is None:
            reward.template = config.actor_train.data_args.template if role == "reward" else "native"


def _fill_in_lengths(config: BaseConfig) -> list[Problem]:
    prompt, response, sequence = config.prompt_length, config.response_length, config.sequence_length
    if response is None and sequence is None:
        given = {"pretrain": config.pretrain, "actor_train.data_args.file_name": config.actor_train.data_args.file_name}
        needed = "".join(f", and {path}" for path, value in given.items() if not value)
        message = f"is not given; write response_length, the longest response in tokens{needed}"
        return [Problem("response_length", message)]
    if sequence is not None and "prompt_length" not in config.source.given:
        alone = sequence - 1
        if isinstance(config, RLConfig):
            alone = prompt if sequence > prompt else sequence // 2
        prompt = config.prompt_length = alone if response is None else max(1, sequence - response)
    if response is None and sequence is not None and sequence <= prompt:
        hint = f"use more than {prompt}, or a smaller prompt_length"
        message = f"{sequence} leaves no room for a response after prompt_length {prompt}; {hint}"
        return [Problem("sequence_length", message)]
    config.response_length = response = response or (sequence or 0) - prompt
    config.sequence_length = prompt + response
    if sequence not in (None, config.sequence_length):
        total = f"prompt_length {prompt} + response_length {response} = {prompt + response}"
        return [Problem("sequence_length", f"{sequence} is not {total}; leave sequence_length out")]
    return []


def _fill_in_rl(config: RLConfig) -> None:
    if config.rollout_dump_dir is None:
        config.rollout_dump_dir = str(Path(config.output_dir) / "samples")
    elif "rollout_dump_steps" not in config.source.given:
        config.rollout_dump_steps = None  # nothing is deleted in a folder that was asked for
    if config.rollout_dump_every is None and config.rollout_dump_steps:
        config.rollout_dump_every = -(-config.max_steps // 10)
    sampling = config.actor_infer.generating_args
    if sampling.max_new_tokens is None:
        sampling.max_new_tokens = config.response_length
    if sampling.num_return_sequences is None:
        sampling.num_return_sequences = config.num_return_sequences_in_group
    _inherit(config, "generating_args", sampling, skip=("num_return_sequences",))
    if config.validation.generating_args.num_return_sequences is None:
        config.validation.generating_args.num_return_sequences = 1
    if config.async_training.max_staleness_allowed is None:
        config.async_training.max_staleness_allowed = config.default_max_staleness
    _fill_in_policy(config)
    _fill_in_critic(config)
    fill_in_mismatch(config)
    _fill_in_timeout(config)


def _fill_in_critic(config: RLConfig) -> None:
    """A critic takes optimizer steps of as many samples as the policy, where its batch sizes are not given."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if any(f"critic.training_args.{name}" in config.source.given for name in names):
        return
    samples, data = config.actor_train.samples_per_optimizer_step, config.critic.layout.data
    sizes = (config.actor_train.training_args.per_device_train_batch_size, 1)
    if size := next((size for size in sizes if samples % (size * data) == 0), None):
        config.critic.training_args.per_device_train_batch_size = size
        config.critic.training_args.gradient_accumulation_steps = samples // (size * data)


def _fill_in_forward_sizes(config: BaseConfig) -> None:
    """A forward pass takes as many samples as a training pass, which needs more memory for each of them."""
    for role in ("actor_train", "reference", "critic", "reward"):
        section = getattr(config, role, None)
        if isinstance(section, MegatronRoleConfig) and f"{role}.infer_batch_size" not in config.source.given:
            trained = section if isinstance(section, TrainedRoleConfig) else config.actor_train
            size = trained.training_args.per_device_train_batch_size
            section.infer_batch_size = max(section.infer_batch_size, size)


def _fill_in_timeout(config: RLConfig) -> None:
    """A longer time for longer responses, within that of a trajectory."""
    if "actor_infer.generation_timeout_s" in config.source.given:
        return
    sections = (config.actor_infer.generating_args, config.validation.generating_args)
    seconds = max(section.max_new_tokens or 0 for section in sections) / SLOWEST_TOKENS_PER_S
    whole = config.trajectory_timeout_s if isinstance(config, AgenticConfig) else math.inf
    config.actor_infer.generation_timeout_s = min(max(config.actor_infer.generation_timeout_s, seconds), whole)


def default_mismatch(config: LearnerOptions) -> dict[str, float | None]:
    """The bounds of `mismatch_bounds`, for a large model where the run's is not on this machine yet."""
    shape = None
    with contextlib.suppress(UnsupportedModel):  # `check_models` reports it
        shape = read_model_shape(local_model(config.actor_train.model_args.model_name_or_path or ""))
    layers, width = UNKNOWN_SHAPE if shape is None else (shape.layers, shape.hidden)
    dtypes = (config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype)
    return mismatch_bounds(dtypes, layers, width, config.sequence_length or 0, gpu=config.platform != "cpu")


def fill_in_mismatch(config: RLConfig) -> None:
    """Sets the bounds that are not given; null leaves a bound out."""
    for key, bound in default_mismatch(config).items():
        if key not in config.source.given:
            setattr(config, key, bound)


def _fill_in_policy(config: RLConfig) -> None:
    """Sets the policies the loss compares, and the weights that are part of some variants."""
    variant, weights = config.actor_train.pg_variant, config.correction.weights
    if traits_of(variant).needs_weights and weights.level is None:
        weights.level = "token"
    source, chosen = proximal_source(config, variant, config.async_generation_ratio), config.old_log_probs_source
    config.pg_ratio_base = ratio_base(config, variant, source)  # type: ignore[assignment]
    reads_pass = config.uses_sum_pi_squared and chosen == "auto"
    config.old_log_probs_source = "recompute" if reads_pass else source  # type: ignore[assignment]


def _inherit(config: BaseConfig, section: str, training: Any, skip: tuple[str, ...]) -> None:
    """Sets every key of a section of validation that the file does not set to the value of training."""
    target = getattr(config.validation, section)
    given = set(config.source.given)
    for item in fields(target):
        if item.name not in skip and f"validation.{section}.{item.name}" not in given:
            setattr(target, item.name, getattr(training, item.name))


def _fill_in_agents(config: AgenticConfig) -> list[Problem]:
    problems = _fill_in_turn_lengths(config) + _fill_in_sample_kind(config)
    for tag, entry in config.custom_envs.items():
        problems += _fill_in_steps(f"custom_envs.{tag}", entry, config.max_actions_per_traj)
    if problems:
        return problems
    if config.val_batch_size is None:
        config.val_batch_size = config.rollout_batch_size
    config.num_return_sequences_in_group = config.train_env_manager.group_size
    groups = min(config.groups_admitted, MOST_BATCHES * config.groups_per_batch)
    _fill_in_manager(config.train_env_manager, config, groups, config.groups_per_batch)
    groups = config.val_batch_size // config.val_env_manager.group_size
    _fill_in_manager(config.val_env_manager, config, groups, groups)
    return []


def _fill_in_turn_lengths(config: AgenticConfig) -> list[Problem]:
    """Sets the longest text of a turn, and the rest of the trajectory as `prompt_length`."""
    given = set(config.source.given)
    problems = [
        Problem(key, "a trajectory has several turns; write sequence_length for all of it and max_tokens_per_step")
        for key in SINGLE_TURN_KEYS
        if key in given
    ]
    sampling = config.actor_infer.generating_args
    if config.sequence_length is None:
        message = "is not given; write the longest trajectory in tokens, such as 8192"
        problems.append(Problem("sequence_length", message))
    limits = [entry.max_tokens_per_step for entry in config.custom_envs.values() if not entry.is_agent]
    if config.max_tokens_per_step is None:
        config.max_tokens_per_step = sampling.max_new_tokens
    if config.max_tokens_per_step is None and (None in limits or not config.custom_envs):
        hint = "write the longest text of one turn in tokens, such as 128"
        other = "actor_infer.generating_args.max_new_tokens"
        problems.append(Problem("max_tokens_per_step", f"is not given, and neither is {other}; {hint}"))
    if problems:
        return problems
    assert config.sequence_length is not None
    for entry in config.custom_envs.values():
        if entry.max_tokens_per_step is None:
            whole = max(1, config.sequence_length - 1) if entry.is_agent else None
            entry.max_tokens_per_step = config.max_tokens_per_step or whole
    longest = max([entry.max_tokens_per_step or 0 for entry in config.custom_envs.values()] or [1])
    if sampling.max_new_tokens is None:
        sampling.max_new_tokens = longest
    if config.validation.generating_args.max_new_tokens is None:
        config.validation.generating_args.max_new_tokens = longest
    config.response_length = longest
    config.prompt_length = max(1, config.sequence_length - longest)
    return []


def _fill_in_sample_kind(config: AgenticConfig) -> list[Problem]:
    """Sets `sample_by` and the `env_manager_cls` of every entry, which agree, and one sample per request."""
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
            instead = f"{'train' if role == 'actor_infer' else 'val'}_env_manager.group_size"
            message = f"{sampling.num_return_sequences} is not 1: a turn has one text; write {instead}"
            problems.append(Problem(f"{role}.generating_args.num_return_sequences", message))
        sampling.num_return_sequences = 1
    return problems


def _fill_in_steps(path: str, entry: CustomEnvConfig, default: int) -> list[Problem]:
    """Sets the `max_steps` of an entry and of its options, which are one number; for an agent, its `max_requests`."""
    if entry.is_agent:
        entry.max_steps = entry.max_requests = entry.max_requests or MAX_REQUESTS
        return []
    inner = entry.env_config.get("max_steps")
    if entry.max_steps is not None and inner is not None and inner != entry.max_steps:
        return [Problem(f"{path}.max_steps", f"{entry.max_steps} is not env_config.max_steps {inner}; keep one")]
    if inner is None:
        entry.env_config["max_steps"] = entry.max_steps = entry.max_steps or default
    elif isinstance(inner, int):
        entry.max_steps = inner
    return []


def _fill_in_manager(manager: EnvManagerConfig, config: AgenticConfig, groups: int, least: int) -> None:
    """Sets tags, the share of each tag, and groups: `groups`, or fewer (`least`) where the shares are equal then."""
    manager.tags = manager.tags or list(config.custom_envs)
    partition, tags = manager.num_groups_partition, len(manager.tags)
    if manager.num_env_groups is None:
        equal = groups // max(tags, 1) * tags
        manager.num_env_groups = sum(partition) or max(1, equal if equal >= least else groups)
    if not partition and tags and manager.num_env_groups % tags == 0:
        manager.num_groups_partition = [manager.num_env_groups // tags] * tags
