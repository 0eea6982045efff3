"""Advantage estimators by name (`adv_estimator`): what a response is worth beyond what was to be expected.

R is the sum of a response's token rewards: its score, less the KL penalty of its tokens where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from roll.algorithms.masking import EPSILON, group_mean, group_std, masked, whiten, zero_spread
from roll.algorithms.registry import Registry
from roll.configs.pipeline import RLConfig


@dataclass(frozen=True)
class AdvantageConfig:
    """Settings of the advantages, under the names and meanings of the YAML keys."""

    adv_estimator: str = "grpo"
    grpo_norm_by_std: bool = True
    norm_mean_type: str | None = None
    norm_std_type: str | None = None
    gamma: float = 1.0
    reward_clip: float | None = None
    advantage_clip: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    add_token_level_kl: bool = False
    kl_penalty: str = "k3"

    @classmethod
    def from_config(cls, config: RLConfig) -> AdvantageConfig:
        """The settings of a run."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Shaped:
    """What an estimator sees, after the scores were clipped and whitened.

    Attributes:
        scores: R_i [B].
        token_kl: [B, T] the penalty of each token (coefficient times KL), zeros without `add_token_level_kl`.
        groups: [B] int64, equal for the samples of one prompt.
        response_mask: [B, T] bool.
    """

    scores: Tensor
    token_kl: Tensor
    groups: Tensor
    response_mask: Tensor


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


@ADV_ESTIMATORS.register("grpo")
def grpo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_group + EPSILON), the same for every token of a sample.

    `grpo_norm_by_std: false` leaves the division out (Dr. GRPO, arXiv 2503.20783). Source: DeepSeekMath, arXiv
    2402.03300 section 4.1. A group of one or of equal R has A = 0.
    """
    return _by_response(shaped, "group" if config.grpo_norm_by_std else None)


@ADV_ESTIMATORS.register("rloo")
def rloo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = n / (n - 1) (R - mean_group): R less the mean of the other n - 1 responses to the prompt.

    The baseline does not depend on the response it is taken from, so the gradient is unbiased. Source: Ahmadian et al.
    2024 (arXiv 2402.14740), after Kool et al. 2019. A group of one has A = 0.
    """
    advantages, returns = _by_response(shaped, None)
    sizes = torch.bincount(shaped.groups)[shaped.groups].to(advantages.dtype)
    return advantages * (sizes / (sizes - 1).clamp(min=1))[:, None], returns


@ADV_ESTIMATORS.register("lite_ppo")
def lite_ppo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_batch + EPSILON), to be used with `loss_agg_mode: token-mean`.

    The deviation of the batch does not blow up the advantages of prompts whose responses hardly differ. Source: Liu et
    al. 2025, "Tricks or Traps?" (arXiv 2508.08221).
    """
    return _by_response(shaped, "batch")


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = R - mean_group, whitened over the batch's response tokens.

    Source: REINFORCE++ (arXiv 2501.03262), its variant with a group baseline.
    """
    advantages, returns = _by_response(shaped, None)
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
    scores = normalize(shaped.scores, shaped.groups, config.norm_mean_type, config.norm_std_type)
    returns = return_to_go(token_rewards(scores, shaped.token_kl, mask), mask, config.gamma)
    return returns, returns


def normalize(scores: Tensor, groups: Tensor, mean_type: str | None, std_type: str | None) -> Tensor:
    """(R - mean) / (std + EPSILON) [B], each over the batch, over the group, or not at all (None).

    Standard deviations are unbiased. Where the scores a mean or deviation is taken over are all equal (a group of one
    among them), the result is exactly 0: they tell nothing apart.
    """
    over = {"group": groups, "batch": torch.zeros_like(groups)}
    result = scores
    if mean_type is not None:
        result = result - group_mean(scores, over[mean_type])
    if std_type is not None:
        result = result / (group_std(scores, over[std_type]) + EPSILON)
    for kind in (mean_type, std_type):
        if kind is not None:
            result = torch.where(zero_spread(scores, over[kind]), 0.0, result)
    return result


def _by_response(shaped: Shaped, std_type: str | None) -> tuple[Tensor, Tensor]:
    """R less the group's mean, divided by a deviation or not, on every token; and the undiscounted return to go."""
    mask = shaped.response_mask
    rewards = token_rewards(shaped.scores, shaped.token_kl, mask)
    centred = normalize(rewards.sum(-1), shaped.groups, "group", std_type)
    return masked(centred[:, None].expand_as(rewards), mask), return_to_go(rewards, mask, 1.0)
