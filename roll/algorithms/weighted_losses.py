"""Policy losses in which log pi carries the gradient: REINFORCE, and what weights or tethers it on stale samples."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import masked, masked_sum
from roll.algorithms.policy_config import PolicyLossConfig
from roll.algorithms.variant import PG_VARIANTS, TokenLosses, bounded_exp, policy_ratio


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


@PG_VARIANTS.register("tis")
def tis(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-sg(clip(r, lower, upper)) A log pi: truncated importance sampling (Ionides 2008), per token.

    Between the bounds the gradient is that of -r A; the upper bound trades variance for bias. Source of the form for
    policies: IMPALA (arXiv 1802.01561) section 4.
    """
    ratio = policy_ratio(log_probs, base_log_probs, response_mask).detach()
    weight = ratio.clamp(config.tis_lower_bound, config.tis_upper_bound)
    return TokenLosses(-weight * advantages * log_probs, ratio, weight != ratio)


@PG_VARIANTS.register("topr")
def topr(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-w_pos A log pi for responses of score s > 0, -w_neg sg(clip(r, 0, 1)) A log pi for the others.

    What was good is imitated at full weight; what was bad is pushed away only as far as the policy still does it.
    `topr_level: sequence` takes r from the summed log ratio of the response, as the paper does. Source: Le Roux et al.
    2025 (arXiv 2503.14286).

    Raises:
        ValueError: `scores` is None.
    """
    if scores is None:
        raise ValueError("pg_variant topr needs the raw scores [b] of the samples; got None")
    log_ratio = masked(log_probs - base_log_probs, response_mask).detach()
    if config.topr_level == "sequence":
        log_ratio = masked_sum(log_ratio, response_mask, dim=-1)[:, None].expand_as(log_ratio)
    ratio = bounded_exp(masked(log_ratio, response_mask))
    positive = (scores > 0)[:, None]
    tapered = config.topr_negative_weight * ratio.clamp(max=1.0)
    weight = torch.where(positive, torch.full_like(ratio, config.topr_positive_weight), tapered)
    return TokenLosses(-weight * advantages * log_probs, ratio, ~positive & (ratio > 1))


@PG_VARIANTS.register("cispo")
def cispo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi: the weight is clipped, and no token loses its gradient.

    With `cispo_use_unified_mask` tokens with (A > 0 and r > 1 + eps_high) or (A < 0 and r < 1 - eps_low) have no loss,
    as in PPO. Source: MiniMax-M1 (arXiv 2506.13585) eq. 4-5, and its unified formulation for the mask.
    """
    low, high = 1 - config.cispo_epsilon_low, 1 + config.cispo_epsilon_high
    ratio = policy_ratio(log_probs, base_log_probs, response_mask).detach()
    weight = ratio.clamp(low, high)
    clipped = weight != ratio
    if config.cispo_use_unified_mask:
        dropped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        weight = weight.masked_fill(dropped, 0.0)
    return TokenLosses(-weight * advantages * log_probs, ratio, clipped)


@PG_VARIANTS.register("kimi15")
def kimi15(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-A log pi + (tau / 2) (log pi - log base)^2: nothing is weighted; a square tethers the policy to its base.

    Source: Kimi k1.5 (arXiv 2501.12599) section 2.3.2, per token.
    """
    log_ratio = masked(log_probs - base_log_probs, response_mask)
    loss = -advantages * log_probs + 0.5 * config.kimi15_tau * log_ratio**2
    return TokenLosses(loss, bounded_exp(log_ratio).detach(), torch.zeros_like(loss, dtype=torch.bool))
