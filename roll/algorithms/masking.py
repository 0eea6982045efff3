"""Sums, means and deviations over the tokens of a mask, and over the samples of a group."""

from __future__ import annotations

import torch
from torch import Tensor

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
