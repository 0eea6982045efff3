"""How a batch of pairs becomes an update: negative log-likelihood of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roll.algorithms.losses import SFTLossConfig
from roll.configs.pipeline import SFTConfig
from roll.pipeline.clock import StepClock
from roll.pipeline.interfaces import SampleBatch
from roll.pipeline.sharding import training_plans, training_shards

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


class SFTLearner:
    """One optimizer step a batch."""

    def __init__(self, config: SFTConfig, actor: Cluster) -> None:
        """Takes the cluster that learns."""
        self._config = config
        self._actor = actor

    async def learn(self, batch: SampleBatch, clock: StepClock) -> dict[str, float]:
        """`actor/loss` and what the optimizer reports."""
        data = batch.data
        data.meta_info |= {"temperature": 1.0, "loss": "sft", "loss_config": SFTLossConfig()}
        (plan,) = training_plans(data, self._config.actor_train, self._actor.layout.data)
        with clock.measure("train"):
            metrics = (await self._actor.train_step(training_shards(data, plan)))[0]
        return {f"actor/{name}": value for name, value in metrics.items()}

    async def save(self, folder: Path) -> None:
        """Writes actor_train."""
        await self._actor.save_checkpoint(str(folder / "actor_train"))

    async def load(self, folder: Path) -> None:
        """Restores actor_train."""
        await self._actor.load_checkpoint(str(folder / "actor_train"))

    async def export_hf(self, folder: Path) -> None:
        """Writes the trained model as a HF folder."""
        await self._actor.export_hf(str(folder))
