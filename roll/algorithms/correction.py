"""Off-policy correction (`correction`): weights and rejection of stale tokens, and metrics of how stale they are.

Three policies: mu sampled the tokens, p is the proximal policy (the weights before this batch's update), pi is the
current one. All functions use l = log p - log mu per token, clamped to +-LOG_RATIO_CLAMP and without gradient. p is
known once per batch. In bypass mode there is no p, and before the first optimizer step of a batch p is pi: then pi
takes its place, and the loss computes l per micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from roll.algorithms.aggregation import EPSILON, LossScale, masked, masked_max, masked_mean, masked_sum, unit_mean
from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.options.correction_options import CorrectionOptions, DifferenceOptions, RejectionOptions
from roll.algorithms.policy_loss.base import clamped_exp


@dataclass(frozen=True)
class Correction:
    """Result of `off_policy_correction`.

    Attributes:
        weights: [B, T] factors of the token losses without gradient; 0 outside the response mask, 1 inside it when
            the configuration has no weights.
        kept: [B, T] bool, the response mask without rejected tokens.
    """

    weights: Tensor
    kept: Tensor


def off_policy_correction(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    response_mask: Tensor,
    options: CorrectionOptions,
    turn_index: Tensor | None = None,
) -> Correction:
    """Weights and kept tokens of whole samples; the result of a sample does not depend on other samples or padding.

    A rejected token has no term in the loss but keeps its weight, except with `mode: mask`, which rejects the tokens
    whose weight is outside the bounds and sets that weight to 0.

    `log_probs` is log p, or log pi in bypass mode, and `behavior_log_probs` log mu, both [B, T]; without `turn_index`
    [B, T] a response is one turn.
    """
    mask = response_mask.bool()
    log_ratio = clamped_log_ratio(log_probs, behavior_log_probs, mask)
    turns = torch.zeros_like(mask, dtype=torch.int64) if turn_index is None else turn_index.clamp(min=0)
    kept = mask
    for rejection in options.all_rejections.values():
        kept = kept & within_bounds(log_ratio, mask, rejection, turns)
    if options.difference.level is not None:
        moved = masked(log_probs.detach().double().exp() - behavior_log_probs.double().exp(), mask)
        kept = kept & _inside(moved, options.difference.level, options.difference, mask, turns)
    if options.veto_threshold is not None:
        unclamped = _log_ratio(log_probs, behavior_log_probs, mask)  # e^-20 is above some thresholds
        kept = kept & ~(mask & (unclamped < math.log(options.veto_threshold))).any(-1, keepdim=True)
    weights, inside = importance_weights(log_ratio, mask, options, turns)
    return Correction(masked(weights, mask).to(log_probs.dtype), kept & inside)


def batch_correction(
    correction: Correction,
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    response_mask: Tensor,
    options: CorrectionOptions,
) -> Correction:
    """Adds what depends on the whole batch to the result of `off_policy_correction`; arguments as there.

    `m2_threshold` leaves out further tokens, see `within_second_moment`. `weights.normalize` divides the weights by
    their mean over the response tokens, or over the responses where a response has one weight (`level: sequence`), as
    in verl. Samples that are left out of the loss have no part in either; `response_mask` is without them.
    """
    weights, kept, mask = correction.weights, correction.kept, response_mask.bool()
    if options.m2_threshold is not None:
        squares = _log_ratio(log_probs, behavior_log_probs, mask) ** 2
        kept = within_second_moment(squares, kept & mask, options.m2_threshold) | (kept & ~mask)
    if options.weighted and options.weights.normalize:
        counted = masked_mean(weights, mask, dim=-1) if options.weights.level == "sequence" else weights
        mean = masked_mean(counted, mask.any(-1) if counted is not weights else mask)
        weights = weights / mean.clamp(min=EPSILON)
    return Correction(weights, kept)


def within_second_moment(squares: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """The mask [B, T] without its largest `squares` [B, T], as many as needed for their mean to be at most `threshold`.

    Source: M2PO (arXiv 2510.01161).
    """
    values, order = squares[mask].sort()
    means = values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)
    kept = mask.clone()
    dropped = torch.zeros_like(values, dtype=torch.bool)
    dropped[order[int((means <= threshold).sum()) :]] = True
    kept[mask] = ~dropped
    return kept


def off_policy_sequences(
    log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, delta: float
) -> Tensor:
    """Tokens that OPSM leaves out [B, T] bool: A < 0, and the mean of log mu - log pi over the response is above delta.

    Such a response has already become less likely; pushing it further down learns from a policy that is gone. Source:
    DeepSeek-V3.2 (arXiv 2512.02556), off-policy sequence masking.
    """
    drift = -masked_mean(_log_ratio(log_probs, behavior_log_probs, response_mask.bool()), response_mask, dim=-1)
    return response_mask.bool() & (advantages < 0) & (drift > delta)[:, None]


def clamped_log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> Tensor:
    """The log ratio l [B, T] in float64, without gradient, 0 outside the mask."""
    return _log_ratio(log_probs, behavior_log_probs, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> Tensor:
    return masked((log_probs - behavior_log_probs).detach().double(), mask)


def importance_weights(
    log_ratio: Tensor, mask: Tensor, options: CorrectionOptions, turns: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights [B, T] and whether each is inside the bounds [B, T].

    The ratio is e^l of a token, e^(sum l) of a response (`sequence`), or e^(mean l) of a response (`geometric`) or of a
    turn (`segment`); the last three are the same for all its tokens. `clamp` bounds the weight (truncated importance
    sampling); `mask` leaves weights inside the bounds unchanged and sets the others to 0 (masked importance sampling,
    IcePop).
    """
    bounds = options.weights
    if bounds.level is None:
        return torch.ones_like(log_ratio), torch.ones_like(mask)
    if bounds.level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=-1)[:, None].expand_as(log_ratio)
    elif bounds.level == "geometric":
        log_ratio = masked_mean(log_ratio, mask, dim=-1)[:, None].expand_as(log_ratio)
    elif bounds.level == "segment":
        log_ratio = unit_mean(log_ratio, mask, turns)
    ratio = clamped_exp(log_ratio)
    if bounds.mode == "clamp":
        return ratio.clamp(bounds.lower, bounds.upper), torch.ones_like(mask)
    inside = (ratio >= bounds.lower) & (ratio <= bounds.upper)
    return masked(ratio, inside), inside


def within_bounds(log_ratio: Tensor, mask: Tensor, options: RejectionOptions, turns: Tensor) -> Tensor:
    """Whether the rejection statistic is inside [lower, upper]: [B, T] bool.

    One value per token, turn (`segment-mean`) or response.

    k1 = l, with bounds given as ratios e^k1: lower 0.5 rejects tokens that p finds less than half as likely as mu did,
    upper 2 those it finds more than twice as likely. k2 = l^2 / 2 and k3 = e^l - 1 - l, with bounds in nats.
    `sequence-max` keeps a response only if all its tokens are inside.
    """
    if options.statistic is None:
        return torch.ones_like(mask)
    bounds = replace(options, lower=_in_nats(options.lower, options), upper=_in_nats(options.upper, options))
    return _inside(STATISTICS[options.statistic](log_ratio), options.level, bounds, mask, turns)


def _inside(
    statistic: Tensor, level: str, bounds: RejectionOptions | DifferenceOptions, mask: Tensor, turns: Tensor
) -> Tensor:
    """Whether the statistic of tokens [B, T], aggregated to `level`, is inside the bounds: [B, T] bool."""
    if level == "sequence-sum":
        statistic = masked_sum(statistic, mask, dim=-1)[:, None]
    elif level == "sequence-mean":
        statistic = masked_mean(statistic, mask, dim=-1)[:, None]
    elif level == "segment-mean":
        statistic = unit_mean(statistic, mask, turns)
    inside = torch.ones_like(statistic, dtype=torch.bool)
    if bounds.lower is not None:
        inside = inside & (statistic >= bounds.lower)
    if bounds.upper is not None:
        inside = inside & (statistic <= bounds.upper)
    if level == "sequence-max":
        inside = (inside | ~mask).all(-1, keepdim=True)
    return inside.expand_as(mask)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
"""`correction.rejection.statistic` -> f(l), any shape; 0 where p and mu agree."""


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
NO_OP = "correction/no_op"
"""Names of the metrics; roll/trackers/metrics.py describes them. All but NO_OP are computed here."""

WEIGHT_SQUARE_MEAN = "correction/is_weight_square_mean"
"""Partial sum from which `finalize` computes ESS; not reported."""


def diagnostics(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    response_mask: Tensor,
    weights: Tensor | None = None,
    kept_mask: Tensor | None = None,
) -> dict[str, float]:
    """The correction metrics of one batch, over the response mask before rejection.

    `weights` [B, T] are those that the loss uses, by default the plain ratio e^l; `kept_mask` are the tokens left after
    rejection, by default all.
    """
    scale = LossScale.of(response_mask, response_mask.shape[-1])
    sums = partial_sums(log_probs, behavior_log_probs, response_mask, scale, weights, kept_mask)
    return finalize({name: float(value) for name, value in sums.items()})


def partial_sums(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    weights: Tensor | None = None,
    kept_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """The part of the correction metrics that one micro-batch contributes, as 0-d tensors for `finalize`.

    Names ending in `_max` are combined by max over micro-batches, all others by sum.

    Arguments are as for `diagnostics`, with the counts over the global batch.
    """
    mask = response_mask.bool()
    difference = _log_ratio(log_probs, behavior_log_probs, mask)
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
        CHI2_SEQUENCE: masked_sum(_squared_sequence_ratio(difference) - 1, any_token) / samples,
        WEIGHT_MAX: masked_max(weights, mask),
        MASKED_FRACTION: rejected.sum().double() / tokens,
        LOG_PROB_DIFF_MAX: masked_max(difference.abs(), mask),
        LOG_PPL_DIFF: masked_sum(-masked_mean(difference, mask, dim=-1), any_token) / samples,
    }


def finalize(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replaces the mean squared weight by the effective sample size ESS = (mean w)^2 / mean w^2.

    Metrics without a mean squared weight are returned unchanged.
    """
    result = {name: value for name, value in metrics.items() if name != WEIGHT_SQUARE_MEAN}
    if WEIGHT_SQUARE_MEAN in metrics:
        square = metrics[WEIGHT_SQUARE_MEAN]
        result[ESS] = metrics[WEIGHT_MEAN] ** 2 / square if square else 0.0
    return result


def _squared_sequence_ratio(difference: Tensor) -> Tensor:
    """e^2L [B], with L the clamped sum of a sample's log ratios [B, T]."""
    return (2 * difference.sum(-1).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).exp()
