"""What every rank does for test_policy_updates.py: one optimizer step per `pg_variant` on one stale batch."""

from __future__ import annotations

from typing import Any

import torch

from roll.datasets.batch import Batch
from tests.integration.rank_pool import RankContext

RATE = 1.0


def one_step_of_each_variant(context: RankContext) -> None:
    """`arguments`: model, batch (tensors by name), loss_configs, teachers (by variant), temperature, top_k.

    A teacher is more tensors of the batch. Every step starts from the weights of `model`. With an Adam epsilon of 1 the
    first step subtracts RATE g / (|g| + 1), so the weights after it tell the gradient g of each parameter.
    """
    arguments = context.arguments
    for variant, loss_config in arguments["loss_configs"].items():
        strategy = context.strategy(
            arguments["model"],
            megatron={"sequence_parallel": context.layout.tensor > 1},
            training={"learning_rate": RATE, "adam_epsilon": 1.0},
            max_grad_norm=0.0,
        )
        batch = arguments["batch"] | arguments["teachers"].get(variant, {})
        data = _shard(batch, strategy.coordinates.data, context.layout.data)
        data.meta_info |= {"loss": "policy", "loss_config": loss_config, "temperature": arguments["temperature"]}
        if "most_likely" not in context.results:
            context.results["most_likely"] = _most_likely_tokens(strategy, arguments)
        metrics = strategy.train_step(data)
        weights = {name: tensor.clone() for name, tensor in strategy.weights.full_tensors()}
        context.results[variant] = {"grad_norm": metrics["grad_norm"], "loss": metrics["loss"], "weights": weights}
        strategy.shutdown()


def _most_likely_tokens(strategy: Any, arguments: Any) -> dict[str, torch.Tensor]:
    """What this rank gives for the whole batch, in micro-batches of unequal size; nothing off the last stage."""
    data = Batch(dict(arguments["batch"]))
    samples = list(range(len(arguments["batch"]["input_ids"])))
    micro_batches = [samples[:3], samples[3:]]
    data.meta_info = {"temperature": arguments["temperature"], "micro_batches": micro_batches}
    data.meta_info["top_k"] = arguments["top_k"]
    return dict(strategy.compute_log_probs(data).batch.items())


def _shard(batch: dict[str, torch.Tensor], data_rank: int, data_ranks: int) -> Batch:
    """This data rank's samples, in micro-batches of unequal size; token and sample counts are those of the batch."""
    rows = list(range(data_rank, len(batch["input_ids"]), data_ranks))
    data = Batch({name: tensor[rows] for name, tensor in batch.items()})
    indices = list(range(len(rows)))
    plan = {
        "micro_batches": [indices[:1], indices[1:]],
        "tokens": float(batch["response_mask"].sum()),
        "sequences": float(len(batch["input_ids"])),
    }
    data.meta_info = {"optimizer_steps": [plan]}
    return data
