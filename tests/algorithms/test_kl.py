from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.kl import (
    KL_CLAMP,
    KL_ESTIMATORS,
    KLController,
    kl_divergence,
)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5), ("abs", 0.5)],
)
def test_closed_form(estimator, expected):
    assert kl_divergence(torch.tensor(-1.0), torch.tensor(-1.5), estimator).item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_samples_of_the_policy_is_the_divergence(estimator):
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (policy * (policy / reference).log()).sum()
    mean = (policy * kl_divergence(policy.log(), reference.log(), estimator)).sum()
    assert mean.item() == pytest.approx(exact.item())


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradient_by_finite_differences(estimator):
    log_probs = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.4], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_divergence(x, reference, estimator), (log_probs,))


def test_k3_is_bounded_and_has_a_finite_gradient_for_any_log_ratio():
    log_probs = torch.tensor([-500.0, 0.0], requires_grad=True)
    divergence = kl_divergence(log_probs, torch.tensor([0.0, -500.0]), "k3")
    divergence.sum().backward()
    assert divergence.abs().max().item() == KL_CLAMP
    assert torch.isfinite(log_probs.grad).all()


def test_without_a_target_the_coefficient_is_constant():
    controller = KLController(0.2)
    controller.update(kl=5.0, samples=100)
    assert controller.coefficient == 0.2


@pytest.mark.parametrize(("kl", "factor"), [(0.11, 1.01), (0.5, 1.02), (0.09, 0.99), (0.0, 0.98), (-1.0, 0.98)])
def test_an_adaptive_controller_moves_towards_its_target(kl, factor):
    controller = KLController(0.2, target=0.1, horizon=1000)
    controller.update(kl=kl, samples=100)
    assert controller.coefficient == pytest.approx(0.2 * factor)


def test_a_batch_larger_than_the_horizon_does_not_turn_the_coefficient_negative():
    controller = KLController(0.2, target=0.1, horizon=10)
    controller.update(kl=0.0, samples=100)
    assert controller.coefficient == 0.0
