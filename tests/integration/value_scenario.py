"""What every rank of a layout does for test_critic_model.py, in one spawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.algorithms.losses import ValueLossConfig
from roll.datasets.batch import Batch
from tests.integration.megatron_scenario import token_batch, training_batch
from tests.integration.rank_pool import RankContext

STEPS = 20


def run(context: RankContext) -> None:
    """`arguments`: models (name to folder) that give values, `trained` one of them, variants (name to options)."""
    for name, folder in context.arguments["models"].items():
        _score_and_export(context, name, Path(folder))
    for name, options in context.arguments["variants"].items():
        _train(context, name, Path(context.arguments["trained"]), dict(options))
    if context.arguments["resumed"]:
        _resume(context, Path(context.arguments["trained"]))


def _values(strategy: Any) -> torch.Tensor | None:
    data = Batch(token_batch())
    data.meta_info = {"temperature": 0.7, "micro_batches": [[0, 3, 5], [1, 2, 7, 4], [6]]}
    answer = strategy.compute_values(data)
    return answer.batch["values"].clone() if len(answer) else None


def _score_and_export(context: RankContext, name: str, folder: Path) -> None:
    strategy = context.strategy(folder, megatron={"sequence_parallel": context.layout.tensor > 1}, critic=True)
    context.results[f"values/{name}"] = _values(strategy)
    strategy.forward.packed = True
    context.results[f"values/{name}/packed"] = _values(strategy)
    context.results[f"parameters/{name}"] = [n for stage in strategy.stages for n, _ in stage.named_parameters()]
    strategy.weights.export_hf(context.folder / name)
    strategy.shutdown()


def _batch(strategy: Any, context: RankContext, size: int) -> Batch:
    data = training_batch(strategy.coordinates.data, context.layout.data, size)
    ids = data.batch["input_ids"].float()
    data.batch["returns"] = torch.cos(ids)  # a target that a model of these tokens can learn
    data.batch["values"] = torch.zeros_like(ids)
    data.meta_info |= {"loss": "value", "loss_config": ValueLossConfig()}
    return data


def _train(context: RankContext, name: str, folder: Path, options: dict[str, Any]) -> None:
    size = options.pop("micro_batch_size")
    strategy = context.strategy(folder, critic=True, **options)
    data = _batch(strategy, context, size)
    context.results[f"steps/{name}"] = [strategy.train_step(data) for _ in range(STEPS)]
    strategy.weights.export_hf(context.folder / f"trained {name}")
    strategy.shutdown()


def _resume(context: RankContext, folder: Path) -> None:
    """Two steps, two more while a checkpoint is written; then a new strategy loads and repeats the two."""
    strategy = context.strategy(folder, critic=True)
    data = _batch(strategy, context, 2)
    for _ in range(2):
        strategy.train_step(data)
    strategy.begin_checkpoint(context.folder / "checkpoint")
    unbroken = [strategy.train_step(data) for _ in range(2)]
    weights = {key: value.clone() for key, value in strategy.weights.full_tensors()}
    strategy.shutdown()
    strategy = context.strategy(folder, critic=True)
    strategy.load_checkpoint(context.folder / "checkpoint")
    resumed = [strategy.train_step(data) for _ in range(2)]
    same = all(torch.equal(weights[key], value) for key, value in strategy.weights.full_tensors())
    context.results["resume"] = {"unbroken": unbroken, "resumed": resumed, "same_weights": same}
    strategy.shutdown()
