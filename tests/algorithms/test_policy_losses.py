from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from roll.algorithms.options.policy_options import VARIANT_KEYS, PolicyOptions, PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES, PolicyTokens
from roll.base.schema import declared
from tests.algorithms.batches import random_batch

CONFIG = PolicySettings(pg_variant="ppo", pg_clip_low=0.2, pg_clip_high=0.3)


def one_token(variant, ratio, advantage, config=CONFIG):
    """Loss, clipped flag and gradient with respect to log pi of a single token."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    base, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[True]])
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    terms = POLICY_LOSSES[variant](PolicyTokens(log_probs, base, advantages, mask), config)
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


GSPO = replace(CONFIG, pg_variant="gspo", gspo_clip_low=0.2, gspo_clip_high=0.3)


def response(variant, log_ratios, advantage, config):
    """Losses, clipped flags and gradient of one response whose tokens are off from their base by `log_ratios`."""
    base = -torch.arange(1.0, 1.0 + len(log_ratios), dtype=torch.float64)[None]
    log_probs = (base + torch.tensor([log_ratios])).requires_grad_()
    mask = torch.ones_like(base, dtype=torch.bool)
    terms = POLICY_LOSSES[variant](
        PolicyTokens(log_probs, base, torch.full_like(base, advantage), mask, torch.ones(1)), config
    )
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    return terms.loss[0].tolist(), terms.clipped[0].tolist(), gradient[0].tolist()


def test_gspo_uses_the_mean_log_ratio_of_the_response():
    losses, clipped, gradient = response("gspo", [0.3, -0.1], 2.0, GSPO)
    ratio = math.exp(0.1)
    assert losses == pytest.approx([-2 * ratio] * 2) and clipped == [False, False]
    assert gradient == pytest.approx([-2 * ratio] * 2)


def test_gspo_clips_a_response_as_a_whole():
    losses, clipped, gradient = response("gspo", [1.0, 0.0], 2.0, GSPO)
    assert losses == pytest.approx([-2.6] * 2) and clipped == [True, True] and gradient == [0.0, 0.0]
    losses, clipped, gradient = response("gspo", [-1.0, 0.0], -2.0, GSPO)
    assert losses == pytest.approx([1.6] * 2) and clipped == [True, True] and gradient == [0.0, 0.0]
    assert response("gspo", [1.0, 0.0], -2.0, GSPO)[1] == [False, False]


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("log_ratio", [25.0, -25.0])
def test_a_response_beyond_the_clamp_of_the_ratio_has_no_gradient(log_ratio, advantage):
    assert response("gspo", [log_ratio, log_ratio], advantage, GSPO)[2] == [0.0, 0.0]


def test_gspo_of_one_token_is_ppo_with_other_bounds():
    for ratio in (0.5, 1.1, 1.5):
        for advantage in (-2.0, 2.0):
            assert one_token("gspo", ratio, advantage, GSPO) == pytest.approx(one_token("ppo", ratio, advantage))


def test_geo_mean_is_the_geometric_mean_of_bounded_ratios():
    losses, clipped, gradient = response("geo_mean", [0.2, 0.9, -0.9], 2.0, CONFIG)
    ratio = math.exp((0.2 + 0.4 - 0.9) / 3)
    assert losses == pytest.approx([-2 * ratio] * 3) and clipped == [False, True, False]
    assert gradient == pytest.approx([-2 * ratio, 0.0, -2 * ratio])
    losses, clipped, gradient = response("geo_mean", [0.2, 0.9, -0.9], -2.0, CONFIG)
    ratio = math.exp((0.2 + 0.9 - 0.4) / 3)
    assert losses == pytest.approx([2 * ratio] * 3) and clipped == [False, False, True]
    assert gradient == pytest.approx([2 * ratio, 2 * ratio, 0.0])


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo_is_a_sigmoid_of_the_ratio_with_a_tau_for_each_sign(advantage, tau):
    loss, _, gradient = one_token("sapo", 1.5, advantage)
    gate = 1 / (1 + math.exp(-0.5 * tau))
    assert loss == pytest.approx(-advantage * 4 / tau * gate)
    assert gradient == pytest.approx(-advantage * 4 * gate * (1 - gate) * 1.5)
    assert one_token("sapo", 1.0, advantage)[2] == pytest.approx(-advantage)


BASE = math.exp(-1.0)
"""Probability of the token of `one_token` under the base."""


@pytest.mark.parametrize(
    ("variant", "beyond", "within"),
    [("dppo_tv", 0.151, 0.149), ("dppo_kl", 0.160, 0.155)],
)
def test_dppo_drops_tokens_that_moved_too_far_away_and_keeps_those_on_the_way_back(variant, beyond, within):
    def moved(by, advantage):
        return one_token(variant, 1 + by / BASE, advantage)

    assert moved(beyond, 2.0)[1:] == (True, 0.0) and moved(beyond, -2.0)[1] is False
    assert moved(-beyond, -2.0)[1:] == (True, 0.0) and moved(-0.1, -2.0)[1] is False
    kept = moved(within, 2.0)
    assert kept[1:] == (False, pytest.approx(-2.0 * (1 + within / BASE)))
    assert kept[0] == pytest.approx(-2.0 * (1 + within / BASE))
    assert moved(-beyond, 2.0)[1] is False


def test_the_threshold_of_dppo_kl_is_in_nats_of_token_or_not():
    q, p = BASE, 1.4 * BASE
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    for threshold, dropped in ((divergence * 1.001, False), (divergence * 0.999, True)):
        assert one_token("dppo_kl", 1.4, 1.0, replace(CONFIG, dppo_kl_threshold=threshold))[1] is dropped


def test_decoupled_ppo_without_weights_is_ppo():
    for ratio in (0.5, 1.1, 1.5):
        assert one_token("decoupled_ppo", ratio, -2.0) == one_token("ppo", ratio, -2.0)


@pytest.mark.parametrize("variant", ["vanilla", "ppo", "decoupled_ppo", "kimi15", "sapo", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("dual", [False, True])
def test_gradient_by_finite_differences(variant, dual):
    batch = random_batch(samples=3, tokens=5, seed=1)
    config = replace(CONFIG, dual_clip_loss=dual)

    def loss(log_probs):
        names = ("old_log_probs", "advantages", "response_mask", "scores")
        terms = POLICY_LOSSES[variant](PolicyTokens(log_probs, *(batch[name] for name in names)), config)
        return terms.loss[batch["response_mask"]]

    assert torch.autograd.gradcheck(loss, (batch["log_probs"].requires_grad_(),))


def test_gspo_has_the_gradient_of_the_surrogate_with_a_constant_sequence_ratio():
    batch = random_batch(samples=3, tokens=5, seed=1)
    mask, frozen = batch["response_mask"], batch["log_probs"].detach().clone()
    off = torch.where(mask, frozen - batch["old_log_probs"], 0.0)
    sequence_ratio = (off.sum(-1) / mask.sum(-1)).exp()[:, None]

    def surrogate(log_probs):
        ratio = sequence_ratio * (log_probs - frozen).exp()
        free = -ratio * batch["advantages"]
        return torch.maximum(free, -ratio.clamp(0.8, 1.3) * batch["advantages"])[mask]

    log_probs = batch["log_probs"].requires_grad_()
    assert torch.autograd.gradcheck(surrogate, (log_probs,))
    terms = POLICY_LOSSES["gspo"](PolicyTokens(log_probs, batch["old_log_probs"], batch["advantages"], mask), GSPO)
    ours = torch.autograd.grad(terms.loss[mask].sum(), log_probs)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(surrogate(log_probs).sum(), log_probs)[0])


def test_a_very_small_ratio_gives_a_finite_loss():
    loss, _, gradient = one_token("ppo", math.exp(-90.0), -1.0)
    assert math.isfinite(loss) and math.isfinite(gradient)


@pytest.mark.parametrize("variant", POLICY_LOSSES)
@pytest.mark.parametrize("log_ratio", [-900.0, 900.0])
def test_every_variant_is_finite_for_extreme_log_ratios(variant, log_ratio):
    losses, _, gradient = response(variant, [log_ratio, 0.1], -1.0, CONFIG)
    assert all(map(math.isfinite, losses + gradient))


def changed(key: str) -> Any:
    """Another value of a key of PolicyOptions."""
    declared_key = declared(PolicyOptions)[key]
    default = declared_key.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return next(value for value in get_args(declared_key.hint) if value != default)
    return default / 2 if default else 0.9


@pytest.mark.parametrize("key", VARIANT_KEYS)
def test_every_key_changes_only_the_loss_of_its_variants(key):
    batch = random_batch(seed=2)
    mask, base = batch["response_mask"], batch["old_log_probs"] + torch.tensor([-0.8, 0.8, 0.0]).repeat(3)
    config = replace(CONFIG, dual_clip_loss=key == "dual_clip_c", dual_clip_c=1.2)
    config = replace(config, clip_cov_ratio=1.0, clip_cov_lower=-0.4, clip_cov_upper=0.4, kl_cov_ratio=0.2)

    def loss(name, settings):
        chosen = replace(settings, pg_variant=name).chosen_tokens(base, batch["advantages"], mask, seed=1)
        tokens = PolicyTokens(batch["log_probs"], base, batch["advantages"], mask, batch["scores"], chosen)
        terms = POLICY_LOSSES[name](tokens, settings)
        return terms.loss[mask].sum().item()

    for name in POLICY_LOSSES:
        moved = loss(name, config) != pytest.approx(loss(name, replace(config, **{key: changed(key)})))
        assert moved == (name in VARIANT_KEYS[key]), name


def gradients(base, seed=3):
    """Gradient of every variant with ratios against `base`, keys wide enough that few tokens are clipped."""
    batch = random_batch(seed=seed)
    mask, result = batch["response_mask"], {}
    wide = replace(CONFIG, clip_cov_ratio=0.2, clip_cov_lower=0.0)
    for name, variant in POLICY_LOSSES.items():
        log_probs, fresh = batch["log_probs"].clone().requires_grad_(), base == "log_probs"
        settings = replace(wide, pg_variant=name)
        chosen = None if fresh else settings.chosen_tokens(batch[base], batch["advantages"], mask, seed=1)
        tokens = PolicyTokens(log_probs, batch[base], batch["advantages"], mask, batch["scores"], chosen)
        terms = variant(tokens, settings)
        (result[name],) = torch.autograd.grad(terms.loss[mask].sum(), log_probs)
    return result


def test_on_stale_samples_no_two_variants_have_the_same_gradient():
    found = gradients("behavior_log_probs")
    names = [name for name in found if name != "decoupled_ppo"]
    for first in names:
        for second in names:
            assert first == second or not torch.allclose(found[first], found[second]), (first, second)


def test_with_the_current_policy_as_base_all_variants_have_the_same_gradient():
    for name, gradient in gradients("log_probs").items():
        torch.testing.assert_close(gradient, gradients("log_probs")["vanilla"], msg=name)
