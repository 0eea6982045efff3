"""Policy-gradient losses per token, by name (`pg_variant`).

A variant is one function registered in PG_VARIANTS. It sees whole samples (b of them, T padded tokens), so that
sequence-level ratios are as easy as token-level ones, and returns values per token; the `policy` loss of
`roll.algorithms.losses` masks and aggregates them. What stands outside the response mask is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.masking import masked
from roll.algorithms.policy_config import PolicyLossConfig
from roll.algorithms.registry import Registry


@dataclass(frozen=True)
class TokenLosses:
    """What a variant returns, each [b, T].

    Attributes:
        loss: loss of each token, with gradient.
        ratio: pi / base as the variant uses it, detached; reported.
        clipped: tokens whose loss a clip bounds, so that they pass no gradient or a bounded one; reported.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, PolicyLossConfig], TokenLosses]
PG_VARIANTS: Registry[PolicyLoss] = Registry("pg_variant")
"""f(log_probs [b, T] with grad, base_log_probs [b, T], advantages [b, T], response_mask [b, T], scores [b], config)."""


def policy_ratio(log_probs: Tensor, base_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """The ratio r = exp(clamp(log pi - log base, +-LOG_RATIO_CLAMP)) [b, T], exactly 1 outside the mask."""
    log_ratio = masked(log_probs - base_log_probs, response_mask)
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


@PG_VARIANTS.register("vanilla")
def vanilla(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-A log pi (REINFORCE, Williams 1992): no ratio enters, so stale data is not corrected for."""
    ratio = policy_ratio(log_probs, base_log_probs, response_mask).detach()
    return TokenLosses(-advantages * log_probs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


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
    ratio = policy_ratio(log_probs, base_log_probs, response_mask)
    return clipped_surrogate(ratio, advantages, config)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: PolicyLossConfig) -> TokenLosses:
    """PPO's loss of a given ratio [b, T]; see `ppo`."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - config.pg_clip_low, 1 + config.pg_clip_high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if config.dual_clip_loss:
        ceiling = -config.dual_clip_c * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return TokenLosses(loss, ratio.detach(), clipped)
