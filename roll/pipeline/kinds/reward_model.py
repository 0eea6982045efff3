"""Reward models: a value head learns from pairs of a better and a worse response. Nothing is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from roll.algorithms.options.preference_options import RewardModelOptions
from roll.base.schema import part
from roll.configs.pipeline import RewardModelConfig
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_scored
from roll.datasets.preferences import PreferencePair
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.kinds.preference import PairLearner, PreferencePipeline
from roll.pipeline.learning.shards import forward

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


class RewardModelPipeline(PreferencePipeline[RewardModelConfig]):
    """One role that learns to rate sequences."""

    def learner(self, clusters: Mapping[str, Cluster[TrainWorker]]) -> RewardModelLearner:
        options = part(RewardModelOptions, self._config)
        return RewardModelLearner(self._config, clusters["actor_train"], options)


class RewardModelLearner(PairLearner):
    """Learns from the rewards of both responses: the values after their last tokens, which are end tokens."""

    loss = "bradley_terry"

    def collate(self, items: Sequence[PreferencePair]) -> Batch:
        """Prompts and responses; `response_mask` is set on the token after them."""
        both = [one for pair in items for one in (pair.chosen, pair.rejected)]
        return Batch(collate_scored([[*one.prompt_ids, *one.response_ids] for one in both]))

    async def outputs(self, data: Batch) -> torch.Tensor:
        answer = await forward(self._actor, TrainWorker.compute_values, data, self._role)
        values: torch.Tensor = answer.batch["values"]
        return values
