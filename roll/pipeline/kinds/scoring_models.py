"""The models of roles `reward` and `judge` as the process in which samples are scored calls them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from roll.configs.pipeline import RLVRConfig, role_seed
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.configs.scoring.scoring_roles import RewardEngineConfig, RewardModelRoleConfig, ScoringEngineConfig
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_scored
from roll.datasets.records import prefix_errors
from roll.datasets.templates import template_variables
from roll.datasets.tokenizer import load_tokenizer
from roll.distributed.calls.remote_call import ClusterClient
from roll.distributed.infer.infer_worker import EngineClient
from roll.distributed.infer.score_worker import NOTHING_SAMPLED
from roll.distributed.infer.sglang_engine import scoring_length
from roll.distributed.train.train_worker import TrainWorker
from roll.hub.names import local_model
from roll.models.families.shape import read_model_shape
from roll.pipeline.learning.shards import forward
from roll.pipeline.session import Session
from roll.rewards.judge_model import JudgeAnswer, JudgeModelScorer, JudgeQuestion
from roll.rewards.reward_model import RewardModelScorer
from roll.rollout.engine_pool import EnginePool
from roll.rollout.types import GenerateRequest, SamplingParams

ModelScorer = RewardModelScorer | JudgeModelScorer
"""Scores responses by a model of the run."""


@dataclass(frozen=True)
class RewardModel:
    """The cluster of role `reward`; can be pickled."""

    client: ClusterClient[TrainWorker]
    config: RewardModelRoleConfig

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The value after the last token of each sequence of token ids.

        Raises:
            ClusterError: a rank failed or did not answer in time.
        """
        missing = max(0, self.client.layout.data - len(sequences))
        data = Batch(collate_scored([*sequences, *[sequences[-1]] * missing]))  # each rank has a sample
        values = (await forward(self.client, TrainWorker.compute_values, data, self.config)).batch["values"]
        ends = torch.tensor([len(sequence) for sequence in sequences])
        scores: list[float] = values[torch.arange(len(sequences)), ends].tolist()
        return scores


@dataclass
class RewardEngines:
    """The engines of role `reward`, with the retries of a failed request; can be pickled."""

    engines: EngineClient
    config: RewardEngineConfig
    retries: int

    @cached_property
    def _pool(self) -> EnginePool:
        return EnginePool(self.engines, self.retries, self.config.max_running_requests, restarted=True)

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float | str]:
        """The value after the last token of each sequence of token ids, or the error by which no engine gave one.

        Raises:
            ClusterError: an engine failed or did not answer in time.
        """
        requests = [[GenerateRequest("score", [*ids], NOTHING_SAMPLED)] for ids in sequences]
        results = await self._pool.generate(requests)
        return [result.value if result.value is not None else str(result.error) for (result,) in results]


@dataclass
class JudgeModel:
    """The engines of role `judge`, whose answers end with one of `stop_token_ids`; can be pickled."""

    engines: EngineClient
    config: RLVRConfig
    stop_token_ids: tuple[int, ...]

    @cached_property
    def _pool(self) -> EnginePool:
        retries, running = self.config.max_generation_retries, self.config.judge.max_running_requests
        return EnginePool(self.engines, retries, running, restarted=True)

    async def answers(self, questions: Sequence[JudgeQuestion]) -> list[JudgeAnswer]:
        """The answer to each question; its seed follows from the question and the number of the attempt.

        Raises:
            ClusterError: an engine failed or did not answer in time.
        """
        results = await self._pool.generate([[self._request(question)] for question in questions])
        return [JudgeAnswer(tuple(result.response_ids), result.error) for (result,) in results]

    def _request(self, question: JudgeQuestion) -> GenerateRequest:
        number = zlib.crc32(repr(question.prompt_ids).encode())
        sampling = SamplingParams(
            question.max_new_tokens, temperature=question.temperature, stop_token_ids=self.stop_token_ids
        )
        seed = role_seed(self.config.seed, "judge", number, question.attempt)
        return GenerateRequest(f"judge-{number}", list(question.prompt_ids), sampling, seed)


@dataclass(frozen=True)
class ScoringModels:
    """The models of the run that score responses; None where no reward needs one. Can be pickled."""

    reward: RewardModel | RewardEngines | None = None
    judge: JudgeModel | None = None

    @classmethod
    def of(cls, session: Session, config: RLVRConfig) -> ScoringModels:
        """The scoring models of the running clusters."""
        ranks, engines = session.train_clusters.get("reward"), session.infer_clusters
        reward: RewardModel | RewardEngines | None = None
        judge: JudgeModel | None = None
        if ranks is not None:
            reward = RewardModel(ranks.client(), config.reward)
        if "reward" in engines:
            cluster = engines["reward"]
            assert isinstance(cluster.config, RewardEngineConfig)
            reward = RewardEngines(EngineClient(cluster.client()), cluster.config, config.max_generation_retries)
        if "judge" in engines:
            judge = JudgeModel(EngineClient(engines["judge"].client()), config, _stop_tokens(config))
        return cls(reward, judge)

    def connect(self, scorer: ModelScorer) -> None:
        """Gives a scorer its model."""
        if isinstance(scorer, JudgeModelScorer):
            assert self.judge is not None, "a configuration with a judge has role judge"
            scorer.connect(self.judge.answers)
        else:
            assert self.reward is not None, "a configuration with a reward_model has role reward"
            scorer.connect(self.reward.scores, concurrent=isinstance(self.reward, RewardEngines))


def _stop_tokens(config: RLVRConfig) -> tuple[int, ...]:
    end = load_tokenizer(config.judge.model_args.model_name_or_path).eos_token_id
    return (int(end),)


def model_scorers(config: RLVRConfig) -> dict[str, ModelScorer]:
    """The scorers of the rewards that a model of the run scores, by their names; not connected to it yet.

    Raises:
        RunError: the tokenizer of a model cannot be read.
        DatasetError: it lacks the chat template of a reward.
    """
    scorers: dict[str, ModelScorer] = {}
    variables = template_variables({}, config.template_time)
    for name, reward in config.rewards.items():
        role = scoring_role(reward)
        if role is None:
            continue
        folder = getattr(config, role).model_args.model_name_or_path
        with prefix_errors(f"rewards.{name} ({folder})"):
            assert reward.template is not None, "loading fills it in"
            tokenizer = load_tokenizer(folder)
            if role == "judge":
                scorers[name] = JudgeModelScorer(tokenizer, reward, scoring_length(config.judge), variables)
            else:
                scorers[name] = RewardModelScorer(
                    tokenizer, reward.template, longest_sequence(config.reward), variables
                )
    return scorers


def longest_sequence(role: RewardModelRoleConfig | ScoringEngineConfig) -> int | None:
    """Most tokens of a sequence that the model can score; None: any number. Megatron pads it by one more."""
    if isinstance(role, ScoringEngineConfig):
        return scoring_length(role)
    shape = read_model_shape(local_model(role.model_args.model_name_or_path or ""), role.value_head)
    limits = [shape.max_positions if shape is not None else None]
    if role.forward_token_limit is not None:
        limits.append(role.forward_token_limit // role.layout.round_to * role.layout.round_to)
    known = [limit - 1 for limit in limits if limit]
    return min(known, default=None)
