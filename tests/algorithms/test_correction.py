from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.correction import diagnostics

MASK = torch.tensor([[0, 1, 1], [0, 1, 0]])
MU = torch.tensor([[-9.0, -1.0, -1.0], [-9.0, -1.0, -9.0]])


def shifted(*log_ratios: float) -> torch.Tensor:
    """Log p, off from MU by the given amounts on the three response tokens and by other amounts elsewhere."""
    log_probs = MU + 7.0
    log_probs[MASK.bool()] = MU[MASK.bool()] + torch.tensor(log_ratios)
    return log_probs


def test_equal_policies_have_weight_one_and_no_divergence():
    metrics = diagnostics(shifted(0, 0, 0), MU, MASK)
    ones = {"correction/ess", "correction/is_weight_mean", "correction/is_weight_max"}
    assert metrics == {name: 1.0 if name in ones else 0.0 for name in metrics}
    assert len(metrics) == 10


def test_closed_forms():
    logs = [math.log(2.0), 0.0, math.log(0.5)]
    metrics = diagnostics(shifted(*logs), MU, MASK)
    expected = {
        "correction/ess": 3.5**2 / (3 * 5.25),
        "correction/behavior_k1": 0.0,
        "correction/behavior_k3": 0.5 / 3,
        "correction/chi2_token": 5.25 / 3 - 1,
        "correction/chi2_sequence": (4 + 0.25) / 2 - 1,
        "correction/is_weight_mean": 3.5 / 3,
        "correction/is_weight_max": 2.0,
        "correction/masked_fraction": 0.0,
        "correction/log_prob_diff_max": math.log(2.0),
        "correction/log_ppl_diff": (-math.log(2.0) / 2 + math.log(2.0)) / 2,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_k1_has_the_sign_of_log_p_minus_log_mu():
    assert diagnostics(shifted(-0.1, -0.1, -0.1), MU, MASK)["correction/behavior_k1"] == pytest.approx(-0.1)


def test_given_weights_and_rejection_are_reported():
    kept = torch.tensor([[0, 1, 0], [0, 1, 0]])
    metrics = diagnostics(shifted(1, 0, 0), MU, MASK, weights=torch.full((2, 3), 0.5), kept_mask=kept)
    assert metrics["correction/ess"] == pytest.approx(1.0)
    assert metrics["correction/is_weight_mean"] == metrics["correction/is_weight_max"] == 0.5
    assert metrics["correction/masked_fraction"] == pytest.approx(1 / 3)


def test_a_very_unlikely_token_does_not_overflow():
    assert all(math.isfinite(value) for value in diagnostics(shifted(-900.0, 900.0, 0.0), MU, MASK).values())


def test_an_empty_batch_is_all_zeros():
    assert set(diagnostics(MU, MU, torch.zeros_like(MASK)).values()) == {0.0}
