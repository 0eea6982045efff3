"""The policy loss with a correction: weights, rejection, denominators, and bypass mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.correction import diagnostics, finalize, off_policy_correction
from roll.algorithms.losses import LOSSES, LossScale
from roll.algorithms.options.correction_options import CorrectionOptions, RejectionOptions, WeightOptions
from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES
from tests.algorithms.batches import SPLITS, check_split, pad, random_batch

TOKENS = CorrectionOptions(WeightOptions("token", "clamp", 0.8, 1.2))
EVERYTHING = CorrectionOptions(
    WeightOptions("sequence", "clamp", 0.5, 1.5), RejectionOptions("k1", "token", 0.7, 1.9), veto_threshold=0.5
)
DECOUPLED = PolicySettings(pg_variant="decoupled_ppo", correction=TOKENS, use_kl_loss=True, kl_loss_coef=0.1)
BYPASS = PolicySettings(pg_variant="vanilla", correction=TOKENS, old_log_probs_source="behavior")


def corrected(batch, options):
    """The batch with the tensors that the driver adds when there is a proximal policy."""
    result = off_policy_correction(batch["old_log_probs"], batch["behavior_log_probs"], batch["response_mask"], options)
    return batch | {"correction_weights": result.weights, "correction_kept": result.kept}


def policy(batch, config, scale=None, entropy=True):
    log_probs = batch["log_probs"].detach().clone().requires_grad_()
    scale = scale or LossScale.of(batch["response_mask"], 16)
    loss, metrics = LOSSES["policy"](log_probs, batch["entropy"] if entropy else None, batch, scale, config)
    loss.backward()
    return loss.item(), log_probs.grad, {name: value.item() for name, value in metrics.items()}


def test_weights_multiply_the_policy_term_but_not_the_kl():
    batch = corrected(random_batch(), TOKENS)
    weights = batch["correction_weights"]
    _, gradient, metrics = policy(batch, DECOUPLED)
    _, plain, _ = policy(batch, replace(DECOUPLED, correction=CorrectionOptions(), use_kl_loss=False))
    _, divergence, without = policy(batch | {"advantages": 0 * batch["advantages"]}, DECOUPLED)
    torch.testing.assert_close(gradient, weights * plain + divergence)
    assert metrics["kl_loss"] == without["kl_loss"] and (weights[batch["response_mask"]] != 1).any()


def test_bypass_weights_are_those_of_the_current_policy():
    batch, mask = random_batch(), random_batch()["response_mask"]
    _, gradient, _ = policy(batch, BYPASS)
    ratio = (batch["log_probs"] - batch["behavior_log_probs"]).exp().clamp(0.8, 1.2)
    expected = torch.where(mask, -ratio * batch["advantages"] / mask.sum(-1, keepdim=True), 0.0) / len(mask)
    torch.testing.assert_close(gradient, expected)


def test_vanilla_with_token_weights_is_tis():
    batch = random_batch()
    tis = PolicySettings(
        pg_variant="tis",
        pg_ratio_base="behavior",
        tis_lower_bound=0.8,
        tis_upper_bound=1.2,
        old_log_probs_source="behavior",
    )
    torch.testing.assert_close(policy(batch, BYPASS)[1], policy(batch, tis)[1])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_rejected_tokens_have_no_term_but_count_in_the_denominator(mode):
    batch = corrected(random_batch(), EVERYTHING)
    kept = batch["correction_kept"]
    config = replace(DECOUPLED, correction=EVERYTHING, loss_agg_mode=mode, entropy_loss_coef=0.1)
    _, gradient, _ = policy(batch, config)
    assert 0 < kept.sum() < batch["response_mask"].sum()
    assert (gradient[~kept] == 0).all() and (gradient[kept] != 0).all()
    everything = batch | {"correction_kept": batch["response_mask"]}
    torch.testing.assert_close(gradient[kept], policy(everything, config)[1][kept])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_renormalized_loss_is_that_of_the_kept_tokens_alone(mode):
    options = replace(EVERYTHING, renormalize=True)
    batch = corrected(random_batch(), options)
    kept, config = batch["correction_kept"], replace(DECOUPLED, correction=options, loss_agg_mode=mode)
    scale = LossScale.of(kept, 16)
    alone = batch | {"response_mask": kept}
    torch.testing.assert_close(policy(batch, config, scale)[1], policy(alone, config, scale)[1])
    assert policy(batch, config, scale)[2] == policy(alone, config, scale)[2]


LEVELS = [
    CorrectionOptions(WeightOptions(level, mode, 0.7, 1.4), RejectionOptions(statistic, at, 0.0, 1.3), 0.3)
    for level, mode, statistic, at in [
        ("token", "mask", "k1", "token"),
        ("sequence", "clamp", "k2", "sequence-sum"),
        ("geometric", "mask", "k3", "sequence-max"),
        (None, "clamp", "k1", "sequence-mean"),
    ]
]


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("options", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("padding", [0, 5])
def test_neither_the_split_nor_padding_changes_gradient_or_metrics(bypass, options, split, padding):
    variant, source = ("kimi15", "behavior") if bypass else ("decoupled_ppo", "recompute")
    config = replace(DECOUPLED, pg_variant=variant, correction=options, old_log_probs_source=source)
    batch = corrected(random_batch(), options)
    scale = LossScale.of(batch["response_mask"], 16)
    check_split(lambda part: policy(part, config, scale), batch, split, padding)


CHANGES = [
    replace(EVERYTHING, weights=WeightOptions("token", "clamp", 0.5, 1.5)),
    replace(EVERYTHING, weights=WeightOptions("geometric", "clamp", 0.5, 1.5)),
    replace(EVERYTHING, weights=WeightOptions("sequence", "mask", 0.5, 1.5)),
    replace(EVERYTHING, weights=WeightOptions("sequence", "clamp", 0.9, 1.5)),
    replace(EVERYTHING, weights=WeightOptions("sequence", "clamp", 0.5, 1.1)),
    replace(EVERYTHING, rejection=RejectionOptions("k2", "token", 0.0, 0.05)),
    replace(EVERYTHING, rejection=RejectionOptions("k1", "sequence-sum", 0.7, 1.9)),
    replace(EVERYTHING, rejection=RejectionOptions("k1", "token", 0.9, 1.9)),
    replace(EVERYTHING, rejection=RejectionOptions("k1", "token", 0.7, 1.1)),
    replace(EVERYTHING, veto_threshold=0.7),
    replace(EVERYTHING, renormalize=True),
]


@pytest.mark.parametrize("options", CHANGES)
@pytest.mark.parametrize("bypass", [False, True])
def test_every_key_changes_the_loss(options, bypass):
    def loss(settings):
        source = "behavior" if bypass else "recompute"
        config = replace(BYPASS, correction=settings, old_log_probs_source=source)
        return policy(corrected(random_batch(seed=4), settings), config)[0]

    assert loss(options) != pytest.approx(loss(EVERYTHING))


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_the_correction_works_with_every_variant(variant):
    config = replace(DECOUPLED, pg_variant=variant, use_kl_loss=False, gspo_clip_low=0.9, gspo_clip_high=9.0)
    batch = corrected(random_batch(), TOKENS)
    plain = policy(batch, replace(config, correction=CorrectionOptions()))[1]
    torch.testing.assert_close(policy(batch, config)[1], plain * batch["correction_weights"])


def test_decoupled_ppo_differs_from_ppo_on_stale_samples_in_the_first_step():
    batch = corrected(random_batch(), TOKENS)
    batch["log_probs"] = batch["old_log_probs"]
    ppo = replace(DECOUPLED, pg_variant="ppo", correction=CorrectionOptions())
    assert not torch.allclose(policy(batch, DECOUPLED)[1], policy(batch, ppo)[1])


@pytest.mark.parametrize("options", [CorrectionOptions(), TOKENS, EVERYTHING])
def test_bypass_reports_the_correction_metrics_of_the_current_policy(options):
    batch = random_batch()
    mask, mu = batch["response_mask"], batch["behavior_log_probs"]
    _, _, metrics = policy(batch, replace(BYPASS, correction=options))
    found = finalize({name: value for name, value in metrics.items() if "/" in name})
    result = off_policy_correction(batch["log_probs"], mu, mask, options)
    weights = result.weights if options.weighted else None
    assert found == pytest.approx(diagnostics(batch["log_probs"], mu, mask, weights, result.kept))


def test_values_outside_the_mask_do_not_change_the_weights():
    batch = random_batch()
    padded = pad(batch, 3, fill=float("nan"))
    assert policy(padded, BYPASS)[0] == pytest.approx(policy(batch, BYPASS)[0])
    assert torch.isfinite(policy(padded, BYPASS)[1]).all()


@pytest.mark.parametrize("variant", ["gspo", "topr"])
def test_a_rejected_token_has_no_part_in_the_ratio_of_its_response(variant):
    batch = random_batch(samples=3, tokens=8)
    first = batch["response_mask"].double().argmax(-1)
    behavior = batch["old_log_probs"].clone()
    behavior[torch.arange(3), first] += 5  # far below the lower bound
    kept = batch["response_mask"].clone()
    kept[torch.arange(3), first] = False
    config = PolicySettings(
        pg_variant=variant,
        topr_level="sequence",
        loss_agg_mode="token-mean",
        correction=CorrectionOptions(rejection=RejectionOptions("k1", "token", 0.5)),
    )
    scale = LossScale.of(batch["response_mask"], 16)
    loss, gradient, _ = policy(corrected(batch | {"behavior_log_probs": behavior}, config.correction), config, scale)
    without, expected, _ = policy(
        batch | {"response_mask": kept}, replace(config, correction=CorrectionOptions()), scale
    )
    torch.testing.assert_close(gradient, expected)
    assert loss == pytest.approx(without) and gradient.abs().sum() > 0


def test_tokens_that_opsm_leaves_out_are_not_those_of_the_rejection():
    batch = random_batch()
    _, _, without = policy(batch, BYPASS)
    opsm = replace(BYPASS, correction=replace(BYPASS.correction, opsm_delta=1e-9))
    _, _, metrics = policy(batch, opsm)
    assert metrics["opsm_fraction"] > 0
    assert metrics["correction/masked_fraction"] == without["correction/masked_fraction"]
