"""Metrics of a batch of groups and of a validation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice

from roll.rollout.types import Group, Trajectory


def rollout_metrics(groups: Sequence[Group], version: int, stale_after: int) -> dict[str, float]:
    """`rollout/...` and `staleness/...` of a batch; the mean reward of each tag where there are several.

    Args:
        groups: complete ones; their greedy responses count in `rollout/greedy_reward_mean` alone.
        version: weight version that learns from them.
        stale_after: versions; a group whose oldest token is older counts in `stale_samples_ratio`.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [trajectory.score for trajectory in trajectories]
    versions = [trajectory.sampled_versions for trajectory in trajectories]
    lengths = [len(sampled) for sampled in versions]
    token_ages = [version - sampled for of_trajectory in versions for sampled in of_trajectory]
    ages = [version - min(of_trajectory) for of_trajectory in versions]
    remaining = iter(ages)
    group_ages = [max(islice(remaining, len(group.trajectories))) for group in groups]
    greedy, by_tag = [group.greedy.score for group in groups if group.greedy is not None], _by_tag(groups)
    return {
        "rollout/reward_mean": statistics.fmean(scores),
        **{
            f"rollout/reward_mean/{tag}": statistics.fmean(each.score for each in of_tag)
            for tag, of_tag in by_tag
            if len(by_tag) > 1
        },
        "rollout/reward_std": statistics.pstdev(scores),
        **({"rollout/greedy_reward_mean": statistics.fmean(greedy)} if greedy else {}),
        "rollout/response_length_mean": statistics.fmean(lengths),
        "rollout/response_length_p90": float(sorted(lengths)[math.ceil(0.9 * len(lengths)) - 1]),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/sequence_length_mean": statistics.fmean(len(trajectory.ids) for trajectory in trajectories),
        "rollout/truncated_fraction": statistics.fmean(each.stop == "sequence_length" for each in trajectories),
        "rollout/turns_mean": statistics.fmean(len(trajectory.all_turns) for trajectory in trajectories),
        "rollout/versions_max": float(max(len(set(of_trajectory)) for of_trajectory in versions)),
        **_prefix_reuse(trajectories),
        **_routing_size(trajectories),
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": float(max(ages)),
        "staleness/token_mean": statistics.fmean(token_ages),
        "staleness/token_max": float(max(token_ages)),
        "avg_sample_age": statistics.fmean(group_ages),
        "max_sample_age": float(max(group_ages)),
        "stale_samples_ratio": statistics.fmean(age > stale_after for age in group_ages),
    }


def _routing_size(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    recorded = [each.routing.nbytes for each in trajectories if each.routing is not None]
    return {"rollout/routing_megabytes": sum(recorded) / 1e6} if recorded else {}


def _prefix_reuse(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Share of the prompt tokens of second and later turns that the engine had in its prefix cache.

    Only turns sampled by the same weights as the turn before count: other weights may not use its cache.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns[1:] if turn.reusable]
    prompt_tokens = sum(turn.start for turn in turns)
    return {"rollout/prefix_reuse": sum(turn.cached for turn in turns) / prompt_tokens} if prompt_tokens else {}


def validation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`val/...`: mean score over all trajectories and by tag, and the mean length of their sampled tokens."""
    by_tag: dict[str, list[float]] = {}
    for group in groups:
        by_tag.setdefault(group.tag, []).extend(group.scores)
    lengths = [len(trajectory.sampled_versions) for group in groups for trajectory in group.trajectories]
    return {
        **{f"val/{tag}/score": statistics.fmean(scores) for tag, scores in sorted(by_tag.items())},
        "val/score": statistics.fmean(score for scores in by_tag.values() for score in scores),
        "val/response_length_mean": statistics.fmean(lengths),
    }


def environment_metrics(groups: Sequence[Group], family: str) -> dict[str, float]:
    """`<family>/<tag>/...`: number of actions and what the environments measure, as means over trajectories.

    A metric is averaged over the trajectories that have it: one that was cut off before its first action may not.
    """
    actions = {
        f"{family}/{tag}/num_actions": statistics.fmean(len(trajectory.all_turns) for trajectory in trajectories)
        for tag, trajectories in _by_tag(groups)
    }
    return actions | reported_metrics(groups, family)


def reported_metrics(groups: Sequence[Group], family: str) -> dict[str, float]:
    """`<family>/<tag>/...`: what environments or rewards report, each as mean over the trajectories that have it."""
    metrics = {}
    for tag, trajectories in _by_tag(groups):
        for name in dict.fromkeys(name for trajectory in trajectories for name in trajectory.metrics):
            values = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
            metrics[f"{family}/{tag}/{name}"] = statistics.fmean(values)
    return metrics


def _by_tag(groups: Sequence[Group]) -> list[tuple[str, list[Trajectory]]]:
    by_tag: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_tag.setdefault(group.tag, []).extend(group.trajectories)
    return sorted(by_tag.items())
