"""Weights and rejection in closed form, with asymmetric bounds so that a wrong sign fails."""

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


def weights_of(level, mode="clamp", lower=0.0, upper=100.0):
    options = CorrectionOptions(weights=WeightOptions(level, mode, lower, upper))
    result = off_policy_correction(*log_probs(), MASK, options)
    return result.weights[MASK].tolist(), result.kept[MASK].tolist()


def kept_by(statistic, level="token", lower=None, upper=None, ratios=RATIOS):
    options = CorrectionOptions(rejection=RejectionOptions(statistic, level, lower, upper))
    result = off_policy_correction(*log_probs(ratios), MASK, options)
    assert (result.weights[MASK] == 1).all() and not result.kept[~MASK].any()
    return result.kept[MASK].tolist()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.25, 1.0, 3.0, 0.8, 1.5]),
        ("sequence", [0.75] * 3 + [1.2] * 2),
        ("geometric", [0.75 ** (1 / 3)] * 3 + [1.2**0.5] * 2),
    ],
)
def test_weights_of_each_level(level, expected):
    assert weights_of(level)[0] == pytest.approx(expected)


def test_clamped_weights_keep_every_token():
    weights, kept = weights_of("token", lower=0.5, upper=2.0)
    assert weights == pytest.approx([0.5, 1.0, 2.0, 0.8, 1.5]) and all(kept)
    assert weights_of("sequence", upper=1.1)[0] == pytest.approx([0.75] * 3 + [1.1] * 2)


def test_masked_weights_are_unchanged_or_rejected():
    weights, kept = weights_of("token", "mask", lower=0.5, upper=2.0)
    assert weights == pytest.approx([0.0, 1.0, 0.0, 0.8, 1.5]) and kept == [False, True, False, True, True]
    weights, kept = weights_of("sequence", "mask", lower=0.9, upper=2.0)
    assert weights == pytest.approx([0.0] * 3 + [1.2] * 2) and kept == [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (0.2, 1.2, [True, True, False, True, False]),
        (0.5, 4.0, [False, True, True, True, True]),
        (None, 1.2, [True, True, False, True, False]),
        (0.9, None, [False, True, True, False, True]),
    ],
)
def test_bounds_of_k1_are_bounds_of_the_ratio_p_over_mu(lower, upper, expected):
    assert kept_by("k1", "token", lower, upper) == expected


@pytest.mark.parametrize(
    ("statistic", "level", "lower", "upper", "expected"),
    [
        ("k1", "sequence-sum", 0.8, 5.0, [False, True]),
        ("k1", "sequence-sum", 0.5, 1.0, [True, False]),
        ("k1", "sequence-mean", 0.95, 5.0, [False, True]),
        ("k1", "sequence-mean", 0.5, 1.05, [True, False]),
        ("k1", "sequence-max", 0.5, 5.0, [False, True]),
        ("k1", "sequence-max", 0.1, 2.0, [False, True]),
        ("k1", "sequence-max", 0.1, 5.0, [True, True]),
        ("k2", "sequence-max", None, 0.5, [False, True]),
        ("k2", "sequence-sum", None, 1.6, [True, True]),
        ("k2", "sequence-sum", None, 1.5, [False, True]),
        ("k2", "sequence-mean", None, 0.4, [False, True]),
        ("k3", "sequence-max", None, 0.95, [True, True]),
        ("k3", "sequence-max", None, 0.8, [False, True]),
        ("k3", "sequence-mean", 0.1, None, [True, False]),
    ],
)
def test_statistics_of_a_response(statistic, level, lower, upper, expected):
    first, second = expected
    assert kept_by(statistic, level, lower, upper) == [first] * 3 + [second] * 2


def test_k2_and_k3_of_a_token_are_in_nats():
    squares = [0.5 * math.log(ratio) ** 2 for sample in RATIOS for ratio in sample]
    assert kept_by("k2", upper=0.5) == [value <= 0.5 for value in squares]
    thirds = [ratio - 1 - math.log(ratio) for sample in RATIOS for ratio in sample]
    assert kept_by("k3", upper=0.7) == [value <= 0.7 for value in thirds]
    assert [value <= 0.7 for value in thirds] == [True, True, False, True, True]


def test_k3_grows_faster_where_p_is_above_mu():
    assert kept_by("k3", upper=0.9, ratios=[[0.25, 4.0, 1.0], [1.0, 1.0]]) == [True, False, True, True, True]


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
