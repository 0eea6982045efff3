"""Arithmetic of the benchmark of balance."""

from __future__ import annotations

import pytest

from benchmarks.balance import Work, idle_share, in_order


def test_idle_share_is_the_mean_wait_for_the_slowest_rank() -> None:
    assert idle_share([[1.0, 1.0]]) == 0
    assert idle_share([[4.0, 2.0]]) == pytest.approx(0.25)
    assert idle_share([[4.0, 2.0], [2.0, 4.0]]) == pytest.approx(0.25), "ranks wait in each step"
    assert idle_share([[4.0, 2.0], [1.0, 1.0]]) == pytest.approx(0.2)


def test_in_order_deals_equal_counts_of_consecutive_samples() -> None:
    plan = in_order([5, 5, 5, 10, 1, 1, 1, 1], ranks=2, max_tokens=10)
    assert plan.indices == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.micro_batches == [[[0, 1], [2], [3]], [[0, 1, 2, 3]]]


def test_lengths_are_reproducible_and_have_a_long_tail() -> None:
    work = Work()
    lengths = sorted(work.lengths(3))
    assert lengths == sorted(work.lengths(3)) and lengths != sorted(work.lengths(4))
    assert lengths[0] >= work.prompt + work.shortest and lengths[-1] <= work.max_tokens
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]
