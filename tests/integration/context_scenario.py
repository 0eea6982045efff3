"""What every rank of a layout does for test_context_parallel.py: log-probs, gradients and optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from roll.algorithms.losses import ValueLossConfig
from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.options.preference_options import DPOOptions, RewardModelOptions
from roll.datasets.batch import Batch
from roll.datasets.collate import sampling_masks
from tests.integration.rank_pool import RankContext

LENGTHS = (1, 16, 40, 2, 3, 4, 5, 7, 8, 9, 13, 6)
"""Around multiples of chunks, and one sample much longer than all others; rows 2 i and 2 i + 1 are a pair."""
ON_ONE_RANK = 1
"""A sample of which only the first tokens are scored; sample 0, with it in a micro-batch, has none that could be."""
STEPS = 3
TRAINING = {"learning_rate": 1e-2, "adam_epsilon": 1e-2}
"""With this epsilon Adam's steps do not magnify rounding where a gradient is almost 0."""
WIDTH = max(LENGTHS)
PPO = PolicySettings(pg_variant="ppo", entropy_loss_coef=0.01, use_kl_loss=True, kl_loss_coef=0.1)
LOSSES_OF_KINDS: dict[str, tuple[str, Any]] = {
    "actor": ("policy", PPO),
    "critic": ("value", ValueLossConfig()),
    "reward": ("bradley_terry", RewardModelOptions(center_rewards_coefficient=0.01)),
    "dpo": ("dpo", DPOOptions()),
}


def whole_batch() -> dict[str, torch.Tensor]:
    """The same samples in every process, with what each loss reads."""
    generator = torch.Generator().manual_seed(5)
    count = len(LENGTHS)
    ids = torch.randint(0, 101, (count, WIDTH), generator=generator)
    columns = torch.arange(WIDTH)
    mask = columns < torch.tensor(LENGTHS)[:, None]
    response = mask & (columns > 0)
    response[ON_ONE_RANK, 4:] = False
    noise = torch.randn(4, count, WIDTH, generator=generator)
    kept = [[[] if column % 3 else [*{5, 7, int(ids[row, column])}] for column in range(WIDTH)] for row in range(count)]
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "old_log_probs": -4.6 + 0.3 * noise[0],
        "behavior_log_probs": -4.6 + 0.3 * noise[1],
        "ref_log_probs": -4.6 + 0.3 * noise[2],
        "advantages": noise[3],
        "returns": noise[0],
        "values": noise[1],
        "scores": torch.linspace(-1, 1, count),
        "turn_index": torch.where(response, columns // 5, -1),
        **sampling_masks(kept, WIDTH),
    }


def shard(data_rank: int, data_ranks: int, kind: str) -> tuple[Batch, list[int]]:
    """Every `data_ranks`-th pair in two micro-batches, the first of one pair, and the rows it has."""
    tensors = whole_batch()
    if kind == "reward":  # it scores the last token
        lengths = tensors["attention_mask"].sum(1)
        tensors["response_mask"] = torch.arange(WIDTH) == (lengths[:, None] - 1).clamp(min=1)
        tensors["attention_mask"][0, 1] = 1
    rows = [row for pair in range(data_rank, len(LENGTHS) // 2, data_ranks) for row in (2 * pair, 2 * pair + 1)]
    data = Batch({name: tensor[rows] for name, tensor in tensors.items()})
    counts = {"tokens": float(tensors["response_mask"].sum()), "sequences": float(len(LENGTHS))}
    places = list(range(len(rows)))
    loss, config = LOSSES_OF_KINDS[kind]
    data.meta_info = {
        "loss": loss,
        "loss_config": config,
        "temperature": 0.7,
        "micro_batches": [places] if data_rank else [places[:2], places[2:]],  # ranks may have unequally many
        "optimizer_steps": [{"micro_batches": [places[:2], places[2:]], **counts}],
    }
    return data, rows


def run(context: RankContext) -> None:
    """`arguments`: model, variants (name to kind and options of the strategy), mutations to try on the first."""
    for name, (kind, options) in context.arguments["variants"].items():
        context.results[name] = _outcome(context, kind, options, STEPS)
    for name in context.arguments.get("mutations", ()):
        with mutated(name, context.layout.context):
            context.results[name] = _outcome(context, "actor", {"packed": True}, 1)


def _outcome(context: RankContext, kind: str, options: Mapping[str, Any], steps: int) -> dict[str, Any]:
    from roll.distributed.train import megatron_strategy

    role = {"critic": "critic", "reward": "reward_model"}.get(kind)
    more = {role: True} if role else {}
    strategy = context.strategy(Path(context.arguments["model"]), training=TRAINING, **more, **options)
    data, rows = shard(strategy.coordinates.data, context.layout.data, kind)
    scored = (strategy.compute_values if role else strategy.compute_log_probs)(data)
    found: list[dict[str, torch.Tensor]] = []
    update = megatron_strategy.update

    def recorded(*arguments: Any) -> float:
        if not found:
            found.append(_gradients(strategy))
        return update(*arguments)

    with patch.object(megatron_strategy, "update", recorded):
        metrics = [strategy.train_step(data) for _ in range(steps)]
    outcome = {
        "rows": rows,
        "scores": {name: tensor.clone() for name, tensor in scored.batch.items()} if len(scored) else None,
        "gradients": found[0],
        "steps": metrics,
        "weights": {name: tensor.clone() for name, tensor in strategy.weights.full_tensors()},
    }
    strategy.shutdown()
    return outcome


def _gradients(strategy: Any) -> dict[str, torch.Tensor]:
    """The gradient of each weight of this stage under its HF name, gathered from the optimizer's shards."""
    for wrapped in strategy.wrapped:
        for buffer in wrapped.buffers if wrapped.ddp_config.use_distributed_optimizer else ():
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
    weights = copy.copy(strategy.weights)
    weights._weights = [replace(weight, parameter=weight.parameter.main_grad) for weight in weights._weights]
    return {name: tensor.clone() for name, tensor in weights.full_tensors()}


def losses(context: RankContext) -> None:
    """Loss, metrics and gradient norm of each of `configs` (name to PolicySettings), without an update."""
    from roll.algorithms.aggregation import LossScale
    from roll.algorithms.losses import LOSSES
    from roll.distributed.train.megatron_forward import reduce_micro_batches

    strategy = context.strategy(Path(context.arguments["model"]), packed=True)
    data, _ = shard(0, 1, "actor")
    step = data.meta_info["optimizer_steps"][0]
    scale = LossScale(step["tokens"], step["sequences"], WIDTH)
    for name, config in context.arguments["configs"].items():
        for wrapped in strategy.wrapped:
            wrapped.zero_grad_buffer()
        strategy.optimizer.zero_grad()

        def loss(log_probs: Any, entropy: Any, fields: Any, config: PolicySettings = config) -> Any:
            return LOSSES["policy"](log_probs, entropy, fields, scale, config)

        rows = strategy.forward.backward(data.batch, step["micro_batches"], 0.7, loss, config.needs_entropy_gradient)
        metrics = reduce_micro_batches(rows, strategy.device)
        strategy.optimizer.prepare_grads()
        context.results[name] = {**metrics, "grad_norm": float(strategy.optimizer.get_grad_norm())}
    strategy.shutdown()


def mutated(name: str, ranks: int) -> AbstractContextManager[Any]:
    """The package with one mistake."""
    from megatron.core import parallel_state

    from roll.distributed.train import megatron_forward, megatron_optimizer, micro_batch
    from roll.models import context_attention

    part, sums, stack = micro_batch.local_part, megatron_optimizer.finalize_model_grads, ExitStack()
    rows, group = megatron_forward._whole_rows, parallel_state.get_data_parallel_group

    def neighbours(micro: Any, *arguments: int) -> Any:
        own = part(micro, *arguments)
        return replace(own, targets=own.input_ids[0].roll(-1)[own.hidden_rows])

    def restarted(micro: Any, *arguments: int) -> Any:
        lengths = [length // ranks for length in micro.lengths]
        return replace(part(micro, *arguments), positions=torch.cat([torch.arange(length) for length in lengths]))

    def consecutive(micro: Any, *arguments: int) -> Any:
        with patch.object(torch, "minimum", lambda chunks, _: chunks // 2):
            return part(micro, *arguments)

    def averaged(model: Any, *arguments: Any, **options: Any) -> None:
        sums(model, *arguments, **options)
        for each in model:
            each.scale_gradients(1 / ranks)

    def own_only(x: torch.Tensor, group: Any) -> torch.Tensor:
        return x.chunk(group.size())[group.rank()].contiguous()

    mutations: dict[str, tuple[Any, str, Any]] = {
        "the target is the neighbour in the rank's part": (micro_batch, "local_part", neighbours),
        "a rank has consecutive chunks": (micro_batch, "local_part", consecutive),
        "positions start again in a rank's part": (micro_batch, "local_part", restarted),
        "metrics are summed over context ranks": (
            parallel_state,
            "get_data_parallel_group",
            lambda *_, **options: group(**options | {"with_context_parallel": True}),
        ),
        "log-probs are averaged over context ranks": (
            megatron_forward,
            "_whole_rows",
            lambda *arguments: rows(*arguments) / ranks,
        ),
        "gradients are averaged over context ranks": (megatron_optimizer, "finalize_model_grads", averaged),
        "gradients of other ranks' queries are lost": (
            context_attention.tensor_parallel,
            "reduce_scatter_to_sequence_parallel_region",
            own_only,
        ),
    }
    stack.enter_context(patch.object(*mutations[name]))
    return stack


MUTATIONS = (
    "the target is the neighbour in the rank's part",
    "a rank has consecutive chunks",
    "positions start again in a rank's part",
    "metrics are summed over context ranks",
    "log-probs are averaged over context ranks",
    "gradients are averaged over context ranks",
    "gradients of other ranks' queries are lost",
)
