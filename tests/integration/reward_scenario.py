"""What every rank of a layout does for test_reward_model_layouts.py, in one spawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.algorithms.options.preference_options import RewardModelOptions
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_scored
from tests.integration.megatron_scenario import token_batch
from tests.integration.rank_pool import RankContext

STEPS = 5
PAD = 0
CENTERING = 0.01
TRAINING = {"learning_rate": 1e-3, "adam_epsilon": 1e-4}
"""With this epsilon Adam's first step does not turn the rounding of gradients near 0 into whole steps."""


def sequences() -> list[list[int]]:
    """Eight sequences of different lengths, four pairs; none ends with the padding token."""
    batch = token_batch()
    lengths = batch["attention_mask"].sum(-1).tolist()
    rows = [row[:length] for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
    return [[*row[:-1], max(row[-1], PAD + 1)] for row in rows]


def run(context: RankContext) -> None:
    """`arguments`: models (name to folder) that are rated and trained, the options of Megatron, whether to pack.

    Those named in `frozen` are also rated by role `reward`.
    """
    options = {key: context.arguments[key] for key in ("megatron", "packed")} | {"reward_model": True}
    for name, folder in context.arguments["models"].items():
        if name in context.arguments["frozen"]:
            strategy = context.strategy(Path(folder), infer=True, **options)
            context.results[f"rewards/frozen {name}"] = _rewards(strategy)
            strategy.shutdown()
        strategy = context.strategy(Path(folder), training=TRAINING, **options)
        context.results[f"parameters/{name}"] = [n for stage in strategy.stages for n, _ in stage.named_parameters()]
        strategy.weights.export_hf(context.folder / name)
        context.results[f"rewards/{name}"] = _rewards(strategy)
        steps = context.results[f"steps/{name}"] = [strategy.train_step(_pairs())]
        strategy.weights.export_hf(context.folder / f"first {name}")
        steps += [strategy.train_step(_pairs()) for _ in range(STEPS - 1)]
        strategy.weights.export_hf(context.folder / f"trained {name}")
        context.results[f"rewards/trained {name}"] = _rewards(strategy)
        strategy.shutdown()


def _rewards(strategy: Any) -> torch.Tensor | None:
    data = Batch(collate_scored(sequences()))
    data.meta_info = {"temperature": 0.7, "micro_batches": [[0, 3, 5], [1, 2, 7, 4], [6]]}
    answer = strategy.compute_values(data)
    return answer.batch["values"][data.batch["response_mask"]].clone() if len(answer) else None


def _pairs() -> Batch:
    data = Batch(collate_scored(sequences()))
    plan = {"micro_batches": [[0, 1, 4, 5], [2, 3], [6, 7]], "tokens": 8.0, "sequences": 8.0}
    loss = RewardModelOptions(center_rewards_coefficient=CENTERING)
    data.meta_info = {"loss": "bradley_terry", "loss_config": loss, "optimizer_steps": [plan], "temperature": 1.0}
    return data
