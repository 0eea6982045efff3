"""How far the sampling policy mu is from the policy p that the update assumes: always measured, always logged.

With l = log p - log mu per token, clamped to +-LOG_RATIO_CLAMP, and w = e^l unless other weights are in use. Where
there is no proximal policy (bypass), the current policy pi stands in the place of p, and the loss measures it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from roll.algorithms.aggregation import LossScale
from roll.algorithms.importance import clamped_log_ratio
from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.masking import masked, masked_max, masked_mean, masked_sum

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
