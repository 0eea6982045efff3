from __future__ import annotations

import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossScale, aggregate

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
def test_closed_form(mode, expected):
    scale = LossScale.of(MASK, sequence_length=5)
    assert aggregate(VALUES, MASK, mode, scale).item() == pytest.approx(expected)


def test_samples_without_response_tokens_do_not_count():
    assert LossScale.of(MASK, 5) == LossScale(tokens=4.0, sequences=2.0, sequence_length=5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_empty_batch_aggregates_to_zero(mode):
    empty = torch.zeros_like(MASK)
    assert aggregate(VALUES, empty, mode, LossScale.of(empty, 5)).item() == 0.0
