from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.aggregation import (
    constant_group,
    group_index,
    group_mean,
    group_std,
    masked_max,
    masked_mean,
    whiten,
)

VALUES = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 5.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_what_stands_outside_the_mask_has_no_influence():
    assert masked_mean(VALUES, MASK) == 3.0
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [1.5, 4.5]
    assert masked_max(VALUES, MASK) == 5.0


def test_an_empty_mask_gives_zero():
    empty = torch.zeros_like(MASK)
    assert masked_mean(VALUES, empty) == 0.0
    assert masked_max(VALUES, empty) == 0.0


def test_whitened_values_have_mean_zero_and_variance_one():
    values, mask = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6) < 0.7
    kept = whiten(values, mask)[mask]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert kept.std().item() == pytest.approx(1.0, abs=1e-5)


def test_whitening_equal_values_gives_zeros_not_noise():
    assert whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)).abs().max() == 0


def test_groups_need_not_be_consecutive():
    groups = group_index(["b", "a", "b", "a", "c"])
    values = torch.tensor([1.0, 10.0, 3.0, 10.0, 7.0])
    assert groups.tolist() == [0, 1, 0, 1, 2]
    assert group_mean(values, groups).tolist() == [2.0, 10.0, 2.0, 10.0, 7.0]
    assert group_std(values, groups).tolist() == pytest.approx([math.sqrt(2), 0, math.sqrt(2), 0, 0])
    assert constant_group(values, groups).tolist() == [False, True, False, True, True]
