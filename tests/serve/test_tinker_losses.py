"""Tinker's losses as its documentation writes them, in value and gradient, and what is refused of its data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.serve.losses import TINKER_LOSSES, TinkerLoss, tinker_loss
from roll.serve.wire import Datum, WireError

TOKENS = [5, 6, 7, 8, 9]
ADVANTAGES = np.array([0.0, 1.5, -2.0, 0.7, -0.3], np.float32)
SAMPLED = np.array([-0.4, -1.0, -2.0, -0.5, -1.5], np.float32)
CURRENT = [-0.5, -0.6, -1.2, -1.4, -1.6]
RATIO_MASK = np.array([0, 1, 1, 1, 1], np.float32)


def datum(**tensors: Any) -> Datum:
    return Datum(TOKENS, {"target_tokens": np.array([6, 7, 8, 9, 10]), **tensors})


def sampled(**tensors: Any) -> Datum:
    return datum(advantages=ADVANTAGES, logprobs=SAMPLED, **tensors)


def ratio(current: Tensor) -> Tensor:
    return torch.exp(current - torch.from_numpy(SAMPLED))


def ppo(current: Tensor) -> Tensor:
    advantages = torch.from_numpy(ADVANTAGES)
    return -torch.min(ratio(current) * advantages, ratio(current).clamp(0.8, 1.2) * advantages).sum()


def gspo(current: Tensor) -> Tensor:
    """One ratio for the tokens of the mask: the exponential of their mean log-ratio, with each token's own gradient."""
    inside, advantages = torch.from_numpy(RATIO_MASK) != 0, torch.from_numpy(ADVANTAGES)
    mean = (current.detach() - torch.from_numpy(SAMPLED))[inside].mean()
    shared = torch.exp(mean + current - current.detach())
    return -torch.min(shared * advantages, shared.clamp(0.9, 1.3) * advantages)[inside].sum()


CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}


@pytest.mark.parametrize(
    ("name", "data", "settings", "formula"),
    [
        ("cross_entropy", datum(weights=ADVANTAGES), {}, lambda lp: (-lp * torch.from_numpy(ADVANTAGES)).sum()),
        ("importance_sampling", sampled(), {}, lambda lp: -(ratio(lp) * torch.from_numpy(ADVANTAGES)).sum()),
        ("ppo", sampled(), {}, ppo),
        ("cispo", sampled(), CLIP,
         lambda lp: -(ratio(lp).clamp(0.9, 1.3).detach() * lp * torch.from_numpy(ADVANTAGES)).sum()),
        ("dro", sampled(), {"beta": 0.05},
         lambda lp: -(lp * torch.from_numpy(ADVANTAGES) - 0.025 * (lp - torch.from_numpy(SAMPLED)) ** 2).sum()),
        ("gspo", sampled(sequence_ratio_mask=RATIO_MASK), CLIP, gspo),
    ],
)  # fmt: skip
def test_a_loss_is_its_formula(
    name: str, data: Datum, settings: dict[str, float], formula: Callable[[Tensor], Tensor]
) -> None:
    loss = tinker_loss(name)
    rows = [loss.row(data, "data[0]")] * 2
    assert rows[0].ids == [5, 6, 7, 8, 9, 10]
    ours, theirs = (torch.tensor(CURRENT, requires_grad=True) for _ in range(2))
    loss.total(rows, loss.settings(settings, "loss_fn_config"), [ours, ours]).backward()
    (2 * formula(theirs)).backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    value = loss.total(rows, loss.settings(settings, "loss_fn_config"), [ours, ours])
    assert value.item() == pytest.approx(2 * formula(theirs).item(), abs=1e-5)


def test_every_loss_has_its_formula_above() -> None:
    assert set(TINKER_LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}


@pytest.mark.parametrize("name", ["stable_reinforce", "custom", "grpo"])
def test_another_loss_is_refused_by_name(name: str) -> None:
    with pytest.raises(WireError, match=f"loss_fn: {name} is not served; use cross_entropy, importance_sampling"):
        tinker_loss(name)


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        ("ppo", datum(advantages=ADVANTAGES), "has advantages, target_tokens; this loss reads"),
        ("ppo", sampled(mask=RATIO_MASK), "has advantages, logprobs, mask"),
        ("cross_entropy", datum(weights=ADVANTAGES[1:]), "has 4 values for 5 tokens"),
        ("cross_entropy", datum(weights=np.full(5, math.inf, np.float32)), "not finite"),
        ("gspo", sampled(sequence_ratio_mask=np.array([1, 0, 1, 1, 1])), "leaves out tokens with an advantage"),
        ("cross_entropy", Datum([], {"target_tokens": np.array([]), "weights": np.array([])}), "has no token"),
    ],
)
def test_data_that_a_loss_cannot_read_is_refused(loss: str, data: Datum, message: str) -> None:
    with pytest.raises(WireError, match=message):
        tinker_loss(loss).row(data, "data[3]")


def test_a_target_without_a_loss_need_not_be_the_next_token() -> None:
    targets = np.array([0, 0, 8, 9, 10])
    weights = np.array([0, 0, 1, 1, 1], np.float32)
    row = tinker_loss("cross_entropy").row(Datum(TOKENS, {"target_tokens": targets, "weights": weights}), "data[0]")
    assert row.log_probs([-1.0, -2.0, -3.0, -4.0, -5.0]) == [0.0, 0.0, -3.0, -4.0, -5.0]
    with pytest.raises(WireError, match=r"data\[0\].target_tokens\[1\]: 0 is not the next token"):
        tinker_loss("cross_entropy").row(
            Datum(TOKENS, {"target_tokens": targets, "weights": np.roll(weights, -1)}), "data[0]"
        )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ppo", {"kl_coeff": 0.1}, "kl_coeff: is not served; known: clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.2}, "clip_low_threshold: 1.2; give"),
        ("ppo", {"clip_high_threshold": "wide"}, "clip_high_threshold: wide; give"),
        ("cispo", {"clip_low_threshold": 0.5}, "clip_high_threshold: None; give"),
        ("dro", {}, "beta: None; give"),
        ("cross_entropy", {"beta": 1.0}, "known: none"),
    ],
)
def test_settings_are_checked(name: str, settings: dict[str, float | str], message: str) -> None:
    loss: TinkerLoss = tinker_loss(name)
    with pytest.raises(WireError, match=message):
        loss.settings(settings, "loss_fn_config")
