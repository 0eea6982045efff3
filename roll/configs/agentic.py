"""Reinforcement learning of agents: the environments, how many play at a time, and what a trajectory may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.agent_templates import SYSTEM_TEMPLATE, TURN_TEMPLATE, system_template, turn_template
from roll.configs.agentic_learning import AgenticLearningOptions
from roll.configs.fields import one_or_many, option
from roll.configs.pipeline import RLConfig

SampleBy = Literal["traj", "step"]
"""One training sample is a whole trajectory, or one turn of it."""

MANAGERS = {"TrajEnvManager": "traj", "StepEnvManager": "step"}
"""Classes that other recipes name -> value of `sample_by`."""

ADJUSTMENTS = {
    "copy": "a copied sample would be trained on twice",
    "delete": "a deleted one would be generated for nothing",
    "random_sample": "a copied sample would be trained on twice, a deleted one generated for nothing",
    "auto": "a copied sample would be trained on twice, a deleted one generated for nothing",
}
"""Values of `batch_adjust_mode` elsewhere -> why they are not available."""


def env_manager(value: Any) -> Any:
    """`traj` or `step`, also from the class path that another recipe has.

    Raises:
        ValueError: another class.
    """
    if not isinstance(value, str) or value in MANAGERS.values():
        return value
    name = value.rpartition(".")[2]
    if name not in MANAGERS:
        known = ", ".join([*MANAGERS.values(), *(f"...{cls}" for cls in MANAGERS)])
        raise ValueError(f"{value!r} is not available; known: {known}")
    return MANAGERS[name]


def batch_adjustment(value: Any) -> Any:
    """The value, if it is not one whose reason to be refused is known.

    Raises:
        ValueError: it is.
    """
    if isinstance(value, str) and value in ADJUSTMENTS:
        raise ValueError(f"{value} is not available: {ADJUSTMENTS[value]}; leave it out, and batches are padded")
    return value


@dataclass
class CustomEnvConfig:
    """One kind of environment, and how it is talked to."""

    env_type: str = option(
        "frozen_lake", "A name of docs/environments.md, an id of gymnasium's registry, or `module:Class`."
    )
    env_config: dict[str, Any] = option(factory=dict, help="Its options.")
    max_steps: int | None = option(
        None, "Actions of one trajectory; default: env_config.max_steps, or max_actions_per_traj.", minimum=1
    )
    max_tokens_per_step: int | None = option(
        None, "Longest text of one turn in tokens; default: the pipeline's max_tokens_per_step.", minimum=1
    )
    agent_system_template: str | None = option(
        SYSTEM_TEMPLATE, "System message, null for none; may hold {env_instruction}.", parse=system_template
    )
    agent_template: str = option(
        TURN_TEMPLATE,
        "Message of every turn, with the fields {turn_idx} (from 1), {observation}, {actions_left}, "
        "{max_response_length} and {env_instruction}, which is empty after the first turn. Where neither template has "
        "{env_instruction}, the first turn begins with it.",
        parse=turn_template,
    )
    env_manager_cls: SampleBy | None = option(
        None, "traj or step; one for all, default: the pipeline's sample_by.", parse=env_manager
    )


@dataclass
class EnvManagerConfig:
    """Which environments play, how many at a time, and in how many processes.

    A group is `group_size` trajectories of one task: the same environment, the same options, the same seed.
    """

    num_env_groups: int | None = option(
        None,
        "Groups that play at a time; default: the sum of num_groups_partition, or the groups of one batch.",
        minimum=1,
    )
    group_size: int = option(8, "Trajectories of one task; in val_env_manager the default is 1.", minimum=1)
    group_size_redundancy: int = option(
        0, "Environments of a group beyond group_size: it is complete when group_size of them have ended.", minimum=0
    )
    tags: list[str] = option(
        factory=list,
        parse=one_or_many,
        help="Names in custom_envs that play; a single one is a list of one; empty: all.",
    )
    num_groups_partition: list[int] = option(
        factory=list,
        help="Of num_env_groups, how many are of each of `tags`; empty: equal parts. Groups are dealt to tags in these "
        "proportions.",
    )
    max_env_num_per_worker: int = option(16, "Environments of one process; 0: all in one.", minimum=0)
    max_traj_per_env: Literal[-1] = option(
        -1, "An environment plays as many trajectories, one after the other, as batches ask for: only -1."
    )

    @property
    def environments(self) -> int:
        """Environments that play at a time."""
        return (self.num_env_groups or 1) * (self.group_size + self.group_size_redundancy)

    @property
    def processes(self) -> int:
        """Processes they live in."""
        return -(-self.environments // (self.max_env_num_per_worker or self.environments))


def _frozen_lake() -> dict[str, CustomEnvConfig]:
    options = {"size": 4, "p": 0.8, "is_slippery": False, "format_penalty": -0.01}
    return {"FrozenLake": CustomEnvConfig(env_type="frozen_lake", env_config=options)}


@dataclass
class AgenticConfig(AgenticLearningOptions, RLConfig):
    """Reinforcement learning of agents that act in environments over several turns.

    `rollout_batch_size` counts trajectories. What other keys settle is filled in by loading: see `derive_agentic`.
    """

    pipeline: Literal["agentic"] = option("agentic", "Which pipeline this file is for.")
    custom_envs: dict[str, CustomEnvConfig] = option(factory=_frozen_lake, help="Kinds of environments by tag.")
    train_env_manager: EnvManagerConfig = option(
        factory=EnvManagerConfig, help="The environments of training; its group_size are the samples compared."
    )
    val_env_manager: EnvManagerConfig = option(
        factory=lambda: EnvManagerConfig(group_size=1), help="The environments of validation."
    )
    val_batch_size: int | None = option(None, "Trajectories of one validation; default: rollout_batch_size.", minimum=1)
    max_actions_per_traj: int = option(
        10, "Actions of one trajectory in environments that set no max_steps.", minimum=1
    )
    max_tokens_per_step: int | None = option(
        None, "Longest text of one turn in tokens; default: actor_infer.generating_args.max_new_tokens.", minimum=1
    )
    sample_by: SampleBy | None = option(
        None,
        "What one training sample is: a whole trajectory (traj) or one turn with what came before it (step); default: "
        "what env_manager_cls says, or traj.",
    )
    env_step_timeout_s: float = option(
        60.0, "Longest one reset or step of an environment may take; its trajectory has failed then.", above=0
    )
    trajectory_timeout_s: float = option(
        3600.0, "Longest a trajectory may take from reset to its last reward; it has failed then.", above=0
    )
    batch_adjust_mode: Literal["pad"] = option(
        "pad", "What fills up a batch that does not divide: samples without a loss; only pad.", parse=batch_adjustment
    )

    @property
    def groups_per_batch(self) -> int:
        """Groups of one step."""
        return max(1, self.rollout_batch_size // self.train_env_manager.group_size)

    @property
    def samples_per_batch(self) -> int:
        """Samples of one step, with `sample_by: step` at most."""
        return self.rollout_batch_size * (self.turns if self.sample_by == "step" else 1)

    @property
    def turns(self) -> int:
        """Actions of one training trajectory, at most."""
        return max((self.custom_envs[tag].max_steps or 1 for tag in self.playing(self.train_env_manager)), default=1)

    def playing(self, manager: EnvManagerConfig) -> list[str]:
        """Tags of a manager that exist."""
        return [tag for tag in manager.tags or self.custom_envs if tag in self.custom_envs]
