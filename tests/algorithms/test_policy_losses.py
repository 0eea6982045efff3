"""Which tokens a policy loss bounds and which keys it reads; test_losses_by_loops.py has values and gradients."""

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


def one_token(variant, ratio, advantage, config=CONFIG, score=1.0):
    """Loss, clipped flag and gradient with respect to log pi of a single token."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    base, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[True]])
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    terms = POLICY_LOSSES[variant](PolicyTokens(log_probs, base, advantages, mask, torch.tensor([score])), config)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    return terms.loss.item(), terms.clipped.item(), gradient.item()


DUAL = {"dual_clip_loss": True, "dual_clip_c": 3.0}
TIS = {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0}
UNIFIED = {"cispo_use_unified_mask": True}


@pytest.mark.parametrize(
    ("variant", "keys", "ratio", "advantage", "score", "clipped"),
    [
        ("vanilla", {}, 2.0, 3.0, 1, False),
        ("ppo", {}, 1.1, 2.0, 1, False),
        ("ppo", {}, 1.5, 2.0, 1, True),
        ("ppo", {}, 0.5, 2.0, 1, False),
        ("ppo", {}, 0.5, -2.0, 1, True),
        ("ppo", {}, 1.5, -2.0, 1, False),
        ("ppo", DUAL, 5.0, -2.0, 1, True),
        ("decoupled_ppo", {}, 0.5, -2.0, 1, True),
        ("tis", TIS, 0.4, 2.0, 1, True),
        ("tis", TIS, 1.5, 2.0, 1, False),
        ("tis", TIS, 2.5, 2.0, 1, True),
        ("topr", {}, 2.5, 2.0, 1, False),
        ("topr", {}, 2.5, 2.0, -1, True),
        ("topr", {}, 0.5, 2.0, -1, False),
        ("cispo", UNIFIED, 1.5, 2.0, 1, True),
        ("cispo", UNIFIED, 0.5, 2.0, 1, True),
        ("cispo", UNIFIED, 1.05, 2.0, 1, False),
        ("kimi15", {}, 2.5, 2.0, 1, False),
    ],
)
def test_tokens_whose_ratio_is_bounded_are_marked(variant, keys, ratio, advantage, score, clipped):
    assert one_token(variant, ratio, advantage, replace(CONFIG, **keys), float(score))[1] is clipped


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


def test_gspo_clips_a_response_as_a_whole_and_geo_mean_token_by_token():
    assert response("gspo", [0.3, -0.1], 2.0, GSPO)[1] == [False, False]
    for log_ratio, advantage in ((1.0, 2.0), (-1.0, -2.0)):
        _, clipped, gradient = response("gspo", [log_ratio, 0.0], advantage, GSPO)
        assert clipped == [True, True] and gradient == [0.0, 0.0]
        assert response("gspo", [log_ratio, 0.0], -advantage, GSPO)[1] == [False, False]
    assert response("geo_mean", [0.2, 0.9, -0.9], 2.0, CONFIG)[1] == [False, True, False]
    assert response("geo_mean", [0.2, 0.9, -0.9], -2.0, CONFIG)[1] == [False, False, True]


def test_topr_at_sequence_level_marks_whole_responses():
    base = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -2.0, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    off = torch.tensor([[-0.2, -0.3, 5.0], [0.4, 0.1, 0.2]])
    config = replace(CONFIG, topr_level="sequence")
    terms = POLICY_LOSSES["topr"](PolicyTokens(base + off, base, torch.ones_like(base), mask, torch.zeros(2)), config)
    assert terms.ratio[0].tolist() == pytest.approx([math.exp(-0.5), math.exp(-0.5), 1.0])
    assert terms.ratio[1].tolist() == pytest.approx([math.exp(0.7)] * 3)
    assert terms.clipped.tolist() == [[False] * 3, [True] * 3]


def test_topr_needs_scores():
    with pytest.raises(ValueError, match="topr needs the raw scores"):
        one = torch.zeros(1, 1)
        POLICY_LOSSES["topr"](PolicyTokens(one, one, one, one.bool()), CONFIG)


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("log_ratio", [25.0, -25.0])
def test_a_response_beyond_the_clamp_of_the_ratio_has_no_gradient(log_ratio, advantage):
    assert response("gspo", [log_ratio, log_ratio], advantage, GSPO)[2] == [0.0, 0.0]


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


@pytest.mark.parametrize("variant", POLICY_LOSSES)
@pytest.mark.parametrize("log_ratio", [-900.0, -90.0, 900.0])
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
