"""DPPO: the trust region is a change of probability instead of a ratio."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.aggregation import masked
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, policy_loss
from roll.base.schema import option

PROBABILITY_MARGIN = 1e-6
"""Probabilities closer to 1 count as this far from it, so that the log-prob of all other tokens is finite."""


@dataclass
class TotalVariationOptions:
    """The key of the region in probability."""

    dppo_tv_threshold: float = option(0.15, "Largest change of a token's probability.", gt=0, le=1, usual=(1e-6, 1.0))


@dataclass
class BinaryKLOptions:
    """The key of the region in KL divergence."""

    dppo_kl_threshold: float = option(
        0.05,
        "Largest binary KL divergence, of the sampled token against all others, in nats.",
        gt=0,
        usual=(1e-6, 100.0),
    )


@policy_loss("dppo_tv", options=TotalVariationOptions, ratio_base="behavior", reads_ratio_type=False)
def dppo_tv(tokens: PolicyTokens, options: TotalVariationOptions) -> TokenLosses:
    """-r A, without tokens that moved away by more than `dppo_tv_threshold` in probability: |pi - base| of the token.

    A token moves away where A > 0 and r > 1, or A < 0 and r < 1. A ratio would bound rare tokens too much and frequent
    ones too little. Source: DPPO (arXiv 2602.04879), Binary-TV.
    """
    divergence = (tokens.log_probs.detach().exp() - tokens.base.exp()).abs()
    return _within_divergence(tokens, divergence <= options.dppo_tv_threshold)


@policy_loss("dppo_kl", options=BinaryKLOptions, ratio_base="behavior", reads_ratio_type=False)
def dppo_kl(tokens: PolicyTokens, options: BinaryKLOptions) -> TokenLosses:
    """As `dppo_tv`, with the KL divergence between the base's and the policy's probabilities of the token or not.

    q log(q / pi) + (1 - q) log((1 - q) / (1 - pi)), where q is the base's probability of the token. Source: DPPO
    (arXiv 2602.04879), Binary-KL.
    """
    current, base = (masked(x, tokens.mask).double() for x in (tokens.log_probs.detach(), tokens.base))
    other, base_other = (torch.log1p(-x.exp().clamp(max=1 - PROBABILITY_MARGIN)) for x in (current, base))
    divergence = base.exp() * (base - current) + (1 - base.exp()) * (base_other - other)
    return _within_divergence(tokens, divergence <= options.dppo_kl_threshold)


def _within_divergence(tokens: PolicyTokens, inside: Tensor) -> TokenLosses:
    """-r A of the tokens that are `inside` [b, T] the trust region, or on the way back into it."""
    ratio = tokens.ratio
    away = ((tokens.advantages > 0) & (ratio > 1)) | ((tokens.advantages < 0) & (ratio < 1))
    dropped = away & ~inside
    return TokenLosses(-ratio * tokens.advantages.masked_fill(dropped, 0.0), ratio.detach(), dropped)
