"""What every rank of a layout does for test_reward_model.py, in one spawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.algorithms.losses import BradleyTerryConfig
from roll.datasets.collate import collate_scored
from roll.distributed.protocol import DataProto
from tests.integration.megatron_scenario import token_batch
from tests.integration.rank_pool import RankContext

STEPS = 5
PAD = 0


def sequences() -> list[list[int]]:
    """Eight sequences of different lengths, four pairs; none ends with the padding token."""
    batch = token_batch()
    lengths = batch["attention_mask"].sum(-1).tolist()
    rows = [row[:length] for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
    return [[*row[:-1], max(row[-1], PAD + 1)] for row in rows]


def run(context: RankContext) -> None:
    """`arguments`: models (name to folder) that are rated and trained, the options of Megatron, whether to pack."""
    for name, folder in context.arguments["models"].items():
        strategy = context.strategy(
            Path(folder), context.arguments["megatron"], packed=context.arguments["packed"], reward_model=True
        )
        context.results[f"parameters/{name}"] = [n for stage in strategy.stages for n, _ in stage.named_parameters()]
        strategy.weights.export_hf(context.folder / name)
        context.results[f"rewards/{name}"] = _rewards(strategy)
        context.results[f"steps/{name}"] = [strategy.train_step(_pairs()) for _ in range(STEPS)]
        strategy.weights.export_hf(context.folder / f"trained {name}")
        context.results[f"rewards/trained {name}"] = _rewards(strategy)
        strategy.shutdown()


def _rewards(strategy: Any) -> torch.Tensor | None:
    data = DataProto.from_dict(collate_scored(sequences()))
    data.meta_info = {"temperature": 0.7, "micro_batches": [[0, 3, 5], [1, 2, 7, 4], [6]]}
    answer = strategy.compute_values(data)
    return answer.batch["values"][data.batch["response_mask"]].clone() if len(answer) else None


def _pairs() -> DataProto:
    data = DataProto.from_dict(collate_scored(sequences()))
    plan = {"micro_batches": [[0, 1, 4, 5], [2, 3], [6, 7]], "tokens": 8.0, "sequences": 8.0}
    loss = BradleyTerryConfig(center_rewards_coefficient=0.01)
    data.meta_info = {"loss": "bradley_terry", "loss_config": loss, "optimizer_steps": [plan], "temperature": 1.0}
    return data
