"""DPO: learning from pairs of a better and a worse response, against a frozen reference. Nothing is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from roll.algorithms.losses import pair_kl
from roll.algorithms.options.preference_options import DPOOptions
from roll.base.schema import part
from roll.base.timers import StepClock
from roll.configs.pipeline import DPOConfig
from roll.configs.roles import ReferenceConfig
from roll.configs.run_options import TrainerOptions
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_examples
from roll.datasets.preferences import PreferencePair
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.kinds.preference import PairLearner, PreferencePipeline
from roll.pipeline.learning.shards import cluster_log_probs
from roll.rollout.source import SampleBatch

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


class DPOPipeline(PreferencePipeline[DPOConfig]):
    """A policy that learns and a reference that does not."""

    def learner(self, clusters: Mapping[str, Cluster[TrainWorker]]) -> DPOLearner:
        config = self._config
        options, reference = part(DPOOptions, config), clusters.get("reference")
        return DPOLearner(config, clusters["actor_train"], options, reference, config.reference)


class DPOLearner(PairLearner):
    """Learns from the log-probs of the responses under policy and reference."""

    loss = "dpo"

    def __init__(
        self,
        config: TrainerOptions,
        actor: Cluster[TrainWorker],
        options: DPOOptions,
        reference: Cluster[TrainWorker] | None,
        reference_role: ReferenceConfig,
    ) -> None:
        super().__init__(config, actor, options)
        self._reference, self._reference_role = reference, reference_role
        self._uses_means = options.dpo_loss_type == "kto_pair"

    def collate(self, items: Sequence[PreferencePair]) -> Batch:
        return Batch(collate_examples([one for pair in items for one in (pair.chosen, pair.rejected)]))

    async def outputs(self, data: Batch) -> torch.Tensor:
        answer = await cluster_log_probs(self._actor, data, self._role)
        log_probs: torch.Tensor = answer.batch["log_probs"]
        return log_probs

    def with_means(self, data: Batch, outputs: torch.Tensor) -> Batch:
        """With `kto_pair`, the pairs with their `pair_kl` [2 P]."""
        if not self._uses_means:
            return data
        return data.adding({"pair_kl": pair_kl(outputs, data.batch, self._loss_config)})

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Log-probs of the reference, with `kto_pair` also those of the policy for its means, then the optimizer step.

        These means are over the whole batch, whose micro-batches the training pass sees one at a time.
        """
        with clock.measure("old_log_probs"):
            data = await self._with_reference(batch.data)
            if self._uses_means:
                data = self.with_means(data, await self.outputs(data))
        return await super().learn(replace(batch, data=data), step, clock)

    async def validate(self, data: Batch) -> dict[str, float]:
        return await super().validate(await self._with_reference(data))

    async def _with_reference(self, data: Batch) -> Batch:
        if self._reference is None:  # the weights below the adapters
            answer = await cluster_log_probs(self._actor, data, self._role, base=True)
        else:
            answer = await cluster_log_probs(self._reference, data, self._reference_role)
        return data.adding({"ref_log_probs": answer.batch["log_probs"] * data.batch["response_mask"]})
