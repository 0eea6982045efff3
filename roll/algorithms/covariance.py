"""Tokens whose log-prob and advantage vary together, which make the entropy fall: `pg_variant` clip_cov and kl_cov.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning" (arXiv 2505.22617).
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.aggregation import masked, masked_mean
from roll.algorithms.policy_losses import PolicyLossConfig
from roll.configs.policy import COVARIANCE_VARIANTS, losses_of


def token_covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(log p - its mean) x (A - its mean) [B, T] in float64, with means over the batch's response tokens; eq. 10.

    Args:
        log_probs: log p [B, T].
        advantages: [B, T].
        response_mask: [B, T].

    Returns:
        [B, T], 0 outside the mask. Their mean is the covariance of the batch.
    """
    values = [masked(x, response_mask).double() for x in (log_probs, advantages)]
    first, second = (x - masked_mean(x, response_mask) for x in values)
    return masked(first * second, response_mask)


def high_covariance(
    log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: PolicyLossConfig, seed: int
) -> Tensor | None:
    """The tokens [B, T] bool that the variant treats differently; None for other variants.

    Of N response tokens, `clip_cov` takes N x `clip_cov_ratio` at random from those with a covariance between its two
    bounds, and `kl_cov` the N x `kl_cov_ratio` with the highest covariance; at least one, if there is one.

    Args:
        log_probs: log p [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        config: of the policy loss.
        seed: of the choice.
    """
    variant = next((name for name in losses_of(config.pg_variant) if name in COVARIANCE_VARIANTS), None)
    if variant is None:
        return None
    mask = response_mask.bool()
    covariances, tokens = token_covariances(log_probs, advantages, mask), int(mask.sum())
    if variant == "clip_cov":
        candidates = mask & (covariances >= config.clip_cov_lower) & (covariances <= config.clip_cov_upper)
        order = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return _largest(order, candidates, max(1, int(tokens * config.clip_cov_ratio)))
    return _largest(covariances, mask, max(1, int(tokens * config.kl_cov_ratio)))


def _largest(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """The `count` largest values within the mask, or all of it, as a mask."""
    candidates = values.masked_fill(~mask, -torch.inf).flatten()
    chosen = torch.zeros_like(mask).flatten()
    chosen[candidates.topk(min(count, int(mask.sum()))).indices] = True
    return chosen.view_as(mask)
