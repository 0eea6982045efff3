"""Advantage estimators by name (`adv_estimator`): what a response is worth beyond what was to be expected.

R is the sum of a response's token rewards: its score, less the KL penalty of its tokens where there is one. Where
samples are trajectories R is that of the trajectory, which statistics count once in however many samples it stands.
Those that look into the turns of a trajectory are in `roll.algorithms.turn_estimators`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from roll.algorithms import turn_estimators
from roll.algorithms.advantage_config import AdvantageConfig
from roll.algorithms.estimation import ADV_ESTIMATORS, Shaped, normalize, return_to_go, token_rewards
from roll.algorithms.masking import masked, whiten

__all__ = ["ADV_ESTIMATORS", "AdvantageConfig", "Shaped", "return_to_go", "token_rewards", "turn_estimators"]


@ADV_ESTIMATORS.register("grpo")
def grpo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_group + EPSILON), the same for every token of a sample.

    `grpo_norm_by_std: false` leaves the division out (Dr. GRPO, arXiv 2503.20783). Source: DeepSeekMath, arXiv
    2402.03300 section 4.1. A group of one or of equal R has A = 0.
    """
    return _by_response(shaped, _centred("group" if config.grpo_norm_by_std else None))


@ADV_ESTIMATORS.register("rloo")
def rloo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = n / (n - 1) (R - mean_group): R less the mean of the other n - 1 responses to the prompt.

    The baseline does not depend on the response it is taken from, so the gradient is unbiased. Source: Ahmadian et al.
    2024 (arXiv 2402.14740), after Kool et al. 2019. A group of one has A = 0.
    """

    def beside_the_others(rewards: Tensor, groups: Tensor) -> Tensor:
        sizes = torch.bincount(groups)[groups].to(rewards.dtype)
        return normalize(rewards, groups, "group", None) * (sizes / (sizes - 1).clamp(min=1))

    return _by_response(shaped, beside_the_others)


@ADV_ESTIMATORS.register("lite_ppo")
def lite_ppo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_batch + EPSILON), to be used with `loss_agg_mode: token-mean`.

    The deviation of the batch does not blow up the advantages of prompts whose responses hardly differ. Source: Liu et
    al. 2025, "Tricks or Traps?" (arXiv 2508.08221).
    """
    return _by_response(shaped, _centred("batch"))


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = R - mean_group, whitened over the batch's response tokens.

    Source: REINFORCE++ (arXiv 2501.03262), its variant with a group baseline.
    """
    advantages, returns = _by_response(shaped, _centred(None))
    return whiten(advantages, shaped.response_mask), returns


@ADV_ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, whitened over the batch's response tokens.

    There are no groups: the baseline is the batch. With `add_token_level_kl` the KL of the tokens from t on is in G_t.
    Source: REINFORCE++ (arXiv 2501.03262).
    """
    mask = shaped.response_mask
    returns = return_to_go(token_rewards(shaped.scores, shaped.token_kl, mask), mask, config.gamma)
    return whiten(returns, mask), returns


@ADV_ESTIMATORS.register("reinforce")
def reinforce(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, of scores normalised as norm_mean_type and norm_std_type say."""
    mask = shaped.response_mask
    episodes = shaped.episodes
    scores = normalize(episodes.once(shaped.scores), shaped.episode_groups, config.norm_mean_type, config.norm_std_type)
    returns = return_to_go(token_rewards(episodes.spread(scores), shaped.token_kl, mask), mask, config.gamma)
    return returns, returns


def _centred(std_type: str | None) -> Callable[[Tensor, Tensor], Tensor]:
    """f(R [E], groups [E]): R less the group's mean, divided by a deviation or not."""
    return lambda rewards, groups: normalize(rewards, groups, "group", std_type)


def _by_response(shaped: Shaped, advantage: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """f(R [E], groups [E]) of each episode on every token of it; and the undiscounted return to go."""
    mask = shaped.response_mask
    rewards = token_rewards(shaped.scores, shaped.token_kl, mask)
    worth = shaped.episodes.spread(advantage(shaped.episode_rewards, shaped.episode_groups))
    return masked(worth[:, None].expand_as(rewards), mask), return_to_go(rewards, mask, 1.0)
