"""Between the driver's batch and the ranks' shards: who gets which samples, and how answers come back in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll.configs.parallel_layout import ParallelLayout
from roll.configs.roles import ActorTrainConfig, MegatronRoleConfig
from roll.datasets.micro_batches import OptimizerStepPlan, plan_forward, plan_optimizer_steps
from roll.distributed.protocol import DataProto

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

LOG_PROB_KEYS = ("input_ids", "attention_mask", "position_ids", "response_mask")


def sample_lengths(data: DataProto) -> list[int]:
    """Tokens of each sample, padding not counted."""
    return data.batch["attention_mask"].sum(-1).tolist()


def training_plans(data: DataProto, config: ActorTrainConfig, layout: ParallelLayout) -> list[OptimizerStepPlan]:
    """The optimizer steps of one pass over `data`."""
    limit = config.training_token_limit
    return plan_optimizer_steps(
        sample_lengths(data),
        layout.data,
        samples_per_step=config.training_args.samples_per_optimizer_step(layout.data),
        micro_batch_size=config.training_args.per_device_train_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=layout.tensor,
    )


def training_shards(data: DataProto, plan: OptimizerStepPlan, counted: torch.Tensor | None = None) -> list[DataProto]:
    """One shard for each data-parallel rank, with its micro-batches and the global denominators of the loss.

    Args:
        data: the batch.
        plan: one optimizer step of it.
        counted: [B, T] tokens the denominators count, if not all of the response mask. Samples without any, padding
            among them, do not count either.
    """
    rows = [index for share in plan.indices for index in share]
    mask = (data.batch["response_mask"] if counted is None else counted).bool()[rows]
    tokens, sequences = float(mask.sum()), float(mask.any(-1).sum())
    shards = []
    for indices, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        shard = data.select_idxs(indices)
        step = {"micro_batches": micro_batches, "tokens": tokens, "sequences": sequences}
        shard.meta_info = {**data.meta_info, "optimizer_steps": [step]}
        shards.append(shard)
    return shards


async def cluster_log_probs(cluster: Cluster, data: DataProto, config: MegatronRoleConfig) -> DataProto:
    """`log_probs` and `entropy` [B, T] of `data` under the cluster's weights, in the order of `data`.

    Args:
        cluster: actor_train or reference.
        data: a batch with `meta_info["temperature"]`.
        config: the cluster's role, for the size of its forward micro-batches.
    """
    limit = config.forward_token_limit
    plan = plan_forward(
        sample_lengths(data),
        cluster.layout.data,
        micro_batch_size=config.infer_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=cluster.layout.tensor,
    )
    inputs = data.select(*LOG_PROB_KEYS)
    shards = []
    for indices, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        shard = inputs.select_idxs(indices)
        shard.meta_info = {"temperature": data.meta_info["temperature"], "micro_batches": micro_batches}
        shards.append(shard)
    answers = DataProto.concat(await cluster.compute_log_probs(shards))
    return answers.reorder(torch.tensor(plan.inverse))
