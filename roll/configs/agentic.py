"""Reinforcement learning of agents: environments, their messages, trajectories and the rewards of turns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

from roll.base.schema import Condition, one_or_many, option
from roll.configs.advantages import TURN_ESTIMATORS, estimators
from roll.configs.asynchronous import exact_ratio
from roll.configs.pipeline import VALIDATES, RLConfig
from roll.configs.policy import traits_of

SYSTEM_FIELDS = ("env_instruction",)
"""Fields of `agent_system_template`, the system message of a trajectory; other braces in it are text."""

TURN_FIELDS = ("turn_idx", "observation", "actions_left", "max_response_length", "env_instruction")
"""Fields of `agent_template`, the message of every turn."""

STEP_FIELDS = ("current_observation", "current_step", "step_count", "history", "history_length", "suffix")
"""Fields that templates of ROLL have for single turns. Here earlier turns are messages of their own, so `history` says
that they are above, `history_length` and `step_count` are their number, and `suffix` is empty."""

OBSERVATIONS = ("observation", "current_observation")

SYSTEM_TEMPLATE = "You act in an environment, one action per turn, and want the highest total reward."
"""Default of `agent_system_template`."""

TURN_TEMPLATE = """Turn {turn_idx}:
{observation}
Actions left: {actions_left}. Think briefly, then give one action, in at most {max_response_length} tokens."""
"""Default of `agent_template`. `turn_idx` counts from 1."""


HISTORY = "the messages above"
"""Text of the field `history`: earlier turns are part of the conversation and are not repeated."""


def first_messages(
    system: str, template: str, instruction: str, observation: str, actions: int, tokens: int
) -> list[dict[str, str]]:
    """The messages before the first action; the instruction comes first, unless a template has a field for it.

    A trajectory has at most `actions` answers of at most `tokens` tokens; `system` is empty for no system message.
    """
    text = turn_message(template, 0, observation, actions, tokens, instruction)
    if not any("{env_instruction}" in each for each in (system, template)):
        text = f"{instruction}\n{text}"
    before = [{"role": "system", "content": system.replace("{env_instruction}", instruction)}] if system else []
    return [*before, {"role": "user", "content": text}]


def turn_message(template: str, turn: int, observation: str, actions: int, tokens: int, instruction: str = "") -> str:
    """The message before action number `turn`, from 0; other arguments as in `first_messages`."""
    fields: dict[str, Any] = {
        "turn_idx": turn + 1,
        "observation": observation,
        "actions_left": actions - turn,
        "max_response_length": tokens,
        "env_instruction": instruction,
        "current_observation": observation,
        "current_step": turn + 1,
        "step_count": turn,
        "history": HISTORY if turn else "",
        "history_length": turn,
        "suffix": "",
    }
    return template.format(**fields)


def system_template(text: Any) -> Any:
    """An `agent_system_template`: everything but its field is sent as it is, braces too.

    Raises:
        ValueError: it has a field of `agent_template`.
    """
    for name in re.findall(r"\{(\w+)\}", text) if isinstance(text, str) else []:
        if name in TURN_FIELDS + STEP_FIELDS and name not in SYSTEM_FIELDS:
            raise ValueError(f"{{{name}}} is not a field; known: {{{SYSTEM_FIELDS[0]}}}; write it in agent_template")
    return text


def turn_template(text: Any) -> Any:
    """An `agent_template` whose fields are checked; a value of another type is returned unchanged.

    Raises:
        ValueError: a field is unknown, braces do not match, or the observation is missing.
    """
    if isinstance(text, str) and not set(OBSERVATIONS) & set(fields_of(text, TURN_FIELDS + STEP_FIELDS)):
        raise ValueError("does not contain {observation}, so the model would see nothing of the environment; add it")
    return text


def fields_of(text: str, known: tuple[str, ...]) -> list[str]:
    """Names of the fields of a template.

    Raises:
        ValueError: one is not in `known`, or braces do not match.
    """
    literal = "write {{ and }} for literal braces"
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"braces do not match ({error}); {literal}") from None
    for name in names:
        if name not in known:
            own = ", ".join(f"{{{one}}}" for one in known if one not in STEP_FIELDS)
            raise ValueError(f"{{{name}}} is not a field; known: {own}; {literal}")
    return names


GIGPO = estimators("gigpo", reason="only adv_estimator gigpo reads it")

METHODS: dict[str, dict[str, str | None]] = {
    "identity": {"norm_mean_type": None, "norm_std_type": None},
    "mean": {"norm_mean_type": "group", "norm_std_type": None},
    "mean_std": {"norm_mean_type": "group", "norm_std_type": "group"},
}
"""`method` in recipes of ROLL -> the two types with the same meaning."""


@dataclass
class RewardNormalization:
    """Which rewards are normalised together, and how."""

    grouping: Literal["traj_group_id", "traj_id", "tags", "batch"] = option(
        "traj_group_id",
        "What a group is: trajectories with one initial state, the turns of one trajectory, one tag, or the batch.",
    )
    norm_mean_type: Literal["batch", "group"] | None = option("group", "Subtract this mean; null: none.")
    norm_std_type: Literal["batch", "group"] | None = option(
        "group", "Divide by this standard deviation; null: by none."
    )


def read_normalization(value: Any) -> Any:
    """A `reward_normalization` section with `method` replaced by the two types; any other value unchanged.

    Raises:
        ValueError: the method is unknown, or given together with a type it sets.
    """
    if not isinstance(value, Mapping) or "method" not in value:
        return value
    method = value["method"]
    if method == "asym_clip":
        raise ValueError(
            "method asym_clip is not available: use norm_mean_type: group and norm_std_type: group, and bound the "
            "result with advantage_clip"
        )
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"method {method!r} is not one of {', '.join(METHODS)}; or give norm_mean_type and norm_std_type"
        )
    both = [name for name in METHODS[method] if name in value]
    if both:
        raise ValueError(f"method {method} is another spelling of {' and '.join(both)}, which is given too; keep one")
    return {key: item for key, item in value.items() if key != "method"} | METHODS[method]


@dataclass
class AgenticOptions:
    """The keys of the loss and the advantages that only trajectories of several turns have."""

    reward_normalization: RewardNormalization = option(
        factory=RewardNormalization,
        parse=read_normalization,
        only_for=estimators(
            *TURN_ESTIMATORS,
            reason=f"only adv_estimator {', '.join(TURN_ESTIMATORS)} read it; others define their own normalisation",
        ),
        help="Which rewards gigpo, step_reinforce and agentic_reinforce normalise together, and how.",
    )
    ratio_type: Literal["token", "segment", "sequence"] = option(
        "token",
        "The ratio of the policy loss: a token's own, or that of the mean over its turn or over its sample.",
        only_for=Condition(
            lambda config, _: traits_of(config.actor_train.pg_variant).reads_ratio_type,
            "this actor_train.pg_variant has no ratio, or always that of the sequence",
            ("actor_train.pg_variant",),
        ),
    )
    episode_reward_weight: float = option(
        1.0, "gigpo: weight of the normalised score of the episode.", ge=0, only_for=GIGPO
    )
    step_reward_weight: float = option(1.0, "gigpo: weight of the normalised return of the turn.", ge=0, only_for=GIGPO)
    step_reward_gamma: float = option(
        0.95,
        "gigpo, step_reinforce: discount from one turn to the one before.",
        ge=0,
        le=1,
        only_for=estimators("gigpo", "step_reinforce", reason="only adv_estimator gigpo and step_reinforce read it"),
    )


SampleBy = Literal["traj", "step"]
"""One training sample is a whole trajectory or one turn of it."""

MANAGERS = {"TrajEnvManager": "traj", "StepEnvManager": "step", "StepConcatEnvManager": "step"}
"""Classes in recipes of ROLL -> value of `sample_by`."""

ADJUSTMENTS = {
    "copy": "a copied sample would be trained on twice",
    "delete": "a deleted one would be wasted",
    "random_sample": "a copied sample would be trained on twice, a deleted one wasted",
    "auto": "a copied sample would be trained on twice, a deleted one wasted",
}
"""Values of `batch_adjust_mode` in ROLL -> why they are not available."""


def env_manager(value: Any) -> Any:
    """`traj` or `step`, also for the class path of a recipe of ROLL.

    Raises:
        ValueError: another class.
    """
    if not isinstance(value, str) or value in MANAGERS.values():
        return value
    name = value.rpartition(".")[2]
    if name not in MANAGERS:
        known = ", ".join([*dict.fromkeys(MANAGERS.values()), *(f"...{cls}" for cls in MANAGERS)])
        raise ValueError(f"{value!r} is not available; known: {known}")
    return MANAGERS[name]


def batch_adjustment(value: Any) -> Any:
    """The value of `batch_adjust_mode`.

    Raises:
        ValueError: it is one of ADJUSTMENTS.
    """
    if isinstance(value, str) and value in ADJUSTMENTS:
        raise ValueError(f"{value} is not available: {ADJUSTMENTS[value]}; leave it out, and batches are padded")
    return value


@dataclass
class CustomEnvConfig:
    """One kind of environment and the messages the model gets about it."""

    env_type: str = option(
        "frozen_lake", "A name of docs/environments.md, an id of gymnasium's registry, or `module:Class`."
    )
    env_config: dict[str, Any] = option(factory=dict, help="Options of the environment.")
    max_steps: int | None = option(
        None, "Actions of one trajectory; default: env_config.max_steps, or max_actions_per_traj.", ge=1
    )
    max_tokens_per_step: int | None = option(
        None, "Longest text of one turn in tokens; default: the pipeline's max_tokens_per_step.", ge=1
    )
    agent_system_template: str | None = option(
        SYSTEM_TEMPLATE,
        "System message, null for none; {env_instruction} is replaced, other braces are text.",
        parse=system_template,
    )
    agent_template: str = option(
        TURN_TEMPLATE,
        "Message of every turn, with the fields {turn_idx} (from 1), {observation}, {actions_left}, "
        "{max_response_length} and {env_instruction}, which is empty after the first turn. Where neither template has "
        "{env_instruction}, the first turn begins with it. Fields of ROLL's templates for single turns are read too.",
        parse=turn_template,
    )
    env_manager_cls: SampleBy | None = option(
        None, "traj or step, the same for all entries; default: the pipeline's sample_by.", parse=env_manager
    )


@dataclass
class EnvManagerConfig:
    """Which environments run, how many at a time, and in how many processes.

    A group is `group_size` trajectories of one task: the same environment, the same options, the same seed.
    """

    num_env_groups: int | None = option(
        None,
        "Groups whose environments run at a time; default: the sum of num_groups_partition, or those of 1 + "
        "async_generation_ratio batches, at most 4, and of one validation.",
        ge=1,
    )
    group_size: int = option(8, "Trajectories of one task; in val_env_manager the default is 1.", ge=1)
    group_size_redundancy: int = option(
        0, "Extra environments per group, which is complete when group_size of them have finished; 0 is off.", ge=0
    )
    tags: list[str] = option(
        factory=list,
        parse=one_or_many,
        help="Names in custom_envs that are used; a single one is a list of one; empty: all.",
    )
    num_groups_partition: list[int] = option(
        factory=list, help="How many of num_env_groups each of `tags` gets; empty: equal parts."
    )
    max_env_num_per_worker: int = option(16, "Environments of one process; 0: all in one.", ge=0)
    max_traj_per_env: Literal[-1] = option(
        -1, "Trajectories of one environment, one after the other: only -1, as many as the batches need."
    )

    @property
    def environments(self) -> int:
        """Number of environments that run at a time."""
        return (self.num_env_groups or 1) * (self.group_size + self.group_size_redundancy)

    @property
    def processes(self) -> int:
        return -(-self.environments // (self.max_env_num_per_worker or self.environments))


def _some_entry_lacks(*keys: str) -> Condition:
    """The condition that an entry of `custom_envs` sets none of these keys, the first of which replaces the default."""

    def holds(config: Any, _: Any) -> bool:
        given = set(config.source.given)
        return any(given.isdisjoint(f"custom_envs.{tag}.{key}" for key in keys) for tag in config.custom_envs)

    return Condition(holds, f"every entry of custom_envs has its own {keys[0]}", ("custom_envs",))


def _frozen_lake() -> dict[str, CustomEnvConfig]:
    options = {"size": 4, "p": 0.8, "is_slippery": False, "format_penalty": -0.01}
    return {"FrozenLake": CustomEnvConfig(env_type="frozen_lake", env_config=options)}


@dataclass
class AgenticConfig(AgenticOptions, RLConfig):
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
    max_actions_per_traj: int = option(
        10,
        "Actions of one trajectory in environments without max_steps.",
        ge=1,
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
        60.0, "Maximum duration of one reset or step of an environment; after it the trajectory has failed.", gt=0
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
    def groups_per_batch(self) -> int:
        return max(1, self.rollout_batch_size // self.train_env_manager.group_size)

    @property
    def groups_admitted(self) -> int:
        """Groups that may be in progress at a time: those of 1 + async_generation_ratio batches, rounded down."""
        return math.floor((1 + exact_ratio(self.async_generation_ratio)) * self.groups_per_batch)

    @property
    def samples_per_batch(self) -> int:
        """Number of samples of one step; with `sample_by: step` the maximum."""
        return self.rollout_batch_size * (self.turns if self.sample_by == "step" else 1)

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
