"""Classes that a configuration may name in tests/pipeline/test_extensions.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.pipeline.rollouter import Rollouter


class MyRollouter(Rollouter):
    """The built-in rollouter under another name."""


class Doubling:
    """Adds twice the reward, and tries to replace a metric."""

    def __init__(self, config: Any) -> None:
        self.name = config.exp_name

    def step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {f"{self.name}/twice": 2 * metrics["rollout/reward_mean"], "rollout/reward_mean": -1.0}


class Listening:
    """Records the reports."""

    def __init__(self, config: Any) -> None:
        self.heard: list[Mapping[str, Any]] = []

    def report(self, health: Mapping[str, Any]) -> None:
        self.heard.append(health)
