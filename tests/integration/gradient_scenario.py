"""What ranks do for test_model_families.py, test_frozen_weights.py and test_router_replay.py: gradients by HF names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from roll.datasets.batch import ROUTING, Batch
from tests.integration.megatron_scenario import SAMPLES, training_batch
from tests.integration.rank_pool import RankContext


def gradients(strategy: Any, data: Batch) -> dict[str, torch.Tensor]:
    """Of the mean of the negative log-probs of all tokens of the responses, by the names of trained weights."""
    plan = data.meta_info["optimizer_steps"][0]

    def loss(log_probs: torch.Tensor, _: Any, fields: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(log_probs * fields["response_mask"]).sum() / plan["tokens"], {}

    for wrapped in strategy.wrapped:
        wrapped.zero_grad_buffer()
    strategy.forward.routing = data.non_tensor_batch.get(ROUTING, ())
    strategy.forward.backward(data.batch, plan["micro_batches"], 1.0, loss, False)
    weights = strategy.weights._weights
    try:
        trained = [weight for weight in weights if weight.parameter.requires_grad]
        strategy.weights._weights = [replace(weight, parameter=weight.parameter.main_grad) for weight in trained]
        return {name: tensor.float().clone() for name, tensor in strategy.weights.full_tensors()}
    finally:
        strategy.weights._weights = weights


def families(context: RankContext) -> None:
    """Log-probs, gradients and an export of each of `models`."""
    for family, folder in context.arguments["models"].items():
        strategy = context.strategy(Path(folder), megatron={"sequence_parallel": context.layout.tensor > 1})
        data = training_batch(0, 1, 3)
        data.meta_info["micro_batches"] = data.meta_info["optimizer_steps"][0]["micro_batches"]
        for packed in (False, True):
            strategy.forward.packed = packed
            scored = strategy.compute_log_probs(data).batch["log_probs"].clone()
            context.results[family, packed] = scored, gradients(strategy, data)
        strategy.weights.export_hf(context.folder / family)
        strategy.shutdown()


def frozen(context: RankContext) -> None:
    """Gradients and steps of each of `variants`: frozen parts, the folder of the model, and options of the strategy."""
    for name, (parts, folder, options) in context.arguments["variants"].items():
        data = training_batch(context.rank % context.layout.data, context.layout.data, 2)
        strategy = context.strategy(Path(folder), **options)
        expected = gradients(strategy, data)
        strategy.shutdown()
        strategy = context.strategy(Path(folder), frozen_parts=parts, **options)
        found = gradients(strategy, data)
        before = _weights(strategy)
        for _ in range(2):
            strategy.train_step(data)
        strategy.begin_checkpoint(context.folder / name)
        unbroken, memory = strategy.train_step(data), strategy.memory()
        after = _weights(strategy)
        strategy.shutdown()
        strategy = context.strategy(Path(folder), frozen_parts=parts, **options)
        strategy.load_checkpoint(context.folder / name)
        resumed = strategy.train_step(data)
        same = all(torch.equal(after[key], value) for key, value in _weights(strategy).items())
        strategy.shutdown()
        context.results[name] = {"expected": expected, "found": found, "before": before, "after": after}
        context.results[name] |= {"resumed": (resumed, unbroken, same), "memory": memory}


def _weights(strategy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in strategy.weights.full_tensors()}


def replayed(context: RankContext) -> None:
    """Log-probs, gradients and agreement of each of `variants`: a name of `routings`, and options of the strategy."""
    for name, (kind, options) in context.arguments["variants"].items():
        megatron = {"sequence_parallel": context.layout.tensor > 1, **options.get("megatron", {})}
        strategy = context.strategy(Path(context.arguments["model"]), replays=True, **{**options, "megatron": megatron})
        rank, ranks = strategy.coordinates.data, context.layout.data
        data = training_batch(rank, ranks, 3)
        rows = range(rank, SAMPLES, ranks)
        data.meta_info["micro_batches"] = data.meta_info["optimizer_steps"][0]["micro_batches"]
        data.meta_info["records_routing"] = kind == "recorded"
        if kind not in ("live", "recorded"):
            routing = [context.arguments["routings"][kind][row] for row in rows]
            data = Batch(data.tensors(), {ROUTING: routing}, data.meta_info)
        scored = strategy.compute_log_probs(data)
        strategy.forward.replay.agreement()
        found = gradients(strategy, data)
        context.results[name] = {
            "log_probs": scored.batch["log_probs"].clone() if len(scored) else None,
            "gradients": found,
            "agreement": strategy.forward.replay.agreement().get("moe/routing_agreement"),
            "rows": list(rows),
            "recorded": [*scored.non_tensor_batch.get(ROUTING, ())],
        }
        strategy.shutdown()


def split(context: RankContext) -> None:
    """Three steps of each of `variants`: each in one call, in two, and with gradients that two calls have added up."""
    for name, options in context.arguments["variants"].items():
        size = options.pop("micro_batch_size")
        for way in ("one call", "two calls", "parts"):
            strategy = context.strategy(Path(context.arguments["model"]), **options)
            data = training_batch(strategy.coordinates.data, context.layout.data, size)
            steps = [_step(strategy, data, way) for _ in range(3)]
            context.results[name, way] = steps, _weights(strategy)
            try:
                strategy.optimizer_step()
            except RuntimeError as error:
                context.results["without gradients"] = str(error)
            strategy.shutdown()


def _step(strategy: Any, data: Batch, way: str) -> dict[str, float]:
    if way == "one call":
        metrics: dict[str, float] = strategy.train_step(data)
        return metrics
    [plan] = data.meta_info["optimizer_steps"]
    micro_batches = plan["micro_batches"]
    middle = 1 if way == "parts" else 0
    losses: dict[str, float] = {}
    for part in filter(None, (micro_batches[:middle], micro_batches[middle:])):
        meta = data.meta_info | {"optimizer_steps": [plan | {"micro_batches": part}]}
        found, _ = strategy.forward_backward(Batch(data.tensors(), meta_info=meta))
        losses = {metric: losses.get(metric, 0.0) + value for metric, value in found.items()}
    return losses | strategy.optimizer_step()
