"""Samples are dealt to ranks by their cost for the role's model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from roll.configs.arguments import TrainingArguments, TrainModelArguments
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.roles import ActorTrainConfig
from roll.datasets.batch import Batch
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.kinds.preference import pair_plans
from roll.pipeline.learning.shards import forward, sample_costs, shared_prefixes, training_plans

LENGTHS = [80, 40, 40, 30, 30, 30]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Attention takes as long as the matrices from 21 tokens on."""


class Lengths:
    """Two data-parallel ranks; a forward pass gives each sample its length, and keeps the lengths of each shard."""

    layout = ParallelLayout(data=2)
    platform = "cpu"
    shards: list[list[int]]

    async def call_shards(self, _, shards):
        lengths = [shard.batch["attention_mask"].sum(-1) for shard in shards]
        self.shards = [each.tolist() for each in lengths]
        return [Batch({"lengths": each}) for each in lengths]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def role(folder: Path | None, samples: int = 6) -> ActorTrainConfig:
    limits = {
        f"{key}_in_{kind}": value
        for kind in ("train", "infer")
        for key, value in {"use_dynamic_batching": True, "max_tokens_per_microbatch": 500}.items()
    }
    return ActorTrainConfig(
        model_args=TrainModelArguments(model_name_or_path=None if folder is None else str(folder)),
        training_args=TrainingArguments(gradient_accumulation_steps=samples // 2),
        device_mapping=[0, 1],
        **limits,
    )


def batch(lengths: list[int]) -> Batch:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Batch({key: mask for key in ("input_ids", "attention_mask", "position_ids", "response_mask")})


def test_a_sample_as_long_as_the_crossover_of_the_model_costs_twice_its_tokens(folder):
    # per layer 8 x (16 + 2 x 4 + 16) x 64 + 3 x 8 x 4, and the head 8 x 128 of two layers, over 16 x 64
    crossover = (8 * 40 * 64 + 96 + 512) / 1024
    assert sample_costs([10, 40], role(folder)) == pytest.approx([10 + 100 / crossover, 40 + 1600 / crossover])
    assert sample_costs([10, 40], role(None)) == [10, 40]


def test_training_and_forward_passes_balance_the_square_of_lengths(folder):
    (plan,) = training_plans(batch(LENGTHS), role(folder), "cpu")
    assert plan.indices == [[0], [1, 2, 3, 4, 5]]
    cluster = Lengths()
    answer = asyncio.run(forward(cluster, TrainWorker.compute_log_probs, batch(LENGTHS), role(folder)))
    assert cluster.shards == [[80], [40, 40, 30, 30, 30]]
    assert answer.batch["lengths"].tolist() == LENGTHS


def test_without_a_model_tokens_are_balanced():
    (plan,) = training_plans(batch(LENGTHS), role(None), "cpu")
    assert [sum(LENGTHS[index] for index in shard) for shard in plan.indices] == [140, 110]


@pytest.mark.parametrize("packed", [True, False])
def test_a_pair_costs_what_both_of_its_rows_cost(folder, packed):
    pairs = [120, 10, *[30, 20] * 7] if packed else [120, 10, *[35, 1] * 7]
    worker = role(folder, samples=8)
    worker.use_sequence_packing = packed
    (plan,) = pair_plans(batch(pairs), worker)
    assert plan.indices[0] == [0, 1], "by tokens, its rank would have others too"


def grouped() -> Batch:
    """Two groups of two, which alternate: they share 5 and 3 tokens; and a sample alone in its group."""
    data = batch([8, 8, 6, 4, 9])
    ids = torch.arange(data.batch["input_ids"].numel()).view(5, -1)
    ids[2, :5], ids[3, :3] = ids[0, :5], ids[1, :3]
    data.batch["input_ids"] = ids
    data.batch["group_ids"] = torch.tensor([7, 3, 7, 3, 5])
    return data


def test_samples_of_a_group_share_the_tokens_before_the_first_that_differs():
    assert shared_prefixes(grouped(), role(None), "cpu") == [(7, 5), (3, 3), (7, 5), (3, 3), None]


def test_a_prefix_ends_before_padding_that_looks_like_a_token():
    data = grouped()
    data.batch["input_ids"][3] = data.batch["input_ids"][1]
    assert shared_prefixes(data, role(None), "cpu")[1] == (3, 4)


def test_nothing_is_shared_on_a_gpu_or_with_padding_or_without_groups():
    padded = role(None)
    padded.use_sequence_packing = False
    assert shared_prefixes(grouped(), role(None), "cuda") is None
    assert shared_prefixes(grouped(), padded, "cpu") is None
    assert shared_prefixes(batch(LENGTHS), role(None), "cpu") is None


def test_a_group_stays_on_one_rank_where_its_prompt_is_computed_once():
    """Two prompts of 16 tokens, one with four responses of 8 tokens and one with four of 4."""
    data = batch([24, 20] * 4)
    prompts, responses = torch.arange(32).view(2, 16).repeat(4, 1), torch.arange(100, 164).view(8, 8)
    data.batch["input_ids"] = torch.cat([prompts, responses], 1)
    data.batch["group_ids"] = torch.arange(8) % 2
    worker, cluster = role(None, samples=8), Lengths()
    for platform, shards in {"cpu": [[24] * 4, [20] * 4], "cuda": [[24, 24, 20, 20]] * 2}.items():
        (plan,) = training_plans(data, worker, platform)
        assert [sorted(data.batch["attention_mask"].sum(-1)[shard].tolist())[::-1] for shard in plan.indices] == shards
        cluster.platform = platform
        asyncio.run(forward(cluster, TrainWorker.compute_log_probs, data, worker))
        assert [sorted(shard)[::-1] for shard in cluster.shards] == shards
