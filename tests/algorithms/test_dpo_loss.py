"""The preference loss in closed form, by finite differences, and however the pairs are split."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from roll.algorithms.aggregation import LossScale
from roll.algorithms.losses import LOSSES, pair_kl
from roll.algorithms.options.preference_options import DPOOptions
from tests.algorithms.batches import PAIR_SPLITS, check_split, random_batch, rows

PLAIN = DPOOptions(beta=0.5)
CONFIGS = {
    "sigmoid": PLAIN,
    "smoothed": replace(PLAIN, label_smoothing=0.2),
    "hinge": replace(PLAIN, dpo_loss_type="hinge"),
    "ipo": replace(PLAIN, dpo_loss_type="ipo"),
    "kto_pair": replace(PLAIN, dpo_loss_type="kto_pair"),
    "kto_pair by token": replace(PLAIN, dpo_loss_type="kto_pair", length_normalized=True),
    "by token": replace(PLAIN, length_normalized=True),
    "with likelihood": replace(PLAIN, sft_loss_coef=0.3),
}


def with_pair_kl(batch, config):
    return batch | {"pair_kl": pair_kl(batch["log_probs"], batch, config)}


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def dpo(batch, config, scale=None):
    batch = batch if "pair_kl" in batch else with_pair_kl(batch, config)
    log_probs = batch["log_probs"].clone().requires_grad_()
    scale = scale or LossScale.of(batch["response_mask"], 16)
    loss, metrics = LOSSES["dpo"](log_probs, None, batch, scale, config)
    loss.backward()
    return loss.item(), log_probs.grad, {name: value.item() for name, value in metrics.items()}


def one_pair(better, worse):
    """A pair whose responses of two tokens gained this much in total, from a reference of -1 for each token."""
    gains = torch.tensor([[better], [worse]], dtype=torch.float64)
    ref = torch.full((2, 3), -1.0, dtype=torch.float64)
    mask = torch.tensor([[False, True, True]] * 2)
    return {"log_probs": ref + gains / 2, "ref_log_probs": ref, "response_mask": mask}


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("sigmoid", math.log1p(math.exp(-0.5 * 0.9))),
        ("smoothed", 0.8 * math.log1p(math.exp(-0.45)) + 0.2 * math.log1p(math.exp(0.45))),
        ("hinge", 1 - 0.45),
        ("ipo", (0.9 - 1.0) ** 2),
        ("kto_pair", 1 - (sigmoid(0.5 * 0.7) + sigmoid(0.5 * (0.7 + 0.2))) / 2),
        ("by token", math.log1p(math.exp(-0.5 * 0.45))),
        ("with likelihood", math.log1p(math.exp(-0.45)) - 0.3 * (-1 + 0.35)),
    ],
)
def test_closed_form_of_one_pair(name, loss):
    found, _, metrics = dpo(one_pair(0.7, -0.2), CONFIGS[name])
    assert found == pytest.approx(loss)
    unit = 0.5 if name == "by token" else 1.0
    assert metrics["margin"] == pytest.approx(0.5 * 0.9 * unit) and metrics["accuracy"] == 1
    assert metrics["chosen_reward"] == pytest.approx(0.35 * unit)
    assert metrics["rejected_reward"] == pytest.approx(-0.1 * unit)


def test_at_the_reference_the_loss_is_log_2_and_pushes_the_responses_apart():
    loss, gradient, metrics = dpo(one_pair(0.0, 0.0), PLAIN)
    assert loss == pytest.approx(math.log(2)) and metrics["accuracy"] == metrics["margin"] == 0
    assert gradient[0, 1:].tolist() == pytest.approx([-0.25] * 2)
    assert gradient[1, 1:].tolist() == pytest.approx([0.25] * 2)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("split", PAIR_SPLITS)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_gradient_does_not_depend_on_how_the_pairs_are_split_or_padded(name, split, padding):
    config = CONFIGS[name]
    batch = with_pair_kl(random_batch(), config)
    scale = LossScale.of(batch["response_mask"], 16)
    check_split(lambda part: dpo(part, config, scale), batch, split, padding)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_by_finite_differences(name):
    batch = with_pair_kl(random_batch(samples=4, tokens=5), CONFIGS[name])
    scale = LossScale.of(batch["response_mask"], 16)
    assert torch.autograd.gradcheck(
        lambda log_probs: LOSSES["dpo"](log_probs, None, batch, scale, CONFIGS[name])[0],
        (batch["log_probs"].requires_grad_(),),
    )


def test_a_row_without_a_partner_is_ignored():
    batch = random_batch(samples=3)
    scale = LossScale.of(batch["response_mask"][:2], 16)
    loss, gradient, _ = dpo(batch, PLAIN, scale)
    assert loss == pytest.approx(dpo(rows(batch, [0, 1]), PLAIN, scale)[0]) and (gradient[2] == 0).all()
    alone, gradient, _ = dpo(rows(batch, [0]), PLAIN, scale)
    assert alone == 0 and (gradient == 0).all()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "sigmoid"])
def test_every_setting_changes_the_loss(name):
    batch = random_batch()
    assert dpo(batch, CONFIGS[name])[0] != pytest.approx(dpo(batch, PLAIN)[0])
    assert dpo(batch, replace(CONFIGS[name], beta=0.1))[0] != pytest.approx(dpo(batch, CONFIGS[name])[0])


def test_kto_pair_compares_with_the_mean_gain_of_the_other_responses_of_the_step():
    """As TRL computed it: means of the chosen and of the rejected log ratios, at least 0, each used for the other."""
    batch = random_batch()
    gains = ((batch["log_probs"] - batch["ref_log_probs"]) * batch["response_mask"]).sum(-1)
    gains[1::2] += 1.0 - gains[1::2].mean()  # so that one mean is above 0 and the other is not
    gains[0::2] -= 0.5 + gains[0::2].mean()
    lengths = batch["response_mask"].sum(-1, keepdim=True)
    batch["log_probs"] = batch["ref_log_probs"] + gains[:, None] / lengths
    chosen_kl, rejected_kl = gains[0::2].mean().clamp(min=0), gains[1::2].mean().clamp(min=0)
    assert chosen_kl == 0 and rejected_kl == pytest.approx(1.0)
    losses = [
        1 - torch.sigmoid(0.5 * (gains[0::2] - rejected_kl)),
        1 - torch.sigmoid(0.5 * (chosen_kl - gains[1::2])),
    ]
    config = CONFIGS["kto_pair"]
    assert dpo(batch, config)[0] == pytest.approx(torch.cat(losses).mean().item())
    assert not pair_kl(batch["log_probs"].requires_grad_(), batch, config).requires_grad


def test_kto_pair_without_the_means_of_its_step_is_refused():
    with pytest.raises(KeyError, match="pair_kl"):
        LOSSES["dpo"](random_batch()["log_probs"], None, random_batch(), LossScale(1, 8, 16), CONFIGS["kto_pair"])
