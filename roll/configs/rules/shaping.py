"""Shaping of scores: length penalties, statistics over the run and weights of samples have the effect they are for."""

from __future__ import annotations

from roll.algorithms.advantage_options import RUNNING, RUNNING_TAG, RUNNING_TYPES
from roll.base.errors import Report
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import RLConfig, RLVRConfig
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.configs.scoring.rewards import RewardConfig, rewards_of


def check_shaping(config: RLConfig, report: Report) -> None:
    """What shapes scores does so, and scores have the range that it expects."""
    if isinstance(config, RLVRConfig) and config.length_reward_coef:
        _check_length_reward(config, report)
    if config.uses_running_statistics:
        _check_running(config, report)
    if config.difficulty_loss_weight:
        _check_difficulty_weights(config, report)
    if config.length_loss_weight and isinstance(config, RLVRConfig):
        _check_length_weights(config, report)


def _check_length_reward(config: RLVRConfig, report: Report) -> None:
    if config.num_return_sequences_in_group == 1:
        report.warn(
            "length_reward_coef",
            "has no effect: num_return_sequences_in_group is 1, and it compares the lengths of the responses to a "
            "prompt; use length_penalty_per_token",
        )
    threshold = config.length_reward_threshold
    for name, reward in _sole_rewards(config).items():
        low, high = _bounds(reward)
        if not low <= threshold < high:
            report.warn(
                "length_reward_threshold",
                f"{threshold:g} does not tell right from wrong answers: scores of rewards.{name} are {low:g} and "
                f"{high:g}, and one above the threshold is right; use {low:g}",
            )


def _check_running(config: RLConfig, report: Report) -> None:
    """Statistics over the run change the score that is learned from, and see it as the rewards gave it."""
    types = {key: getattr(config, key) for key in ("norm_mean_type", "norm_std_type")}
    running = {key: kind for key, kind in types.items() if kind in RUNNING_TYPES}
    key, kind = next(iter(running.items()))
    if config.uses_critic and isinstance(config, AgenticConfig):
        report.error(
            key,
            f"{kind} would scale the score of a trajectory but not the rewards of its turns, which gae adds up; leave "
            "it out, or use whiten_advantages",
        )
    elif config.whiten_rewards and RUNNING in running.values():
        key = next(key for key, kind in running.items() if kind == RUNNING)
        report.warn(
            key,
            "running has no effect with whiten_rewards: true, which gives the scores of every batch mean 0 and "
            "variance 1; leave one of them out",
        )
    elif config.whiten_rewards:
        report.warn(
            key,
            f"{RUNNING_TAG} keeps statistics of scores that whiten_rewards: true has scaled by those of their batch, "
            "which differ from batch to batch; set whiten_rewards to false",
        )


def _check_difficulty_weights(config: RLConfig, report: Report) -> None:
    path = "difficulty_loss_weight"
    _check_two_weights(config, path, "difficulty_weight_easy", "difficulty_weight_hard", report)
    if config.num_return_sequences_in_group == 1:
        report.warn(
            path,
            "takes the only sample of a prompt for its difficulty, so it weights right and wrong answers differently; "
            "use at least 2 samples, or set it to false",
        )
    for name, reward in _sole_rewards(config).items() if isinstance(config, RLVRConfig) else ():
        low, high = _bounds(reward)
        if low < 0 or high > 1:
            report.warn(
                path,
                f"measures difficulty by mean scores from 0 to 1, and those of rewards.{name} are from {low:g} to "
                f"{high:g}: beyond 0 and 1 all prompts have the same weight",
            )


def _check_length_weights(config: RLVRConfig, report: Report) -> None:
    path = "length_loss_weight"
    _check_two_weights(config, path, "length_weight_short", "length_weight_long", report)
    if config.samples_per_batch == 1:
        report.warn(path, "has no effect: a batch of one response has no lengths to compare")


def _check_two_weights(config: RLConfig, path: str, first: str, second: str, report: Report) -> None:
    weight = getattr(config, first)
    if weight == getattr(config, second):
        report.error(
            path, f"true has no effect: {first} and {second} are both {weight:g}; use two weights, or set it to false"
        )


def _sole_rewards(config: RLVRConfig) -> dict[str, RewardConfig]:
    """The rewards that score some prompts alone, with the two scores of their keys; those of a model are any number."""
    rewards = config.rewards
    return {
        name: reward
        for name, reward in rewards.items()
        if scoring_role(reward) != "reward"
        and (not reward.tag_included or any([*rewards_of(rewards, tag)] == [name] for tag in reward.tag_included))
    }


def _bounds(reward: RewardConfig) -> tuple[float, float]:
    """The lower and the higher of its two scores, with its weight."""
    scores = reward.weight * reward.wrong_score, reward.weight * reward.correct_score
    return min(scores), max(scores)
