"""From the metrics of single actions to those of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Aggregation = Literal["mean", "sum", "last"]
"""How the values of an episode's actions become one: their mean over all actions, their sum, or the last action's."""

RESERVED = ("score", "num_actions")
"""What a run tells of every episode under these names."""


def rules_fault(rules: Any) -> str | None:
    """What is wrong with an environment's METRICS, in words; None where nothing is."""
    if not isinstance(rules, Mapping):
        return f"METRICS is {type(rules).__name__}; it maps names to {', '.join(get_args(Aggregation))}"
    for name, rule in rules.items():
        if not isinstance(name, str) or rule not in get_args(Aggregation):
            return f"METRICS has {name!r}: {rule!r}; it maps names to {', '.join(get_args(Aggregation))}"
        if name in RESERVED:
            return f"METRICS has {name!r}, which a run tells of every episode; call it by another name"
    return None


def episode_metrics(rules: Mapping[str, Aggregation], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value for each metric of an environment, in the order of `rules`.

    Args:
        rules: an environment's `METRICS`.
        steps: info["metrics"] of every step of one episode, in order.

    Raises:
        ValueError: no steps; see `metrics_without_action`.
    """
    if not steps:
        raise ValueError("episode_metrics: an episode without an action has no metrics")
    return {name: _aggregated(rule, [step[name] for step in steps]) for name, rule in rules.items()}


def metrics_without_action(rules: Mapping[str, Aggregation]) -> dict[str, float]:
    """Of an episode cut off before its first action: what a last action leaves, such as `success`, is 0.

    The others are left out, for nothing was done that could have been well or badly done.
    """
    return {name: 0.0 for name, rule in rules.items() if rule == "last"}


def _aggregated(rule: Aggregation, values: list[float]) -> float:
    if rule == "last":
        return values[-1]
    return sum(values) / (len(values) if rule == "mean" else 1)
