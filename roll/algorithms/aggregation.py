"""Sums, means and deviations over the tokens of a mask, and over the samples of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.registry import Registry

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, so that a zero spread gives zero and not infinity."""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, T] where `mask` [B, T] is set and exact zeros elsewhere, whatever stood there (NaN included)."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the tokens of the mask; over all of [B, T], or over `dim`."""
    kept = masked(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the tokens of the mask, 0 where there are none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest value over the mask, as a 0-d tensor; 0 where there are no tokens."""
    if not bool(mask.any()):
        return values.new_zeros(())
    return values.masked_fill(~mask.bool(), -torch.inf).max()


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit variance over the tokens of the mask [..], zeros elsewhere.

    (x - mean) / (std + EPSILON) with the unbiased standard deviation. Fewer than two values, or a zero spread, give
    zeros: they tell nothing apart.
    """
    mask = mask.bool()
    kept = values[mask]
    if kept.numel() < 2 or bool(kept.max() == kept.min()):
        return torch.zeros_like(values)
    return masked((values - kept.mean()) / (kept.std() + EPSILON), mask)


def group_index(ids: list | tuple) -> Tensor:
    """Consecutive numbers [B] int64 for arbitrary hashable group ids, in order of first appearance."""
    numbers: dict = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in ids], dtype=torch.int64)


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """Mean of each sample's group, [B] from values [B] and group numbers [B]."""
    size = int(groups.max()) + 1
    sums = values.new_zeros(size).index_add_(0, groups, values)
    counts = values.new_zeros(size).index_add_(0, groups, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[groups]


def group_std(values: Tensor, groups: Tensor) -> Tensor:
    """Unbiased standard deviation of each sample's group [B]; 0 for a group of one."""
    size = int(groups.max()) + 1
    squares = values.new_zeros(size).index_add_(0, groups, (values - group_mean(values, groups)) ** 2)
    counts = values.new_zeros(size).index_add_(0, groups, torch.ones_like(values))
    return (squares / (counts - 1).clamp(min=1)).sqrt()[groups]


def zero_spread(values: Tensor, groups: Tensor) -> Tensor:
    """Whether all values of a sample's group are exactly equal, [B] bool; true for a group of one."""
    size = int(groups.max()) + 1
    highest = values.new_full((size,), -torch.inf).scatter_reduce_(0, groups, values, "amax")
    lowest = values.new_full((size,), torch.inf).scatter_reduce_(0, groups, values, "amin")
    return (highest == lowest)[groups]


def normalize(
    scores: Tensor, groups: Tensor, mean_type: str | None, std_type: str | None, least_std: float = 0.0
) -> Tensor:
    """(R - mean) / (std + EPSILON) [B], each over the batch, over the group, or not at all (None).

    Standard deviations are unbiased. Where the scores a mean or deviation is taken over are all equal (a group of one
    among them), or deviate by no more than `least_std`, the result is exactly 0: they tell nothing apart.
    """
    if not scores.numel():
        return scores
    result = scores
    if mean_type is not None:
        result = result - group_mean(scores, _population(groups, mean_type))
    if std_type is not None:
        result = result / deviation(scores, groups, std_type)
    return torch.where(tells_nothing(scores, groups, (mean_type, std_type), least_std), 0.0, result)


def deviation(scores: Tensor, groups: Tensor, std_type: str) -> Tensor:
    """What `normalize` divides by, std + EPSILON [B] over the batch or over the group."""
    return group_std(scores, _population(groups, std_type)) + EPSILON


def tells_nothing(
    scores: Tensor, groups: Tensor, types: tuple[str | None, str | None], least_std: float = 0.0
) -> Tensor:
    """Where `normalize` gives 0 because there is no spread, [B] bool."""
    flat = torch.zeros_like(groups, dtype=torch.bool)
    for kind in types:
        if kind is not None:
            population = _population(groups, kind)
            flat = flat | zero_spread(scores, population)
            if least_std > 0:
                flat = flat | (group_std(scores, population) <= least_std)
    return flat


def _population(groups: Tensor, kind: str) -> Tensor:
    return groups if kind == "group" else torch.zeros_like(groups)


@dataclass(frozen=True)
class LossScale:
    """Counts over the global batch of one optimizer step: all micro-batches of all data-parallel ranks.

    Because every term is divided by them, the sum of the losses of the micro-batches is the loss of the batch,
    however it was split.

    Attributes:
        tokens: response tokens (N_tok).
        sequences: samples with at least one response token (N_seq).
        sequence_length: the configured length that `seq-mean-token-sum-norm` divides by.
    """

    tokens: float
    sequences: float
    sequence_length: int

    @classmethod
    def of(cls, response_mask: Tensor, sequence_length: int) -> LossScale:
        """The counts of a whole global batch, from its response_mask [B, T]."""
        lengths = response_mask.sum(-1)
        return cls(float(lengths.sum()), float((lengths > 0).sum()), sequence_length)


Aggregation = Callable[[Tensor, Tensor, LossScale], Tensor]
LOSS_AGG_MODES: Registry[Aggregation] = Registry("loss_agg_mode")
"""S_i = sum_t l_t and T_i the token count of sample i, over its response mask."""


@LOSS_AGG_MODES.register("token-mean")
def token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / N_tok: every token of the batch weighs the same."""
    return masked_sum(values, mask) / max(scale.tokens, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-sum")
def seq_mean_token_sum(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / N_seq: a long sample weighs more."""
    return masked_sum(values, mask) / max(scale.sequences, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-mean")
def seq_mean_token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i (S_i / T_i) / N_seq: every sample weighs the same."""
    return masked_mean(values, mask, dim=-1).sum() / max(scale.sequences, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / (N_seq * sequence_length): a token weighs the same in every batch (Dr. GRPO, arXiv 2503.20783)."""
    return masked_sum(values, mask) / (max(scale.sequences, 1.0) * scale.sequence_length)


def aggregate(values: Tensor, mask: Tensor, mode: str, scale: LossScale) -> Tensor:
    """This micro-batch's share of the batch's loss.

    Args:
        values: [b, T] per token; what stands outside the mask has no influence.
        mask: [b, T] response mask.
        mode: a name of LOSS_AGG_MODES.
        scale: counts over the global batch.

    Returns:
        0-d tensor.
    """
    return LOSS_AGG_MODES[mode](values, mask, scale)
