"""What advantage estimators are made of: their registry, what they see, and the sums and normalisations they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from roll.algorithms.advantage_config import AdvantageConfig
from roll.algorithms.masking import EPSILON, group_mean, group_std, masked, zero_spread
from roll.algorithms.registry import Registry
from roll.algorithms.turns import Episodes, Turns, episodes_of


@dataclass(frozen=True)
class Shaped:
    """What an estimator sees, after the scores were clipped and whitened.

    Attributes:
        scores: R_i [B].
        token_kl: [B, T] the penalty of each token (coefficient times KL), zeros without `add_token_level_kl`.
        groups: [B] int64, equal for the samples of one prompt, or of trajectories from one start.
        response_mask: [B, T] bool.
        turns: where the samples are trajectories; None otherwise.
    """

    scores: Tensor
    token_kl: Tensor
    groups: Tensor
    response_mask: Tensor
    turns: Turns | None = None

    @cached_property
    def episodes(self) -> Episodes:
        """What statistics over scores count once: trajectories, or the samples where there are no turns."""
        return episodes_of(self.response_mask, self.turns)

    @property
    def episode_rewards(self) -> Tensor:
        """R [E]: the score of each episode less the KL penalty of its tokens."""
        if self.turns is None:
            return token_rewards(self.scores, self.token_kl, self.response_mask).sum(-1)
        penalty = masked(self.token_kl, self.response_mask).sum(-1)
        return self.episodes.once(self.scores) - self.episodes.total(penalty)

    @property
    def episode_groups(self) -> Tensor:
        """[E] numbers of the episodes' groups."""
        return self.episodes.numbers(self.groups)


Estimator = Callable[[Shaped, AdvantageConfig], tuple[Tensor, Tensor]]
ADV_ESTIMATORS: Registry[Estimator] = Registry("adv_estimator")
"""f(shaped, config) -> (advantages [B, T], returns [B, T])."""


def token_rewards(scores: Tensor, token_kl: Tensor, response_mask: Tensor) -> Tensor:
    """Rewards [B, T]: the score [B] on the last response token of each sample, minus the KL penalty of every token."""
    mask = response_mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(mask & (positions == last), scores[:, None], 0.0) - masked(token_kl, mask)


def return_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the response tokens [B, T]; gaps in the mask are stepped over, not discounted."""
    if gamma == 1.0:
        return masked(masked(rewards, response_mask).flip(-1).cumsum(-1).flip(-1), response_mask)
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = response_mask[:, t].bool()
        following = torch.where(here, rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(here, following, 0.0)
    return returns


def normalize(
    scores: Tensor, groups: Tensor, mean_type: str | None, std_type: str | None, least_std: float = 0.0
) -> Tensor:
    """(R - mean) / (std + EPSILON) [B], each over the batch, over the group, or not at all (None).

    Standard deviations are unbiased. Where the scores a mean or deviation is taken over are all equal (a group of one
    among them), or deviate by no more than `least_std`, the result is exactly 0: they tell nothing apart.
    """
    if not scores.numel():
        return scores
    result = scores
    if mean_type is not None:
        result = result - group_mean(scores, _population(groups, mean_type))
    if std_type is not None:
        result = result / deviation(scores, groups, std_type)
    return torch.where(tells_nothing(scores, groups, (mean_type, std_type), least_std), 0.0, result)


def deviation(scores: Tensor, groups: Tensor, std_type: str) -> Tensor:
    """What `normalize` divides by, std + EPSILON [B] over the batch or over the group."""
    return group_std(scores, _population(groups, std_type)) + EPSILON


def tells_nothing(
    scores: Tensor, groups: Tensor, types: tuple[str | None, str | None], least_std: float = 0.0
) -> Tensor:
    """Where `normalize` gives 0 because there is no spread, [B] bool."""
    flat = torch.zeros_like(groups, dtype=torch.bool)
    for kind in types:
        if kind is not None:
            population = _population(groups, kind)
            flat = flat | zero_spread(scores, population)
            if least_std > 0:
                flat = flat | (group_std(scores, population) <= least_std)
    return flat


def _population(groups: Tensor, kind: str) -> Tensor:
    return groups if kind == "group" else torch.zeros_like(groups)
