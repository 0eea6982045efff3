"""The keys of estimators that use the turns of a trajectory, and of the normalisation of their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from roll.algorithms.advantage_options import TURN_ESTIMATORS, estimators
from roll.base.schema import option

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
class TurnOptions:
    """The keys of the advantages that only trajectories of several turns have."""

    reward_normalization: RewardNormalization = option(
        factory=RewardNormalization,
        parse=read_normalization,
        only_for=estimators(
            *TURN_ESTIMATORS,
            reason=f"only adv_estimator {', '.join(TURN_ESTIMATORS)} read it; others define their own normalisation",
        ),
        help="Which rewards gigpo, step_reinforce and agentic_reinforce normalise together, and how.",
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
