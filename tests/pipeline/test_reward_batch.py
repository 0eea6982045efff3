"""Sequences of a reward model: batches for its ranks, the longest it can score, and the scorers of a configuration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.configs.parallel_layout import ParallelLayout
from roll.configs.pipeline import RLVRConfig
from roll.configs.rewards import BUILT_IN, RewardConfig
from roll.configs.roles import RewardModelArguments, RewardModelRoleConfig
from roll.datasets.records import DatasetError
from roll.distributed.protocol import DataProto
from roll.pipeline.reward_batch import RewardModel, longest_sequence, reward_model_scorers


class Client:
    """Ranks whose value before a token is the sum of the tokens before it; counts the rows of each call."""

    def __init__(self, data: int) -> None:
        self.layout = ParallelLayout(data=data)
        self.rows: list[list[int]] = []

    async def call_shards(self, method: Callable[..., Any], shards: Sequence[DataProto]) -> list[DataProto]:
        assert method.__name__ == "compute_values"
        self.rows.append([len(shard.batch["input_ids"]) for shard in shards])
        answers = []
        for shard in shards:
            assert sorted(index for micro in shard.meta_info["micro_batches"] for index in micro) == list(
                range(len(shard.batch["input_ids"]))
            )
            ids = shard.batch["input_ids"] * shard.batch["attention_mask"]
            answers.append(DataProto.from_dict({"values": (ids.cumsum(-1) - ids).float()}))
        return answers


def role(**options: Any) -> RewardModelRoleConfig:
    return RewardModelRoleConfig(device_mapping=[0, 1], **options)


@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_any_number_of_sequences_is_scored_by_any_number_of_ranks_in_order(count: int, packed: bool) -> None:
    lengths = torch.randint(1, 30, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    sequences = [list(range(1, length + 1)) for length in lengths]
    client = Client(8)
    model = RewardModel(client, role(infer_batch_size=3, use_sequence_packing=packed))  # type: ignore[arg-type]
    scores = asyncio.run(model.scores(sequences))
    assert scores == [length * (length + 1) / 2 for length in lengths]
    (rows,) = client.rows
    assert sum(rows) == max(count, 8) and min(rows) >= 1


def test_the_longest_sequence_leaves_a_token_for_the_padding_in_its_micro_batch(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": 99, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "a"}, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(shape | config))
    model = RewardModelArguments(model_name_or_path=str(tmp_path))
    budget = {"use_dynamic_batching_in_infer": True, "max_tokens_per_microbatch_in_infer": 65}
    assert longest_sequence(role(model_args=model)) == 127
    tensor = role(model_args=model, **budget)
    tensor.strategy_args.strategy_config.tensor_model_parallel_size = 2
    assert longest_sequence(tensor) == 63, "a micro-batch is rounded up to a multiple of the ranks"
    client = Client(1)
    scores = asyncio.run(RewardModel(client, tensor).scores([[1] * 63, [1] * 63]))  # type: ignore[arg-type]
    assert scores == [63.0, 63.0]


def test_each_reward_of_the_model_reads_prompts_in_its_own_template(tiny_model_dir: Path) -> None:
    function = BUILT_IN["reward_model"].function
    rewards = {name: RewardConfig(function=function, template=name) for name in ("none", "native")}
    config = RLVRConfig(rewards={"math_rule": RewardConfig(), **rewards})
    config.reward.model_args.model_name_or_path = str(tiny_model_dir)
    assert list(reward_model_scorers(config)) == ["none", "native"]
    rewards["none"].template = "llama3"
    with pytest.raises(DatasetError, match="rewards.none .*needs the special tokens"):
        reward_model_scorers(config)
    assert reward_model_scorers(RLVRConfig()) == {}
