"""Reinforcement learning of agents: trajectories, their batches and the rewards of turns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll.algorithms.advantages import AdvantageSettings
from roll.algorithms.options.advantage_options import TurnOptions
from roll.algorithms.options.policy_options import RatioOptions
from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, option
from roll.configs.asynchronous import exact_ratio
from roll.configs.environments import CustomEnvConfig, EnvManagerConfig, SampleBy, check_manager
from roll.configs.gateway import FOR_AGENTS, GatewayOptions
from roll.configs.pipeline import VALIDATES, RLConfig

ADJUSTMENTS = {
    "copy": "a copied sample would be trained on twice",
    "delete": "a deleted one would be wasted",
    "random_sample": "a copied sample would be trained on twice, a deleted one wasted",
    "auto": "a copied sample would be trained on twice, a deleted one wasted",
}
"""Values of `batch_adjust_mode` in ROLL -> why they are not available."""


def batch_adjustment(value: Any) -> Any:
    """The value of `batch_adjust_mode`.

    Raises:
        ValueError: it is one of ADJUSTMENTS.
    """
    if isinstance(value, str) and value in ADJUSTMENTS:
        raise ValueError(f"{value} is not available: {ADJUSTMENTS[value]}; leave it out, and batches are padded")
    return value


def _some_entry_lacks(*keys: str) -> Condition:
    """The condition that an entry of `custom_envs` sets none of these keys, the first of which replaces the default."""

    def holds(config: Any, _: Any) -> bool:
        given = set(config.source.given)
        return any(given.isdisjoint(f"custom_envs.{tag}.{key}" for key in keys) for tag in config.custom_envs)

    return Condition(holds, f"every entry of custom_envs has its own {keys[0]}", ("custom_envs",))


SOME_ENVIRONMENT = Condition(
    lambda config, _: not all(entry.is_agent for entry in config.custom_envs.values()),
    "every entry of custom_envs is an agent, which trajectory_timeout_s ends",
    ("custom_envs",),
)


def _frozen_lake() -> dict[str, CustomEnvConfig]:
    options = {"size": 4, "p": 0.8, "is_slippery": False, "format_penalty": -0.01}
    return {"FrozenLake": CustomEnvConfig(env_type="frozen_lake", env_config=options)}


@dataclass
class AgenticConfig(TurnOptions, RatioOptions, RLConfig):
    """Reinforcement learning of agents that act in environments over several turns.

    `rollout_batch_size` counts trajectories. `roll.configs.defaults` fills in the keys that follow from others.
    """

    pipeline: Literal["agentic"] = option("agentic", "Which pipeline this file is for.")
    custom_envs: dict[str, CustomEnvConfig] = option(factory=_frozen_lake, help="Kinds of environments by tag.")
    train_env_manager: EnvManagerConfig = option(
        factory=EnvManagerConfig, help="The environments of training; the samples of one of its groups are compared."
    )
    val_env_manager: EnvManagerConfig = option(
        factory=lambda: EnvManagerConfig(group_size=1), help="The environments of validation.", only_for=VALIDATES
    )
    val_batch_size: int | None = option(
        None, "Trajectories of one validation; default: rollout_batch_size.", ge=1, only_for=VALIDATES
    )
    gateway: GatewayOptions = option(
        factory=GatewayOptions, help="The endpoint through which agents call the policy.", only_for=FOR_AGENTS
    )
    max_actions_per_traj: int = option(
        10,
        "Actions of one trajectory in environments without max_steps.",
        ge=1,
        usual=(1, 1e4),
        only_for=_some_entry_lacks("max_steps", "env_config.max_steps"),
    )
    max_tokens_per_step: int | None = option(
        None,
        "Longest text of one turn in tokens; default: actor_infer.generating_args.max_new_tokens.",
        ge=1,
        only_for=_some_entry_lacks("max_tokens_per_step"),
    )
    sample_by: SampleBy | None = option(
        None,
        "What one training sample is: a whole trajectory (traj) or one turn with the turns before it (step); default: "
        "env_manager_cls, or traj.",
    )
    env_step_timeout_s: float = option(
        60.0,
        "Maximum duration of one reset or step of an environment; after it the trajectory has failed.",
        gt=0,
        only_for=SOME_ENVIRONMENT,
    )
    trajectory_timeout_s: float = option(
        3600.0,
        "Maximum duration of a trajectory from reset to its last reward; after it the trajectory has failed.",
        gt=0,
    )
    batch_adjust_mode: Literal["pad"] = option(
        "pad",
        "How a batch that does not divide is filled: with samples without a loss; only pad.",
        parse=batch_adjustment,
    )

    @property
    def advantages(self) -> AdvantageSettings:
        """The settings of the advantages, without lengths: `response_length` is that of one turn of a trajectory."""
        return replace(
            super().advantages,
            overlong_buffer_len=None,
            length_reward_coef=0.0,
            length_penalty_per_token=0.0,
            length_loss_weight=False,
        )

    @property
    def groups_per_batch(self) -> int:
        return max(1, self.rollout_batch_size // self.train_env_manager.group_size)

    @property
    def groups_admitted(self) -> int:
        """Groups that may be in progress at a time: those of 1 + async_generation_ratio batches, rounded down."""
        return math.floor((1 + exact_ratio(self.async_generation_ratio)) * self.groups_per_batch)

    @property
    def samples_per_batch(self) -> int:
        """Number of samples of one step; with `sample_by: step` the maximum, with agents an estimate."""
        return self.rollout_batch_size * (self.turns if self.sample_by == "step" else self.branches)

    @property
    def branches(self) -> int:
        """Samples of one training trajectory where it is not divided into turns."""
        return max((self.custom_envs[tag].branches for tag in self.tags_of(self.train_env_manager)), default=1)

    @property
    def requests_per_engine(self) -> int:
        """Maximum number of requests of one engine at a time, rounded up: an environment waits for each turn."""
        return -(-self.train_env_manager.environments // self.actor_infer.layout.data)

    @property
    def turns(self) -> int:
        """Maximum number of actions of one training trajectory."""
        return max((self.custom_envs[tag].max_steps or 1 for tag in self.tags_of(self.train_env_manager)), default=1)

    def tags_of(self, manager: EnvManagerConfig) -> list[str]:
        """The tags of a manager that exist in custom_envs."""
        return [tag for tag in manager.tags or self.custom_envs if tag in self.custom_envs]


def check_agentic(config: AgenticConfig) -> Iterator[Finding]:
    """Batches are whole groups, trajectories have room for their turns, deadlines and messages are consistent."""
    yield from _check_groups(config)
    yield from _check_lengths(config)
    yield from _check_deadlines(config)
    yield from _check_template(config)
    yield from _check_learning_rate(config)


def _check_groups(config: AgenticConfig) -> Iterator[Finding]:
    """Batches are whole groups, tags exist, and their shares add up; for validation too if there is one."""
    batches = {"train_env_manager": ("rollout_batch_size", config.rollout_batch_size)}
    if config.eval_steps:
        batches["val_env_manager"] = ("val_batch_size", config.val_batch_size or 0)
    for name, batch in batches.items():
        yield from check_manager(name, getattr(config, name), batch, config.custom_envs)
    yield from _check_unused(config)
    yield from _check_ahead(config)
    yield from _check_greedy(config)
    yield from _check_held_out(config)


def _check_unused(config: AgenticConfig) -> Iterator[Finding]:
    used = {*config.train_env_manager.tags, *(config.val_env_manager.tags if config.eval_steps else [])}
    for tag in config.custom_envs:
        if tag not in used:
            yield warning(f"custom_envs.{tag}", "has no effect: no env_manager has it in its tags")


def _check_ahead(config: AgenticConfig) -> Iterator[Finding]:
    limits = {"train_env_manager": (config.groups_admitted, "async_generation_ratio and rollout_batch_size admit")}
    if config.eval_steps and config.val_batch_size:
        limits["val_env_manager"] = (config.val_batch_size // config.val_env_manager.group_size, "val_batch_size has")
    for name, (limit, why) in limits.items():
        groups = getattr(config, name).num_env_groups
        if groups > max(limit, 1):
            yield warning(f"{name}.num_env_groups", f"{groups} groups never run at a time: {why} {limit}; use that")


def _check_greedy(config: AgenticConfig) -> Iterator[Finding]:
    group = config.val_env_manager.group_size
    if config.eval_steps and group > 1 and config.validation.generating_args.temperature == 0:
        yield warning(
            "val_env_manager.group_size",
            f"{group} runs each task {group} times identically, since validation.generating_args.temperature is 0; "
            "use 1",
        )


def _check_held_out(config: AgenticConfig) -> Iterator[Finding]:
    """Rows that validation plays are not trained on."""
    entries = config.custom_envs
    trained = {name for tag in config.tags_of(config.train_env_manager) for name in entries[tag].tasks.file_name}
    for tag in config.tags_of(config.val_env_manager) if config.eval_steps else ():
        for name in sorted(trained.intersection(entries[tag].tasks.file_name)):
            yield warning(
                f"custom_envs.{tag}.tasks.file_name",
                f"{name} is trained on too, so its score is not of unseen tasks; keep it out of training with "
                "train_env_manager.tags and val_env_manager.tags",
            )


def _check_lengths(config: AgenticConfig) -> Iterator[Finding]:
    """Each limit of a turn is checked once, at the key that sets it, for the entry with the most turns."""
    given, sampling = set(config.source.given), "actor_infer.generating_args.max_new_tokens"
    common = "max_tokens_per_step" if "max_tokens_per_step" in given else sampling
    turns: dict[tuple[str, int], int] = {}
    for tag, entry in config.custom_envs.items():
        own = f"custom_envs.{tag}.max_tokens_per_step"
        limit = (own if own in given else common, entry.max_tokens_per_step or 0)
        turns[limit] = max(turns.get(limit, 1), 1 if entry.is_agent else entry.max_steps or 1)
    for (path, tokens), most in turns.items():
        yield from _check_turns(path, tokens, most, config)
    for role in ("actor_infer", "validation"):
        path, longest = f"{role}.generating_args.max_new_tokens", getattr(config, role).generating_args.max_new_tokens
        if path in given and longest > (config.response_length or 0):
            yield warning(
                path, f"{longest} is never reached: max_tokens_per_step ends turns at {config.response_length}"
            )


def _check_turns(path: str, tokens: int, turns: int, config: AgenticConfig) -> Iterator[Finding]:
    whole, longest = config.sequence_length or 0, config.actor_infer.generating_args.max_new_tokens or 0
    if tokens >= whole:
        yield error(
            path,
            f"{tokens} tokens for one turn leave no room for an observation in sequence_length {whole}; use less, such "
            f"as {max(1, whole // (2 * turns))}",
        )
    elif tokens > longest:
        yield warning(
            path, f"{tokens} is never reached: actor_infer.generating_args.max_new_tokens ends turns at {longest}"
        )
    elif turns * tokens >= whole:
        yield warning(
            path,
            f"{turns} turns of up to {tokens} tokens fill sequence_length {whole} without any observation: long "
            "trajectories are cut there",
        )


def _check_deadlines(config: AgenticConfig) -> Iterator[Finding]:
    whole = config.trajectory_timeout_s
    parts = {"actor_infer.generation_timeout_s": config.actor_infer.generation_timeout_s}
    if SOME_ENVIRONMENT.holds(config, config):
        parts["env_step_timeout_s"] = config.env_step_timeout_s
    for path, part in parts.items():
        if part > whole:
            yield error(
                path, f"{part:g} is never reached: trajectory_timeout_s {whole:g} ends it first; use at most that"
            )
    deadline = config.async_training.batch_deadline_s
    if deadline < whole:
        yield warning(
            "async_training.batch_deadline_s",
            f"{deadline:g} ends the run before a trajectory that hangs has failed, at trajectory_timeout_s {whole:g}; "
            "use more than that",
        )


def _check_template(config: AgenticConfig) -> Iterator[Finding]:
    if config.actor_train.data_args.template == "none":
        yield error(
            "actor_train.data_args.template",
            "none cannot separate the messages of a trajectory; use native, or a chat template by name",
        )
    for key in ("template", "template_kwargs"):
        path, used = f"validation.data_args.{key}", getattr(config.actor_train.data_args, key)
        if path in config.source.given and getattr(config.validation.data_args, key) != used:
            yield error(path, f"has no effect: training and validation both use actor_train.data_args.{key} {used}")


def _check_learning_rate(config: AgenticConfig) -> Iterator[Finding]:
    kind = config.actor_train.training_args.lr_scheduler_type
    if config.sample_by == "step" and kind != "constant":
        yield warning(
            "actor_train.training_args.lr_scheduler_type",
            f"{kind} is computed for the largest possible number of turns; trajectories that end early leave it "
            "unfinished",
        )
    elif config.branches > 1 and kind != "constant":
        yield warning(
            "actor_train.training_args.lr_scheduler_type",
            f"{kind} is computed for {config.branches} branches of each session; with fewer it stays unfinished, with "
            "more it ends early",
        )
