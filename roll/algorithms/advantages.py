"""From scores to advantages (`adv_estimator`), over the global batch, so that they do not depend on how it is split.

An estimator is one function registered in ADV_ESTIMATORS. `compute_advantages` does what all of them share: shaping of
the scores before, whitening and clipping after, and the counts a run reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from roll.algorithms.kl import kl_divergence
from roll.algorithms.masking import (
    EPSILON,
    group_mean,
    group_std,
    masked,
    masked_max,
    masked_mean,
    masked_sum,
    whiten,
    zero_spread,
)
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


@dataclass(frozen=True)
class Advantages:
    """The result.

    Attributes:
        advantages: [B, T] float32, 0 outside the response mask.
        returns: [B, T] float32, what a critic would learn: the return to go before any normalisation of advantages.
        metrics: ready to log.
    """

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float]


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

    R is the sum of the sample's token rewards. `grpo_norm_by_std: false` leaves the division out (Dr. GRPO, arXiv
    2503.20783). Source: DeepSeekMath, arXiv 2402.03300 eq. 3. A group of one or of equal R has A = 0.
    """
    mask, groups = shaped.response_mask, shaped.groups
    rewards = token_rewards(shaped.scores, shaped.token_kl, mask)
    totals = rewards.sum(-1)
    centred = normalize(totals, groups, "group", "group" if config.grpo_norm_by_std else None)
    return masked(centred[:, None].expand_as(rewards), mask), return_to_go(rewards, mask, 1.0)


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


def compute_advantages(
    scores: Tensor,
    groups: Tensor,
    response_mask: Tensor,
    config: AdvantageConfig,
    *,
    log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Advantages:
    """Advantages and returns of one global batch.

    In this order: reward_clip, whiten_rewards, token KL, the estimator, whiten_advantages, advantage_clip.

    Args:
        scores: [B] raw rewards.
        groups: [B] int64 group numbers; `roll.algorithms.masking.group_index` makes them from prompt ids.
        response_mask: [B, T].
        config: names the estimator and holds its knobs.
        log_probs: [B, T] of the policy; needed with `add_token_level_kl`.
        ref_log_probs: [B, T] of the reference; needed with `add_token_level_kl`.
        kl_coef: weight of the token KL, from a KL controller.

    Raises:
        ValueError: a score is not finite, or token KL lacks its log-probs.
    """
    if not bool(torch.isfinite(scores).all()):
        bad = [index for index, good in enumerate(torch.isfinite(scores).tolist()) if not good]
        raise ValueError(f"scores of samples {bad[:8]} are not finite; a failed reward must be dropped, not scored")
    mask, scores = response_mask.bool(), scores.float()
    kl = _reference_kl(config, mask, log_probs, ref_log_probs)
    shaped = Shaped(_shape_scores(scores, config), kl_coef * kl, groups, mask)
    advantages, returns = ADV_ESTIMATORS[config.adv_estimator](shaped, config)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    metrics = _metrics(advantages, returns, scores, groups, mask)
    if config.add_token_level_kl:
        metrics |= {"advantage/token_kl": float(masked_mean(kl, mask)), "advantage/kl_coef": kl_coef}
    return Advantages(advantages, returns, metrics)


def _reference_kl(
    config: AdvantageConfig, mask: Tensor, log_probs: Tensor | None, ref_log_probs: Tensor | None
) -> Tensor:
    if not config.add_token_level_kl:
        return torch.zeros(mask.shape, device=mask.device)
    if log_probs is None or ref_log_probs is None:
        raise ValueError("add_token_level_kl: true needs the log-probs of the policy and of the reference")
    return masked(kl_divergence(log_probs, ref_log_probs, config.kl_penalty).detach().float(), mask)


def _shape_scores(scores: Tensor, config: AdvantageConfig) -> Tensor:
    if config.reward_clip is not None:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)
    if config.whiten_rewards:
        scores = whiten(scores, torch.ones_like(scores, dtype=torch.bool))
    return scores


def _metrics(advantages: Tensor, returns: Tensor, scores: Tensor, groups: Tensor, mask: Tensor) -> dict[str, float]:
    mean = masked_mean(advantages, mask)
    flat = groups[zero_spread(scores, groups)].unique().numel()
    return {
        "advantage/mean": float(mean),
        "advantage/std": float((masked_sum((advantages - mean) ** 2, mask) / mask.sum().clamp(min=1)).sqrt()),
        "advantage/max": float(masked_max(advantages, mask)),
        "advantage/min": -float(masked_max(-advantages, mask)),
        "advantage/return_mean": float(masked_mean(returns, mask)),
        "advantage/zero_spread_groups": float(flat),
        "advantage/zero_spread_group_fraction": flat / groups.unique().numel(),
    }
