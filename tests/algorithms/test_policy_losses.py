from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from roll.algorithms.policy_config import PolicyLossConfig
from roll.algorithms.policy_losses import PG_VARIANTS
from tests.algorithms.batches import random_batch

CONFIG = PolicyLossConfig(pg_clip_low=0.2, pg_clip_high=0.3)


def one_token(variant, ratio, advantage, config=CONFIG):
    """Loss, clipped flag and gradient with respect to log pi of a single token."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    base, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[True]])
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    terms = PG_VARIANTS[variant](log_probs, base, advantages, mask, None, config)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    return terms.loss.item(), terms.clipped.item(), gradient.item()


def test_vanilla_is_minus_advantage_times_log_prob():
    loss, clipped, gradient = one_token("vanilla", ratio=2.0, advantage=3.0)
    assert loss == pytest.approx(-3.0 * (math.log(2.0) - 1.0))
    assert gradient == pytest.approx(-3.0) and not clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.6, True),
        (0.5, 2.0, -1.0, False),
        (0.5, -2.0, 1.6, True),
        (1.5, -2.0, 3.0, False),
    ],
)
def test_ppo_closed_form(ratio, advantage, loss, clipped):
    got, was_clipped, gradient = one_token("ppo", ratio, advantage)
    assert got == pytest.approx(loss) and was_clipped == clipped
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    dual = replace(CONFIG, dual_clip_loss=True, dual_clip_c=3.0)
    assert one_token("ppo", 5.0, -2.0)[0] == pytest.approx(10.0)
    assert one_token("ppo", 5.0, -2.0, dual) == (pytest.approx(6.0), True, 0.0)
    assert one_token("ppo", 5.0, 2.0, dual)[0] == one_token("ppo", 5.0, 2.0)[0]


@pytest.mark.parametrize("variant", PG_VARIANTS)
@pytest.mark.parametrize("dual", [False, True])
def test_gradient_by_finite_differences(variant, dual):
    batch = random_batch(samples=3, tokens=5, seed=1)
    config = replace(CONFIG, dual_clip_loss=dual)

    def loss(log_probs):
        terms = PG_VARIANTS[variant](
            log_probs, batch["old_log_probs"], batch["advantages"], batch["response_mask"], batch["scores"], config
        )
        return terms.loss[batch["response_mask"]]

    assert torch.autograd.gradcheck(loss, (batch["log_probs"].requires_grad_(),))


def test_a_ratio_beyond_all_bounds_stays_finite():
    loss, _, gradient = one_token("ppo", math.exp(-90.0), -1.0)
    assert math.isfinite(loss) and math.isfinite(gradient)


@pytest.mark.parametrize(
    ("knob", "value"), [("pg_clip_low", 0.01), ("pg_clip_high", 0.01), ("dual_clip_loss", True), ("dual_clip_c", 1.1)]
)
def test_every_knob_of_ppo_turns_the_loss(knob, value):
    batch = random_batch(seed=2)
    config = replace(CONFIG, dual_clip_loss=knob == "dual_clip_c")

    def loss(settings):
        mask = batch["response_mask"]
        base = batch["old_log_probs"] + torch.tensor([-0.8, 0.8, 0.0]).repeat(3)
        terms = PG_VARIANTS["ppo"](batch["log_probs"], base, batch["advantages"], mask, None, settings)
        return terms.loss[mask].sum().item()

    if knob == "dual_clip_loss":
        config = replace(config, dual_clip_c=1.2)
    assert loss(config) != pytest.approx(loss(replace(config, **{knob: value})))
