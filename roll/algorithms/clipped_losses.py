"""Policy losses whose ratio carries the gradient and is clipped: the size of an update is what they bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.policy_config import PolicyLossConfig
from roll.algorithms.ratio_type import tied_base
from roll.algorithms.variant import PG_VARIANTS, TokenLosses, policy_ratio


@dataclass(frozen=True)
class Clip:
    """Bounds of a ratio: [1 - low, 1 + high], and where A < 0 a loss of at most `dual` times |A|, if given."""

    low: float
    high: float
    dual: float | None = None


@PG_VARIANTS.register("ppo")
def ppo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), and with dual clip min(that, -c A) where A < 0.

    Source: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; separate bounds, DAPO (arXiv 2503.14476); dual clip, Ye et
    al. 2020 (arXiv 1912.09729) eq. 5.
    """
    return clipped_surrogate(policy_ratio(log_probs, base_log_probs, response_mask), advantages, _ppo_clip(config))


@PG_VARIANTS.register("decoupled_ppo")
def decoupled_ppo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """PPO against the proximal policy: the clip measures this update, the correction weight p / mu the data's age.

    The weight is that of the correction block, which the configuration turns on for this variant and the `policy` loss
    multiplies on every token. Source: Hilton et al. 2021 (arXiv 2110.00641); AReaL (arXiv 2505.24298).
    """
    return clipped_surrogate(policy_ratio(log_probs, base_log_probs, response_mask), advantages, _ppo_clip(config))


@PG_VARIANTS.register("gspo")
def gspo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """PPO's loss of r_t = sg[s] pi_t / sg[pi_t], where s = exp(mean_t(log pi - log base)) is the response's ratio.

    All tokens of a response share the value of the ratio, and are clipped or not together; the gradient flows through
    each token's own log-prob. Source: GSPO (arXiv 2507.18071), its token-level form.
    """
    base = tied_base(log_probs, base_log_probs, response_mask, "sequence")
    ratio = policy_ratio(log_probs, base, response_mask).to(log_probs.dtype)
    return clipped_surrogate(ratio, advantages, Clip(config.gspo_clip_low, config.gspo_clip_high))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLosses:
    """PPO's loss of a given ratio [b, T]; see `ppo`."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return TokenLosses(loss, ratio.detach(), clipped)


def _ppo_clip(config: PolicyLossConfig) -> Clip:
    return Clip(config.pg_clip_low, config.pg_clip_high, config.dual_clip_c if config.dual_clip_loss else None)
