"""Messages of the rules of asynchronous generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.asynchronous import versions_ahead
from roll.configs.check import check
from tests.configs.samples import refusal, rlvr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["async_generation_ratio=-1"], "async_generation_ratio: -1.0 is too small; the least allowed is 0"),
        (["async_generation_ratio=.nan"], "async_generation_ratio: nan is not a finite number"),
        (["async_generation_ratio=.inf"], "async_generation_ratio: inf is not a finite number"),
        (
            ["async_generation_ratio=2.5", "async_training.max_staleness_allowed=2"],
            "async_training.max_staleness_allowed: 2 would drop samples that async_generation_ratio 2.5 admits, "
            "up to 3 version(s) old; use at least 3",
        ),
        (
            ["async_generation_ratio=1", "async_training.rollouter=inline"],
            "async_training.rollouter: inline generates each batch on request",
        ),
        (
            ["async_generation_ratio=1", "async_training.min_batch_count=3"],
            "async_training.min_batch_count: 3 batches are never ready at a time: async_generation_ratio 1 admits 2",
        ),
        (
            ["async_generation_ratio=0.5", "deterministic=true", "platform=cpu"],
            "deterministic: true is not possible at async_generation_ratio 0.5",
        ),
        (["async_training.max_queue_size=7"], "async_training.max_queue_size: 7 samples cannot hold 1 batch(es)"),
        (["async_training.batch_deadline_s=5"], "async_training.batch_deadline_s: 5 ends the run before"),
        (
            ["health_check_interval_s=900", "rpc_timeout_s=600"],
            "health_check_interval_s: 900 s is the duration of a health check, which rpc_timeout_s 600 s would end as "
            "if the engine did not answer; use less than 600, such as 2",
        ),
        (
            ["rewards.math_rule.query_filter_config.type=mean_filter"],
            "query_filter_config.type: mean_filter without thresholds drops nothing; give filter_args",
        ),
        (
            [
                "rewards.math_rule.query_filter_config.type=std_filter",
                "adv_estimator=reinforce",
                "num_return_sequences_in_group=1",
                "rollout_batch_size=512",
            ],
            "std_filter drops every group, since num_return_sequences_in_group 1 leaves a standard deviation of 0",
        ),
        (
            ["rewards.math_rule.query_filter_config.filter_args.std_threshold=0.1"],
            "std_threshold: belongs to type std_filter, but type is no_filter",
        ),
        (
            [
                "rewards.math_rule.query_filter_config.type=mean_filter",
                "rewards.math_rule.query_filter_config.filter_args.threshold_up=0.1",
                "rewards.math_rule.query_filter_config.filter_args.threshold_down=0.9",
            ],
            "no mean score lies between threshold_down 0.9 and threshold_up 0.1",
        ),
    ],
)
def test_contradicting_bounds_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(tmp_path, *overrides)


def test_a_drain_that_may_exceed_the_sync_timeout_is_a_warning(tmp_path: Path) -> None:
    warnings = check(rlvr(tmp_path, "in_flight_policy=drain")).warnings
    assert any("drain first waits for requests of up to" in str(warning) for warning in warnings)


def test_a_health_check_that_a_shorter_timeout_ends_is_a_warning(tmp_path: Path) -> None:
    message = "health_check_timeout_s: 120 s and health_check_interval_s 2 s are longer than rpc_timeout_s 100 s"
    [warning] = [str(each) for each in check(rlvr(tmp_path, "rpc_timeout_s=100")).warnings if message in str(each)]
    assert "use at most 98, or a higher rpc_timeout_s" in warning
    assert "health_check" not in str(check(rlvr(tmp_path, "rpc_timeout_s=122")).warnings)


def test_submission_interval_without_background_generation_is_a_warning(tmp_path: Path) -> None:
    message = "async_training.batch_generation_interval_s: has no effect: each batch is generated on request"
    interval = "async_training.batch_generation_interval_s=1"
    assert any(message in str(warning) for warning in check(rlvr(tmp_path, interval)).warnings)
    ahead = check(rlvr(tmp_path, interval, "async_generation_ratio=1")).warnings
    assert not any("interval" in str(warning) for warning in ahead)


def test_a_ratio_beyond_the_length_of_the_run_is_a_warning(tmp_path: Path) -> None:
    message = "async_generation_ratio: 10 batches ahead are more than remain in a run of max_steps 10"
    warnings = check(rlvr(tmp_path, "max_steps=10", "async_generation_ratio=10")).warnings
    assert any(message in str(warning) for warning in warnings)
    enough = check(rlvr(tmp_path, "max_steps=10", "async_generation_ratio=9")).warnings
    assert not any("batches ahead" in str(warning) for warning in enough)


@pytest.mark.parametrize(
    ("ratio", "ahead", "allowed"), [(0, 0, 5), (0.5, 1, 5), (0.1 * 3 + 0.7, 1, 5), (1, 1, 5), (6.5, 7, 7)]
)
def test_staleness_defaults_follow_from_the_ratio(tmp_path: Path, ratio: float, ahead: int, allowed: int) -> None:
    config = rlvr(tmp_path, f"async_generation_ratio={ratio!r}")
    assert versions_ahead(config.async_generation_ratio) == ahead
    assert config.async_training.max_staleness_allowed == config.default_max_staleness == allowed
    assert config.runs_in_background == (ratio > 0)
