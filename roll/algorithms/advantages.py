"""From scores to advantages (`adv_estimator`), over the global batch, so that they do not depend on how it is split.

An estimator is one function registered in ADV_ESTIMATORS (`roll.algorithms.estimation`). `compute_advantages` does what
all of them share: shaping of the scores before, whitening and clipping after, and the counts a run reports.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.estimators import ADV_ESTIMATORS, AdvantageConfig, Shaped
from roll.algorithms.kl import kl_divergence
from roll.algorithms.masking import masked, masked_max, masked_mean, masked_sum, whiten, zero_spread
from roll.algorithms.turns import Episodes, Turns, check_turns, episodes_of


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


def compute_advantages(
    scores: Tensor,
    groups: Tensor,
    response_mask: Tensor,
    config: AdvantageConfig,
    *,
    log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    turns: Turns | None = None,
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
        turns: where the samples are trajectories or turns of them; statistics over scores then count every trajectory
            once, and samples without response tokens not at all.

    Raises:
        ValueError: a score is not finite, token KL lacks its log-probs, or the turns are missing where the estimator
            needs them or contradict the rest.
    """
    if not bool(torch.isfinite(scores).all()):
        bad = [index for index, good in enumerate(torch.isfinite(scores).tolist()) if not good]
        raise ValueError(f"scores of samples {bad[:8]} are not finite; a failed reward must be dropped, not scored")
    mask, scores = response_mask.bool(), scores.float()
    kl = _reference_kl(config, mask, log_probs, ref_log_probs)
    if turns is not None:
        check_turns(turns, scores, groups, mask)
    scores = _shape_scores(scores, episodes_of(mask, turns), config)
    shaped = Shaped(scores, kl_coef * kl, groups, mask, turns)
    advantages, returns = ADV_ESTIMATORS[config.adv_estimator](shaped, config)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    metrics = _metrics(advantages, returns, shaped)
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


def _shape_scores(scores: Tensor, episodes: Episodes, config: AdvantageConfig) -> Tensor:
    if config.reward_clip is not None:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)
    if config.whiten_rewards:
        once = episodes.once(scores)
        scores = episodes.spread(whiten(once, torch.ones_like(once, dtype=torch.bool)))
    return scores


def _metrics(advantages: Tensor, returns: Tensor, shaped: Shaped) -> dict[str, float]:
    mask, groups = shaped.response_mask, shaped.episode_groups
    mean = masked_mean(advantages, mask)
    flat = groups[zero_spread(shaped.episodes.once(shaped.scores), groups)].unique().numel() if len(groups) else 0
    return {
        "advantage/mean": float(mean),
        "advantage/std": float((masked_sum((advantages - mean) ** 2, mask) / mask.sum().clamp(min=1)).sqrt()),
        "advantage/max": float(masked_max(advantages, mask)),
        "advantage/min": -float(masked_max(-advantages, mask)),
        "advantage/return_mean": float(masked_mean(returns, mask)),
        "advantage/zero_spread_groups": float(flat),
        "advantage/zero_spread_group_fraction": flat / max(groups.unique().numel(), 1),
    }
