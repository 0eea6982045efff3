"""Vetoes, turns, differences of probabilities and combinations; test_losses_by_loops.py has weights and rejections."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.correction import off_policy_correction
from roll.algorithms.options.correction_options import (
    CorrectionOptions,
    DifferenceOptions,
    RejectionOptions,
    WeightOptions,
)

MASK = torch.tensor([[False, True, True, True], [False, True, True, False]])
RATIOS = [[0.25, 1.0, 3.0], [0.8, 1.5]]
"""p / mu of the response tokens of two samples; products 0.75 and 1.2, largest 3 and 1.5, smallest 0.25 and 0.8."""


def log_probs(ratios=RATIOS) -> tuple[torch.Tensor, torch.Tensor]:
    """Log p and log mu with these ratios on the response tokens, other values elsewhere."""
    behavior = torch.full(MASK.shape, -2.0)
    proximal = torch.full(MASK.shape, 77.0)
    proximal[MASK] = -2.0 + torch.tensor([math.log(ratio) for sample in ratios for ratio in sample])
    return proximal, behavior


def test_one_token_below_the_threshold_vetoes_its_response():
    options = CorrectionOptions(veto_threshold=1e-4)
    vetoed = off_policy_correction(*log_probs([[1.0, 0.9e-4, 1.0], [1.0, 1.0]]), MASK, options)
    assert vetoed.kept[MASK].tolist() == [False] * 3 + [True] * 2
    assert off_policy_correction(*log_probs([[1.0, 1.1e-4, 1e4], [1.0, 1.0]]), MASK, options).kept.equal(MASK)


def test_a_threshold_below_the_clamp_of_the_ratio_vetoes_too():
    options = CorrectionOptions(veto_threshold=1e-10)
    vetoed = off_policy_correction(*log_probs([[1.0, 0.9e-10, 1.0], [1.0, 1.0]]), MASK, options)
    assert vetoed.kept[MASK].tolist() == [False] * 3 + [True] * 2
    assert off_policy_correction(*log_probs([[1.0, 1.1e-10, 1.0], [1.0, 1.0]]), MASK, options).kept.equal(MASK)


def test_rejections_are_combined_and_do_not_change_weights():
    options = CorrectionOptions(
        WeightOptions("token", "clamp", 0.0, 2.0), RejectionOptions("k1", "token", None, 1.2), veto_threshold=0.5
    )
    result = off_policy_correction(*log_probs(), MASK, options)
    assert result.weights[MASK].tolist() == pytest.approx([0.25, 1.0, 2.0, 0.8, 1.5])
    assert result.kept[MASK].tolist() == [False, False, False, True, False]


def test_default_options_change_nothing():
    options = CorrectionOptions()
    result = off_policy_correction(*log_probs(), MASK, options)
    assert not options.active and result.kept.equal(MASK) and result.weights.equal(MASK.float())


def test_weights_have_no_gradient():
    proximal, behavior = log_probs()
    result = off_policy_correction(
        proximal.requires_grad_(), behavior, MASK, CorrectionOptions(WeightOptions("sequence"))
    )
    assert not result.weights.requires_grad


TURNS = torch.tensor([[-1, 0, 1, 1], [-1, 0, 0, -1]])


def test_weights_and_rejection_of_a_turn():
    options = CorrectionOptions(WeightOptions("segment", "clamp", 0.0, 100.0))
    result = off_policy_correction(*log_probs(), MASK, options, TURNS)
    assert result.weights[MASK].tolist() == pytest.approx([0.25, 3**0.5, 3**0.5, 1.2**0.5, 1.2**0.5])
    whole = off_policy_correction(*log_probs(), MASK, options)
    assert whole.weights[MASK].tolist() == pytest.approx([0.75 ** (1 / 3)] * 3 + [1.2**0.5] * 2)
    for lower, upper, kept in ((0.5, None, [False, True, True]), (None, 1.5, [True, False, False])):
        rejection = CorrectionOptions(rejection=RejectionOptions("k1", "segment-mean", lower, upper))
        result = off_policy_correction(*log_probs(), MASK, rejection, TURNS)
        assert result.kept[MASK].tolist() == [*kept, True, True]


def test_tokens_whose_probability_changed_too_much_are_rejected():
    moved = [(ratio - 1) * math.exp(-2) for sample in RATIOS for ratio in sample]
    for lower, upper in ((-0.05, None), (None, 0.1), (-0.05, 0.05)):
        options = CorrectionOptions(difference=DifferenceOptions("token", lower, upper))
        kept = off_policy_correction(*log_probs(), MASK, options).kept[MASK].tolist()
        assert kept == [(lower or -1) <= change <= (upper or 1) for change in moved]
    mean = sum(moved[:3]) / 3
    for bound, expected in ((mean * 1.01, True), (mean * 0.99, False)):
        options = CorrectionOptions(difference=DifferenceOptions("sequence-mean", None, bound))
        assert off_policy_correction(*log_probs(), MASK, options).kept[0, 1:].tolist() == [expected] * 3
    both = CorrectionOptions(
        rejection=RejectionOptions("k1", "token", 0.5), difference=DifferenceOptions("token", None, 0.1)
    )
    assert both.active and off_policy_correction(*log_probs(), MASK, both).kept[MASK].tolist() == [
        False, True, False, True, True,
    ]  # fmt: skip


def test_samples_without_response_tokens_have_no_weights():
    empty = torch.zeros_like(MASK)
    for level in ("token", "sequence", "geometric", "segment"):
        for at in ("token", "segment-mean", "sequence-mean", "sequence-sum", "sequence-max"):
            options = CorrectionOptions(WeightOptions(level), RejectionOptions("k3", at, 0.1, 1.0), veto_threshold=1e-4)
            result = off_policy_correction(*log_probs(), empty, options)
            assert not result.kept.any() and (result.weights == 0).all()


OPTIONS = st.builds(
    CorrectionOptions,
    st.builds(
        WeightOptions,
        st.sampled_from([None, "token", "sequence", "geometric", "segment"]),
        st.sampled_from(["clamp", "mask"]),
        st.floats(0, 1),
        st.floats(1, 5),
    ),
    st.builds(
        RejectionOptions,
        st.sampled_from([None, "k1", "k2", "k3"]),
        st.sampled_from(["token", "segment-mean", "sequence-mean", "sequence-sum", "sequence-max"]),
        st.none() | st.floats(0, 0.9),
        st.none() | st.floats(1.1, 5),
    ),
    st.none() | st.floats(1e-6, 0.5),
    st.just(False),
    st.builds(
        DifferenceOptions,
        st.sampled_from([None, "token", "segment-mean", "sequence-max"]),
        st.none() | st.floats(-1, 0),
        st.none() | st.floats(0, 1),
    ),
)
LOG_RATIOS = st.lists(st.lists(st.floats(-50, 50), min_size=4, max_size=4), min_size=1, max_size=4)


@settings(deadline=None)
@given(OPTIONS, LOG_RATIOS, st.integers(0, 5))
def test_weights_are_bounded_and_independent_of_other_samples_and_padding(options, log_ratios, padding):
    behavior = torch.full((len(log_ratios), 4), -3.0)
    proximal = behavior + torch.tensor(log_ratios)
    mask = torch.tensor([[True, True, True, index % 2 == 0] for index in range(len(log_ratios))])
    whole = off_policy_correction(proximal, behavior, mask, options)
    if options.weighted:
        assert (whole.weights <= options.weights.upper + 1e-5).all() and (whole.weights >= 0).all()
    assert (whole.kept & ~mask).sum() == 0
    for index in range(len(log_ratios)):
        row = slice(index, index + 1)
        wide = [torch.nn.functional.pad(x[row], (0, padding), value=9.0) for x in (proximal, behavior)]
        alone = off_policy_correction(*wide, torch.nn.functional.pad(mask[row], (0, padding)), options)
        torch.testing.assert_close(alone.weights[:, :4], whole.weights[row])
        assert alone.kept[:, :4].equal(whole.kept[row])
