"""From the metrics of single actions to those of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Aggregation = Literal["mean", "sum", "last"]
"""How the values of an episode's actions become one: their mean over all actions, their sum, or the last action's."""

RESERVED = ("score", "num_actions")
"""What a run tells of every episode under these names."""


def rules_fault(rules: Mapping[Any, Any]) -> str | None:
    """What is wrong with an environment's METRICS, in words; None where nothing is."""
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
        ValueError: no steps; an episode without an action has no metrics, and zeros would be invented.
    """
    if not steps:
        raise ValueError("episode_metrics: an episode without an action has no metrics")
    return {name: _aggregated(rule, [step[name] for step in steps]) for name, rule in rules.items()}


def _aggregated(rule: Aggregation, values: list[float]) -> float:
    if rule == "last":
        return values[-1]
    return sum(values) / (len(values) if rule == "mean" else 1)
