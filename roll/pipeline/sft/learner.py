"""How a batch of pairs becomes an update: negative log-likelihood of the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.configs.pipeline import SFTConfig
from roll.distributed.train_worker import TrainWorker
from roll.pipeline.clock import StepClock
from roll.pipeline.interfaces import SampleBatch
from roll.pipeline.learner import ActorLearner
from roll.pipeline.sharding import training_plans, training_shards

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


class SFTLearner(ActorLearner):
    """One optimizer step a batch."""

    def __init__(self, config: SFTConfig, actor: Cluster[TrainWorker]) -> None:
        """Takes the cluster that learns."""
        super().__init__(actor)
        self._config = config

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """`actor/loss` and what the optimizer reports."""
        data = batch.data
        data.meta_info |= {"temperature": 1.0, "loss": "sft", "loss_config": None}
        (plan,) = training_plans(data, self._config.actor_train, self._actor.layout)
        with clock.measure("train"):
            metrics = (await self._actor.call_shards(TrainWorker.train_step, training_shards(data, plan)))[0]
        return {f"actor/{name}": value for name, value in metrics.items()}
