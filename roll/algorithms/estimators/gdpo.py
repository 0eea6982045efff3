"""GDPO: each of several rewards is normalised by itself."""

from __future__ import annotations

from roll.algorithms.aggregation import normalize, whiten
from roll.algorithms.estimators.base import RewardBatch, by_response, estimator, given
from roll.algorithms.lazy_torch import Tensor


@estimator("gdpo", needs="reward_parts", whitens=True, in_group=True, per_response=True)
def gdpo(batch: RewardBatch, options: object) -> tuple[Tensor, Tensor]:
    """A = sum_k w_k (r_k - mean_group) / (std_group + EPSILON) over the rewards k, whitened over the batch's samples.

    A reward with equal scores in a group, or of a single sample, adds 0 there. Penalties (the KL of the tokens,
    `overlong_buffer_len`, lengths) are subtracted minus their group mean and in their own unit, so that their
    coefficients keep a meaning. Samples without a token do not count in the whitening, and rewards that cancel out
    leave no rounding for it to enlarge: it is computed in float64. Source: Liu et al. 2026 (arXiv 2601.05242), GDPO.
    Like there and in TRL (`normalize_then_sum`) every sample counts once in the whitening; in verl every token does.

    Raises:
        ValueError: the batch has not the score of one reward for each weight.
    """
    parts, weights = given(batch.reward_parts), batch.reward_weights
    if parts.shape[-1] != len(weights):
        raise ValueError(
            f"adv_estimator gdpo needs the score of each of {len(weights)} rewards, and this batch has "
            f"{parts.shape[-1]}; use grpo or rloo, which read their sum"
        )
    episodes, groups = batch.episodes, batch.episode_groups
    penalty = batch.episode_kl
    if batch.overlong is not None:
        penalty = penalty + episodes.per_episode(batch.overlong)
    total = -normalize(penalty.double(), groups, None)
    for scores, weight in zip(episodes.per_episode(parts).double().unbind(-1), weights, strict=True):
        scored = ~scores.isnan()
        total[scored] += weight * normalize(scores[scored], groups[scored], groups[scored])
    sampled = episodes.sum_samples(batch.response_mask.sum(-1)) > 0
    return by_response(batch, lambda rewards, groups: whiten(total, sampled).to(rewards.dtype))
