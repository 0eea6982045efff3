"""The rewards that come with this project: their names, and which keys of an entry of `rewards` they read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll.base.schema import Condition

if TYPE_CHECKING:
    from roll.configs.scoring.rewards import RewardConfig


@dataclass(frozen=True)
class BuiltInReward:
    """A reward that comes with this project.

    Attributes:
        function: its `module:function`.
        timeout_s: default of `timeout_s`, in seconds.
        max_concurrent_calls: default of `max_concurrent_calls`; None for a function that is not a coroutine.
        truth: types of the ground truth that it compares with; none if it may do without, or reads any.
    """

    function: str
    timeout_s: float = 5.0
    max_concurrent_calls: int | None = None
    truth: tuple[type, ...] = (str, int, float)


BUILT_IN = {
    "math_rule": BuiltInReward("roll.rewards.math_rule:math_reward"),
    "multiple_choice": BuiltInReward("roll.rewards.answers:multiple_choice"),
    "exact_match": BuiltInReward("roll.rewards.answers:exact_match", truth=(str, int, float, list)),
    "regex": BuiltInReward("roll.rewards.answers:regex"),
    "ifeval": BuiltInReward("roll.rewards.ifeval:ifeval_reward", truth=()),
    "reasoning_gym": BuiltInReward("roll.rewards.reasoning_gym:reasoning_gym_reward", truth=()),
    "code_sandbox": BuiltInReward("roll.rewards.code_sandbox:code_reward", 60.0, max_concurrent_calls=1, truth=()),
    "llm_judge": BuiltInReward("roll.rewards.llm_judge:judge_reward", timeout_s=120.0, max_concurrent_calls=16),
    "reward_model": BuiltInReward("roll.rewards.reward_model:RewardModelScorer", truth=()),
}
"""Rewards by the name that an entry of `rewards`, or its `function`, may have.

A function of the user needs no entry here: `function: module:name` names it (docs/rewards/own.md). To add a built-in
reward `mine`:

1. its entry here, and the keys that only it reads in `RewardConfig` below, with `only_for=belongs_to("mine")`;
2. its function in `roll/rewards`, in a module whose SELF_TEST has samples of it that are scored before every run;
3. `STAND_IN_TRUTHS` in `roll/lab/rehearse/inputs.py`, unless its ground truth may be a number;
4. `roll/configs/scoring/rewards.py`: what its keys have to fulfil together;
5. `roll/compat`: the classes and keys of other frameworks that mean it, such as `WORKERS` of `roll_rewards.py`;
6. its row in docs/rewards.md, its mention in docs/features.md, and `make docs` for docs/configuration.md.

Tests compare this table with 3 (`tests/lab/rehearse/test_rehearse_inputs.py`) and 6
(`tests/rewards/test_reward_documentation.py`)."""


COMPARISONS = ("math_rule", "multiple_choice", "exact_match", "regex", "ifeval")
"""Built-in rewards for which a response that takes longer than `timeout_s` is wrong, and no failure."""


def built_in_of(function: str) -> str | None:
    """Name of the built-in reward with this `module:function`; None for a function of the user."""
    return next((name for name, item in BUILT_IN.items() if item.function == function), None)


def is_comparison(function: str) -> bool:
    return built_in_of(function) in COMPARISONS


def scoring_role(reward: RewardConfig) -> Literal["reward", "judge"] | None:
    """The role whose model gives the scores; None for a function in a process of its own."""
    built_in = built_in_of(reward.function)
    if built_in == "reward_model":
        return "reward"
    return "judge" if built_in == "llm_judge" and reward.base_url is None else None


def belongs_to(*names: str) -> Condition:
    """The condition that the reward is one of these built-in ones, or a function of the user, which reads any key."""
    return Condition(
        lambda config, section: built_in_of(section.function) in (None, *names),
        f"of the built-in rewards, only {' and '.join(names)} read{'s' if len(names) == 1 else ''} it",
        (".function",),
        is_error=True,
        variants=names,
    )


def regular_expression(value: Any) -> Any:
    """A regular expression, unchanged; any other value is left to the check of its type.

    Raises:
        ValueError: it cannot be compiled.
    """
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


PENALTIES = ("regex", "reward_model")
"""Built-in rewards that may lower a score on purpose: what they find may be unwanted."""
