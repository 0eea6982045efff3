"""Splits a batch over the ranks of a Megatron cluster: forward passes, and the optimizer steps of a trained role."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from roll.algorithms.aggregation import SAMPLE_WEIGHTS, mean_one
from roll.configs.roles import ActorTrainConfig, MegatronRoleConfig, TrainedRoleConfig
from roll.datasets.batch import ROUTING, Batch
from roll.datasets.collate import SAMPLING_MASK, SAMPLING_MASK_SIZES
from roll.datasets.micro_batches import OptimizerStepPlan, Prefix, plan_forward, plan_optimizer_steps, sample_cost
from roll.distributed.train.train_worker import TrainWorker
from roll.hub.names import local_model
from roll.models.families.shape import read_model_shape

if TYPE_CHECKING:
    from roll.distributed.calls.remote_call import ClusterClient

LOG_PROB_KEYS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""Tensors that a forward pass for log-probs needs."""


async def cluster_log_probs(
    cluster: ClusterClient[TrainWorker],
    data: Batch,
    config: MegatronRoleConfig,
    temperature: float = 1.0,
    sum_pi_squared: bool = False,
    top_k: int = 0,
    base: bool = False,
    records_routing: bool = False,
) -> Batch:
    """`log_probs` and `entropy` [B, T] of `data` under the weights of actor_train or reference; see `forward`.

    With `sum_pi_squared`, a tensor of that name too, and with `top_k`, the most likely tokens; with `base` without
    adapters; with `records_routing` also the experts of tokens; see `MegatronInferStrategy.compute_log_probs`.
    """
    options = {"sum_pi_squared": sum_pi_squared, "top_k": top_k, "base": base, "records_routing": records_routing}
    return await forward(cluster, TrainWorker.compute_log_probs, data, config, temperature, **options)


async def forward(
    cluster: ClusterClient[TrainWorker],
    method: Callable[[TrainWorker, Batch], Batch],
    data: Batch,
    config: MegatronRoleConfig,
    temperature: float = 1.0,
    **options: bool | int,
) -> Batch:
    """What a forward pass of a cluster gives for every sample, in the order of `data`.

    `method` of its ranks reads `temperature`, micro-batches and `options` of `meta_info`; the role `config` has the
    size of micro-batches.
    """
    limit = config.forward_token_limit
    masks = [key for key in (SAMPLING_MASK, SAMPLING_MASK_SIZES) if key in data]
    lengths = sample_lengths(data)
    plan = plan_forward(
        [*map(cluster.layout.padded, lengths)],
        cluster.layout.data,
        costs=sample_costs(lengths, config),
        micro_batch_size=config.infer_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=cluster.layout.round_to,
        packed=config.use_sequence_packing,
        prefixes=shared_prefixes(data, config, cluster.platform),
    )
    inputs = data.select(*LOG_PROB_KEYS, *masks)
    if isinstance(config, ActorTrainConfig):  # the experts of the policy; other models have their own
        inputs = inputs.with_column(ROUTING, data)
    shards = []
    for indices, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        shard = inputs.select_idxs(indices)
        shard.meta_info = {"temperature": temperature, "micro_batches": micro_batches, **options}
        shards.append(shard)
    return Batch.join(await cluster.call_shards(method, shards), plan.inverse)


def sample_lengths(data: Batch) -> list[int]:
    lengths: list[int] = data.batch["attention_mask"].sum(-1).tolist()
    return lengths


def shared_prefixes(data: Batch, role: MegatronRoleConfig, platform: str) -> list[Prefix | None] | None:
    """What each sample shares with its group in a micro-batch, as `plan_optimizer_steps` takes it.

    Returns:
        None where the ranks compute every token of every sample (`MegatronInferStrategy` shares prefixes of packed
        samples on a CPU, not under context parallelism), or the batch has no groups.
    """
    shares = platform == "cpu" and role.use_sequence_packing and role.layout.context == 1
    if not shares or "group_ids" not in data:
        return None
    ids, mask = data.batch["input_ids"], data.batch["attention_mask"].bool()
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(data.batch["group_ids"].tolist()):
        groups.setdefault(group, []).append(index)
    prefixes: list[Prefix | None] = [None] * len(data)
    for group, rows in groups.items():
        common = ((ids[rows] == ids[rows[0]]) & mask[rows]).all(0)
        tokens = int(common.long().cumprod(0).sum())
        if tokens and len(rows) > 1:
            for index in rows:
                prefixes[index] = group, tokens
    return prefixes


def sample_costs(lengths: Sequence[int], role: MegatronRoleConfig) -> list[float]:
    crossover = _crossover_length(role.model_args.model_name_or_path, role.value_head)
    return [sample_cost(length, crossover) for length in lengths]


@cache
def _crossover_length(model: str | None, value_head: bool) -> float:
    shape = None if model is None else read_model_shape(local_model(model), value_head)
    return math.inf if shape is None else shape.crossover_length()


def training_plans(
    data: Batch, role: TrainedRoleConfig, platform: str, samples_per_step: int | None = None
) -> list[OptimizerStepPlan]:
    """The optimizer steps of one pass over `data` by a trained role on a platform; those of padding are left out.

    A step has `samples_per_step`, by default those of the role.
    """
    limit, size = role.training_token_limit, samples_per_step or role.samples_per_optimizer_step
    lengths = sample_lengths(data)
    plans = plan_optimizer_steps(
        [*map(role.layout.padded, lengths)],
        role.layout.data,
        samples_per_step=size,
        costs=sample_costs(lengths, role),
        micro_batch_size=role.training_args.per_device_train_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=role.layout.round_to,
        packed=role.use_sequence_packing,
        prefixes=shared_prefixes(data, role, platform),
    )
    return [plans[number] for number in live_steps(data, size)]


def live_steps(data: Batch, samples_per_step: int) -> list[int]:
    """Numbers of the optimizer steps of `data` whose samples are not all padding; [0] if there are none."""
    live = data.batch["response_mask"].bool().any(-1).view(-1, samples_per_step).any(-1)
    return live.nonzero().flatten().tolist() or [0]


def training_shards(
    data: Batch, plan: OptimizerStepPlan, options: Mapping[str, Any], counted: torch.Tensor | None = None
) -> list[Batch]:
    """One shard for each data-parallel rank, with its micro-batches and the global denominators of the loss.

    `options` are `temperature`, `loss` and `loss_config`; see `MegatronTrainStrategy.train_step`.

    Denominators count the tokens of `counted` [B, T], by default the response mask, and samples that have any.
    """
    rows = [index for share in plan.indices for index in share]
    mask = (data.batch["response_mask"] if counted is None else counted).bool()[rows]
    tokens, sequences = float(mask.sum()), float(mask.any(-1).sum())
    if SAMPLE_WEIGHTS in data:
        data = data.adding({SAMPLE_WEIGHTS: mean_one(data.batch[SAMPLE_WEIGHTS], rows, mask.any(-1))})
    shards = []
    for indices, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        shard = data.select_idxs(indices)
        step = {"micro_batches": micro_batches, "tokens": tokens, "sequences": sequences}
        shard.meta_info = {**options, "optimizer_steps": [step]}
        shards.append(shard)
    return shards
