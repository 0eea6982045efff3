"""How a batch of scored samples becomes an update: log-probs, advantages, policy loss. Shared by RLVR and agents."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roll.algorithms.advantages import AdvantageConfig, compute_advantages
from roll.algorithms.correction import (
    LOG_PROB_DIFF_MAX,
    NO_OP,
    WEIGHT_MAX,
    WEIGHT_MEAN,
    diagnostics,
    finalize,
    off_policy_correction,
)
from roll.algorithms.kl import kl_controller
from roll.algorithms.losses import PolicyLossConfig
from roll.algorithms.turn_advantages import TURN_KEYS, read_turns
from roll.configs.pipeline import RLConfig
from roll.distributed.protocol import DataProto
from roll.pipeline.clock import StepClock
from roll.pipeline.errors import RunError
from roll.pipeline.interfaces import SampleBatch
from roll.pipeline.learner import ActorLearner
from roll.pipeline.ratio_checks import first_update_fault, is_inert
from roll.pipeline.rollout_dump import dump_samples
from roll.pipeline.sharding import cluster_log_probs, training_plans, training_shards

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

logger = logging.getLogger(__name__)

LEARNER_STATE = "rl_learner.json"
"""File of a checkpoint: what a learner remembers beside its roles."""


class RLLearner(ActorLearner):
    """Learns with actor_train; a reference cluster is there only when a KL term uses it."""

    def __init__(self, config: RLConfig, actor: Cluster, reference: Cluster | None) -> None:
        """Takes the clusters; `reference` is None when no KL term is on."""
        super().__init__(actor)
        self._config = config
        self._reference = reference
        self._loss_config = PolicyLossConfig.from_config(config)
        self._advantage_config = AdvantageConfig.from_config(config)
        self._kl = kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self._updated = False
        self._unmoved = 0
        """Steps without a gradient up to now: samples that are no older were drawn from the policy as it is."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Old and reference log-probs, correction, advantages, then `ppo_epochs` passes of optimizer steps.

        Raises:
            RunError: the first step contradicts itself: ratio is not 1, or log-probs disagree with the engine's.
        """
        data = batch.data
        data.meta_info["temperature"] = self._config.actor_infer.generating_args.temperature
        with clock.measure("old_log_probs"):
            await self._add_log_probs(data)
        with clock.measure("advantages"):
            metrics = self._add_correction(data) | self._add_advantages(data)
        if self._config.rollout_dump_dir:
            dump_samples(data, Path(self._config.rollout_dump_dir), step)
        data.non_tensor_batch.clear()  # for people, not for ranks
        with clock.measure("train"):
            metrics |= await self._train(data)
        return metrics | self._watch(metrics, batch.metrics.get("staleness/max", 0.0))

    async def _add_log_probs(self, data: DataProto) -> None:
        if self._loss_config.bypass:
            data.batch["old_log_probs"] = data.batch["behavior_log_probs"].clone()
        else:
            answer = await cluster_log_probs(self._actor, data, self._config.actor_train)
            data.batch["old_log_probs"] = answer.batch["log_probs"] * data.batch["response_mask"]
        if self._reference is not None:
            answer = await cluster_log_probs(self._reference, data, self._config.reference)
            data.batch["ref_log_probs"] = answer.batch["log_probs"] * data.batch["response_mask"]

    def _add_correction(self, data: DataProto) -> dict[str, float]:
        """Weights and kept tokens against the proximal policy, and how far it is from the one that sampled.

        Without a proximal policy (bypass) both are up to the loss, which sees the current one.
        """
        if self._loss_config.bypass:
            return {}
        proximal, behavior = data.batch["old_log_probs"], data.batch["behavior_log_probs"]
        mask, options = data.batch["response_mask"], self._loss_config.correction
        weights = kept = None
        if options.active:
            correction = off_policy_correction(proximal, behavior, mask, options)
            data.batch["correction_weights"], data.batch["correction_kept"] = correction.weights, correction.kept
            weights, kept = correction.weights if options.weighted else None, correction.kept
        metrics = diagnostics(proximal, behavior, mask, weights, kept)
        if not self._updated:
            self._check_parity(metrics[LOG_PROB_DIFF_MAX])
        return metrics

    def _add_advantages(self, data: DataProto) -> dict[str, float]:
        result = compute_advantages(
            data.batch["scores"],
            data.batch["group_ids"],
            data.batch["response_mask"],
            self._advantage_config,
            log_probs=data.batch["old_log_probs"],
            ref_log_probs=data.batch.get("ref_log_probs", None),
            kl_coef=self._kl.coefficient,
            turns=read_turns(data.batch),
        )
        if self._config.add_token_level_kl:
            samples = int(data.batch["response_mask"].bool().any(-1).sum())
            self._kl.update(result.metrics["advantage/token_kl"], samples)
        data.batch["advantages"], data.batch["returns"] = result.advantages, result.returns
        return result.metrics

    async def _train(self, data: DataProto) -> dict[str, float]:
        config = self._config
        data.meta_info |= {"loss": "policy", "loss_config": self._loss_config}
        data = self._without_turns(data)
        counted = data.batch["correction_kept"] if config.correction.renormalize else None
        steps: list[dict[str, float]] = []
        for _ in range(config.ppo_epochs):
            for plan in training_plans(data, config.actor_train, self._actor.layout):
                step = finalize((await self._actor.train_step(training_shards(data, plan, counted)))[0])
                if not self._updated:
                    self._check_first_update(step)
                    self._updated = True
                steps.append(step)
        return {metric_name(name): reduce_steps(name, [step[name] for step in steps]) for name in steps[0]}

    def _without_turns(self, data: DataProto) -> DataProto:
        """The batch without what only the advantages read of its turns."""
        read = ("turn_index",) if self._loss_config.reads_turns else ()
        keys = [*data.tensors(), *data.non_tensor_batch]
        return data.select(*(key for key in keys if key not in TURN_KEYS or key in read))

    def _check_first_update(self, step: dict[str, float]) -> None:
        config = self._config
        dtype, bound = config.actor_train.model_args.dtype, config.log_prob_parity_bound
        fault = first_update_fault(step, self._loss_config.pg_ratio_base, dtype, bound)
        if fault:
            raise RunError(fault)

    def _watch(self, metrics: dict[str, float], staleness: float) -> dict[str, float]:
        """Counts a batch of stale samples for which nothing was corrected, and says so where that was not asked for."""
        weights = None
        if self._loss_config.correction.weighted:
            weights = max(abs(metrics[WEIGHT_MAX] - 1), abs(metrics[WEIGHT_MEAN] - 1))
        inert = staleness > self._unmoved and is_inert(metrics["actor/ratio_deviation_max"], weights, staleness)
        self._unmoved = self._unmoved + 1 if metrics.get("actor/grad_norm") == 0 else 0
        uncorrected = self._loss_config.pg_variant == "vanilla" and weights is None
        if inert and not uncorrected and not self._config.allow_uncorrected_off_policy:
            logger.error(
                "the correction is not working: samples are up to %g versions old, and every ratio and weight is 1 "
                "(pg_variant %s, pg_ratio_base %s, old_log_probs_source %s)",
                staleness,
                self._loss_config.pg_variant,
                self._loss_config.pg_ratio_base,
                self._loss_config.old_log_probs_source,
            )
        return {NO_OP: float(inert)}

    def _check_parity(self, difference: float) -> None:
        """On fresh weights the engine's log-probs and the trainer's are of one policy."""
        bound = self._config.log_prob_parity_bound
        if bound is not None and not difference <= bound:
            raise RunError(
                f"engine and trainer disagree about the log-prob of a sampled token by {difference:.3g}, more than "
                f"log_prob_parity_bound {bound}: check that both load the same weights, temperature and dtype"
            )

    async def save(self, folder: Path) -> None:
        """Writes actor_train, the KL coefficient, and how long no gradient has moved the policy."""
        await super().save(folder)
        state = {"kl_coefficient": self._kl.coefficient, "unmoved": self._unmoved}
        (folder / LEARNER_STATE).write_text(json.dumps(state), encoding="utf-8")

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote; an update has been made before, so first-step checks are over.

        A fixed KL coefficient is that of the configuration, which may have changed.
        """
        await super().load(folder)
        state = json.loads((folder / LEARNER_STATE).read_text(encoding="utf-8"))
        if self._config.target_kl is not None:
            self._kl.coefficient = float(state["kl_coefficient"])
        self._unmoved = int(state["unmoved"])
        self._updated = True


def metric_name(name: str) -> str:
    """The name of a training metric in a run: those of the correction have theirs, all others are the actor's."""
    return name if name.startswith("correction/") else f"actor/{name}"


def reduce_steps(name: str, values: list[float]) -> float:
    """One number for several optimizer steps: the largest for names ending in `_max`, the mean otherwise."""
    return max(values) if name.endswith("_max") else float(torch.tensor(values, dtype=torch.float64).mean())
