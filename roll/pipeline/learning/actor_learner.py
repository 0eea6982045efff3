"""What all learners have in common: the roles that they train, and how these are saved, restored and exported."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from roll.distributed.calls.remote_call import ALL
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.learning.performance import PEAK_TFLOPS

if TYPE_CHECKING:
    from roll.base.timers import StepClock
    from roll.distributed.calls.remote_call import ClusterClient
    from roll.rollout.source import SampleBatch

ROLE, CRITIC = "actor_train", "critic"

POLL_S, MAX_POLL_S = 0.02, 0.5
"""First and longest interval between two checks whether a checkpoint is written."""


class ActorLearner(ABC):
    """How a batch becomes an update of actor_train, and of a critic if there is one; saves, restores, exports them."""

    def __init__(self, actor: ClusterClient[TrainWorker], critic: ClusterClient[TrainWorker] | None = None) -> None:
        self._actor = actor
        self._critic = critic
        self._peak: float | None = None
        """Of the slowest device of actor_train; 0 where one is not known."""
        self._trained = {ROLE: actor} | ({} if critic is None else {CRITIC: critic})

    @abstractmethod
    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Updates the weights with the whole batch, as step number `step`; returns `actor/...` and related metrics."""

    async def finish_step(self) -> dict[str, float]:
        """`memory/<role>_<kind>`: the largest of any rank, in bytes; and the peak of a device, where it is known."""
        if self._peak is None:
            self._peak = min(peak or 0.0 for peak in await self._actor.call(ALL, TrainWorker.peak_tflops))
        metrics = {PEAK_TFLOPS: self._peak} if self._peak else {}
        for role, cluster in self._trained.items():
            ranks = await cluster.call(ALL, TrainWorker.memory)
            metrics |= {f"memory/{role}_{kind}": float(max(rank[kind] for rank in ranks)) for kind in ranks[0]}
        return metrics

    async def save(self, folder: Path) -> None:
        for role, cluster in self._trained.items():
            await cluster.call(ALL, TrainWorker.begin_checkpoint, folder / role)

    async def saved(self) -> float:
        """Waits until what `save` began is written; polls the ranks, since a rank answers only between its calls.

        Returns:
            Seconds that optimizer steps waited for it.
        """
        interval, seconds = POLL_S, 0.0
        for cluster in self._trained.values():
            while None in (waits := await cluster.call(ALL, TrainWorker.checkpoint_written)):
                await asyncio.sleep(interval)
                interval = min(2 * interval, MAX_POLL_S)
            seconds += max(wait for wait in waits if wait is not None)
        return seconds

    async def load(self, folder: Path) -> None:
        for role, cluster in self._trained.items():
            await cluster.call(ALL, TrainWorker.load_checkpoint, folder / role)

    async def export_merged(self, folder: Path) -> None:
        """Writes the policy as a HF folder, with its adapters added to the weights."""
        await self._actor.call(ALL, TrainWorker.export_merged, folder)

    async def export_hf(self, folder: Path) -> None:
        """Writes the policy as a HF folder, or its adapters as a PEFT folder; the critic in its subfolder `critic`."""
        await self._actor.call(ALL, TrainWorker.export_hf, folder)
        if self._critic is not None:
            await self._critic.call(ALL, TrainWorker.export_hf, folder / CRITIC)


def metric_name(name: str) -> str:
    """The name of a training metric in a run: those of correction, experts and adapters keep theirs."""
    return name if name.startswith(("correction/", "moe/", "lora/")) else f"actor/{name}"
