"""The loss of a critic in closed form, by finite differences, and however the batch is split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossScale
from roll.algorithms.losses import LOSSES, ValueLossConfig
from tests.algorithms.batches import SPLITS, check_split, random_batch

CLIPPED = ValueLossConfig(value_clip=0.2)


def critic_batch(**sizes):
    """A batch whose values have moved from those at the start of the step, some beyond the bound."""
    batch = random_batch(**sizes)
    return {
        "response_mask": batch["response_mask"],
        "values": batch["old_log_probs"],
        "now": batch["log_probs"],
        "returns": batch["old_log_probs"] + 4 * (batch["ref_log_probs"] - batch["old_log_probs"]),
    }


def loss_of(batch, config, scale=None):
    values = batch["now"].clone().requires_grad_()
    scale = scale or LossScale.of(batch["response_mask"], 16)
    loss, metrics = LOSSES["value"](values, None, batch, scale, config)
    loss.backward()
    return loss.item(), values.grad, {name: value.item() for name, value in metrics.items()}


def test_closed_form_of_one_token():
    batch = {
        "response_mask": torch.tensor([[True]]),
        "values": torch.tensor([[1.0]]),
        "returns": torch.tensor([[3.0]]),
    }
    for now, clip, loss, gradient, clipped in [
        (2.0, None, 0.5, -1.0, 0.0),
        (2.0, 0.5, 0.5 * 1.5**2, 0.0, 1.0),  # moved further than the bound, towards the return: no gradient
        (1.2, 0.5, 0.5 * 1.8**2, -1.8, 0.0),
        (0.0, 0.5, 0.5 * 3.0**2, -3.0, 0.0),  # moved away: the gradient stays
    ]:
        found = loss_of(batch | {"now": torch.tensor([[now]])}, ValueLossConfig(value_clip=clip))
        assert found[0] == pytest.approx(loss) and found[1].item() == pytest.approx(gradient)
        assert found[2] == pytest.approx({"clip_fraction": clipped, "value_mean": now})


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_gradient_does_not_depend_on_how_the_batch_is_split_or_padded(mode, split, padding):
    batch, config = critic_batch(), replace(CLIPPED, loss_agg_mode=mode)
    scale = LossScale.of(batch["response_mask"], 16)
    check_split(lambda part: loss_of(part, config, scale), batch, split, padding)


def test_gradient_by_finite_differences():
    batch = critic_batch(samples=3, tokens=5)
    scale = LossScale.of(batch["response_mask"], 16)
    assert torch.autograd.gradcheck(
        lambda values: LOSSES["value"](values, None, batch, scale, CLIPPED)[0], (batch["now"].requires_grad_(),)
    )


def test_every_setting_changes_the_loss():
    plain = loss_of(critic_batch(), ValueLossConfig())[0]
    assert loss_of(critic_batch(), CLIPPED)[0] > plain
    assert loss_of(critic_batch(), ValueLossConfig(loss_agg_mode="token-mean"))[0] != pytest.approx(plain)


def test_values_outside_the_mask_do_not_count_even_if_they_are_not_numbers():
    batch = critic_batch()
    loss, gradient, metrics = loss_of(batch, CLIPPED)
    broken = {
        name: x if x.dtype == torch.bool else torch.where(batch["response_mask"], x, torch.nan)
        for name, x in batch.items()
    }
    again = loss_of(broken, CLIPPED)
    assert again[0] == loss and torch.equal(again[1], gradient) and again[2] == metrics
