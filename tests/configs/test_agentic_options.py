"""The keys of learning from trajectories: their spelling in other recipes, and the settings that use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from roll.algorithms.advantages import AdvantageSettings
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.estimators.turn_returns import RewardNormalization
from roll.algorithms.options.advantage_options import TurnOptions
from roll.algorithms.options.policy_options import RatioOptions
from roll.base.schema import Converter, known_keys
from roll.configs.environments import SYSTEM_TEMPLATE, TURN_FIELDS, TURN_TEMPLATE, system_template, turn_template
from roll.configs.pipeline import RLConfig, RLVRConfig
from roll.loading.suggestions import suggest_for
from tests.configs.samples import refusal


@dataclass
class Agent(TurnOptions, RatioOptions, RLConfig):
    """A run with turns."""


def read(**keys) -> tuple[TurnOptions, list[str]]:
    converter = Converter(suggest_for(TurnOptions))
    options = converter.overlay(keys, TurnOptions())
    return options, [str(problem) for problem in converter.problems]


METHODS = {"identity": (None, None), "mean": ("group", None), "mean_std": ("group", "group")}


@pytest.mark.parametrize("method", METHODS)
def test_normalization_method_sets_both_types(method: str) -> None:
    options, problems = read(reward_normalization={"grouping": "tags", "method": method})
    assert not problems and options.reward_normalization == RewardNormalization("tags", *METHODS[method])


def test_normalization_types_are_read() -> None:
    options, problems = read(reward_normalization={"norm_mean_type": "batch", "norm_std_type": None})
    assert not problems and options.reward_normalization == RewardNormalization("traj_group_id", "batch", None)


REFUSED = {
    "asym_clip": ({"method": "asym_clip"}, "method asym_clip is not available: use norm_mean_type: group"),
    "unknown": ({"method": "median"}, "method 'median' is not one of identity, mean, mean_std"),
    "unhashable": ({"method": ["mean"]}, "method ['mean'] is not one of identity, mean, mean_std"),
    "both": ({"method": "mean", "norm_std_type": "batch"}, "which is given too; keep one"),
    "grouping": ({"grouping": "prompt"}, "reward_normalization.grouping: 'prompt' is not one of traj_group_id"),
    "key": ({"gruoping": "tags"}, "reward_normalization.gruoping: unknown key; did you mean"),
    "no section": ("mean", "reward_normalization: 'mean' is not a section"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_normalization_is_explained(what: str) -> None:
    value, message = REFUSED[what]
    options, problems = read(reward_normalization=value)
    assert len(problems) == 1 and message in problems[0], problems
    assert problems[0].startswith("reward_normalization")


def test_a_discount_is_between_0_and_1() -> None:
    assert "step_reward_gamma: 1.5 is too large" in read(step_reward_gamma=1.5)[1][0]


def test_every_key_has_a_help_text() -> None:
    assert all(key.field.metadata["help"] for key in known_keys(TurnOptions))


def test_advantage_and_loss_configs_of_an_agentic_run() -> None:
    norm = RewardNormalization("tags", "batch", None)
    config = Agent(
        reward_normalization=norm, step_reward_gamma=0.5, episode_reward_weight=2.0, step_reward_weight=3.0, gamma=0.9
    )
    advantages = config.advantages
    assert (advantages.reward_normalization, advantages.step_reward_gamma, advantages.gamma) == (norm, 0.5, 0.9)
    assert (advantages.episode_reward_weight, advantages.step_reward_weight) == (2.0, 3.0)
    assert Agent(ratio_type="segment").policy.ratio_type == "segment"


def test_defaults_are_the_same_in_agentic_and_rlvr() -> None:
    assert Agent().advantages == RLVRConfig().advantages == AdvantageSettings()
    assert Agent().policy == RLVRConfig().policy


@pytest.mark.parametrize("estimator", [name for name, each in ADV_ESTIMATORS.items() if each.needs == "turns"])
def test_turn_estimators_are_refused_in_rlvr(tmp_path: Path, estimator: str) -> None:
    message = refusal(tmp_path, f"adv_estimator={estimator}")
    assert f"adv_estimator: {estimator} needs trajectories of several turns" in message


def test_default_templates_are_valid() -> None:
    assert system_template(SYSTEM_TEMPLATE) == SYSTEM_TEMPLATE
    assert turn_template(TURN_TEMPLATE) == TURN_TEMPLATE


def test_default_turn_contains_observation_and_limits() -> None:
    values = {name: f"<{name}>" for name in TURN_FIELDS}
    message = TURN_TEMPLATE.format(**values)
    assert all(values[name] in message for name in ("turn_idx", "observation", "actions_left", "max_response_length"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{observation} {reward}", "{reward} is not a field; known: {turn_idx}, {observation}, {actions_left}, "),
        ("{observation.secret}", "{observation.secret} is not a field"),
        ("{}", "{} is not a field"),
        ("{observation", "braces do not match"),
        ("no field", "does not contain {observation}"),
        ("{{observation}}", "does not contain {observation}"),
    ],
)
def test_invalid_turn_template_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        turn_template(text)
    assert message in str(caught.value)


def test_system_template_has_no_turn_fields() -> None:
    with pytest.raises(ValueError, match="{observation} is not a field; known: {env_instruction}; write it in agent_t"):
        system_template("{observation}")


@pytest.mark.parametrize("text", [r"\boxed{}", '{"a": 1}', "{{A}}", "{", "}", r"\frac{1}{x}", "{env_instruction} {0}"])
def test_other_braces_of_a_system_template_are_text(text: str) -> None:
    assert system_template(text) == text


def test_template_of_another_type_is_left_to_the_type_check() -> None:
    assert system_template(5) == turn_template(5) == 5
