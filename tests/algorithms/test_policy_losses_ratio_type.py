from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.losses import LOSSES, LossScale
from roll.algorithms.options.policy_options import PolicySettings, traits_of
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.algorithms.policy_loss.base import sequence_ratio_base
from tests.algorithms.batches import pad, random_batch, rows

TYPES = ["token", "segment", "sequence"]
CONFIG = PolicySettings(pg_variant="ppo", pg_clip_low=0.2, pg_clip_high=0.3, tis_upper_bound=1.2)


def turns_batch(seed=0, **sizes):
    """A random batch whose responses are turns of two tokens, each followed by a token of the environment."""
    batch = random_batch(seed=seed, **sizes)
    position = batch["response_mask"].cumsum(-1) - 1
    batch["response_mask"] = batch["response_mask"] & (position % 3 != 2)
    batch["turn_index"] = torch.where(batch["response_mask"], position // 3, -1)
    return batch


def by_hand(batch, ratio_type):
    """Mean log ratio of each token's turn or sample, computed with loops."""
    off = (batch["log_probs"] - batch["old_log_probs"]).detach()
    mean = torch.zeros_like(off)
    for row, mask in enumerate(batch["response_mask"].tolist()):
        position = {"token": lambda t: t, "segment": lambda t, r=row: batch["turn_index"][r, t].item()}
        unit = position.get(ratio_type, lambda t: 0)
        tokens = [t for t, inside in enumerate(mask) if inside]
        for t in tokens:
            of_unit = [off[row, u].item() for u in tokens if unit(u) == unit(t)]
            mean[row, t] = sum(of_unit) / len(of_unit)
    return mean


def policy(batch, config, scale=None):
    log_probs = batch["log_probs"].detach().clone().requires_grad_()
    scale = scale or LossScale.of(batch["response_mask"], 16)
    loss, metrics = LOSSES["policy"](log_probs, None, batch, scale, config)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient, metrics


@pytest.mark.parametrize("ratio_type", TYPES)
def test_tokens_of_a_turn_or_sample_have_the_mean_log_ratio(ratio_type):
    batch = turns_batch()
    mask, log_probs = batch["response_mask"], batch["log_probs"]
    base = sequence_ratio_base(log_probs, batch["old_log_probs"], mask, ratio_type, batch["turn_index"])
    torch.testing.assert_close((log_probs - base)[mask], by_hand(batch, ratio_type)[mask])


@pytest.mark.parametrize("ratio_type", TYPES)
@pytest.mark.parametrize("variant", ["vanilla", "ppo", "decoupled_ppo", "kimi15"])
def test_gradient_by_finite_differences_with_a_constant_mean(variant, ratio_type):
    batch = turns_batch(samples=3, tokens=8, seed=1)
    mask, config = batch["response_mask"], replace(CONFIG, pg_variant=variant, ratio_type=ratio_type)
    frozen = batch["log_probs"].detach().clone()
    base, scale = frozen - by_hand(batch, ratio_type), LossScale.of(mask, 16)

    def surrogate(log_probs):
        return LOSSES["policy"](
            log_probs, None, {**batch, "old_log_probs": base}, scale, replace(config, ratio_type="token")
        )[0]

    log_probs = frozen.clone().requires_grad_()
    assert torch.autograd.gradcheck(surrogate, (log_probs,))
    torch.testing.assert_close(policy(batch, config)[1], torch.autograd.grad(surrogate(log_probs), log_probs)[0])


@pytest.mark.parametrize("variant", [name for name in POLICY_LOSSES if traits_of(name).reads_ratio_type])
def test_every_variant_that_reads_the_type_uses_its_ratio(variant):
    batch, config = turns_batch(seed=2), replace(CONFIG, pg_variant=variant)
    for ratio_type in TYPES:
        shared = policy(batch, replace(config, ratio_type=ratio_type))
        base = batch["log_probs"] - by_hand(batch, ratio_type)
        plain = policy({**batch, "old_log_probs": base}, config)
        assert shared[0] == pytest.approx(plain[0])
        torch.testing.assert_close(shared[1], plain[1])


@pytest.mark.parametrize("variant", [name for name in POLICY_LOSSES if name != "vanilla"])
def test_on_stale_samples_the_type_changes_every_variant_that_reads_it(variant):
    batch = turns_batch(seed=2)
    losses = [policy(batch, replace(CONFIG, pg_variant=variant, ratio_type=kind))[0] for kind in TYPES]
    distinct = {round(loss, 9) for loss in losses}
    assert len(distinct) == (3 if traits_of(variant).reads_ratio_type else 1), losses


def test_gspo_is_ppo_with_sequence_ratios_and_other_bounds():
    batch = turns_batch()
    gspo = replace(CONFIG, pg_variant="gspo", gspo_clip_low=0.2, gspo_clip_high=0.3)
    ours, theirs = policy(batch, gspo), policy(batch, replace(CONFIG, ratio_type="sequence"))
    assert ours[0] == pytest.approx(theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])


@pytest.mark.parametrize("ratio_type", TYPES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("indices", [[[i] for i in range(8)], [[5], [1, 0, 7], [2, 3, 4, 6]]])
def test_the_gradient_does_not_depend_on_how_the_batch_is_split_or_padded(ratio_type, mode, indices):
    batch, config = turns_batch(), replace(CONFIG, ratio_type=ratio_type, loss_agg_mode=mode)
    turns = batch.pop("turn_index")
    scale = LossScale.of(batch["response_mask"], 16)
    loss, gradient, _ = policy({**batch, "turn_index": turns}, config, scale)
    total = 0.0
    for part in indices:
        micro = pad(rows(batch, part), 4, fill=float("nan"))
        micro["turn_index"] = torch.nn.functional.pad(turns[part], (0, 4), value=-1)
        part_loss, part_gradient, _ = policy(micro, config, scale)
        torch.testing.assert_close(part_gradient[:, : gradient.shape[1]], gradient[part])
        total += part_loss
    assert total == pytest.approx(loss)


@pytest.mark.parametrize("ratio_type", TYPES)
@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_on_policy_every_ratio_is_one_in_float32(variant, ratio_type):
    batch = {name: value.float() if value.is_floating_point() else value for name, value in turns_batch().items()}
    batch["old_log_probs"] = batch["log_probs"].clone()
    _, gradient, metrics = policy(batch, replace(CONFIG, pg_variant=variant, ratio_type=ratio_type))
    assert metrics["ratio_deviation_max"] == 0.0 and metrics["pg_loss"].dtype == gradient.dtype == torch.float32


@pytest.mark.parametrize("ratio_type", TYPES)
@pytest.mark.parametrize("variant", POLICY_LOSSES)
@pytest.mark.parametrize("log_ratio", [-900.0, 900.0])
def test_extreme_log_ratios_give_finite_gradients(variant, ratio_type, log_ratio):
    batch = turns_batch()
    batch["log_probs"] = batch["old_log_probs"] + log_ratio
    loss, gradient, _ = policy(batch, replace(CONFIG, pg_variant=variant, ratio_type=ratio_type))
    assert math.isfinite(loss) and torch.isfinite(gradient).all()


def test_segment_ratios_need_turn_index():
    batch = random_batch()
    with pytest.raises(ValueError, match="ratio_type: segment needs the tensor turn_index"):
        policy(batch, replace(CONFIG, ratio_type="segment"))
    assert not CONFIG.reads_turns and replace(CONFIG, ratio_type="segment").reads_turns
