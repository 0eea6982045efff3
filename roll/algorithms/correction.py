"""The correction of stale samples: weights for tokens, and tokens left out, from log ratios alone (`correction`).

With l = log p - log mu (decoupled: once per batch, against the proximal policy) or l = log pi - log mu (bypass: in the
loss, against the current policy), clamped to +-LOG_RATIO_CLAMP per token. Nothing here carries a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregation import LossScale, masked, masked_max, masked_mean, masked_sum
from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.policy_losses import bounded_exp
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


ESS = "correction/ess"
BEHAVIOR_K1 = "correction/behavior_k1"
BEHAVIOR_K3 = "correction/behavior_k3"
CHI2_TOKEN = "correction/chi2_token"
CHI2_SEQUENCE = "correction/chi2_sequence"
WEIGHT_MEAN = "correction/is_weight_mean"
WEIGHT_MAX = "correction/is_weight_max"
MASKED_FRACTION = "correction/masked_fraction"
LOG_PROB_DIFF_MAX = "correction/log_prob_diff_max"
LOG_PPL_DIFF = "correction/log_ppl_diff"
INERT = "correction/inert"

CORRECTION_METRICS = {
    ESS: "Effective share of the tokens, (sum w)^2 / (n sum w^2); 1 when all weights are equal.",
    BEHAVIOR_K1: "Mean of l; negative when p finds the samples less likely than mu did.",
    BEHAVIOR_K3: "Mean of e^l - 1 - l, an estimate of KL(mu || p) that is never negative.",
    CHI2_TOKEN: "Mean of e^2l over tokens, minus 1: the variance of token weights.",
    CHI2_SEQUENCE: "Mean of e^2L over samples, minus 1, with L the sum of l over the sample, clamped.",
    WEIGHT_MEAN: "Mean weight of a token.",
    WEIGHT_MAX: "Largest weight of a token.",
    MASKED_FRACTION: "Share of tokens that rejection took out of the loss.",
    LOG_PROB_DIFF_MAX: "Largest |log p - log mu|, not clamped; with fresh weights a parity check of the engines.",
    LOG_PPL_DIFF: "Mean over samples of log-perplexity under p minus that under mu.",
}
"""What `diagnostics` measures, with its meaning."""

WEIGHT_SQUARE_MEAN = "correction/is_weight_square_mean"
"""What `shares` give in place of the ESS, which is no sum."""


def diagnostics(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    response_mask: Tensor,
    weights: Tensor | None = None,
    kept_mask: Tensor | None = None,
) -> dict[str, float]:
    """All of CORRECTION_METRICS for one batch, over the response mask before rejection.

    Args:
        log_probs: log p [B, T], the proximal log-probs.
        behavior_log_probs: log mu [B, T], as the engine returned them.
        response_mask: [B, T].
        weights: [B, T] importance weights the loss uses; default the plain ratio e^l.
        kept_mask: [B, T] tokens left after rejection; default all of the response mask.
    """
    scale = LossScale.of(response_mask, response_mask.shape[-1])
    parts = shares(log_probs, behavior_log_probs, response_mask, scale, weights, kept_mask)
    return complete({name: float(value) for name, value in parts.items()})


def shares(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    weights: Tensor | None = None,
    kept_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """What one micro-batch contributes to the diagnostics of its global batch; 0-d tensors for `complete`.

    Names ending in `_max` combine by max over micro-batches, all others by sum. Arguments as `diagnostics`, and:

    Args:
        log_probs: log p or log pi [b, T].
        behavior_log_probs: log mu [b, T].
        response_mask: [b, T].
        scale: counts over the global batch.
        weights: [b, T]; default the plain ratio.
        kept_mask: [b, T]; default the response mask.
    """
    mask = response_mask.bool()
    difference = masked((log_probs - behavior_log_probs).detach().double(), mask)
    log_ratio = clamped_log_ratio(log_probs, behavior_log_probs, mask)
    ratio = log_ratio.exp()
    weights = ratio if weights is None else masked(weights.detach().double(), mask)
    rejected = mask.new_zeros(mask.shape) if kept_mask is None else mask & ~kept_mask.bool()
    tokens, samples = max(scale.tokens, 1.0), max(scale.sequences, 1.0)
    any_token = mask.any(-1)
    return {
        WEIGHT_MEAN: masked_sum(weights, mask) / tokens,
        WEIGHT_SQUARE_MEAN: masked_sum(weights**2, mask) / tokens,
        BEHAVIOR_K1: masked_sum(log_ratio, mask) / tokens,
        BEHAVIOR_K3: masked_sum(log_ratio.expm1() - log_ratio, mask) / tokens,
        CHI2_TOKEN: masked_sum(ratio**2 - 1, mask) / tokens,
        CHI2_SEQUENCE: masked_sum(_square_of_samples(difference) - 1, any_token) / samples,
        WEIGHT_MAX: masked_max(weights, mask),
        MASKED_FRACTION: rejected.sum().double() / tokens,
        LOG_PROB_DIFF_MAX: masked_max(difference.abs(), mask),
        LOG_PPL_DIFF: masked_sum(-masked_mean(difference, mask, dim=-1), any_token) / samples,
    }


def complete(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with the ESS, (mean w)^2 / mean w^2, in place of the mean square it is computed from."""
    done = {name: value for name, value in metrics.items() if name != WEIGHT_SQUARE_MEAN}
    if WEIGHT_SQUARE_MEAN in metrics:
        square = metrics[WEIGHT_SQUARE_MEAN]
        done[ESS] = metrics[WEIGHT_MEAN] ** 2 / square if square else 0.0
    return done


def _square_of_samples(difference: Tensor) -> Tensor:
    """e^2L [B], with L the clamped sum of the sample's log ratios."""
    return (2 * difference.sum(-1).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).exp()
