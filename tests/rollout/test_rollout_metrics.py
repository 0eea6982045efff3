"""Metrics of batches and validations."""

from __future__ import annotations

import pytest

from roll.rollout.metrics import environment_metrics, rollout_metrics, validation_metrics
from roll.rollout.types import GenerateResult, Group, StopReason, Trajectory


def trajectory(
    *turns: tuple[int, int, float, int], metrics: dict[str, float], stop: StopReason = "terminated"
) -> Trajectory:
    """Turns of (tokens, version, reward, cached), with three prompt tokens before each."""
    made = Trajectory(stop=stop)
    for tokens, version, reward, cached in turns:
        made.add_context([7, 7, 7])
        result = GenerateResult("r", [5] * tokens, [-1.0] * tokens, [version] * tokens, "stop", cached)
        made.add_response(made.ids, result, "", "").reward = reward
    made.metrics = metrics
    return made


def test_metrics_of_a_batch():
    cut = trajectory((1, 3, 0.0, 3), metrics={}, stop="sequence_length")
    near = [trajectory((2, 3, 0.5, 3), (2, 3, 0.5, 4), (4, 4, 1.0, 0), metrics={"gold": 1.0}), cut]
    far = [trajectory((2, 2, 0.0, 3), (1, 2, 0.0, 5), metrics={"gold": 0.0, "letters": 8.0})]
    groups = [Group(0, "Near", 0, "Near-0", near), Group(1, "Far", 0, "Far-1", far)]
    metrics = rollout_metrics(groups, version=4, stale_after=1) | environment_metrics(groups, "env")
    assert metrics["rollout/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["rollout/reward_mean/Near"] == 1 and metrics["rollout/reward_mean/Far"] == 0
    assert [metrics[f"rollout/response_length_{name}"] for name in ("mean", "p90", "max")] == [4, 8, 8]
    assert metrics["rollout/sequence_length_mean"] == pytest.approx((17 + 4 + 9) / 3)
    assert metrics["rollout/truncated_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout/turns_mean"] == 2 and metrics["rollout/versions_max"] == 2
    assert metrics["rollout/prefix_reuse"] == (4 + 5) / (8 + 8), "the third turn has other weights than the second"
    assert metrics["env/Near/gold"] == 1.0, "an episode without the metric has no part in it"
    assert metrics["env/Near/num_actions"] == 2 and metrics["env/Far/letters"] == 8
    assert metrics["staleness/max"] == 2 and metrics["staleness/mean"] == pytest.approx((1 + 1 + 2) / 3)
    assert metrics["staleness/token_mean"] == pytest.approx((4 + 0 + 1 + 6) / 12)
    assert metrics["avg_sample_age"] == 1.5 and metrics["max_sample_age"] == 2 and metrics["stale_samples_ratio"] == 0.5


def test_metrics_without_a_value_are_left_out():
    groups = [Group(0, "Near", 0, "Near-0", [trajectory((1, 0, 0.0, 0), metrics={}, stop="sequence_length")])]
    metrics = rollout_metrics(groups, version=0, stale_after=1) | environment_metrics(groups, "env")
    assert "rollout/prefix_reuse" not in metrics and "rollout/reward_mean/Near" not in metrics
    assert [name for name in metrics if name.startswith("env/")] == ["env/Near/num_actions"]


def test_validation_scores_by_tag_and_over_all_trajectories():
    groups = [
        Group(0, "Near", 0, "Near-0", [trajectory((1, 0, 1.0, 0), metrics={"gold": 1.0})]),
        Group(1, "Far", 0, "Far-1", [trajectory((1, 0, 0.0, 0), metrics={"gold": 0.0})]),
        Group(2, "Near", 0, "Near-2", [trajectory((4, 0, 0.5, 0), metrics={"gold": 0.0})]),
    ]
    metrics = validation_metrics(groups) | environment_metrics(groups, "val")
    assert (metrics["val/Near/score"], metrics["val/Far/score"], metrics["val/score"]) == (0.75, 0.0, 0.5)
    assert metrics["val/response_length_mean"] == 2 and metrics["val/Near/gold"] == 0.5
