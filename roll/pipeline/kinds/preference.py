"""What the pipelines of preference pairs share: how pairs are learned and validated.

`dpo.py` and `reward_model.py` add their tensors, their model's output and loss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from roll.algorithms.aggregation import LossScale
from roll.algorithms.losses import LOSSES
from roll.configs.pipeline import PreferenceConfig
from roll.configs.roles import TrainedRoleConfig
from roll.configs.run_options import TrainerOptions
from roll.datasets.batch import Batch
from roll.datasets.micro_batches import OptimizerStepPlan, plan_optimizer_steps
from roll.datasets.preferences import PreferencePair, load_preferences
from roll.pipeline.kinds.sft import StoredLearner, StoredPipeline
from roll.pipeline.learning.shards import sample_costs, sample_lengths

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster
    from roll.distributed.train.train_worker import TrainWorker

PairConfigT = TypeVar("PairConfigT", bound=PreferenceConfig)


class PreferencePipeline(StoredPipeline[PairConfigT]):
    """A model that learns from pairs."""

    load = staticmethod(load_preferences)


class PairLearner(StoredLearner[PreferencePair]):
    """Learns from batches of P pairs [2 P, T]: the better response of pair i in row 2 i, the worse one in the next."""

    def __init__(self, config: TrainerOptions, actor: Cluster[TrainWorker], loss_config: Any) -> None:
        super().__init__(actor, config.actor_train, loss_config)
        self._longest = config.max_sequence_length

    @abstractmethod
    async def outputs(self, data: Batch) -> torch.Tensor:
        """What the current weights give for the tokens of pairs, [2 P, T]."""

    def with_means(self, data: Batch, outputs: torch.Tensor) -> Batch:
        """The pairs with what the loss needs to know of all of them; here nothing."""
        return data

    def plans(self, data: Batch) -> list[OptimizerStepPlan]:
        return pair_plans(data, self._role)

    async def validate(self, data: Batch) -> dict[str, float]:
        """`val/loss`, `val/accuracy` and `val/margin`."""
        scale, outputs = LossScale.of(data.batch["response_mask"], self._longest), await self.outputs(data)
        batch = self.with_means(data, outputs).batch
        loss, metrics = LOSSES[self.loss](outputs, None, batch, scale, self._loss_config)
        return {"val/loss": float(loss), **{f"val/{name}": float(metrics[name]) for name in ("accuracy", "margin")}}


def pair_plans(data: Batch, role: TrainedRoleConfig) -> list[OptimizerStepPlan]:
    """The optimizer steps of one pass over a batch of pairs, with both rows of a pair in the same micro-batch.

    `per_device_train_batch_size` counts pairs; a token limit counts the tokens of all rows.
    """
    whole = sample_lengths(data)
    rows = torch.tensor([*map(role.layout.padded, whole)]).view(-1, 2)
    limit, packed = role.training_token_limit, role.use_sequence_packing
    lengths = rows.sum(-1) if packed else 2 * rows.amax(-1)
    costs = torch.tensor(sample_costs(whole, role), dtype=torch.float64).view(-1, 2)
    plans = plan_optimizer_steps(
        lengths.tolist(),
        role.layout.data,
        samples_per_step=role.samples_per_optimizer_step,
        costs=(costs.sum(-1) if packed else 2 * costs.amax(-1)).tolist(),
        micro_batch_size=role.training_args.per_device_train_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=(1 if packed else 2) * role.layout.round_to,
        packed=packed,
    )
    return [
        OptimizerStepPlan(
            [_both_rows(shard) for shard in plan.indices],
            [[_both_rows(micro) for micro in shard] for shard in plan.micro_batches],
        )
        for plan in plans
    ]


def _both_rows(pairs: Sequence[int]) -> list[int]:
    return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
