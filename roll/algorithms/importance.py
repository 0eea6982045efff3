"""The correction of stale samples: weights for tokens, and tokens left out, from log ratios alone (`correction`).

With l = log p - log mu (decoupled: once per batch, against the proximal policy) or l = log pi - log mu (bypass: in the
loss, against the current policy), clamped to +-LOG_RATIO_CLAMP per token. Nothing here carries a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.masking import masked, masked_mean, masked_sum
from roll.algorithms.variant import bounded_exp
from roll.configs.policy import CorrectionOptions, RejectionOptions


@dataclass(frozen=True)
class Correction:
    """What the loss of a token is multiplied by, and which tokens are left.

    Attributes:
        weights: [B, T] without gradient, 0 outside the response mask; 1 inside where no weights are asked for.
        kept: [B, T] bool, the response mask without what was rejected.
    """

    weights: Tensor
    kept: Tensor


def correct(
    log_probs: Tensor, behavior_log_probs: Tensor, response_mask: Tensor, options: CorrectionOptions
) -> Correction:
    """Weights and kept tokens of whole samples; samples do not influence each other, nor does padding.

    A rejected token is out of every term of the loss. Its weight is left as it is: rejection and weights are separate
    mechanisms, but for `mode: mask`, where what is outside the bounds has weight 0 and is rejected.

    Args:
        log_probs: log p, or log pi [B, T].
        behavior_log_probs: log mu [B, T].
        response_mask: [B, T].
        options: what to do; default options keep every token at weight 1.
    """
    mask = response_mask.bool()
    log_ratio = clamped_log_ratio(log_probs, behavior_log_probs, mask)
    kept = mask & within_statistic(log_ratio, mask, options.rejection)
    if options.veto_threshold is not None:
        kept = kept & ~(mask & (log_ratio < math.log(options.veto_threshold))).any(-1, keepdim=True)
    weights, inside = importance_weights(log_ratio, mask, options)
    return Correction(masked(weights, mask).to(log_probs.dtype), kept & inside)


def clamped_log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> Tensor:
    """The log ratio l [B, T] in float64, without gradient, 0 outside the mask."""
    difference = masked((log_probs - behavior_log_probs).detach().double(), mask)
    return difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def importance_weights(log_ratio: Tensor, mask: Tensor, options: CorrectionOptions) -> tuple[Tensor, Tensor]:
    """Weights [B, T] and whether each is inside the bounds.

    The ratio is e^l of a token, e^(sum l) of a response (sequence), or e^(mean l) (geometric); the last two stand on
    every token of the response. `clamp` (truncated importance sampling) keeps every token and bounds its weight;
    `mask` (masked importance sampling, IcePop) keeps weights as they are and gives 0 to those outside.
    """
    bounds = options.weights
    if bounds.level is None:
        return torch.ones_like(log_ratio), torch.ones_like(mask)
    if bounds.level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=-1)[:, None].expand_as(log_ratio)
    elif bounds.level == "geometric":
        log_ratio = masked_mean(log_ratio, mask, dim=-1)[:, None].expand_as(log_ratio)
    ratio = bounded_exp(log_ratio)
    if bounds.mode == "clamp":
        return ratio.clamp(bounds.lower, bounds.upper), torch.ones_like(mask)
    inside = (ratio >= bounds.lower) & (ratio <= bounds.upper)
    return masked(ratio, inside), inside


def within_statistic(log_ratio: Tensor, mask: Tensor, options: RejectionOptions) -> Tensor:
    """Where the statistic is inside [lower, upper]: [B, T] bool, the same for all tokens of a response unless `token`.

    k1 = l, with bounds given as ratios e^k1 (so lower 0.5 rejects what p finds less than half as likely as mu did, and
    upper 2 what it finds more than twice as likely); k2 = l^2 / 2 and k3 = e^l - 1 - l, with bounds in nats.
    `sequence-max` asks the extremes: a response is kept when all its tokens are inside.
    """
    if options.statistic is None:
        return torch.ones_like(mask)
    statistic = STATISTICS[options.statistic](log_ratio)
    if options.level == "sequence-sum":
        statistic = masked_sum(statistic, mask, dim=-1)[:, None]
    elif options.level == "sequence-mean":
        statistic = masked_mean(statistic, mask, dim=-1)[:, None]
    lower, upper = _in_nats(options.lower, options), _in_nats(options.upper, options)
    inside = torch.ones_like(statistic, dtype=torch.bool)
    if lower is not None:
        inside = inside & (statistic >= lower)
    if upper is not None:
        inside = inside & (statistic <= upper)
    if options.level == "sequence-max":
        inside = (inside | ~mask).all(-1, keepdim=True)
    return inside.expand_as(mask)


STATISTICS = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
"""`correction.rejection.statistic` -> f(l) [any shape]: estimates of how far mu is from p, zero where they agree."""


def _in_nats(bound: float | None, options: RejectionOptions) -> float | None:
    """A bound in the units of the statistic."""
    if bound is None or options.statistic != "k1":
        return bound
    return math.log(bound) if bound > 0 else -math.inf
