"""DPO: learning from pairs of a better and a worse response, against a frozen reference. Nothing is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from roll.algorithms.losses import pair_kl
from roll.algorithms.preference_options import DPOOptions
from roll.base.schema import part
from roll.configs.pipeline import DPOConfig
from roll.datasets.batch import DataProto
from roll.datasets.collate import collate_examples
from roll.datasets.preferences import PreferencePair
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.kinds.preference import PairLearner, PreferencePipeline
from roll.pipeline.learning.shards import cluster_log_probs
from roll.pipeline.session import Session
from roll.rollout.source import SampleBatch
from roll.rollout.timers import StepClock

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


class DPOPipeline(PreferencePipeline[DPOConfig]):
    """A policy that learns and a reference that does not."""

    def learner(self, session: Session) -> DPOLearner:
        """The learner of both clusters."""
        clusters = session.train_clusters
        return DPOLearner(self._config, clusters["actor_train"], clusters["reference"])


class DPOLearner(PairLearner):
    """Learns from the log-probs of the responses under policy and reference."""

    loss = "dpo"

    def __init__(self, config: DPOConfig, actor: Cluster[TrainWorker], reference: Cluster[TrainWorker]) -> None:
        super().__init__(config, actor, part(DPOOptions, config))
        self._reference, self._reference_config = reference, config.reference
        self._uses_pair_kl = config.dpo_loss_type == "kto_pair"

    def collate(self, pairs: Sequence[PreferencePair]) -> DataProto:
        """Prompts and responses; `response_mask` is set on the tokens of responses."""
        return DataProto.from_dict(collate_examples([one for pair in pairs for one in (pair.chosen, pair.rejected)]))

    async def outputs(self, data: DataProto) -> torch.Tensor:
        """Log-probs of the policy; with `kto_pair` their `pair_kl` [2 P] is added to the batch."""
        answer = await cluster_log_probs(self._actor, data, self._config.actor_train)
        log_probs: torch.Tensor = answer.batch["log_probs"]
        if self._uses_pair_kl:
            data.batch["pair_kl"] = pair_kl(log_probs, data.batch, self._loss_config)
        return log_probs

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Log-probs of the reference, with `kto_pair` also those of the policy for its means, then the optimizer step.

        These means are over the whole batch, whose micro-batches the training pass sees one at a time.
        """
        with clock.measure("old_log_probs"):
            await self._add_reference(batch.data)
            if self._uses_pair_kl:
                await self.outputs(batch.data)
        return await super().learn(batch, step, clock)

    async def validate(self, data: DataProto) -> dict[str, float]:
        """The gains of held-out responses over the reference."""
        await self._add_reference(data)
        return await super().validate(data)

    async def _add_reference(self, data: DataProto) -> None:
        data.meta_info["temperature"] = 1.0
        answer = await cluster_log_probs(self._reference, data, self._reference_config)
        data.batch["ref_log_probs"] = answer.batch["log_probs"] * data.batch["response_mask"]
