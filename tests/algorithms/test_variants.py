"""What is declared of every `pg_variant` is true of its formula."""

from __future__ import annotations

import pytest
import torch

from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES, PolicyTokens


def gradient(variant: str, log_ratio: float) -> float:
    """D loss / d log pi of one token over -A, for an A so large that terms without A vanish, and a score below 0."""
    log_probs = torch.full((1, 1), log_ratio - 1.0, dtype=torch.float64, requires_grad=True)
    base, advantage = torch.full((1, 1), -1.0, dtype=torch.float64), 1e9
    mask = torch.ones_like(base, dtype=torch.bool)
    tokens = PolicyTokens(log_probs, base, torch.full_like(base, advantage), mask, torch.tensor([-1.0]))
    terms = POLICY_LOSSES[variant](tokens, PolicySettings(pg_variant=variant))
    (slope,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    return slope.item() / -advantage


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_no_weight_can_count_a_ratio_twice(variant: str) -> None:
    multiplies = gradient(variant, -0.05) == pytest.approx(2.718281828**-0.05, rel=1e-3)
    assert POLICY_LOSSES[variant].multiplies_ratio == multiplies, (
        f"the gradient of {variant} is {'' if multiplies else 'not '}a multiple of its ratio, so multiplies_ratio must "
        f"be {multiplies}; otherwise correction.weights with a ratio against the sampling policy corrects twice, or is "
        "refused for nothing"
    )


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_a_variant_that_corrects_nothing_is_known_as_one(variant: str) -> None:
    def loss(base: float) -> float:
        one = torch.ones(1, 2, dtype=torch.float64)
        tokens = PolicyTokens(-one, base * one, one, one.bool(), torch.tensor([-1.0]))
        return POLICY_LOSSES[variant](tokens, PolicySettings(pg_variant=variant)).loss.sum().item()

    reads = loss(-1.1) != loss(-0.8)
    assert POLICY_LOSSES[variant].reads_ratio == reads, (
        f"the loss of {variant} {'depends' if reads else 'does not depend'} on its ratio, so reads_ratio must be "
        f"{reads}; otherwise stale samples are trained on uncorrected without a word"
    )
