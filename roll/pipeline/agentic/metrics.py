"""What a batch of trajectories, or a validation, is told as."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.rollout.types import Trajectory


def rollout_metrics(groups: Sequence[TrajectoryGroup], version: int) -> dict[str, float]:
    """`rollout/...`, `env/<tag>/...` and `staleness/...` of a batch that the weights of `version` learn from."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [trajectory.score for trajectory in trajectories]
    lengths = [len(trajectory.sampled) for trajectory in trajectories]
    ages = [version - token for trajectory in trajectories for token in trajectory.sampled]
    oldest = [version - trajectory.oldest_version for trajectory in trajectories]
    return {
        "rollout/reward_mean": statistics.fmean(scores),
        "rollout/reward_std": statistics.pstdev(scores),
        "rollout/response_length_mean": statistics.fmean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/sequence_length_mean": statistics.fmean(len(trajectory.ids) for trajectory in trajectories),
        "rollout/truncated_fraction": statistics.fmean(each.stop == "sequence_length" for each in trajectories),
        "rollout/turns_mean": statistics.fmean(len(trajectory.turns) for trajectory in trajectories),
        "rollout/versions_max": float(max(len(set(trajectory.sampled)) for trajectory in trajectories)),
        **_prefix_reuse(trajectories),
        **_by_tag(groups, "env"),
        "staleness/mean": statistics.fmean(oldest),
        "staleness/max": float(max(oldest)),
        "staleness/token_mean": statistics.fmean(ages),
        "staleness/token_max": float(max(ages)),
    }


def validation_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Mean score over all trajectories and by tag, and what the environments measure."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores: dict[str, list[float]] = {}
    for group in groups:
        scores.setdefault(group.tag, []).extend(group.scores)
    return {
        **{f"val/{tag}/score": statistics.fmean(values) for tag, values in sorted(scores.items())},
        "val/score": statistics.fmean(trajectory.score for trajectory in trajectories),
        "val/response_length_mean": statistics.fmean(len(trajectory.sampled) for trajectory in trajectories),
        **_by_tag(groups, "val"),
    }


def _by_tag(groups: Sequence[TrajectoryGroup], family: str) -> dict[str, float]:
    """Means over the episodes of a tag that have the metric: one cut off before its first action has few, see there."""
    episodes: dict[str, list[Trajectory]] = {}
    for group in groups:
        episodes.setdefault(group.tag, []).extend(group.trajectories)
    told = {}
    for tag, trajectories in sorted(episodes.items()):
        told[f"{family}/{tag}/num_actions"] = statistics.fmean(len(trajectory.turns) for trajectory in trajectories)
        names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.metrics)
        for name in names:
            values = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
            told[f"{family}/{tag}/{name}"] = statistics.fmean(values)
    return told


def _prefix_reuse(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Share of the prompt tokens of second and later turns that the engine had in its cache.

    Only turns that the weights of the turn before answered count: other weights may not use its cache.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns[1:] if turn.reusable]
    asked = sum(turn.start for turn in turns)
    return {"rollout/prefix_reuse": sum(turn.cached for turn in turns) / asked} if asked else {}
