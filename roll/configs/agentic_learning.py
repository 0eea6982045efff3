"""How an agent learns from trajectories of several turns: what their rewards weigh, and whose ratio a token has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from roll.configs.fields import option

METHODS: dict[str, dict[str, str | None]] = {
    "identity": {"norm_mean_type": None, "norm_std_type": None},
    "mean": {"norm_mean_type": "group", "norm_std_type": None},
    "mean_std": {"norm_mean_type": "group", "norm_std_type": "group"},
}
"""`method`, as other recipes write it -> the two types that mean the same."""


@dataclass
class RewardNormalization:
    """Which rewards are compared, and how."""

    grouping: Literal["traj_group_id", "traj_id", "tags", "batch"] = option(
        "traj_group_id",
        "What a group is: trajectories from one start, the turns of one trajectory, one tag of environments, or all.",
    )
    norm_mean_type: Literal["batch", "group"] | None = option("group", "Subtract this mean; null: none.")
    norm_std_type: Literal["batch", "group"] | None = option("group", "Divide by this deviation; null: by none.")


def read_normalization(value: Any) -> Any:
    """A `reward_normalization` section with `method` replaced by the two types; anything else as it is.

    Raises:
        ValueError: the method is unknown, or stands beside a type it would decide.
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
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}; or give norm_mean_type and norm_std_type")
    both = [name for name in METHODS[method] if name in value]
    if both:
        raise ValueError(f"method {method} is the other spelling of {' and '.join(both)}, which is given too; keep one")
    return {key: item for key, item in value.items() if key != "method"} | METHODS[method]


@dataclass
class AgenticLearningOptions:
    """The keys of learning that only trajectories of several turns have."""

    reward_normalization: RewardNormalization = option(
        factory=RewardNormalization,
        parse=read_normalization,
        help="Which rewards gigpo, step_reinforce and agentic_reinforce compare, and how.",
    )
    ratio_type: Literal["token", "segment", "sequence"] = option(
        "token", "The ratio of the policy loss: a token's own, or that of the mean over its turn or over its sample."
    )
    episode_reward_weight: float = option(1.0, "gigpo: weight of the normalised score of the episode.", minimum=0)
    step_reward_weight: float = option(1.0, "gigpo: weight of the normalised return of the turn.", minimum=0)
    step_reward_gamma: float = option(
        0.95, "gigpo, step_reinforce: discount from one turn to the one before.", minimum=0, maximum=1
    )


AGENTIC_KEYS = frozenset(item.name for item in fields(AgenticLearningOptions))
"""What a configuration without turns has not."""


def keys_of(cls: type, config: Any) -> list[str]:
    """Fields of `cls`, settings of one part of a run, that `config` has: those of turns only where it has turns."""
    names = [item.name for item in fields(cls)]
    return [name for name in names if isinstance(config, AgenticLearningOptions) or name not in AGENTIC_KEYS]
