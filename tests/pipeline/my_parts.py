"""Classes that a configuration may name in tests/pipeline/test_extensions.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.rollout.rollouter import Rollouter
from roll.rollout.source import SampleBatch


class MyRollouter(Rollouter):
    """The built-in rollouter under another name."""


class Doubling:
    """Adds twice the reward, and tries to replace a metric."""

    def __init__(self, config: Any) -> None:
        self.name = config.exp_name

    def step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {f"{self.name}/twice": 2 * metrics["rollout/reward_mean"], "rollout/reward_mean": -1.0}


class Masking:
    """Leaves the first sample of every batch out of the loss."""

    def __init__(self, config: Any) -> None:
        self.steps: list[int] = []

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float]:
        self.steps.append(step)
        batch.data.batch["response_mask"][0] = False
        return {"masked": 1}


class Halving(Masking):
    """Removes samples, which a hook must not do."""

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float]:
        batch.data = batch.data.select_idxs([0])
        return {}


class Failing(Masking):
    """Raises in code that it calls."""

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float]:
        return {"length": float(batch.data.batch["lengths"].sum())}


class Listening:
    """Records the reports."""

    def __init__(self, config: Any) -> None:
        self.heard: list[Mapping[str, Any]] = []

    def report(self, health: Mapping[str, Any]) -> None:
        self.heard.append(health)
