"""pass@k: the best of k responses to a prompt counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll.algorithms.aggregation import EPSILON, constant_group, group_mean
from roll.algorithms.estimators.base import RewardBatch, by_response, estimator
from roll.algorithms.lazy_torch import Tensor, torch
from roll.base.errors import Finding, error
from roll.base.schema import option


@dataclass
class PassAtKOptions:
    """The key of pass@k."""

    pass_k: int = option(4, "k of pass@k: the best of k responses counts; below num_return_sequences_in_group.", ge=1)


def _check(options: PassAtKOptions, config: Any) -> Iterator[Finding]:
    group = config.num_return_sequences_in_group
    if 1 < group <= options.pass_k:
        yield error(
            "pass_k",
            f"{options.pass_k} of the {group} responses to a prompt: each set of that size is the whole group, so "
            f"every advantage is 0; use at most {group - 1}, or a larger group",
        )


@estimator("pass_at_k", options=PassAtKOptions, check=_check, in_group=True, per_response=True)
def pass_at_k(batch: RewardBatch, options: PassAtKOptions) -> tuple[Tensor, Tensor]:
    """A = (E[max | i] - E[max]) / std(max), over all sets of `pass_k` responses of the group, and all sets with i.

    Rewards the best of k tries instead of each. k = 1 is grpo with the biased std; a group smaller than k is taken
    whole. Source: Chen et al. 2025 (arXiv 2508.10751) section 3.3, here for any scores instead of 0 and 1.
    """
    return by_response(batch, lambda rewards, groups: best_of_k(rewards, groups, options.pass_k))


def best_of_k(rewards: Tensor, groups: Tensor, k: int) -> Tensor:
    """The advantages of `pass_at_k` [E], exactly, from R [E] and group numbers [E].

    With R ascending in a group of n, C(j-1, k-1) of its C(n, k) sets have R_j as their maximum, and of the
    C(n-1, k-1) sets with i, C(i-1, k-1) have R_i and C(j-2, k-2) have R_j for j > i.
    """
    order = torch.argsort(rewards, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    value, group = rewards[order].double(), groups[order]
    size = torch.bincount(group)
    first = (size.cumsum(0) - size)[group]
    count, rank = size[group].double(), (torch.arange(len(group), device=group.device) - first + 1).double()
    tries = count.clamp(max=k)
    is_max = _choose(rank - 1, tries - 1) / _choose(count, tries)
    mean = group_mean(count * is_max * value, group)
    std = group_mean(count * is_max * (value - mean) ** 2, group).sqrt()
    later = value * _choose(rank - 2, tries - 2)
    total = later.flip(0).cumsum(0).flip(0)
    after = torch.cat([total, total.new_zeros(1)])
    behind = after[1:] - after[first + size[group]]
    with_own = (value * _choose(rank - 1, tries - 1) + behind) / _choose(count - 1, tries - 1)
    flat = constant_group(rewards[order], group) | (std <= EPSILON)
    result = torch.where(flat, 0.0, (with_own - mean) / (std + EPSILON))
    return torch.empty_like(rewards).scatter_(0, order, result.to(rewards.dtype))


def _choose(n: Tensor, k: Tensor) -> Tensor:
    """Binomial coefficients C(n, k) in float64; 0 where k is negative or above n."""
    valid = (k >= 0) & (k <= n)
    safe_n, safe_k = torch.where(valid, n, 0.0), torch.where(valid, k, 0.0)
    log = torch.lgamma(safe_n + 1) - torch.lgamma(safe_k + 1) - torch.lgamma(safe_n - safe_k + 1)
    return torch.where(valid, log.exp(), 0.0)
