"""How a batch of scored samples becomes an update: log-probs, advantages, policy loss. Shared by RLVR and agents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roll.algorithms.advantages import compute_advantages
from roll.algorithms.correction import LOG_PROB_DIFF_MAX, diagnostics
from roll.algorithms.estimators import AdvantageConfig
from roll.algorithms.losses import PolicyLossConfig
from roll.configs.pipeline import RLConfig
from roll.distributed.protocol import DataProto
from roll.pipeline.clock import StepClock
from roll.pipeline.errors import RunError
from roll.pipeline.interfaces import SampleBatch
from roll.pipeline.learner import ActorLearner
from roll.pipeline.sharding import cluster_log_probs, training_plans, training_shards

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

FIRST_STEP_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""How far ratio may be from 1, and KL from 0, before any update. Half precision rounds differently when the forward
pass for old log-probs and the training pass batch samples differently."""


class RLLearner(ActorLearner):
    """Learns with actor_train; a reference cluster is there only when a KL term uses it."""

    def __init__(self, config: RLConfig, actor: Cluster, reference: Cluster | None) -> None:
        """Takes the clusters; `reference` is None when no KL term is on."""
        super().__init__(actor)
        self._config = config
        self._reference = reference
        self._loss_config = PolicyLossConfig.from_config(config)
        self._advantage_config = AdvantageConfig.from_config(config)
        self._updated = False

    async def learn(self, batch: SampleBatch, clock: StepClock) -> dict[str, float]:
        """Old and reference log-probs, advantages, then `ppo_epochs` passes of optimizer steps.

        Raises:
            RunError: the first step contradicts itself: ratio is not 1, or log-probs disagree with the engine's.
        """
        config, data = self._config, batch.data
        data.meta_info["temperature"] = config.actor_infer.generating_args.temperature
        with clock.measure("old_log_probs"):
            await self._add_log_probs(data)
        mask = data.batch["response_mask"]
        metrics = diagnostics(data.batch["old_log_probs"], data.batch["behavior_log_probs"], mask)
        if not self._updated:
            self._check_parity(metrics[LOG_PROB_DIFF_MAX])
        with clock.measure("advantages"):
            metrics |= self._add_advantages(data)
        with clock.measure("train"):
            metrics |= await self._train(data)
        return metrics

    async def _add_log_probs(self, data: DataProto) -> None:
        if self._config.old_log_probs_source == "behavior":
            data.batch["old_log_probs"] = data.batch["behavior_log_probs"].clone()
        else:
            answer = await cluster_log_probs(self._actor, data, self._config.actor_train)
            data.batch["old_log_probs"] = answer.batch["log_probs"] * data.batch["response_mask"]
        if self._reference is not None:
            answer = await cluster_log_probs(self._reference, data, self._config.reference)
            data.batch["ref_log_probs"] = answer.batch["log_probs"] * data.batch["response_mask"]

    def _add_advantages(self, data: DataProto) -> dict[str, float]:
        result = compute_advantages(
            data.batch["scores"],
            data.batch["group_ids"],
            data.batch["response_mask"],
            self._advantage_config,
            log_probs=data.batch["old_log_probs"],
            ref_log_probs=data.batch.get("ref_log_probs", None),
            kl_coef=self._config.init_kl_coef,
        )
        data.batch["advantages"], data.batch["returns"] = result.advantages, result.returns
        return result.metrics

    async def _train(self, data: DataProto) -> dict[str, float]:
        config = self._config
        data.meta_info |= {"loss": "policy", "loss_config": self._loss_config}
        steps: list[dict[str, float]] = []
        for _ in range(config.ppo_epochs):
            for plan in training_plans(data, config.actor_train, self._actor.layout):
                step = (await self._actor.train_step(training_shards(data, plan)))[0]
                if not self._updated:
                    self._check_first_update(step)
                    self._updated = True
                steps.append(step)
        return {f"actor/{name}": reduce_steps(name, [step[name] for step in steps]) for name in steps[0]}

    def _check_first_update(self, metrics: dict[str, float]) -> None:
        """Before any update the current policy is the proximal one: ratio 1, KL 0."""
        if self._config.old_log_probs_source == "behavior":
            return
        tolerance = FIRST_STEP_TOLERANCE[self._config.actor_train.model_args.dtype]
        off = max(abs(metrics["ratio_mean"] - 1), abs(metrics["ratio_max"] - 1), abs(metrics["policy_kl"]))
        if not off <= tolerance:
            raise RunError(
                f"the first optimizer step has ratio_mean {metrics['ratio_mean']}, ratio_max {metrics['ratio_max']} "
                f"and policy_kl {metrics['policy_kl']}; before any update they must be 1, 1 and 0 to {tolerance}. "
                "The training pass and the log-prob pass do not compute the same model"
            )

    def _check_parity(self, difference: float) -> None:
        """On fresh weights the engine's log-probs and the trainer's are of one policy."""
        bound = self._config.log_prob_parity_bound
        if bound is not None and not difference <= bound:
            raise RunError(
                f"engine and trainer disagree about the log-prob of a sampled token by {difference:.3g}, more than "
                f"log_prob_parity_bound {bound}: check that both load the same weights, temperature and dtype"
            )

    async def load(self, folder: Path) -> None:
        """Restores actor_train; an update has been made before, so first-step checks are over."""
        await super().load(folder)
        self._updated = True


def reduce_steps(name: str, values: list[float]) -> float:
    """One number for several optimizer steps: the largest for names ending in `_max`, the mean otherwise."""
    return max(values) if name.endswith("_max") else float(torch.tensor(values, dtype=torch.float64).mean())
