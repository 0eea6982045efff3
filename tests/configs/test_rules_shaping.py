"""Messages of the rules of length penalties, normalisation of scores, and weights of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.check import check
from tests.configs.samples import AGENTIC, agentic, refusal, rlvr

ALONE = "adv_estimator=reinforce num_return_sequences_in_group=1 rollout_batch_size=512"
"""One sample for each prompt."""
CRITIC = "adv_estimator=gae critic.device_mapping=0-15"
TEACHER = "adv_estimator=opd reference.device_mapping=0-15 reference.model_args.model_name_or_path=teacher"
REWARD = "rewards.math_rule"


def warnings(config) -> list[str]:
    return [str(warning) for warning in check(config).warnings]


WARNED = {
    f"{ALONE} length_reward_coef=0.1": "length_reward_coef: has no effect: num_return_sequences_in_group is 1",
    "length_reward_threshold=0.5": "length_reward_threshold: has no effect: length_reward_coef is 0",
    "length_reward_coef=0.1 length_reward_threshold=1": "length_reward_threshold: 1 does not tell right from wrong "
    f"answers: scores of {REWARD} are 0 and 1, and one above the threshold is right; use 0",
    f"length_reward_coef=0.1 {REWARD}.wrong_score=0.1": "length_reward_threshold: 0 does not tell right from wrong "
    f"answers: scores of {REWARD} are 0.1 and 1, and one above the threshold is right; use 0.1",
    f"{TEACHER} length_reward_coef=0.1": "length_reward_coef: has no effect: the advantages of adv_estimator opd do",
    f"{TEACHER} length_penalty_per_token=0.1": "length_penalty_per_token: has no effect: the advantages of adv_est",
    "length_penalty_per_token=10": "length_penalty_per_token: 10 is unusual",
    "norm_std_type=running": "norm_std_type: has no effect: only adv_estimator reinforce reads it, and gae if it is",
    "adv_estimator=reinforce norm_std_type=running_tag whiten_rewards=true": "norm_std_type: running_tag keeps "
    "statistics of scores that whiten_rewards: true has scaled by those of their batch",
    f"{CRITIC} norm_std_type=tag": "norm_std_type: has no effect: only adv_estimator reinforce reads it",
    "adv_estimator=reinforce norm_std_type=running whiten_rewards=true": "norm_std_type: running has no effect with "
    "whiten_rewards: true",
    f"{TEACHER} difficulty_loss_weight=true": "difficulty_loss_weight: has no effect: the advantages of adv_estimator",
    "difficulty_weight_hard=3": "difficulty_weight_hard: has no effect: difficulty_loss_weight is false",
    "difficulty_weight_easy=3": "difficulty_weight_easy: has no effect: difficulty_loss_weight is false",
    "length_weight_short=3": "length_weight_short: has no effect: length_loss_weight is false",
    "length_weight_long=3": "length_weight_long: has no effect: length_loss_weight is false",
    f"{TEACHER} opd_top_k=8 length_loss_weight=true": "length_loss_weight: has no effect: with adv_estimator opd and "
    "opd_top_k all advantages are 0",
    f"difficulty_loss_weight=true {ALONE}": "difficulty_loss_weight: takes the only sample of a prompt for its",
    f"difficulty_loss_weight=true {REWARD}.wrong_score=-1": "difficulty_loss_weight: measures difficulty by mean "
    f"scores from 0 to 1, and those of {REWARD} are from -1 to 1",
}


@pytest.mark.parametrize(("overrides", "message"), WARNED.items())
def test_shaping_without_effect_is_a_warning(tmp_path: Path, overrides: str, message: str) -> None:
    found = warnings(rlvr(tmp_path, *overrides.split()))
    assert any(message in warning for warning in found), found


@pytest.mark.parametrize(
    "overrides",
    [
        "length_reward_coef=0.2",
        "length_penalty_per_token=0.0001",
        f"length_reward_coef=0.2 length_reward_threshold=-1 {REWARD}.wrong_score=-1",
        "difficulty_loss_weight=true",
        "difficulty_loss_weight=true difficulty_weight_easy=0 difficulty_weight_hard=1",
        "adv_estimator=reinforce norm_mean_type=running norm_std_type=tag",
        "adv_estimator=reinforce norm_mean_type=running_tag norm_std_type=running_tag",
        "length_loss_weight=true difficulty_loss_weight=true",
        "length_loss_weight=true length_weight_short=0 length_weight_long=1",
        f"length_loss_weight=true {TEACHER}",
    ],
)
def test_shaping_with_an_effect_has_no_warnings(tmp_path: Path, overrides: str) -> None:
    assert warnings(rlvr(tmp_path, *overrides.split())) == []


def test_scores_of_rewards_that_are_added_have_other_bounds(tmp_path: Path) -> None:
    both = [f"rewards.{name}={{tag_included: [math], weight: 2}}" for name in ("math_rule", "form")]
    for keys in (["length_reward_coef=0.2", "length_reward_threshold=2"], ["difficulty_loss_weight=true"]):
        paths = [warning.path for warning in check(rlvr(tmp_path, *both, *keys)).warnings]
        assert not {"length_reward_threshold", "difficulty_loss_weight"} & set(paths)


REFUSED = {
    "difficulty_loss_weight=true difficulty_weight_hard=0.5": "difficulty_loss_weight: true has no effect: "
    "difficulty_weight_easy and difficulty_weight_hard are both 0.5; use two weights",
    "difficulty_weight_easy=-1": "difficulty_weight_easy: -1.0 is too small; the least allowed is 0",
    "length_loss_weight=true length_weight_long=1.5": "length_loss_weight: true has no effect: length_weight_short and "
    "length_weight_long are both 1.5; use two weights",
    "length_weight_short=-1": "length_weight_short: -1.0 is too small; the least allowed is 0",
    "length_reward_coef=-1": "length_reward_coef: -1.0 is too small; the least allowed is 0",
    "length_penalty_per_token=-1": "length_penalty_per_token: -1.0 is too small; the least allowed is 0",
    "norm_mean_type=domain": "norm_mean_type: 'domain' is not one of batch, group, tag, running, running_tag or null",
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.items())
def test_shaping_that_means_nothing_is_refused(tmp_path: Path, overrides: str, message: str) -> None:
    assert message in refusal(tmp_path, *overrides.split())


@pytest.mark.parametrize("key", ["norm_mean_type", "norm_std_type"])
def test_statistics_over_the_run_serve_a_critic_and_those_of_a_batch_do_not(tmp_path: Path, key: str) -> None:
    paths = {
        kind: [warning.path for warning in check(rlvr(tmp_path, *CRITIC.split(), f"{key}={kind}")).warnings]
        for kind in ("running", "running_tag", "batch", "group", "tag")
    }
    assert key not in paths.pop("running") and key not in paths.pop("running_tag")
    assert all(key in warned for warned in paths.values())


@pytest.mark.parametrize("key", ["length_reward_coef=0.1", "length_penalty_per_token=0.1", "length_loss_weight=true"])
def test_length_penalties_and_weights_belong_to_single_responses(tmp_path: Path, key: str) -> None:
    assert f"{key.partition('=')[0]}: has no effect: it belongs to pipeline rlvr" in warnings(agentic(tmp_path, key))


def test_scores_of_agents_are_normalised_by_tag_and_over_the_run_and_weighted(tmp_path: Path) -> None:
    keys = ("adv_estimator=reinforce", "norm_mean_type=tag", "norm_std_type=running", "difficulty_loss_weight=true")
    named = [warning for warning in warnings(agentic(tmp_path, *keys)) if warning.startswith(("norm", "difficulty"))]
    assert named == []


@pytest.mark.parametrize("kind", ["running", "running_tag"])
def test_rewards_of_turns_that_a_critic_adds_up_are_not_normalised_by_the_run(tmp_path: Path, kind: str) -> None:
    critic = ("adv_estimator=gae", "critic.device_mapping=0-3", f"norm_std_type={kind}")
    message = refusal(tmp_path, *critic, text=AGENTIC)
    assert f"norm_std_type: {kind} would scale the score of a trajectory but not the rewards of its turns" in message
