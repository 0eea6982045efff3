"""Query filters and the limit on filtered groups."""

from __future__ import annotations

import pytest

from roll.configs.scoring.rewards import FilterArguments, QueryFilterConfig
from roll.rollout.filters import QueryFilter, StarvationLimit

RIGHT, WRONG, MIXED = [1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "arguments", "reasons"),
    [
        ("no_filter", {}, [None, None, None]),
        ("mean_filter", {}, [None, None, None]),
        (
            "mean_filter",
            {"threshold_up": 0.9, "threshold_down": 0.1},
            ["filtered_mean_high", "filtered_mean_low", None],
        ),
        ("mean_filter", {"threshold_up": 1, "threshold_down": 0}, ["filtered_mean_high", "filtered_mean_low", None]),
        ("std_filter", {}, ["filtered_zero_variance", "filtered_zero_variance", None]),
        ("std_filter", {"std_threshold": 0.5}, ["filtered_zero_variance"] * 3),
        ("std_filter", {"std_threshold": -1}, [None, None, None]),
    ],
)
def test_a_group_is_kept_or_dropped_with_the_reason(kind, arguments, reasons) -> None:
    query_filter = QueryFilter.from_config(QueryFilterConfig(kind, FilterArguments(**arguments)))
    assert [query_filter.reason(scores) for scores in (RIGHT, WRONG, MIXED)] == reasons


def test_a_starved_batch_names_the_filter_and_counts() -> None:
    limit = StarvationLimit(batch_size=2, max_resample_factor=1.5)
    limit.count_kept()
    path = "rewards.math_rule.query_filter_config"
    assert [limit.count_filtered(reason, path) for reason in ("filtered_mean_low", "filtered_mean_high")] == [
        None,
        None,
    ]
    assert limit.count_filtered("filtered_mean_low", path) is None
    text = limit.count_filtered("filtered_mean_low", path)
    assert text is not None
    assert text.startswith(f"{path}: filtered_mean_low starves the batch: it dropped 3 of the 5 groups")
    assert "the last batch of 2, and 1 were kept; max_resample_factor 1.5 allows 3" in text
    assert f"{path}: filtered_mean_high 1" in text


def test_while_several_batches_are_filled_ahead_the_limit_is_that_of_all() -> None:
    limit = StarvationLimit(batch_size=1, max_resample_factor=2)
    for _ in range(5):
        limit.count_kept()
        assert [limit.count_filtered("filtered_zero_variance") for _ in range(2)] == [None, None]
    text = limit.count_filtered("filtered_zero_variance")
    assert text is not None and "allows 10 to be filtered" in text


def test_every_batch_has_the_whole_limit() -> None:
    limit = StarvationLimit(batch_size=1, max_resample_factor=1)
    for _ in range(5):
        assert limit.count_filtered("filtered_zero_variance") is None
        limit.reset()


def test_a_limit_that_allows_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_resample_factor: 0 is not above 0"):
        StarvationLimit(4, 0)
