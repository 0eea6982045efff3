"""GMPO: the geometric mean of a response's bounded ratios."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.aggregation import masked, masked_mean
from roll.algorithms.lazy_torch import torch
from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, clamped_exp, policy_loss
from roll.base.schema import option


@dataclass
class GeoMeanOptions:
    """The keys of GMPO."""

    geo_mean_clip_low: float = option(
        0.4, "Largest decrease of a token's log-prob that counts where A < 0, in nats.", gt=0, usual=(1e-6, 100.0)
    )
    geo_mean_clip_high: float = option(
        0.4, "Largest increase of a token's log-prob that counts where A > 0, in nats.", gt=0, usual=(1e-6, 100.0)
    )


@policy_loss("geo_mean", options=GeoMeanOptions, reads_ratio_type=False)
def geo_mean(tokens: PolicyTokens, options: GeoMeanOptions) -> TokenLosses:
    """-r_t A with log r_t = sg[mean_t l'_t] + l'_t - sg[l'_t]: the geometric mean of a response's bounded ratios.

    l' is the log ratio, at most `geo_mean_clip_high` where A > 0 and at least -`geo_mean_clip_low` where A < 0, so that
    no single token decides the ratio of all. With `loss_agg_mode: seq-mean-token-mean`, value and gradient are those
    of -A exp(mean_t l'_t) for each response. Source: GMPO (arXiv 2507.20673) eq. 4.
    """
    log_ratio = tokens.log_ratio
    high = torch.where(tokens.advantages > 0, options.geo_mean_clip_high, torch.inf)
    low = torch.where(tokens.advantages < 0, -options.geo_mean_clip_low, -torch.inf)
    bounded = log_ratio.clamp(low, high)
    mean = masked_mean(bounded.detach(), tokens.mask, dim=-1)[:, None]
    ratio = clamped_exp(masked(mean + bounded - bounded.detach(), tokens.mask))
    return TokenLosses(-ratio * tokens.advantages, ratio.detach(), bounded != log_ratio)
