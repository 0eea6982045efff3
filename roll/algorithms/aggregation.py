"""Masked sums and means, group statistics, and the aggregation of token losses into one number (`loss_agg_mode`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.registry import Registry

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

SAMPLE_WEIGHTS = "sample_weights"
"""Tensor [B] with the weight of each sample in means over samples; without it all are equal."""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` [B, T] is set, exactly 0 elsewhere (also where `values` is NaN or infinite).

    `values` are [B, T], or [B, 1] for all tokens of a sample.
    """
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def token_index(mask: Tensor) -> Tensor:
    """Positions [N] of the tokens of the mask [B, T] in a flattened tensor, for `select_tokens`."""
    return mask.flatten().nonzero().squeeze(-1)


def select_tokens(values: Tensor, index: Tensor) -> Tensor:
    """The values [N] of some tokens, from values [B, T] and the index of these tokens.

    Faster than `values[mask]`, forward and backward, and the index serves for several tensors.
    """
    return values.flatten().index_select(0, index)


def place_tokens(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of that shape with the values [N] at the index [N] of its flattened form, 0 elsewhere."""
    return values.new_zeros(math.prod(shape)).index_copy_(0, index, values).view(shape)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the tokens of the mask: over all of [B, T], or over `dim`."""
    kept = masked(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the tokens of the mask: over all of [B, T], or over `dim`; 0 where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def unit_mean(values: Tensor, mask: Tensor, units: Tensor) -> Tensor:
    """Mean over the tokens of the mask in the same row and unit, such as a turn: [B, T] from units [B, T] >= 0."""
    kept = masked(values, mask)
    sums = kept.new_zeros(kept.shape[0], int(units.max()) + 1 if units.numel() else 1)
    counts = sums.clone().scatter_add_(1, units, mask.to(kept.dtype))
    return (sums.scatter_add_(1, units, kept) / counts.clamp(min=1)).gather(1, units)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest value over the mask as a 0-d tensor; 0 if the mask is empty."""
    if not bool(mask.any()):
        return values.new_zeros(())
    return values.masked_fill(~mask.bool(), -torch.inf).max()


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / (std + EPSILON) over the values in the mask, 0 elsewhere; any shape.

    The standard deviation is unbiased. Fewer than two values, or values that are all equal, give 0.
    """
    index = token_index(mask)
    kept = select_tokens(values, index)
    if kept.numel() < 2 or bool(kept.max() == kept.min()):
        return torch.zeros_like(values)
    return place_tokens((kept - kept.mean()) / (kept.std() + EPSILON), index, values.shape)


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """Mean of each sample's group, [B], from values [B] and group numbers [B]."""
    size = int(groups.max()) + 1 if groups.numel() else 0
    sums = values.new_zeros(size).index_add_(0, groups, values)
    counts = values.new_zeros(size).index_add_(0, groups, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[groups]


def group_std(values: Tensor, groups: Tensor) -> Tensor:
    """Unbiased standard deviation of each sample's group, [B]; 0 for a group of one."""
    size = int(groups.max()) + 1
    apart = (values - group_mean(values, groups)).double()  # squares of the largest rewards are too large for float32
    squares = apart.new_zeros(size).index_add_(0, groups, apart**2)
    counts = apart.new_zeros(size).index_add_(0, groups, torch.ones_like(apart))
    return (squares / (counts - 1).clamp(min=1)).sqrt()[groups].to(values.dtype)


def constant_group(values: Tensor, groups: Tensor) -> Tensor:
    """Whether all values of a sample's group are exactly equal, [B] bool; true for a group of one."""
    size = int(groups.max()) + 1 if groups.numel() else 0
    highest = values.new_full((size,), -torch.inf).scatter_reduce_(0, groups, values, "amax")
    lowest = values.new_full((size,), torch.inf).scatter_reduce_(0, groups, values, "amin")
    return (highest == lowest)[groups]


def normalize(values: Tensor, mean_of: Tensor | None, std_of: Tensor | None, minimum_std: float = 0.0) -> Tensor:
    """(x - mean) / (std + EPSILON) of the values [n], exactly 0 where `zero_variance` holds.

    `mean_of` and `std_of` are the numbers [n] of the sets whose mean and unbiased standard deviation are taken; None
    leaves that out.
    """
    if not values.numel():
        return values
    result = values if mean_of is None else values - group_mean(values, mean_of)
    if std_of is not None:
        result = result / (group_std(values, std_of) + EPSILON)
    return torch.where(zero_variance(values, (mean_of, std_of), minimum_std), 0.0, result)


def zero_variance(values: Tensor, sets: Sequence[Tensor | None], minimum_std: float = 0.0) -> Tensor:
    """Where one of the sets of a value has equal values only, as one of a single value has, [n] bool.

    With `minimum_std` above 0, a standard deviation of at most that counts as well.
    """
    flat = torch.zeros_like(values, dtype=torch.bool)
    for numbers in sets:
        if numbers is not None:
            flat = flat | constant_group(values, numbers)
            if minimum_std > 0:
                flat = flat | (group_std(values, numbers) <= minimum_std)
    return flat


@dataclass(frozen=True)
class LossScale:
    """Counts over the global batch of one optimizer step: all micro-batches of all data-parallel ranks.

    Every term of the loss is divided by these counts, so the losses of the micro-batches sum to the loss of the batch
    for any split into micro-batches and ranks.

    Attributes:
        tokens: response tokens (N_tok).
        sequences: samples with at least one response token (N_seq).
        sequence_length: configured length, the divisor of `seq-mean-token-sum-norm`.
    """

    tokens: float
    sequences: float
    sequence_length: int

    @classmethod
    def of(cls, response_mask: Tensor, sequence_length: int) -> LossScale:
        """The counts of a whole global batch, from its response_mask [B, T]."""
        lengths = response_mask.sum(-1)
        return cls(float(lengths.sum()), float((lengths > 0).sum()), sequence_length)


LossAggregation = Callable[[Tensor, Tensor, LossScale], Tensor]
LOSS_AGG_MODES: Registry[LossAggregation] = Registry("loss_agg_mode")
"""f(values [b, T], mask [b, T], scale) -> 0-d. S_i = sum_t l_t and T_i is the token count of sample i, in the mask."""


@LOSS_AGG_MODES.register("token-mean")
def token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / N_tok: every token has the same weight (DAPO, arXiv 2503.14476)."""
    return masked_sum(values, mask) / max(scale.tokens, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-sum")
def seq_mean_token_sum(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / N_seq: long samples have more weight."""
    return masked_sum(values, mask) / max(scale.sequences, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-mean")
def seq_mean_token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i (S_i / T_i) / N_seq: every sample has the same weight (GRPO, arXiv 2402.03300)."""
    return masked_mean(values, mask, dim=-1).sum() / max(scale.sequences, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / (N_seq * sequence_length): a constant divisor for every batch (Dr. GRPO, arXiv 2503.20783)."""
    return masked_sum(values, mask) / (max(scale.sequences, 1.0) * scale.sequence_length)


def aggregate(values: Tensor, mask: Tensor, mode: str, scale: LossScale, weights: Tensor | None = None) -> Tensor:
    """The part of the batch's loss, 0-d, that the values [b, T] of a micro-batch contribute.

    In means over samples each counts with its weight of `weights` [b], whose mean over the batch is 1.
    """
    if weights is not None and mode.startswith("seq-mean"):
        values = values * weights[:, None].to(values.dtype)
    return LOSS_AGG_MODES[mode](values, mask, scale)


def mean_one(weights: Tensor, samples: Sequence[int], live: Tensor) -> Tensor:
    """Weights [B], whose mean over those of n `samples` that are `live` [n] is made 1."""
    kept = weights[list(samples)][live]
    return weights * (len(kept) / kept.sum()) if len(kept) else weights
