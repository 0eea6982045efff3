"""How far the sampling policy mu is from the policy p that the update assumes: always measured, always logged.

With l = log p - log mu per token, clamped to +-LOG_RATIO_CLAMP, and w = e^l unless other weights are in use.
"""

from __future__ import annotations

from torch import Tensor

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
"""Every metric of this module, with its meaning."""


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
    mask = response_mask.bool()
    difference = masked((log_probs - behavior_log_probs).detach().double(), mask)
    log_ratio = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = log_ratio.exp()
    weights = ratio if weights is None else masked(weights.detach().double(), mask)
    kept = mask if kept_mask is None else mask & kept_mask.bool()
    return {
        ESS: effective_sample_share(weights, mask),
        BEHAVIOR_K1: float(masked_mean(log_ratio, mask)),
        BEHAVIOR_K3: float(masked_mean(log_ratio.expm1() - log_ratio, mask)),
        CHI2_TOKEN: float(masked_mean(ratio**2 - 1, mask)),
        CHI2_SEQUENCE: _chi2_sequence(difference, mask),
        WEIGHT_MEAN: float(masked_mean(weights, mask)),
        WEIGHT_MAX: float(masked_max(weights, mask)),
        MASKED_FRACTION: 1 - float(kept.sum() / mask.sum().clamp(min=1)) if mask.any() else 0.0,
        LOG_PROB_DIFF_MAX: float(difference.abs().max()) if difference.numel() else 0.0,
        LOG_PPL_DIFF: _sample_mean(-masked_mean(difference, mask, dim=-1), mask),
    }


def effective_sample_share(weights: Tensor, mask: Tensor) -> float:
    """ESS / n = (sum w)^2 / (n sum w^2) over the mask, in (0, 1]; 0 where all weights are 0 or there are none."""
    squares = float(masked_sum(weights**2, mask))
    return float(masked_sum(weights, mask)) ** 2 / (float(mask.sum()) * squares) if squares else 0.0


def _chi2_sequence(difference: Tensor, mask: Tensor) -> float:
    log_ratio = difference.sum(-1).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return _sample_mean((2 * log_ratio).exp() - 1, mask)


def _sample_mean(values: Tensor, mask: Tensor) -> float:
    """Mean of values [B] over the samples that have any token."""
    return float(masked_mean(values, mask.any(-1)))
