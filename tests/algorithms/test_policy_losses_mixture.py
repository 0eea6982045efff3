"""Several policy losses in one: their weighted sum, and what the configuration makes of it."""

from __future__ import annotations

import pytest
import torch

from roll.algorithms.losses import LOSSES, LossScale
from roll.algorithms.options.policy_options import PolicySettings, losses_of, parse_pg_variant, traits_of
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.configs.pipeline import RLVRConfig
from tests.algorithms.batches import random_batch


def gradient(batch, variant):
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, metrics = LOSSES["policy"](
        log_probs, None, batch, LossScale.of(batch["response_mask"], 16), PolicySettings(pg_variant=variant)
    )
    loss.backward()
    return loss.item(), log_probs.grad, metrics


@pytest.mark.parametrize("other", [name for name in POLICY_LOSSES if name != "ppo"])
def test_a_mixture_is_the_weighted_sum_of_its_losses(other):
    batch = random_batch()
    mixed = gradient(batch, f"0.75 ppo + 0.5 {other}")
    one, two = gradient(batch, "ppo"), gradient(batch, other)
    assert mixed[0] == pytest.approx(0.75 * one[0] + 0.5 * two[0])
    torch.testing.assert_close(mixed[1], 0.75 * one[1] + 0.5 * two[1])
    assert mixed[2]["ratio_mean"] == one[2]["ratio_mean"]
    assert mixed[2]["clip_fraction"] >= max(one[2]["clip_fraction"], two[2]["clip_fraction"])


def test_the_ratio_shown_is_that_of_a_loss_that_reads_one():
    batch = random_batch()
    shown = gradient(batch, "1 vanilla + 1 gspo")[2]["ratio_mean"]
    assert shown == gradient(batch, "gspo")[2]["ratio_mean"]


@pytest.mark.parametrize("value", [{"ppo": 0.5, "topr": 2}, "0.5 ppo + 2 topr", " 0.50 ppo+2.0 topr "])
def test_a_mixture_has_one_text(value):
    assert parse_pg_variant(value) == "0.5 ppo + 2 topr"
    assert losses_of("0.5 ppo + 2 topr") == {"ppo": 0.5, "topr": 2.0}


@pytest.mark.parametrize("weight", [1 / 3, 1e-6, 1e6, 123456.78901, 0.1 + 0.2])
def test_weights_keep_their_exact_value(weight):
    text = parse_pg_variant({"ppo": weight, "topr": 1})
    assert losses_of(text) == {"ppo": weight, "topr": 1.0} and parse_pg_variant(text) == text


def test_a_single_name_is_no_mixture():
    assert parse_pg_variant("decoupled_ppo") == "decoupled_ppo"
    assert losses_of("decoupled_ppo") == {"decoupled_ppo": 1.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"ppo": 0}, "weight 0 of ppo is not a number from 1e-6 to 1e6"),
        ({"ppo": 1e300}, "weight 1e\\+300 of ppo is not a number from 1e-6 to 1e6"),
        ({"ppo": True}, "weight True of ppo"),
        ({"ppo": "half"}, "weight 'half' of ppo"),
        ({}, "has no loss"),
        (["ppo"], "is not the name of a loss"),
        ("1x ppo + 1 topr", "could not convert"),
        ("0.5 ppo + 0.5 ppo", "has a loss twice"),
    ],
)
def test_what_is_no_mixture_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        parse_pg_variant(value)


def test_the_traits_of_a_mixture_are_those_that_keep_it_safe():
    assert traits_of("0.5 ppo + 0.5 topr").ratio_base == "behavior"
    assert traits_of("0.5 ppo + 0.5 gspo").ratio_base == "auto"
    assert not traits_of("0.5 ppo + 0.5 vanilla").reads_ratio
    assert traits_of("0.5 ppo + 0.5 kimi15").multiplies_ratio
    assert traits_of("1 vanilla + 1 decoupled_ppo").needs_weights


def test_a_mixture_takes_the_sampling_policy_as_base_if_one_loss_needs_it():
    config = RLVRConfig()
    config.actor_train.pg_variant = "0.5 ppo + 0.5 topr"
    assert config.policy.base_key == "behavior_log_probs"
