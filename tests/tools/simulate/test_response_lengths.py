from __future__ import annotations

import random
import statistics

import pytest

from roll.tools.simulate.cost_model import response_lengths, spread


@pytest.mark.parametrize(
    ("mean", "longest", "of", "limit"), [(300, 1800, 512, 2048), (3, 5, 1024, 8), (40, 90, 64, 1000)]
)
def test_mean_and_longest_of_a_batch_are_those_asked_for(mean: float, longest: float, of: int, limit: float) -> None:
    lengths = response_lengths(mean, longest, of, limit, seed=0)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.01)
    assert 1 <= min(lengths) and max(lengths) <= limit
    draw = random.Random(1)
    batches = [max(draw.sample(lengths, of)) for _ in range(50)]
    assert statistics.median(batches) == pytest.approx(longest, rel=0.15)


def test_equal_mean_and_longest_give_equal_lengths() -> None:
    assert set(response_lengths(100, 100, 64, 100, seed=0)) == {100.0}
    assert spread(1.0, 64) == spread(5.0, 1) == 0.0


def test_the_seed_only_orders() -> None:
    first, second = response_lengths(10, 40, 32, 64, seed=1), response_lengths(10, 40, 32, 64, seed=2)
    assert first != second and sorted(first) == sorted(second)


@pytest.mark.parametrize(("mean", "longest", "limit"), [(0.5, 3, 8), (5, 3, 8), (10, 12, 8)])
def test_what_cannot_be_lengths_is_refused(mean: float, longest: float, limit: float) -> None:
    with pytest.raises(ValueError, match="are not lengths with 1 <= mean <= longest"):
        response_lengths(mean, longest, 16, limit, seed=0)
