"""The keys of learning from trajectories: their spelling in other recipes, and who reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from roll.algorithms.advantages import AdvantageConfig
from roll.algorithms.policy_losses import PolicyLossConfig
from roll.configs.agentic_learning import AgenticLearningOptions, RewardNormalization
from roll.configs.convert import Converter
from roll.configs.names import TURN_ESTIMATORS
from roll.configs.pipeline import RLConfig, RLVRConfig
from roll.configs.schema import known_keys
from roll.configs.suggestions import suggest_for
from tests.configs.samples import refusal


@dataclass
class Agent(AgenticLearningOptions, RLConfig):
    """A run with turns."""


def read(**keys) -> tuple[AgenticLearningOptions, list[str]]:
    converter = Converter(suggest_for(AgenticLearningOptions))
    options = converter.overlay(keys, AgenticLearningOptions())
    return options, [str(problem) for problem in converter.problems]


METHODS = {"identity": (None, None), "mean": ("group", None), "mean_std": ("group", "group")}


@pytest.mark.parametrize("method", METHODS)
def test_the_older_spelling_of_a_normalisation_means_its_two_types(method: str) -> None:
    options, problems = read(reward_normalization={"grouping": "tags", "method": method})
    assert not problems and options.reward_normalization == RewardNormalization("tags", *METHODS[method])


def test_the_two_types_are_read_as_they_are() -> None:
    options, problems = read(reward_normalization={"norm_mean_type": "batch", "norm_std_type": None})
    assert not problems and options.reward_normalization == RewardNormalization("traj_group_id", "batch", None)


REFUSED = {
    "asym_clip": ({"method": "asym_clip"}, "method asym_clip is not available: use norm_mean_type: group"),
    "unknown": ({"method": "median"}, "method 'median' is none of identity, mean, mean_std"),
    "unhashable": ({"method": ["mean"]}, "method ['mean'] is none of identity, mean, mean_std"),
    "both": ({"method": "mean", "norm_std_type": "batch"}, "which is given too; keep one"),
    "grouping": ({"grouping": "prompt"}, "reward_normalization.grouping: 'prompt' is not one of traj_group_id"),
    "key": ({"gruoping": "tags"}, "reward_normalization.gruoping: unknown key; did you mean"),
    "no section": ("mean", "reward_normalization: 'mean' is not a section"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_normalisation_that_makes_no_sense_is_explained(what: str) -> None:
    value, said = REFUSED[what]
    options, problems = read(reward_normalization=value)
    assert len(problems) == 1 and said in problems[0], problems
    assert problems[0].startswith("reward_normalization")


def test_a_discount_is_between_0_and_1() -> None:
    assert "step_reward_gamma: 1.5 is too large" in read(step_reward_gamma=1.5)[1][0]


def test_every_key_has_a_help_text() -> None:
    assert all(key.field.metadata["help"] for key in known_keys(AgenticLearningOptions))


def test_advantages_and_loss_take_what_a_run_with_turns_says() -> None:
    norm = RewardNormalization("tags", "batch", None)
    config = Agent(
        reward_normalization=norm, step_reward_gamma=0.5, episode_reward_weight=2.0, step_reward_weight=3.0, gamma=0.9
    )
    advantages = AdvantageConfig.from_config(config)
    assert (advantages.reward_normalization, advantages.step_reward_gamma, advantages.gamma) == (norm, 0.5, 0.9)
    assert (advantages.episode_reward_weight, advantages.step_reward_weight) == (2.0, 3.0)
    assert PolicyLossConfig.from_config(Agent(ratio_type="segment")).ratio_type == "segment"


def test_defaults_are_the_same_with_turns_and_without() -> None:
    assert AdvantageConfig.from_config(Agent()) == AdvantageConfig.from_config(RLVRConfig()) == AdvantageConfig()
    assert PolicyLossConfig.from_config(Agent()) == PolicyLossConfig.from_config(RLVRConfig())


@pytest.mark.parametrize("estimator", TURN_ESTIMATORS)
def test_responses_of_one_turn_have_no_use_for_turns(tmp_path: Path, estimator: str) -> None:
    said = refusal(tmp_path, f"adv_estimator={estimator}")
    assert f"adv_estimator: {estimator} is for trajectories of several turns" in said
