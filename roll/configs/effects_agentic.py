"""Known keys that have no effect in some configurations of the agentic pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll.configs.inert import Inert
from roll.configs.names import TURN_ESTIMATORS

COLUMNS = ("id", "tag", "prompt", "messages", "response", "ground_truth", "shuffle")
"""Keys of `data_args` that say how a file of prompts is read."""


RATIO_FREE = ("vanilla", "gspo")
"""Losses that `ratio_type` does not change."""


def _is_agentic(config: Any) -> bool:
    return config.pipeline == "agentic"


def _set_by_default(config: Any, key: str) -> bool:
    """Whether an entry of `custom_envs` leaves the key to the pipeline."""
    given = set(config.source.given)
    own = ("{path}.{key}", "{path}.env_config.{key}") if key == "max_steps" else ("{path}.{key}",)
    paths = [[name.format(path=f"custom_envs.{tag}", key=key) for name in own] for tag in config.custom_envs]
    return any(given.isdisjoint(names) for names in paths)


def _learns_otherwise(*estimators: str) -> Callable[[Any], bool]:
    """Whether it is an agentic run that learns by none of these estimators."""
    return lambda config: _is_agentic(config) and config.adv_estimator not in estimators


AGENTIC: tuple[Inert, ...] = (
    Inert(
        ("reward_normalization", "reward_normalization.*"),
        _learns_otherwise(*TURN_ESTIMATORS),
        f"only adv_estimator {', '.join(TURN_ESTIMATORS)} read it; the others normalise in a way of their own",
        misleads=True,
    ),
    Inert(
        ("episode_reward_weight", "step_reward_weight"),
        _learns_otherwise("gigpo"),
        "only adv_estimator gigpo reads it",
        misleads=True,
    ),
    Inert(
        ("step_reward_gamma",),
        _learns_otherwise("gigpo", "step_reinforce"),
        "only adv_estimator gigpo and step_reinforce read it",
        misleads=True,
    ),
    Inert(
        ("ratio_type",),
        lambda c: _is_agentic(c) and c.actor_train.pg_variant in RATIO_FREE,
        "this actor_train.pg_variant has no ratio, or always that of the sequence",
        misleads=True,
    ),
    Inert(("*.data_args.file_name",), _is_agentic, "what is played is described in custom_envs", misleads=True),
    Inert(
        ("validation.data_args.template",),
        _is_agentic,
        "training and validation talk alike: actor_train.data_args.template",
        misleads=True,
    ),
    Inert(
        tuple(f"*.data_args.{key}" for key in COLUMNS), _is_agentic, "environments say what comes next, no file does"
    ),
    Inert(("reward_pretrain",), _is_agentic, "environments give the rewards"),
    Inert(("max_resample_factor",), _is_agentic, "every complete group is trained on"),
    Inert(
        ("val_batch_size", "val_env_manager.*"), lambda c: c.eval_steps == 0, "eval_steps is 0, so nothing is validated"
    ),
    Inert(
        ("max_actions_per_traj",),
        lambda c: _is_agentic(c) and not _set_by_default(c, "max_steps"),
        "every entry of custom_envs has max_steps of its own",
    ),
    Inert(
        ("max_tokens_per_step",),
        lambda c: _is_agentic(c) and not _set_by_default(c, "max_tokens_per_step"),
        "every entry of custom_envs has max_tokens_per_step of its own",
    ),
)
"""Those of the agentic pipeline."""
