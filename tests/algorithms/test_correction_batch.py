"""What a correction leaves out or scales because of the whole batch (M2PO, normalised weights), and OPSM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import LossScale
from roll.algorithms.correction import (
    batch_correction,
    off_policy_correction,
    off_policy_sequences,
    within_second_moment,
)
from roll.algorithms.losses import LOSSES
from roll.algorithms.options.correction_options import CorrectionOptions, RejectionOptions, WeightOptions
from roll.algorithms.options.policy_options import PolicySettings
from tests.algorithms.batches import pad, random_batch


def test_the_largest_squares_are_left_out_until_the_mean_is_small_enough():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    squares = torch.tensor([[0.01, 0.40, 9.0], [0.05, 0.0, 0.10]])
    for threshold, kept in [
        (1.0, [[1, 1, 0], [1, 1, 1]]),
        (0.112, [[1, 1, 0], [1, 1, 1]]),
        (0.111, [[1, 0, 0], [1, 1, 1]]),
        (0.03, [[1, 0, 0], [1, 1, 0]]),
        (0.001, [[0, 0, 0], [0, 1, 0]]),
    ]:
        assert within_second_moment(squares, mask, threshold).int().tolist() == kept, threshold


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 4), min_size=0, max_size=12), st.floats(1e-3, 3))
def test_what_is_kept_is_the_largest_set_that_fits(values, threshold):
    squares = torch.tensor([values], dtype=torch.float64)
    kept = within_second_moment(squares, torch.ones_like(squares, dtype=torch.bool), threshold)
    left, dropped = squares[kept], squares[~kept]
    assert not len(left) or left.mean() <= threshold * (1 + 1e-9)
    if len(dropped):
        assert not len(left) or dropped.min() >= left.max()
        assert torch.cat([left, dropped.min()[None]]).mean() > threshold * (1 - 1e-9)


def test_what_is_kept_is_kept_by_all_rejections():
    batch = random_batch()
    arguments = (batch["log_probs"], batch["behavior_log_probs"], batch["response_mask"])
    tokens, responses = RejectionOptions("k1", "token", 0.7, 1.4), RejectionOptions("k3", "sequence-mean", upper=0.08)
    kept = [
        off_policy_correction(*arguments, CorrectionOptions(rejection=one, rejections=others)).kept
        for one, others in (
            (tokens, {}),
            (responses, {}),
            (tokens, {"mean": responses}),
            (RejectionOptions(), {"a": tokens, "none": RejectionOptions(), "b": responses}),
        )
    ]
    assert torch.equal(kept[2], kept[0] & kept[1]) and torch.equal(kept[3], kept[2])
    assert 0 < kept[2].sum() < min(kept[0].sum(), kept[1].sum())


def test_m2_adds_to_other_rejections_and_ignores_padding():
    batch, options = random_batch(), CorrectionOptions(veto_threshold=0.6, m2_threshold=0.02)

    def corrected(part):
        arguments = (part["log_probs"], part["behavior_log_probs"], part["response_mask"], options)
        return batch_correction(off_policy_correction(*arguments), *arguments)

    whole, width = corrected(batch), batch["response_mask"].shape[1]
    vetoed = off_policy_correction(
        batch["log_probs"], batch["behavior_log_probs"], batch["response_mask"], options
    ).kept
    assert 0 < whole.kept.sum() < vetoed.sum() and not (whole.kept & ~vetoed).any()
    left = (batch["log_probs"] - batch["behavior_log_probs"])[whole.kept]
    assert (left**2).mean() <= 0.02
    assert torch.equal(corrected(pad(batch, 4)).kept[:, :width], whole.kept)


@pytest.mark.parametrize(
    "options",
    [CorrectionOptions(m2_threshold=0.02), CorrectionOptions(WeightOptions("token", upper=3.0, normalize=True))],
)
def test_samples_that_are_left_out_of_the_loss_do_not_count(options):
    batch = random_batch()
    learned = batch["response_mask"].clone()
    learned[: len(learned) // 2] = False

    def corrected(mask, counted):
        arguments = (batch["log_probs"], batch["behavior_log_probs"])
        return batch_correction(off_policy_correction(*arguments, mask, options), *arguments, counted, options)

    among_all, alone = corrected(batch["response_mask"], learned), corrected(learned, learned)
    assert torch.equal(among_all.kept & learned, alone.kept)
    torch.testing.assert_close(among_all.weights[learned], alone.weights[learned])
    assert torch.equal(among_all.kept & ~learned, batch["response_mask"] & ~learned)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_the_mean_1_over_tokens_or_responses(level):
    """Verl's normalisation: a weight of a response counts once, whatever its length; empty responses do not count."""
    batch = random_batch()
    batch["response_mask"][0] = False
    options = CorrectionOptions(WeightOptions(level, lower=0.5, upper=3.0, normalize=True))
    arguments = (batch["log_probs"], batch["behavior_log_probs"], batch["response_mask"], options)
    plain, mask = off_policy_correction(*arguments).weights, batch["response_mask"]
    counted = (
        plain[mask] if level == "token" else torch.stack([plain[row][mask[row]][0] for row in range(1, len(mask))])
    )
    found = batch_correction(off_policy_correction(*arguments), *arguments).weights
    torch.testing.assert_close(found, plain / counted.mean())
    assert len(set(mask.sum(-1).tolist())) > 2 and (found[~mask] == 0).all()


def test_without_these_options_nothing_changes():
    batch, options = random_batch(), CorrectionOptions(WeightOptions("token"), veto_threshold=0.5)
    arguments = (batch["log_probs"], batch["behavior_log_probs"], batch["response_mask"], options)
    plain = off_policy_correction(*arguments)
    found = batch_correction(plain, *arguments)
    assert torch.equal(found.weights, plain.weights) and torch.equal(found.kept, plain.kept)


def test_opsm_leaves_out_negative_tokens_of_responses_that_became_unlikely():
    mask = torch.tensor([[True, True, False]] * 4)
    behavior = torch.zeros(4, 3)
    log_probs = torch.tensor([[-0.3, 0.1, 9.0], [-0.3, 0.1, 9.0], [0.3, -0.1, -9.0], [-0.1, 0.1, -9.0]])
    advantages = torch.tensor([[-1.0, -1.0, -1.0], [1.0, -1.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    found = off_policy_sequences(log_probs, behavior, advantages, mask, delta=0.05)
    assert found.int().tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert not off_policy_sequences(log_probs, behavior, advantages, mask, delta=0.1001).any()


@pytest.mark.parametrize("source", ["behavior", "recompute"])
def test_tokens_that_opsm_leaves_out_have_no_gradient_and_are_counted(source):
    batch = random_batch(seed=4)
    config = PolicySettings(
        pg_variant="tis", tis_upper_bound=9.0, pg_ratio_base="behavior", old_log_probs_source=source
    )
    opsm = replace(config, correction=CorrectionOptions(opsm_delta=0.0))

    def gradient(settings):
        log_probs = batch["log_probs"].clone().requires_grad_()
        scale = LossScale.of(batch["response_mask"], 16)
        loss, metrics = LOSSES["policy"](log_probs, None, batch, scale, settings)
        loss.backward()
        return log_probs.grad, metrics

    mask = batch["response_mask"]
    left_out = off_policy_sequences(batch["log_probs"], batch["behavior_log_probs"], batch["advantages"], mask, 0.0)
    plain, found = gradient(config)[0], gradient(opsm)
    assert 0 < left_out.sum() < mask.sum() and (found[0][left_out] == 0).all()
    assert torch.equal(found[0][~left_out], plain[~left_out])
    assert found[1]["opsm_fraction"].item() == pytest.approx(left_out.sum().item() / mask.sum().item())
    assert "opsm_fraction" not in gradient(config)[1]
