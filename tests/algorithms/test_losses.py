from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.losses import LOSSES, LossScale
from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.configs.pipeline import RLVRConfig
from tests.algorithms.batches import SPLITS, check_split, pad, random_batch

PPO = PolicySettings(pg_variant="ppo")
EVERYTHING = PolicySettings(pg_variant="ppo", entropy_loss_coef=0.01, use_kl_loss=True, kl_loss_coef=0.1)


def policy(batch, config, scale=None):
    log_probs = batch["log_probs"].clone().requires_grad_()
    entropy = batch["entropy"].clone().requires_grad_()
    scale = scale or LossScale.of(batch["response_mask"], 16)
    loss, metrics = LOSSES["policy"](log_probs, entropy, batch, scale, config)
    loss.backward()
    return loss.item(), log_probs.grad, entropy.grad, {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("variant", POLICY_LOSSES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_gradient_does_not_depend_on_how_the_batch_is_split_or_padded(variant, mode, split, padding):
    batch, config = random_batch(), replace(EVERYTHING, pg_variant=variant, loss_agg_mode=mode)
    scale = LossScale.of(batch["response_mask"], 16)
    check_split(lambda part: policy(part, config, scale), batch, split, padding)


def test_the_loss_is_the_sum_of_its_reported_parts():
    loss, _, _, metrics = policy(random_batch(), replace(EVERYTHING, loss_agg_mode="token-mean"))
    assert loss == pytest.approx(metrics["pg_loss"] + 0.1 * metrics["kl_loss"] - 0.01 * metrics["entropy"])


def test_on_policy_the_ratio_is_one_and_the_divergence_zero():
    batch = random_batch()
    _, _, _, metrics = policy(batch | {"log_probs": batch["old_log_probs"]}, EVERYTHING)
    assert metrics["ratio_deviation_max"] == metrics["log_ratio_abs_max"] == 0.0
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction"] == 0.0 and metrics["policy_kl"] == 0.0


def test_policy_gradient_by_finite_differences():
    batch = random_batch(samples=2, tokens=5)
    scale = LossScale.of(batch["response_mask"], 16)

    def loss(log_probs, entropy):
        return LOSSES["policy"](log_probs, entropy, batch, scale, EVERYTHING)[0]

    assert torch.autograd.gradcheck(loss, (batch["log_probs"].requires_grad_(), batch["entropy"].requires_grad_()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pg_variant", "vanilla"),
        ("loss_agg_mode", "token-mean"),
        ("entropy_loss_coef", 0.5),
        ("use_kl_loss", False),
        ("kl_loss_coef", 0.5),
        ("kl_loss_type", "k2"),
    ],
)
def test_every_key_changes_the_loss(key, value):
    batch = random_batch()
    assert policy(batch, EVERYTHING)[0] != pytest.approx(policy(batch, replace(EVERYTHING, **{key: value}))[0])


def test_entropy_is_optional_without_entropy_loss_coef():
    batch = random_batch()
    scale = LossScale.of(batch["response_mask"], 16)
    _, with_entropy = LOSSES["policy"](batch["log_probs"], batch["entropy"], batch, scale, PPO)
    _, without = LOSSES["policy"](batch["log_probs"], None, batch, scale, PPO)
    assert set(with_entropy) - set(without) == {"entropy"}
    with pytest.raises(ValueError, match="entropy_loss_coef: 0.01 needs the entropy"):
        LOSSES["policy"](batch["log_probs"], None, batch, scale, EVERYTHING)


def test_nan_outside_the_mask_changes_neither_loss_nor_gradient():
    batch = random_batch()
    padded = pad(batch, 3, fill=float("nan"))
    loss, gradient, _, _ = policy(padded, EVERYTHING)
    assert loss == pytest.approx(policy(batch, EVERYTHING)[0])
    assert torch.isfinite(gradient).all()


def test_the_ratio_is_taken_against_pg_ratio_base():
    batch = random_batch()
    unused = torch.full_like(batch["old_log_probs"], torch.nan)
    proximal = policy(batch | {"behavior_log_probs": unused}, EVERYTHING)
    behavior = policy(batch | {"old_log_probs": unused}, replace(EVERYTHING, pg_ratio_base="behavior"))
    assert proximal[0] != pytest.approx(behavior[0])
    swapped = batch | {"old_log_probs": batch["behavior_log_probs"]}
    assert policy(swapped, EVERYTHING)[0] == pytest.approx(behavior[0])


def test_the_distance_of_ratios_from_one_is_reported():
    batch = random_batch()
    mask = batch["response_mask"]
    off = (batch["log_probs"] - batch["old_log_probs"])[mask]
    _, _, _, metrics = policy(batch, EVERYTHING)
    assert metrics["log_ratio_abs_max"] == pytest.approx(off.abs().max().item())
    assert metrics["ratio_deviation_max"] == pytest.approx((off.exp() - 1).abs().max().item())


def test_sft_is_the_mean_negative_log_likelihood_of_the_answer():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    log_probs = torch.tensor([[-9.0, -1.0, -2.0], [-9.0, -9.0, -6.0]], requires_grad=True)
    loss, metrics = LOSSES["sft"](log_probs, -log_probs.detach(), {"response_mask": mask}, LossScale.of(mask, 3), None)
    loss.backward()
    assert loss.item() == pytest.approx(3.0) and metrics["entropy"].item() == pytest.approx(3.0)
    torch.testing.assert_close(log_probs.grad, -mask / 3)


def test_the_gradient_of_a_loss_that_was_computed_elsewhere_is_the_given_one_inside_the_mask():
    batch = random_batch(seed=2)
    mask, given = batch["response_mask"], torch.randn_like(batch["log_probs"])
    log_probs = batch["log_probs"].clone().requires_grad_()
    micro = {"response_mask": mask, "gradients": torch.where(mask.bool(), given, torch.nan)}
    loss, _ = LOSSES["gradient"](log_probs, None, micro, LossScale.of(mask, 8), None)
    loss.backward()
    assert torch.equal(log_probs.grad, torch.where(mask.bool(), given, 0.0))


def test_settings_come_from_the_configuration_and_can_be_pickled():
    config = RLVRConfig(pg_clip_low=0.1, kl_loss_coef=0.3)
    config.actor_train.pg_variant = "vanilla"
    assert RLVRConfig().policy == PPO
    settings = config.policy
    assert (settings.pg_variant, settings.pg_clip_low, settings.kl_loss_coef) == ("vanilla", 0.1, 0.3)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings == replace(PPO, pg_variant="vanilla", pg_clip_low=0.1, kl_loss_coef=0.3)
