"""Compares every engine with the trainer on a few tokens, after a weight update and before generation for training."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from roll.configs.pipeline import LearnerOptions, role_seed
from roll.pipeline.learning.logprob_checks import TokenLogProbs, check_engines
from roll.pipeline.learning.shards import cluster_log_probs
from roll.rollout.engine_pool import EngineDownError, Engines
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import GenerateRequest, Group, SamplingParams, Trajectory

if TYPE_CHECKING:
    from roll.distributed.calls.remote_call import ClusterClient
    from roll.distributed.train.train_worker import TrainWorker

logger = logging.getLogger(__name__)

REQUESTS, NEW_TOKENS, LONGEST_PROMPT = 8, 16, 256
"""Of each engine. Prompts are random ids of lengths up to the longest, so that wrong positions show."""


@dataclass
class EngineProbe:
    """`sample` needs the engines, then `compare` the trainer, both with the same weights and the run's sampling.

    `actors` are the ranks of actor_train by policy.
    """

    config: LearnerOptions
    engines: Engines
    actors: Mapping[str, ClusterClient[TrainWorker]]
    sampling: SamplingParams
    vocabulary: int
    _groups: list[dict[str, Group]] = field(default_factory=list)
    """Of each engine, by policy."""

    async def sample(self) -> None:
        """Generates with every engine; one that is down gets its weights, which are verified, later."""
        self._groups = await asyncio.gather(*map(self._sample, range(self.engines.world_size)))

    async def _sample(self, engine: int) -> dict[str, Group]:
        """Responses of one engine to the requests of all policies, which it has at the same time."""
        groups = {policy: Group(engine, "", engine, _name(engine, policy)) for policy in self.actors}
        requests = [self._request(policy, index) for policy in self.actors for index in range(REQUESTS)]
        try:
            results = await self.engines.generate(engine, requests)
        except EngineDownError as error:
            logger.warning("engine %d was not compared with the trainer: %s", engine, error)
            return {}
        for asked, result in zip(requests, results, strict=True):
            if result.finish_reason == "abort":
                logger.warning("engine %d failed to answer %s: %s", engine, asked.request_id, result.error)
            else:
                groups[asked.policy].trajectories.append(Trajectory.of_response(asked.prompt_ids, result, ""))
        return groups

    def _request(self, policy: str, index: int) -> GenerateRequest:
        longest = max(1, min(LONGEST_PROMPT, (self.config.sequence_length or 0) - NEW_TOKENS))
        sampling = replace(self.sampling, max_new_tokens=min(NEW_TOKENS, self.sampling.max_new_tokens))
        seed = role_seed(self.config.seed, "probe", index)
        ids = random.Random(seed).choices(range(self.vocabulary), k=-(-longest * (index + 1) // REQUESTS))
        return GenerateRequest(f"probe-{policy}{index}", ids, sampling, seed, policy=policy)

    async def compare(self) -> None:
        """Raises RunError where log-probs of an engine are not the trainer's; see `check_engines`."""
        for policy, actor in self.actors.items():
            groups = [found[policy] for found in self._groups if found and found[policy].trajectories]
            if groups:
                await self._compare(groups, actor)

    async def _compare(self, groups: list[Group], actor: ClusterClient[TrainWorker]) -> None:
        role = self.config.actor_train
        data = batch_of_groups(groups, multiple=role.layout.data)
        temperature = self.config.actor_infer.generating_args.temperature
        batch, own = data.batch, (await cluster_log_probs(actor, data, role, temperature)).batch
        tokens = TokenLogProbs(batch["behavior_log_probs"], own["log_probs"], own["entropy"], batch["position_ids"])
        masks = [batch["response_mask"] & (batch["group_ids"] == number)[:, None] for number in range(len(groups))]
        named = {group.name: tokens.where(mask) for group, mask in zip(groups, masks, strict=True)}
        check_engines(named, self.config)


def _name(engine: int, policy: str) -> str:
    return f"engine {engine} with policy {policy}" if policy else f"engine {engine}"
