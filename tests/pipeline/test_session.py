"""The order in which the clusters of a run start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from roll.configs.pipeline import BaseConfig
from roll.pipeline.session import Session


class Starting:
    """A cluster that notes when its start begins and ends."""

    def __init__(self, role: str, devices: list[int], log: list[str]) -> None:
        self.role, self.log = role, log
        self.config = SimpleNamespace(device_mapping=devices)

    def initialize(self) -> Any:
        self.log.append(f"{self.role} starts")

        async def end() -> None:
            await asyncio.sleep(0)
            self.log.append(f"{self.role} is ready")

        return end()


def started(platform: str, infer: list[int], turns: bool = False) -> list[str]:
    """What happens while a session with both roles and a reference gets ready."""
    log: list[str] = []
    session = Session(BaseConfig(platform=platform))  # type: ignore[arg-type]
    clusters: Any = {role: Starting(role, [0, 1], log) for role in ("actor_train", "reference")}
    session.train_clusters, engines = clusters, Starting("actor_infer", infer, log)
    session.infer_clusters = {"actor_infer": engines}  # type: ignore[dict-item]
    if turns:

        async def engines_may_start() -> None:
            log.append("freed")

        session.shared_devices = SimpleNamespace(engines_may_start=engines_may_start)  # type: ignore[assignment]
    asyncio.run(session.ready())
    return log


@pytest.mark.parametrize("infer", [[0, 1], [1, 2]])
def test_an_engine_starts_once_the_training_ranks_on_its_gpu_hold_their_memory(infer: list[int]) -> None:
    log = started("cuda", infer)
    assert log.index("actor_infer starts") > max(map(log.index, ("actor_train is ready", "reference is ready")))
    assert log[-1] == "actor_infer is ready"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_trainers_that_take_turns_free_the_devices_before_engines_on_gpus_start(platform: str) -> None:
    log = started(platform, [0, 1], turns=True)
    assert log.index("freed") > max(map(log.index, ("actor_train is ready", "reference is ready")))
    if platform == "cuda":
        assert log.index("freed") < log.index("actor_infer starts")


@pytest.mark.parametrize(("platform", "infer"), [("cpu", [0, 1]), ("cuda", [2, 3])])
def test_all_clusters_start_at_once_where_they_share_no_memory(platform: str, infer: list[int]) -> None:
    log = started(platform, infer)
    assert {line.rpartition(" ")[2] for line in log[:3]} == {"starts"} and len(log) == 6
