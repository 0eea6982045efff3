"""Masked sums and means, group statistics, and the aggregation of token losses."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.aggregation import (
    LOSS_AGG_MODES,
    LossScale,
    aggregate,
    constant_group,
    group_mean,
    group_std,
    masked_max,
    masked_mean,
    whiten,
)

ROWS = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 5.0]])
ROW_MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_values_outside_the_mask_are_ignored():
    assert masked_mean(ROWS, ROW_MASK) == 3.0
    assert masked_mean(ROWS, ROW_MASK, dim=-1).tolist() == [1.5, 4.5]
    assert masked_max(ROWS, ROW_MASK) == 5.0


def test_an_empty_mask_gives_zero():
    empty = torch.zeros_like(ROW_MASK)
    assert masked_mean(ROWS, empty) == 0.0
    assert masked_max(ROWS, empty) == 0.0


def test_whitened_values_have_mean_zero_and_variance_one():
    values, mask = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6) < 0.7
    kept = whiten(values, mask)[mask]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert kept.std().item() == pytest.approx(1.0, abs=1e-5)


def test_whitening_equal_values_gives_zeros():
    assert whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)).abs().max() == 0


def test_groups_need_not_be_consecutive():
    groups = torch.tensor([0, 1, 0, 1, 2])
    values = torch.tensor([1.0, 10.0, 3.0, 10.0, 7.0])
    assert group_mean(values, groups).tolist() == [2.0, 10.0, 2.0, 10.0, 7.0]
    assert group_std(values, groups).tolist() == pytest.approx([math.sqrt(2), 0, math.sqrt(2), 0, 0])
    assert constant_group(values, groups).tolist() == [False, True, False, True, True]


VALUES = torch.tensor([[1.0, 2.0, 3.0, 99.0], [10.0, 99.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-sum", 16 / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", 16 / (2 * 5)),
    ],
)
def test_aggregation_in_closed_form(mode, expected):
    scale = LossScale.of(MASK, sequence_length=5)
    assert aggregate(VALUES, MASK, mode, scale).item() == pytest.approx(expected)


def test_samples_without_response_tokens_do_not_count():
    assert LossScale.of(MASK, 5) == LossScale(tokens=4.0, sequences=2.0, sequence_length=5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_empty_batch_aggregates_to_zero(mode):
    empty = torch.zeros_like(MASK)
    assert aggregate(VALUES, empty, mode, LossScale.of(empty, 5)).item() == 0.0


def test_the_deviation_of_the_largest_rewards_is_finite():
    values = torch.tensor([1e18, -1e18] * 512)
    deviation = group_std(values, torch.zeros(1024, dtype=torch.long))
    assert deviation.dtype == torch.float32 and deviation[0].item() == pytest.approx(1e18, rel=1e-3)
