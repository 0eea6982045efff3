"""Between the driver's batch and the ranks' shards: who gets which samples, and how answers come back in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll.configs.layout import ParallelLayout
from roll.configs.worker import WorkerConfig
from roll.datasets.micro_batches import OptimizerStepPlan, plan_forward, plan_optimizer_steps
from roll.distributed.protocol import DataProto
from roll.distributed.train_worker import TrainWorker

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

LOG_PROB_KEYS = ("input_ids", "attention_mask", "position_ids", "response_mask")


def sample_lengths(data: DataProto) -> list[int]:
    """Tokens of each sample, padding not counted."""
    return data.batch["attention_mask"].sum(-1).tolist()


def samples_per_optimizer_step(config: WorkerConfig, data_parallel: int) -> int:
    """per_device_train_batch_size * gradient_accumulation_steps * data parallel size."""
    args = config.training_args
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * data_parallel


def training_plans(data: DataProto, config: WorkerConfig, layout: ParallelLayout) -> list[OptimizerStepPlan]:
    """The optimizer steps of one pass over `data`."""
    dynamic = config.use_dynamic_batching_in_train
    return plan_optimizer_steps(
        sample_lengths(data),
        layout.data,
        samples_per_step=samples_per_optimizer_step(config, layout.data),
        micro_batch_size=None if dynamic else config.training_args.per_device_train_batch_size,
        max_tokens=config.max_tokens_per_microbatch_in_train if dynamic else None,
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


async def cluster_log_probs(cluster: Cluster[TrainWorker], data: DataProto, config: WorkerConfig) -> DataProto:
    """`log_probs` and `entropy` [B, T] of `data` under the cluster's weights, in the order of `data`.

    Args:
        cluster: actor_train or reference.
        data: a batch with `meta_info["temperature"]`.
        config: the cluster's role, for the size of its forward micro-batches.
    """
    dynamic = config.use_dynamic_batching_in_infer
    plan = plan_forward(
        sample_lengths(data),
        cluster.layout.data,
        micro_batch_size=None if dynamic else config.infer_batch_size,
        max_tokens=config.max_tokens_per_microbatch_in_infer if dynamic else None,
        round_to=cluster.layout.tensor,
    )
    inputs = data.select(*LOG_PROB_KEYS)
    shards = []
    for indices, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        shard = inputs.select_idxs(indices)
        shard.meta_info = {"temperature": data.meta_info["temperature"], "micro_batches": micro_batches}
        shards.append(shard)
    answers = DataProto.concat(await cluster.call_shards(TrainWorker.compute_log_probs, shards))
    return answers.reorder(torch.tensor(plan.inverse))
