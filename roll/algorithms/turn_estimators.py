"""Advantage estimators that look into the turns of a trajectory: all tokens of a turn get what the turn is worth.

r_k is the reward of turn k less the KL penalty of its tokens, R the score of the episode less that of all its tokens.
`reward_normalization` says what is compared with what: norm(x; groups) = (x - mean) / (std + EPSILON), either over the
groups, over the batch, or left out; exactly 0 where the compared values deviate by EPSILON or less, or are alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.advantage_config import AdvantageConfig
from roll.algorithms.estimation import ADV_ESTIMATORS, Shaped, deviation, normalize, tells_nothing
from roll.algorithms.masking import EPSILON
from roll.algorithms.turn_list import TurnList, on_tokens, turn_rewards
from roll.algorithms.turns import TURN_KEYS, Turns
from roll.configs.agentic import RewardNormalization


@ADV_ESTIMATORS.register("gigpo")
def gigpo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A of turn k = w_e norm(R; grouping) + w_s norm(G_k; states), with G_k = r_k + step_reward_gamma G_{k+1}.

    w_e is `episode_reward_weight`, w_s `step_reward_weight`. The first term compares whole episodes; the second what
    became of turns that began in the same state, so a turn whose state nobody else of its group met has none. Source:
    GiGPO (Feng et al. 2025, arXiv 2505.10978).

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(shaped, "gigpo")
    returns = listed.discounted(turn_rewards(shaped, turns, listed), config.step_reward_gamma)
    norm = config.reward_normalization
    episodes = _normalized(shaped.episode_rewards, shaped.episodes.once(_group_ids(shaped, turns, norm)), norm)
    steps = _normalized(returns, turns.state_ids[listed.rows, listed.columns], norm)
    worth = config.episode_reward_weight * episodes[listed.episode] + config.step_reward_weight * steps
    return on_tokens(worth, shaped, turns, listed), on_tokens(returns, shaped, turns, listed)


@ADV_ESTIMATORS.register("step_reinforce")
def step_reinforce(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A of turn k = norm(G_k; grouping), with G_k = r_k + step_reward_gamma G_{k+1}: REINFORCE over turns.

    The normalisation is over turns, so a long trajectory counts for more than a short one. Source: Williams 1992, with
    a turn as the action.

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(shaped, "step_reinforce")
    returns = listed.discounted(turn_rewards(shaped, turns, listed), config.step_reward_gamma)
    norm = config.reward_normalization
    worth = _normalized(returns, _group_ids(shaped, turns, norm)[listed.rows], norm)
    return on_tokens(worth, shaped, turns, listed), on_tokens(returns, shaped, turns, listed)


@ADV_ESTIMATORS.register("agentic_reinforce")
def agentic_reinforce(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A of turn k = G_k = r'_k + gamma G_{k+1}, with rewards r' that sum to the normalised score norm(R; grouping).

    r' is r / (std + EPSILON), or r where nothing is divided by; the last turn has the rest of the score besides: its
    mean, and what `reward_clip` or `whiten_rewards` made of it. So an episode rewarded at its end alone has the
    normalised score there and 0 before, and one that tells nothing apart has 0 throughout. Source: Williams 1992, with
    a turn as the action.

    Returns:
        Advantages [B, T], and the same as returns.

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(shaped, "agentic_reinforce")
    norm, scores = config.reward_normalization, shaped.episode_rewards
    ids = shaped.episodes.once(_group_ids(shaped, turns, norm))
    rewards = turn_rewards(shaped, turns, listed) * _scale(scores, ids, norm)[listed.episode]
    rest = _normalized(scores, ids, norm) - listed.totals(rewards, len(scores))
    rewards = rewards + torch.where(listed.last, rest[listed.episode], 0.0)
    returns = on_tokens(listed.discounted(rewards, config.gamma), shaped, turns, listed)
    return returns, returns


def _turns(shaped: Shaped, name: str) -> tuple[Turns, TurnList]:
    if shaped.turns is None:
        raise ValueError(
            f"adv_estimator {name} needs the turns of trajectories ({', '.join(TURN_KEYS)}), which this batch has not; "
            "use grpo or reinforce for responses of one turn"
        )
    return shaped.turns, TurnList.of(shaped, shaped.turns)


def _group_ids(shaped: Shaped, turns: Turns, norm: RewardNormalization) -> Tensor:
    """[B] equal for the samples that `grouping` puts together."""
    return {
        "traj_group_id": shaped.groups,
        "traj_id": turns.trajectory_ids,
        "tags": turns.tag_ids,
        "batch": torch.zeros_like(shaped.groups),
    }[norm.grouping]


def _normalized(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """norm(values [n]; ids [n]), see above."""
    groups = ids.unique(return_inverse=True)[1]
    return normalize(values, groups, norm.norm_mean_type, norm.norm_std_type, least_std=EPSILON)


def _scale(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """[n] what `_normalized` multiplies its values by."""
    if not values.numel():
        return values
    groups = ids.unique(return_inverse=True)[1]
    scale = torch.ones_like(values)
    if norm.norm_std_type is not None:
        scale = scale / deviation(values, groups, norm.norm_std_type)
    return torch.where(tells_nothing(values, groups, (norm.norm_mean_type, norm.norm_std_type), EPSILON), 0.0, scale)
