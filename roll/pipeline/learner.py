"""From a batch of scored samples to an update of the weights: log-probs, correction, advantages, training, checks.

`RLLearner.learn` processes one batch; the methods and functions below are in the order in which it calls them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roll.algorithms.advantages import AdvantageConfig, compute_advantages, learned_samples
from roll.algorithms.correction import (
    NO_OP,
    WEIGHT_MAX,
    WEIGHT_MEAN,
    diagnostics,
    finalize,
    off_policy_correction,
)
from roll.algorithms.kl import kl_controller
from roll.algorithms.policy_losses import PolicyLossConfig
from roll.algorithms.turn_advantages import TURN_KEYS, read_turns
from roll.configs.parallel_layout import ParallelLayout
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.policy import traits_of
from roll.configs.roles import MegatronRoleConfig
from roll.datasets.micro_batches import OptimizerStepPlan, plan_forward, plan_optimizer_steps
from roll.distributed.protocol import DataProto
from roll.distributed.train_worker import TrainWorker
from roll.pipeline.logprob_checks import Mismatch, check_engine, check_finite, check_first_update
from roll.pipeline.rollout_batch import dump_samples
from roll.pipeline.training_loop import SampleBatch
from roll.rollout.timers import StepClock

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

logger = logging.getLogger(__name__)

ROLE = "actor_train"

LOG_PROB_KEYS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""Tensors that a forward pass for log-probs needs."""

NO_OP_TOLERANCE = 1e-6
"""Ratios this close to 1 over a whole batch correct nothing."""

LEARNER_STATE = "rl_learner.json"
"""File of a checkpoint: the state of a learner other than that of its roles."""


class ActorLearner:
    """A learner with one trained role; saves, restores and exports it."""

    def __init__(self, actor: Cluster[TrainWorker]) -> None:
        self._actor = actor

    async def memory(self) -> dict[str, float]:
        """`memory/actor_train_<kind>`: the largest of any rank, in bytes."""
        ranks = await self._actor.call_all(TrainWorker.memory)
        return {f"memory/{ROLE}_{kind}": float(max(rank[kind] for rank in ranks)) for kind in ranks[0]}

    async def save(self, folder: Path) -> None:
        """Writes weights, optimizer, schedule and RNG."""
        await self._actor.call_all(TrainWorker.save_checkpoint, str(folder / ROLE))

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        await self._actor.call_all(TrainWorker.load_checkpoint, str(folder / ROLE))

    async def export_hf(self, folder: Path) -> None:
        """Writes the trained model as a HF folder."""
        await self._actor.call_all(TrainWorker.export_hf, str(folder))


class RLLearner(ActorLearner):
    """Learns from RLVR responses and from agents' trajectories; `async_training.trainer_class` names a subclass.

    Symbols: pi is the current policy, p the proximal one (old log-probs), mu the one that sampled (behavior).
    """

    def __init__(self, config: RLConfig, actor: Cluster[TrainWorker], reference: Cluster[TrainWorker] | None) -> None:
        """Connects the clusters; `reference` is None when no KL term is on."""
        super().__init__(actor)
        self._config = config
        self._reference = reference
        self._loss_config = PolicyLossConfig.from_config(config)
        self._advantage_config = AdvantageConfig.from_config(config)
        self._kl = kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self._updated = False
        """Whether an optimizer step was made; the checks of the first step are over then."""
        self._steps_without_gradient = 0
        """Latest steps without a gradient: samples that are no older were drawn from the current policy."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """One update with the whole batch, in `ppo_epochs` passes of optimizer steps; returns its metrics.

        Raises:
            RunError: a log-prob is infinite or NaN, or in the first step those of engine, log-prob pass and training
                pass are too far apart.
        """
        data = batch.data
        data.meta_info["temperature"] = self._config.actor_infer.generating_args.temperature
        with clock.measure("old_log_probs"):
            await self._add_log_probs(data)
        with clock.measure("advantages"):
            metrics = self._add_correction(data)
            metrics |= self._add_advantages(data)
        dump = self._dump(data, step)
        try:
            with clock.measure("train"):
                metrics |= await self._train(_learned(data))
        finally:
            await dump
        return metrics | self._check_correction(metrics, batch.metrics.get("staleness/max", 0.0))

    def _dump(self, data: DataProto, step: int) -> Awaitable[None]:
        """Writes the samples on a thread, while the ranks train."""

        def write() -> None:
            folder, keep = self._config.rollout_dump_dir, self._config.rollout_dump_steps
            if folder is not None and keep != 0:
                dump_samples(data, Path(folder), step, keep)

        return asyncio.ensure_future(asyncio.to_thread(write))

    # 1. Log-probs

    async def _add_log_probs(self, data: DataProto) -> None:
        """Adds `old_log_probs` [B, T] (log p) and, where a KL term is on, `ref_log_probs` [B, T]."""
        mask = data.batch["response_mask"]
        if self._loss_config.bypass:
            data.batch["old_log_probs"] = data.batch["behavior_log_probs"].clone()
        else:
            answer = await cluster_log_probs(self._actor, data, self._config.actor_train)
            data.batch["old_log_probs"] = answer.batch["log_probs"] * mask
        if self._reference is not None:
            answer = await cluster_log_probs(self._reference, data, self._config.reference)
            data.batch["ref_log_probs"] = answer.batch["log_probs"] * mask
        check_finite(data)

    # 2. Correction

    def _add_correction(self, data: DataProto) -> dict[str, float]:
        """Adds weights and kept tokens of the correction [B, T]; returns how far p is from mu.

        With bypass there is no p: the loss computes the correction against pi.
        """
        if self._loss_config.bypass:
            return {}
        proximal, behavior = data.batch["old_log_probs"], data.batch["behavior_log_probs"]
        mask, options = data.batch["response_mask"], self._loss_config.correction
        weights = kept = None
        if options.active:
            turns = data.batch.get("turn_index", None)
            correction = off_policy_correction(proximal, behavior, mask, options, turns)
            data.batch["correction_weights"], data.batch["correction_kept"] = correction.weights, correction.kept
            weights, kept = correction.weights if options.weighted else None, correction.kept
        metrics = diagnostics(proximal, behavior, mask, weights, kept)
        if not self._updated:
            p99 = self._config.p99_logprob_mismatch
            check_engine(Mismatch.between(proximal, behavior, mask, p99), self._config)
        return metrics

    # 3. Advantages

    def _add_advantages(self, data: DataProto) -> dict[str, float]:
        """Adds `advantages` and `returns` [B, T], with a mask of samples `learned` [B]; adapts the KL coefficient."""
        masks = self._add_learned(data)
        result = compute_advantages(
            data.batch["scores"],
            data.batch["group_ids"],
            data.batch["response_mask"],
            self._advantage_config,
            log_probs=data.batch["old_log_probs"],
            ref_log_probs=data.batch.get("ref_log_probs", None),
            kl_coef=self._kl.coefficient,
            turns=read_turns(data.batch),
            learned=data.batch.get("learned", None),
        )
        if self._config.add_token_level_kl:
            samples = int(data.batch["response_mask"].bool().any(-1).sum())
            self._kl.update(result.metrics["advantage/token_kl"], samples)
        data.batch["advantages"], data.batch["returns"] = result.advantages, result.returns
        return result.metrics | masks

    def _add_learned(self, data: DataProto) -> dict[str, float]:
        """Adds `learned` [B], the samples that stay in the loss, where `max_len_mask` or `difficulty_mask` is on."""
        config, batch = self._config, data.batch
        if not config.max_len_mask and not config.difficulty_mask:
            return {}
        learned = learned_samples(
            batch["scores"], batch["group_ids"], batch["trajectory_ids"], batch["truncated"], config
        )
        real = batch["response_mask"].bool().any(-1)
        batch["learned"] = learned
        return {"advantage/learned_samples": float((learned & real).sum() / real.sum().clamp(min=1))}

    # 4. Training

    async def _train(self, data: DataProto) -> dict[str, float]:
        """All optimizer steps of the batch; returns `actor/...` and, with bypass, `correction/...`."""
        config = self._config
        data = data.select(*self._training_keys(data))
        data.meta_info |= {"loss": "policy", "loss_config": self._loss_config}
        counted = data.batch["correction_kept"] if config.correction.renormalize else None
        steps: list[dict[str, float]] = []
        for _ in range(config.ppo_epochs):
            for plan in training_plans(data, config, self._actor.layout):
                shards = training_shards(data, plan, counted)
                step = finalize((await self._actor.call_shards(TrainWorker.train_step, shards))[0])
                if not self._updated:
                    check_first_update(step, self._loss_config, config)
                    self._updated = True
                steps.append(step)
        return {metric_name(name): reduce_steps(name, [step[name] for step in steps]) for name in steps[0]}

    def _training_keys(self, data: DataProto) -> list[str]:
        """Tensors that ranks need: all but those of turns, which only the advantages use."""
        read = ("turn_index",) if self._loss_config.reads_turns else ()
        return [key for key in data.tensors() if key not in TURN_KEYS or key in read]

    # 5. Checks

    def _check_correction(self, metrics: Mapping[str, float], staleness: float) -> dict[str, float]:
        """`correction/no_op`: 1 if samples are stale and nothing was corrected, which is an error unless intended.

        Args:
            metrics: of the whole step.
            staleness: versions the oldest sample is behind.
        """
        weights = None
        if self._loss_config.correction.weighted:
            weights = max(abs(metrics[WEIGHT_MAX] - 1), abs(metrics[WEIGHT_MEAN] - 1))
        stale = staleness > self._steps_without_gradient
        no_op = stale and corrects_nothing(metrics["actor/ratio_deviation_max"], weights, staleness)
        no_gradient = metrics.get("actor/grad_norm") == 0
        self._steps_without_gradient = self._steps_without_gradient + 1 if no_gradient else 0
        uncorrected = weights is None and not traits_of(self._loss_config.pg_variant).reads_ratio
        if no_op and not uncorrected and not self._config.allow_uncorrected_off_policy:
            logger.error(
                "the correction is not working: samples are up to %g versions old, and every ratio and weight is 1 "
                "(pg_variant %s, pg_ratio_base %s, old_log_probs_source %s)",
                staleness,
                self._loss_config.pg_variant,
                self._loss_config.pg_ratio_base,
                self._loss_config.old_log_probs_source,
            )
        return {NO_OP: float(no_op)}

    # Checkpoints

    async def save(self, folder: Path) -> None:
        """Writes actor_train, the KL coefficient and the number of latest steps without a gradient."""
        await super().save(folder)
        state = {"kl_coefficient": self._kl.coefficient, "steps_without_gradient": self._steps_without_gradient}
        (folder / LEARNER_STATE).write_text(json.dumps(state), encoding="utf-8")

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote; an update was made before, so there are no checks of a first step.

        A fixed KL coefficient is that of the configuration, which may have changed.
        """
        await super().load(folder)
        state = json.loads((folder / LEARNER_STATE).read_text(encoding="utf-8"))
        if self._config.target_kl is not None:
            self._kl.coefficient = float(state["kl_coefficient"])
        self._steps_without_gradient = int(state["steps_without_gradient"])
        self._updated = True


async def cluster_log_probs(cluster: Cluster[TrainWorker], data: DataProto, config: MegatronRoleConfig) -> DataProto:
    """`log_probs` and `entropy` [B, T] of `data` under the cluster's weights, in the order of `data`.

    Args:
        cluster: actor_train or reference.
        data: a batch with `meta_info["temperature"]`.
        config: the cluster's role, for the size of its forward micro-batches.
    """
    limit = config.forward_token_limit
    plan = plan_forward(
        sample_lengths(data),
        cluster.layout.data,
        micro_batch_size=config.infer_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=cluster.layout.tensor,
        packed=config.use_sequence_packing,
    )
    inputs = data.select(*LOG_PROB_KEYS)
    shards = []
    for indices, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        shard = inputs.select_idxs(indices)
        shard.meta_info = {"temperature": data.meta_info["temperature"], "micro_batches": micro_batches}
        shards.append(shard)
    answers = DataProto.concat(await cluster.call_shards(TrainWorker.compute_log_probs, shards))
    return answers.reorder(torch.tensor(plan.inverse))


def _learned(data: DataProto) -> DataProto:
    """The batch without the response tokens of samples that are left out of the loss; `data` itself is unchanged."""
    if "learned" not in data.batch.keys():
        return data
    batch = data.batch.clone(recurse=False)
    batch["response_mask"] = batch["response_mask"] & batch["learned"][:, None]
    return DataProto(batch, data.non_tensor_batch, data.meta_info)


def sample_lengths(data: DataProto) -> list[int]:
    """Tokens of each sample, without padding."""
    lengths: list[int] = data.batch["attention_mask"].sum(-1).tolist()
    return lengths


def training_plans(data: DataProto, config: BaseConfig, layout: ParallelLayout) -> list[OptimizerStepPlan]:
    """The optimizer steps of one pass over `data` by actor_train."""
    actor = config.actor_train
    limit = actor.training_token_limit
    return plan_optimizer_steps(
        sample_lengths(data),
        layout.data,
        samples_per_step=actor.samples_per_optimizer_step,
        micro_batch_size=actor.training_args.per_device_train_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=layout.tensor,
        packed=actor.use_sequence_packing,
    )


def training_shards(data: DataProto, plan: OptimizerStepPlan, counted: torch.Tensor | None = None) -> list[DataProto]:
    """One shard for each data-parallel rank, with its micro-batches and the global denominators of the loss.

    Args:
        data: the batch.
        plan: one optimizer step of it.
        counted: [B, T] tokens that the denominators count, if not all of the response mask. Samples without any,
            padding among them, do not count either.
    """
    rows = [index for share in plan.indices for index in share]
    mask = (data.batch["response_mask"] if counted is None else counted).bool()[rows]
    tokens, sequences = float(mask.sum()), float(mask.any(-1).sum())
    shards = []
    for indices, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        shard = data.select_idxs(indices)
        step = {"micro_batches": micro_batches, "tokens": tokens, "sequences": sequences}
        shard.meta_info = {**data.meta_info, "optimizer_steps": [step]}
        shards.append(shard)
    return shards


def metric_name(name: str) -> str:
    """The name of a training metric in a run: those of the correction keep theirs, all others are the actor's."""
    return name if name.startswith("correction/") else f"actor/{name}"


def reduce_steps(name: str, values: list[float]) -> float:
    """One number for several optimizer steps: the largest for names ending in `_max`, the mean otherwise."""
    return max(values) if name.endswith("_max") else float(torch.tensor(values, dtype=torch.float64).mean())


def corrects_nothing(ratio_deviation: float, weight_deviation: float | None, staleness: float) -> bool:
    """Whether stale samples are learned from as if they were on-policy: every ratio and every weight in use is 1.

    Args:
        ratio_deviation: largest |r - 1| of the policy loss over the batch.
        weight_deviation: the same of the correction's weights, from their mean and maximum; None without weights.
        staleness: versions the oldest sample is behind.
    """
    return staleness > 0 and max(ratio_deviation, weight_deviation or 0.0) <= NO_OP_TOLERANCE
