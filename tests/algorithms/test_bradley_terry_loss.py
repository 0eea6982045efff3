"""The loss of a reward model in closed form, by finite differences, and however the pairs are split."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.aggregation import LossScale
from roll.algorithms.losses import LOSSES
from roll.algorithms.options.preference_options import RewardModelOptions
from tests.algorithms.batches import PAIR_SPLITS, check_split, rows

PLAIN = RewardModelOptions()
CONFIGS = {"plain": PLAIN, "centered": RewardModelOptions(center_rewards_coefficient=0.1)}


def bradley_terry(batch, config=PLAIN, scale=None):
    values = batch["values"].clone().requires_grad_()
    scale = scale or LossScale.of(batch["response_mask"], 16)
    loss, metrics = LOSSES["bradley_terry"](values, None, batch, scale, config)
    loss.backward()
    return loss.item(), values.grad, {name: value.item() for name, value in metrics.items()}


def scored(rewards, lengths=None, width=6):
    """Rows with these rewards in the column of their length, and other values elsewhere."""
    lengths = lengths or [3] * len(rewards)
    values = torch.full((len(rewards), width), 9.0, dtype=torch.float64)
    mask = torch.zeros(values.shape, dtype=torch.bool)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        values[row, length], mask[row, length] = reward, True
    return {"values": values, "response_mask": mask}


def random_pairs(count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(2 * count, generator=generator, dtype=torch.float64).tolist()
    lengths = torch.randint(1, 6, (2 * count,), generator=generator).tolist()
    return scored(rewards, lengths)


def test_closed_form_of_one_pair():
    loss, _, metrics = bradley_terry(scored([0.7, -0.2]))
    assert loss == pytest.approx(math.log1p(math.exp(-0.9)))
    assert metrics == pytest.approx({"accuracy": 1.0, "margin": 0.9, "chosen_reward": 0.7, "rejected_reward": -0.2})


def test_centering_adds_the_squared_sum_of_the_rewards():
    loss, _, _ = bradley_terry(scored([0.7, -0.2]), CONFIGS["centered"])
    assert loss == pytest.approx(math.log1p(math.exp(-0.9)) + 0.1 * 0.5**2)
    off = RewardModelOptions(center_rewards_coefficient=0.0)
    assert bradley_terry(scored([0.7, -0.2]), off)[0] == pytest.approx(math.log1p(math.exp(-0.9)))


def test_equal_rewards_have_a_loss_of_log_2_and_are_pushed_apart():
    loss, gradient, metrics = bradley_terry(scored([0.0, 0.0], [3, 5]))
    assert loss == pytest.approx(math.log(2)) and metrics["accuracy"] == metrics["margin"] == 0
    assert gradient[0, 3].item() == pytest.approx(-0.5) and gradient[1, 5].item() == pytest.approx(0.5)
    assert gradient.abs().sum().item() == pytest.approx(1.0), "all other values have no gradient"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("split", PAIR_SPLITS)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_gradient_does_not_depend_on_how_the_pairs_are_split_or_padded(name, split, padding):
    batch, config = random_pairs(), CONFIGS[name]
    scale = LossScale.of(batch["response_mask"], 16)
    check_split(lambda part: bradley_terry(part, config, scale), batch, split, padding)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_by_finite_differences(name):
    batch = random_pairs(2)
    scale = LossScale.of(batch["response_mask"], 16)
    assert torch.autograd.gradcheck(
        lambda values: LOSSES["bradley_terry"](values, None, batch, scale, CONFIGS[name])[0],
        (batch["values"].requires_grad_(),),
    )


def test_a_number_added_to_all_rewards_changes_nothing_unless_they_are_centered():
    batch = random_pairs()
    moved = {**batch, "values": batch["values"] + 3.0}
    assert bradley_terry(moved)[0] == pytest.approx(bradley_terry(batch)[0])
    centered = CONFIGS["centered"]
    assert bradley_terry(moved, centered)[0] > bradley_terry(batch, centered)[0]


def test_a_row_without_a_partner_is_ignored():
    batch = random_pairs()
    three, two = rows(batch, [0, 1, 2]), rows(batch, [0, 1])
    scale = LossScale.of(two["response_mask"], 16)
    loss, gradient, _ = bradley_terry(three, PLAIN, scale)
    assert loss == pytest.approx(bradley_terry(two, PLAIN, scale)[0]) and (gradient[2] == 0).all()
