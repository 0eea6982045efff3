"""Bounds on differences of log-probs by depth, width, length and precision."""

from __future__ import annotations

import pytest

from roll.configs.learning.rounding import mismatch_bounds

FP32, BF16 = ("fp32", "fp32"), ("bf16", "bf16")

MEASURED = [  # dtypes, layers, width, tokens, mean, 99th percentile and largest difference of two right computations
    (FP32, 30, 576, 112, 1.1e-5, 5.3e-5, 1.2e-4),  # SmolLM2-135M, 16 prompts of arithmetic
    (FP32, 30, 576, 4096, 1.1e-5, 2.7e-5, 2.8e-5),
    (FP32, 2, 64, 64, 1.2e-6, 5.2e-6, 6.7e-6),  # random weights with large logits
    (FP32, 10, 256, 1024, 4.3e-5, 2.1e-4, 2.7e-4),
    (FP32, 40, 256, 1024, 1.3e-4, 4.9e-4, 7.0e-4),
    (FP32, 2, 576, 64, 1.1e-5, 4.1e-5, 7.7e-5),
    (FP32, 40, 576, 64, 1.3e-4, 6.6e-4, 8.9e-4),
    (BF16, 30, 576, 96, 5.7e-2, 0.19, None),
    (BF16, 2, 64, 64, 2.9e-2, 0.12, None),
    (BF16, 40, 256, 64, 4.4e-2, 0.15, None),
]


def values(*arguments, **keys):
    return list(mismatch_bounds(*arguments, **keys).values())


@pytest.mark.parametrize("case", MEASURED)
def test_right_computations_have_three_times_the_room_they_need(case):
    *arguments, mean, p99, largest = case
    bounds = values(*arguments)
    assert bounds[0] >= 3 * mean and bounds[1] >= 3 * p99
    assert bounds[2] is None if largest is None else bounds[2] >= 3 * largest


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ((FP32, 2, 64, 64), 5e-4),  # the smallest of: a tensor 3 % off, temperature or rope base off, other epsilons
        ((FP32, 30, 576, 64), 8e-4),
        ((BF16, 30, 576, 64), 0.28),  # a rope base of 10,000 instead of 100,000
    ],
)
def test_wrong_models_are_beyond_the_bounds(arguments, wrong):
    assert values(*arguments)[0] < wrong / 1.4


@pytest.mark.parametrize("dtypes", [FP32, BF16])
def test_bounds_grow_with_the_depth_and_never_fall_with_width_and_length(dtypes):
    for small, large in [((20, 576, 64), (40, 576, 64)), ((2, 64, 64), (2, 128, 64)), ((2, 64, 64), (2, 64, 128))]:
        assert values(dtypes, *small)[0] <= values(dtypes, *large)[0]
    assert values(dtypes, 30, 576, 64)[0] < values(dtypes, 60, 576, 64)[0]


def test_the_coarsest_precision_counts():
    assert values(("fp32", "bf16"), 30, 576, 64) == values(BF16, 30, 576, 64)
    assert values(("fp16", "fp32"), 30, 576, 64)[0] <= values(BF16, 30, 576, 64)[0]


def test_small_models_on_gpus_have_room_for_kernels_chosen_by_the_shape():
    assert values(FP32, 2, 64, 64, gpu=True) == pytest.approx([1e-4, 1e-3, 1e-2])
    assert values(FP32, 30, 576, 64, gpu=True) == values(FP32, 30, 576, 64)
