"""Sequences of a reward model: batches for its ranks, the longest it can score, and the scorers of a configuration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import RLVRConfig
from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.configs.scoring.scoring_roles import (
    RewardEngineConfig,
    RewardEngineModelArguments,
    RewardModelArguments,
    RewardModelRoleConfig,
)
from roll.datasets.batch import Batch
from roll.datasets.records import DatasetError
from roll.pipeline.kinds.scoring_models import JudgeModel, RewardEngines, RewardModel, longest_sequence, model_scorers
from roll.rewards.judge_model import JudgeAnswer, JudgeModelScorer, JudgeQuestion
from roll.rollout.types import GenerateRequest, GenerateResult


class Client:
    """Ranks whose value before a token is the sum of the tokens before it; counts the rows of each call."""

    platform = "cpu"

    def __init__(self, data: int) -> None:
        self.layout = ParallelLayout(data=data)
        self.rows: list[list[int]] = []

    async def call_shards(self, method: Callable[..., Any], shards: Sequence[Batch]) -> list[Batch]:
        assert method.__name__ == "compute_values"
        self.rows.append([len(shard.batch["input_ids"]) for shard in shards])
        answers = []
        for shard in shards:
            assert sorted(index for micro in shard.meta_info["micro_batches"] for index in micro) == list(
                range(len(shard.batch["input_ids"]))
            )
            ids = shard.batch["input_ids"] * shard.batch["attention_mask"]
            answers.append(Batch({"values": (ids.cumsum(-1) - ids).float()}))
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
    assert list(model_scorers(config)) == ["none", "native"]
    rewards["none"].template = "llama3"
    with pytest.raises(DatasetError, match="rewards.none .*needs the special tokens"):
        model_scorers(config)
    assert model_scorers(RLVRConfig()) == {}


def test_a_judge_without_an_endpoint_reads_questions_in_the_template_of_its_own_model(tiny_model_dir: Path) -> None:
    judge = RewardConfig(function=BUILT_IN["llm_judge"].function, template="native")
    config = RLVRConfig(rewards={"llm_judge": judge})
    config.judge.model_args.model_name_or_path = str(tiny_model_dir)
    scorer = model_scorers(config)["llm_judge"]
    assert isinstance(scorer, JudgeModelScorer)
    assert scorer._max_tokens == 1024, "the positions of its model"
    config.judge.sequence_length = 64
    assert model_scorers(config)["llm_judge"]._max_tokens == 64
    judge.base_url = "http://127.0.0.1:30000/v1"
    assert model_scorers(config) == {}, "then it is a function that asks the endpoint"


class Engines:
    """Two engines that answer with the seed of a request."""

    world_size = 2

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, rank: int, requests: list[GenerateRequest]) -> list[GenerateResult]:
        self.requests += requests
        return [
            GenerateResult(each.request_id, [each.prompt_ids[0]], [0.0], [0], "stop", error=None) for each in requests
        ]


def test_a_question_to_a_judge_has_the_same_seed_in_every_run_and_another_one_when_it_is_repeated() -> None:
    engines = Engines()
    judge = JudgeModel(engines, RLVRConfig(seed=5), (1,))  # type: ignore[arg-type]
    questions = [JudgeQuestion((7, 8), 0.5, 9), JudgeQuestion((7, 8), 0.5, 9, attempt=1), JudgeQuestion((8,), 0.5, 9)]
    answers = asyncio.run(judge.answers(questions))
    assert answers == [JudgeAnswer((7,)), JudgeAnswer((7,)), JudgeAnswer((8,))]
    seeds = {tuple(each.prompt_ids): each.seed for each in engines.requests}
    assert len({each.seed for each in engines.requests}) == 3
    sampling = engines.requests[0].sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop_token_ids) == (0.5, 9, (1,))
    again = Engines()
    asyncio.run(JudgeModel(again, RLVRConfig(seed=5), (1,)).answers(questions[2:]))  # type: ignore[arg-type]
    assert again.requests[0].seed == seeds[(8,)]


class ScoringEngines:
    """Two engines whose value is the sum of a sequence; the first refuses what begins with 1, the second 2."""

    world_size = 2

    def __init__(self) -> None:
        self.rows: list[int] = []

    async def generate(self, rank: int, requests: list[GenerateRequest]) -> list[GenerateResult]:
        self.rows.append(len(requests))
        return [self._result(each) if each.prompt_ids[0] != rank + 1 else self._failure(each) for each in requests]

    def _result(self, request: GenerateRequest) -> GenerateResult:
        return GenerateResult(request.request_id, [], [], [], "stop", value=float(sum(request.prompt_ids)))

    def _failure(self, request: GenerateRequest) -> GenerateResult:
        return GenerateResult(request.request_id, [], [], [], "abort", error="refused")


def test_a_sequence_that_an_engine_refuses_is_scored_by_the_next_one() -> None:
    engines = ScoringEngines()
    sequences = [[first, *range(length)] for first in (1, 2, 3) for length in (1, 5, 9)]
    model = RewardEngines(engines, RewardEngineConfig(), retries=1)  # type: ignore[arg-type]
    assert asyncio.run(model.scores(sequences)) == [float(sum(each)) for each in sequences]
    assert sum(engines.rows) > len(sequences)
    model = RewardEngines(engines, RewardEngineConfig(), retries=0)  # type: ignore[arg-type]
    assert asyncio.run(model.scores([[1], [3]])) == ["refused", 3.0]


def test_engines_score_all_positions_of_the_model_or_as_many_as_are_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    config = RewardEngineConfig(model_args=RewardEngineModelArguments(model_name_or_path=str(tmp_path)))
    assert longest_sequence(config) == 128
    config.sequence_length = 64
    assert longest_sequence(config) == 64
