"""Response lengths of a simulation."""

from __future__ import annotations

import random
import statistics

import pytest

from roll.lab.simulate.cost_model import log_normal_sigma, padded_mean, response_lengths


@pytest.mark.parametrize(
    ("mean", "longest", "batch", "limit"), [(300, 1800, 512, 2048), (3, 5, 1024, 8), (40, 90, 64, 1000)]
)
def test_lengths_have_the_requested_mean_and_longest_of_a_batch(
    mean: float, longest: float, batch: int, limit: float
) -> None:
    lengths = response_lengths(mean, longest, batch, limit, seed=0)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.01)
    assert 1 <= min(lengths) and max(lengths) <= limit
    draw = random.Random(1)
    maxima = [max(draw.sample(lengths, batch)) for _ in range(50)]
    assert statistics.median(maxima) == pytest.approx(longest, rel=0.15)


def test_equal_mean_and_longest_give_equal_lengths() -> None:
    assert set(response_lengths(100, 100, 64, 100, seed=0)) == {100.0}
    assert log_normal_sigma(1.0, 64) == log_normal_sigma(5.0, 1) == 0.0


def test_context_ranks_divide_the_time_of_long_samples_only() -> None:
    assert padded_mean([30_001.0] * 4, 16) / 30_001 == pytest.approx(1, abs=1e-3)
    assert padded_mean([3.0, 17.0], 16) == 24 and padded_mean([3.0, 17.0], 1) == 10


def test_seed_changes_only_the_order() -> None:
    first, second = response_lengths(10, 40, 32, 64, seed=1), response_lengths(10, 40, 32, 64, seed=2)
    assert first != second and sorted(first) == sorted(second)


@pytest.mark.parametrize(("mean", "longest", "limit"), [(0.5, 3, 8), (5, 3, 8), (10, 12, 8)])
def test_inconsistent_lengths_are_rejected(mean: float, longest: float, limit: float) -> None:
    with pytest.raises(ValueError, match="need 1 <= mean <= longest"):
        response_lengths(mean, longest, 16, limit, seed=0)
