"""Which tokens clip_cov and kl_cov choose, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES, PolicyTokens
from roll.algorithms.policy_loss.covariance import token_covariances

CLIP = PolicySettings(pg_variant="clip_cov", clip_cov_ratio=0.25, clip_cov_lower=0.5, clip_cov_upper=5.0)
KL = PolicySettings(pg_variant="kl_cov", kl_cov_ratio=0.1, kl_cov_coef=2.0)


def batch(samples: int = 6, tokens: int = 40):
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(samples, tokens, generator=generator) * 4
    advantages = torch.randn(samples, tokens, generator=generator)
    mask = torch.arange(tokens) < torch.tensor([[40], [1], [0], [25], [33], [7]])
    return log_probs, advantages, mask


def test_their_mean_is_the_covariance_of_the_batch():
    log_probs, advantages, mask = batch()
    found = token_covariances(log_probs, advantages, mask)
    expected = torch.cov(torch.stack([log_probs[mask], advantages[mask]]).double(), correction=0)[0, 1]
    assert found[mask].mean() == pytest.approx(expected.item()) and (found[~mask] == 0).all()


def test_values_outside_the_mask_do_not_matter():
    log_probs, advantages, mask = batch()
    broken = [torch.where(mask, x, torch.nan) for x in (log_probs, advantages)]
    assert torch.equal(token_covariances(*broken, mask), token_covariances(log_probs, advantages, mask))


def test_kl_cov_takes_the_highest():
    log_probs, advantages, mask = batch()
    chosen = KL.chosen_tokens(log_probs, advantages, mask, seed=1)
    covariances = token_covariances(log_probs, advantages, mask)
    assert chosen.sum() == int(mask.sum() * 0.1) and not (chosen & ~mask).any()
    assert covariances[chosen].min() >= covariances[mask & ~chosen].max()


def test_clip_cov_draws_from_those_between_the_bounds():
    log_probs, advantages, mask = batch()
    covariances = token_covariances(log_probs, advantages, mask)
    inside = mask & (covariances >= 0.5) & (covariances <= 5.0)
    few = replace(CLIP, clip_cov_ratio=0.05)
    chosen = [few.chosen_tokens(log_probs, advantages, mask, seed) for seed in (1, 1, 2)]
    assert all(each.sum() == int(mask.sum() * 0.05) and not (each & ~inside).any() for each in chosen)
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])
    everything = replace(CLIP, clip_cov_ratio=1.0).chosen_tokens(log_probs, advantages, mask, seed=1)
    assert torch.equal(everything, inside)


def test_a_share_of_less_than_one_token_is_one_token_and_none_if_there_is_none():
    log_probs, advantages, mask = batch()
    for config in (replace(CLIP, clip_cov_ratio=1e-6), replace(KL, kl_cov_ratio=1e-6)):
        assert config.chosen_tokens(log_probs, advantages, mask, seed=1).sum() == 1
        assert config.chosen_tokens(log_probs, advantages, torch.zeros_like(mask), seed=1).sum() == 0
    none = replace(CLIP, clip_cov_lower=1e6, clip_cov_upper=1e7)
    assert none.chosen_tokens(log_probs, advantages, mask, seed=1).sum() == 0


def test_other_variants_choose_nothing_and_mixtures_do():
    arguments = batch()
    assert PolicySettings(pg_variant="ppo").chosen_tokens(*arguments, seed=1) is None
    mixed = replace(KL, pg_variant="0.5 ppo + 0.5 kl_cov")
    assert torch.equal(mixed.chosen_tokens(*arguments, seed=1), KL.chosen_tokens(*arguments, seed=1))


@pytest.mark.parametrize("config", [CLIP, KL])
def test_only_the_chosen_tokens_differ_from_the_plain_loss(config):
    log_probs, advantages, mask = batch()
    chosen = config.chosen_tokens(log_probs, advantages, mask, seed=1)
    moved = (log_probs + 0.05).requires_grad_()
    tokens = PolicyTokens(moved, log_probs, advantages, mask, high_covariance=chosen)
    terms, plain = (
        POLICY_LOSSES[config.pg_variant](each, config) for each in (tokens, replace(tokens, high_covariance=None))
    )
    (gradient,) = torch.autograd.grad(terms.loss[mask].sum(), moved, retain_graph=True)
    (expected,) = torch.autograd.grad(plain.loss[mask].sum(), moved)
    others = mask & ~chosen
    assert torch.equal(gradient[others], expected[others]) and torch.equal(terms.clipped & mask, chosen)
    if config is CLIP:
        assert (gradient[chosen] == 0).all()
    else:
        torch.testing.assert_close(gradient[chosen], expected[chosen] + 2.0)
        torch.testing.assert_close(terms.loss[chosen], plain.loss[chosen] + 2.0 * 0.05)
