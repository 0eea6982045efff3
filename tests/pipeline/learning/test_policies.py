"""Versions of one of several policies: how old its samples are by its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from roll.base.timers import StepClock
from roll.datasets.batch import POLICY, Batch
from roll.pipeline.learning.policies import PoliciesLearner, staleness
from roll.rollout.source import SampleBatch


def test_samples_are_as_old_as_their_policy_has_changed_since():
    """Trained at steps 2 and 5: what versions 2 to 4 of the run sampled is one version old, later samples are new."""
    versions = torch.tensor([[-1, 1, 5], [-1, 4, -1], [-1, 7, 7], [-1, -1, -1]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    assert staleness(Batch({"weight_version": versions, "response_mask": mask}), [2, 5]) == {
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "staleness/token_mean": 3 / 5,
        "staleness/token_max": 2.0,
    }


class Recorded:
    """A learner that records the samples it is given."""

    def __init__(self, config: Any, actor: Any, reference: Any) -> None:
        self.folder, self.learned = config.rollout_dump_dir, list[int]()

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        self.learned += batch.data.batch["number"].tolist()
        return {"actor/loss": 0.5}


def test_a_policy_learns_from_its_samples_and_one_without_samples_keeps_its_version() -> None:
    ranks = SimpleNamespace(role="", actors=[], layout=None, platform="cpu", locations=[], deadlines=None)
    config: Any = SimpleNamespace(policies={"math": None, "code": None}, rollout_dump_dir="samples")
    learner = PoliciesLearner(config, ranks, None, make=Recorded)  # type: ignore[arg-type]

    def learn(step: int, *owners: str) -> dict[str, float]:
        count = len(owners)
        tensors = {
            "number": torch.arange(count),
            "weight_version": torch.zeros(count, 1, dtype=torch.int64),
            "response_mask": torch.ones(count, 1, dtype=torch.bool),
        }
        data = Batch(tensors, {POLICY: np.array(owners, object)})
        return asyncio.run(learner.learn(SampleBatch(data, {}), step, StepClock()))

    first = learn(1, "math", "math")
    assert first == {
        f"math/{name}": value for name, value in (*AGES[0].items(), ("actor/loss", 0.5), ("version", 1.0))
    } | {"code/version": 0.0}
    second = learn(2, "code", "math", "code")
    assert (second["math/staleness/max"], second["code/staleness/max"]) == (1.0, 0.0)
    assert (second["math/version"], second["code/version"]) == (2.0, 1.0)
    made = {name: (each.folder, each.learned) for name, each in learner._learners.items()}  # type: ignore[attr-defined]
    assert made == {"math": ("samples/math", [0, 1, 1]), "code": ("samples/code", [0, 2])}


AGES = [{f"staleness/{name}": 0.0 for name in ("mean", "max", "token_mean", "token_max")}]
