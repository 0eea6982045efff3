"""Compares every engine with the trainer on a few tokens, after a weight update and before generation for training."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from roll.configs.pipeline import LearnerOptions, role_seed
from roll.pipeline.learning.logprob_checks import TokenLogProbs, check_engines
from roll.pipeline.learning.shards import cluster_log_probs
from roll.rollout.engine_pool import EngineDownError, Engines
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import GenerateRequest, Group, SamplingParams, Trajectory

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster
    from roll.distributed.train.train_worker import TrainWorker

logger = logging.getLogger(__name__)

REQUESTS, NEW_TOKENS, LONGEST_PROMPT = 8, 16, 256
"""Of each engine. Prompts are random ids of lengths up to the longest, so that wrong positions show."""


@dataclass
class EngineProbe:
    """`sample` needs the engines, then `compare` the trainer, both with the same weights and the run's sampling."""

    config: LearnerOptions
    engines: Engines
    actor: Cluster[TrainWorker]
    sampling: SamplingParams
    vocabulary: int
    _groups: list[Group] = field(default_factory=list)

    async def sample(self) -> None:
        """Generates with every engine; one that is down gets its weights, which are verified, later."""
        self._groups = await asyncio.gather(*map(self._sample, range(self.engines.world_size)))

    async def _sample(self, engine: int) -> Group:
        group, requests = Group(engine, "", engine, f"engine {engine}"), []
        longest = max(1, min(LONGEST_PROMPT, (self.config.sequence_length or 0) - NEW_TOKENS))
        sampling = replace(self.sampling, max_new_tokens=min(NEW_TOKENS, self.sampling.max_new_tokens))
        for index in range(REQUESTS):
            seed = role_seed(self.config.seed, "probe", index)
            ids = random.Random(seed).choices(range(self.vocabulary), k=-(-longest * (index + 1) // REQUESTS))
            requests.append(GenerateRequest(f"probe-{engine}-{index}", ids, sampling, seed))
        try:
            results = await self.engines.generate(engine, requests)
        except EngineDownError as error:
            logger.warning("engine %d was not compared with the trainer: %s", engine, error)
            return group
        for asked, result in zip(requests, results, strict=True):
            if result.finish_reason == "abort":
                logger.warning("engine %d failed to answer %s: %s", engine, asked.request_id, result.error)
            else:
                group.trajectories.append(Trajectory.of_response(asked.prompt_ids, result, ""))
        return group

    async def compare(self) -> None:
        """Raises RunError where log-probs of an engine are not the trainer's; see `check_engines`."""
        groups, role = [group for group in self._groups if group.trajectories], self.config.actor_train
        if not groups:
            return
        data = batch_of_groups(groups, multiple=role.layout.data)
        temperature = self.config.actor_infer.generating_args.temperature
        batch, own = data.batch, (await cluster_log_probs(self.actor, data, role, temperature)).batch
        tokens = TokenLogProbs(batch["behavior_log_probs"], own["log_probs"], own["entropy"], batch["position_ids"])
        masks = [batch["response_mask"] & (batch["group_ids"] == number)[:, None] for number in range(len(groups))]
        named = {group.name: tokens.where(mask) for group, mask in zip(groups, masks, strict=True)}
        check_engines(named, self.config)
