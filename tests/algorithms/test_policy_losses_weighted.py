"""Variants with a detached weight: closed forms, and the gradient of the equivalent surrogate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES, PolicyTokens
from tests.algorithms.batches import random_batch

CONFIG = PolicySettings(pg_variant="tis", tis_lower_bound=0.5, tis_upper_bound=2.0)
UNIFIED = replace(CONFIG, cispo_use_unified_mask=True)
RATIOS = st.floats(1e-3, 1e3)
ADVANTAGES = st.floats(-3, 3)


def one_token(variant, ratio, advantage, config=CONFIG, score=1.0):
    """Loss, clipped flag and gradient with respect to log pi of a single token whose log-prob is log(ratio) - 1."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    base, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[True]])
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    terms = POLICY_LOSSES[variant](PolicyTokens(log_probs, base, advantages, mask, torch.tensor([score])), config)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    return terms.loss.item(), terms.clipped.item(), gradient.item()


@settings(deadline=None, max_examples=50)
@given(RATIOS, ADVANTAGES)
def test_tis_weights_by_the_clipped_ratio(ratio, advantage):
    weight = min(max(ratio, 0.5), 2.0)
    loss, clipped, gradient = one_token("tis", ratio, advantage)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 1), abs=1e-9)
    assert gradient == pytest.approx(-weight * advantage)
    assert clipped == (not 0.5 <= ratio <= 2.0) or ratio == pytest.approx(weight)


@settings(deadline=None, max_examples=50)
@given(RATIOS, ADVANTAGES, st.sampled_from([1.0, 0.0, -1.0]))
def test_topr_reduces_the_weight_only_of_responses_without_a_score(ratio, advantage, score):
    config = replace(CONFIG, topr_positive_weight=0.7, topr_negative_weight=0.4)
    weight = 0.7 if score > 0 else 0.4 * min(ratio, 1.0)
    loss, clipped, gradient = one_token("topr", ratio, advantage, config, score)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 1), abs=1e-9)
    assert gradient == pytest.approx(-weight * advantage)
    assert not clipped or score <= 0


@settings(deadline=None, max_examples=50)
@given(RATIOS, ADVANTAGES)
def test_cispo_clips_the_weight_and_not_the_gradient(ratio, advantage):
    loss, _, gradient = one_token("cispo", ratio, advantage)
    weight = min(max(ratio, 0.9), 1.1)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 1), abs=1e-9)
    assert gradient == pytest.approx(-weight * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.5, 2.0, 0.0), (1.5, -2.0, 1.1), (0.5, -2.0, 0.0), (0.5, 2.0, 0.9), (1.05, 2.0, 1.05), (1.5, 0.0, 1.1)],
)
def test_the_unified_mask_drops_what_ppo_would_clip(ratio, advantage, weight):
    loss, clipped, gradient = one_token("cispo", ratio, advantage, UNIFIED)
    assert gradient == pytest.approx(-weight * advantage) and clipped == (ratio != 1.05)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 1))


def test_a_wide_epsilon_leaves_the_weight_of_cispo_unbounded_below():
    assert one_token("cispo", 1e-3, 2.0, replace(CONFIG, cispo_epsilon_low=1.0))[2] == pytest.approx(-2e-3)


@settings(deadline=None, max_examples=50)
@given(RATIOS, ADVANTAGES)
def test_kimi15_penalizes_the_squared_log_ratio(ratio, advantage):
    loss, clipped, gradient = one_token("kimi15", ratio, advantage, replace(CONFIG, kimi15_tau=0.3))
    log_ratio = math.log(ratio)
    assert loss == pytest.approx(-advantage * (log_ratio - 1) + 0.15 * log_ratio**2, abs=1e-9)
    assert gradient == pytest.approx(-advantage + 0.3 * log_ratio, abs=1e-9) and not clipped


def test_topr_at_sequence_level_uses_the_product_of_token_ratios():
    base = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -2.0, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    off = torch.tensor([[-0.2, -0.3, 5.0], [0.4, 0.1, 0.2]])
    config = replace(CONFIG, topr_level="sequence")
    terms = POLICY_LOSSES["topr"](PolicyTokens(base + off, base, torch.ones_like(base), mask, torch.zeros(2)), config)
    assert terms.ratio[0].tolist() == pytest.approx([math.exp(-0.5), math.exp(-0.5), 1.0])
    assert terms.ratio[1].tolist() == pytest.approx([math.exp(0.7)] * 3)
    assert (terms.loss / -(base + off))[0, :2].tolist() == pytest.approx([math.exp(-0.5)] * 2)
    assert (terms.loss / -(base + off))[1].tolist() == pytest.approx([1.0] * 3)
    assert terms.clipped.tolist() == [[False] * 3, [True] * 3]


def test_topr_needs_scores():
    with pytest.raises(ValueError, match="topr needs the raw scores"):
        one = torch.zeros(1, 1)
        POLICY_LOSSES["topr"](PolicyTokens(one, one, one, one.bool()), CONFIG)


@pytest.mark.parametrize("variant", ["tis", "topr", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_is_that_of_the_surrogate_with_constant_weights(variant, level):
    batch = random_batch(samples=4, tokens=6, seed=1)
    mask, log_probs = batch["response_mask"], batch["log_probs"].requires_grad_()
    arguments = (batch["old_log_probs"], batch["advantages"], mask, batch["scores"])
    terms = POLICY_LOSSES[variant](PolicyTokens(log_probs, *arguments), replace(UNIFIED, topr_level=level))
    weights = torch.nan_to_num(terms.loss / (-batch["advantages"] * log_probs)).detach()

    def surrogate(x):
        return (-weights * batch["advantages"] * x)[mask]

    assert torch.autograd.gradcheck(surrogate, (log_probs,))
    ours = torch.autograd.grad(terms.loss[mask].sum(), log_probs)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(surrogate(log_probs).sum(), log_probs)[0])
