"""Several policies that share the frozen weights of actor_train: each learns from its own samples of every batch.

A batch is one optimizer step of each policy, times `ppo_epochs`, with all of its samples. A policy without samples in
a batch stays as it is: adapters, optimizer, learning-rate schedule and version.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roll.base.timers import StepClock
from roll.configs.pipeline import LearnerOptions
from roll.datasets.batch import POLICY, Batch
from roll.distributed.calls.remote_call import ClusterClient, RemoteCall
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.learning.actor_learner import ActorLearner
from roll.pipeline.learning.learner import LEARNER_STATE, RLLearner
from roll.rollout.source import SampleBatch

if TYPE_CHECKING:
    from roll.distributed.calls.remote_call import ArgumentT, ResultT


class PolicyRanks(ClusterClient[TrainWorker]):
    """The ranks of actor_train as those of one policy: each shard says which policy computes it."""

    def __init__(self, ranks: ClusterClient[TrainWorker], policy: str) -> None:
        super().__init__(ranks.role, ranks.actors, ranks.layout, ranks.platform, ranks.locations, ranks.deadlines)
        self._policy = policy

    def call_shards(
        self, method: Callable[[TrainWorker, ArgumentT], ResultT], shards: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]:
        """As that of the ranks."""
        for shard in shards:
            assert isinstance(shard, Batch)
            shard.meta_info = {**shard.meta_info, POLICY: self._policy}
        return super().call_shards(method, shards)


class PoliciesLearner(ActorLearner):
    """A learner for each policy, whose metrics have the name of the policy in front."""

    def __init__(
        self,
        config: LearnerOptions,
        actor: ClusterClient[TrainWorker],
        reference: ClusterClient[TrainWorker] | None,
        make: type[RLLearner] = RLLearner,
    ) -> None:
        super().__init__(actor)
        self._learners = {
            name: make(_options_of(config, name), PolicyRanks(actor, name), reference) for name in config.policies
        }
        self._changed_at: dict[str, list[int]] = {name: [] for name in config.policies}
        """Weight versions of the run at which each policy became another one."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Each policy learns from its samples; step k makes weight version k of the run.

        Raises:
            RunError: as `RLLearner.learn`.
        """
        owners = batch.data.non_tensor_batch[POLICY]
        metrics: dict[str, float] = {}
        for name, learner in self._learners.items():
            rows, changed, found = (owners == name).nonzero()[0].tolist(), self._changed_at[name], {}
            if rows:
                own = batch.data.select_idxs(rows)
                found = staleness(own, changed)
                known = {"rollout/reward_mean": batch.metrics.get(f"{name}/rollout/reward_mean", 0.0)}
                found |= await learner.learn(SampleBatch(own, known | found), step, clock)
                changed.append(step)
            metrics |= {f"{name}/{key}": value for key, value in {**found, "version": float(len(changed))}.items()}
        return metrics

    async def finish_step(self) -> dict[str, float]:
        for learner in self._learners.values():
            await learner.samples_written()
        return await super().finish_step()

    async def save(self, folder: Path) -> None:
        """Begins to write actor_train, and writes the state of each policy's learner."""
        await super().save(folder)
        states = {
            name: {"changed_at": self._changed_at[name], **learner.state_dict()}
            for name, learner in self._learners.items()
        }
        (folder / LEARNER_STATE).write_text(json.dumps(states), encoding="utf-8")

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        await super().load(folder)
        states: dict[str, Any] = json.loads((folder / LEARNER_STATE).read_text(encoding="utf-8"))
        for name, learner in self._learners.items():
            learner.load_state_dict(states[name])
            self._changed_at[name] = [int(version) for version in states[name]["changed_at"]]


def staleness(data: Batch, changed_at: Sequence[int]) -> dict[str, float]:
    """`staleness/...` of the samples of a policy in versions of its own.

    A token sampled at version v of the run is as old as versions in `changed_at`, which is sorted, are above v.
    """
    mask, versions = data.batch["response_mask"].bool(), data.batch["weight_version"].contiguous()
    ages = len(changed_at) - torch.bucketize(versions, torch.tensor(changed_at), right=True)
    oldest, tokens = ages.masked_fill(~mask, -1).amax(-1)[mask.any(-1)].double(), ages[mask].double()
    return {
        "staleness/mean": float(oldest.mean()),
        "staleness/max": float(oldest.max()),
        "staleness/token_mean": float(tokens.mean()),
        "staleness/token_max": float(tokens.max()),
    }


def _options_of(config: LearnerOptions, policy: str) -> LearnerOptions:
    """What a policy's learner reads: its samples have a folder of their own."""
    own = copy.copy(config)
    if own.rollout_dump_dir is not None:
        own.rollout_dump_dir = str(Path(own.rollout_dump_dir) / policy)
    return own
