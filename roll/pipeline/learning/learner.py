"""From a batch of scored samples to an update of the weights: log-probs, correction, advantages, training, checks.

`RLLearner.learn` processes one batch. The numbered sections below are in the order in which it calls them, except that
the correction follows the first optimizer step where that gives the old log-probs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roll.algorithms.advantages import (
    GREEDY_KEYS,
    REWARD_PARTS,
    SUM_PI_SQUARED,
    compute_advantages,
    learned_samples,
    read_greedy,
)
from roll.algorithms.correction import (
    MASKED_FRACTION,
    NO_OP,
    WEIGHT_MAX,
    WEIGHT_MEAN,
    batch_correction,
    diagnostics,
    finalize,
    off_policy_correction,
)
from roll.algorithms.distillation import TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS
from roll.algorithms.kl import kl_controller
from roll.algorithms.losses import ValueLossConfig
from roll.algorithms.policy_options import PolicySettings, traits_of
from roll.algorithms.shaping import RunStatistics
from roll.algorithms.turn_advantages import TURN_KEYS, read_turns
from roll.configs.log_prob_passes import training_gives_old_log_probs
from roll.configs.pipeline import RLConfig, role_seed
from roll.datasets.batch import DataProto
from roll.datasets.micro_batches import OptimizerStepPlan
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.learning.actor_learner import ActorLearner
from roll.pipeline.learning.logprob_checks import Mismatch, check_engine, check_finite, check_first_update
from roll.pipeline.learning.shards import (
    LOG_PROB_KEYS,
    cluster_log_probs,
    forward,
    live_steps,
    training_plans,
    training_shards,
)
from roll.rollout.rollout_batch import TAG, dump_samples
from roll.rollout.source import SampleBatch
from roll.rollout.timers import StepClock

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

logger = logging.getLogger(__name__)

NO_OP_TOLERANCE = 1e-6
"""Ratios this close to 1 over a whole batch correct nothing."""

LEARNER_STATE = "rl_learner.json"
"""File of a checkpoint: the state of a learner other than that of its roles."""

STEPS_WITHOUT_ADVANTAGE = 3
"""Steps in a row without any advantage that a run warns of."""


class RLLearner(ActorLearner):
    """Learns from RLVR responses and from agents' trajectories; `async_training.trainer_class` names a subclass.

    Symbols: pi is the current policy, p the proximal one (old log-probs), mu the one that sampled (behavior).
    """

    def __init__(
        self,
        config: RLConfig,
        actor: Cluster[TrainWorker],
        reference: Cluster[TrainWorker] | None,
        critic: Cluster[TrainWorker] | None = None,
    ) -> None:
        super().__init__(actor, critic)
        self._config = config
        self._reference = reference
        self._loss_config = config.policy
        self._value_loss_config = ValueLossConfig(config.value_clip, config.loss_agg_mode)
        self._advantage_config = config.advantages
        if config.opd_top_k is not None:  # the teacher is a term of the loss, not of the advantages
            self._advantage_config = replace(self._advantage_config, opd_kl_coef=0.0)
        self._kl = kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self._statistics = RunStatistics()
        self._separate_pass = type(self) is not RLLearner
        self._dumping: Awaitable[None] | None = None
        self._updated = False
        """Whether an optimizer step was made; the checks of the first step are over then."""
        self._steps_without_gradient = 0
        """Latest steps without a gradient: samples that are no older were drawn from the current policy."""
        self._steps_without_advantage = 0

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """One update with the whole batch, in `ppo_epochs` passes of optimizer steps; returns its metrics.

        Raises:
            RunError: a log-prob is infinite or NaN, or in the first step those of engine, log-prob pass and training
                pass are too far apart.
        """
        data = batch.data
        warming = self._critic is not None and step <= self._config.critic_warmup
        given = range(0) if warming else self._given_by_training(data)
        data.meta_info["temperature"] = self._config.actor_infer.generating_args.temperature
        await self._with_critic(
            self._add_log_probs(data, given, clock), lambda critic: self._add_values(data, critic, clock)
        )
        with clock.measure("advantages"):
            metrics = self._add_learned(data)
            metrics |= {} if given else self._add_correction(data)
            metrics |= self._add_advantages(data)
            self._add_high_covariance(data, step)
        self._warn_of_equal_scores(metrics, batch.metrics)
        try:
            trained = await self._with_critic(
                _nothing() if warming else self._train(_learned(data), given, clock),
                lambda critic: self._train_critic(_learned(data), critic, clock),
            )
        except Exception:
            await asyncio.gather(self._dump(data, step), return_exceptions=True)
            raise
        self._dumping = self._dump(data, step)
        metrics = metrics | trained[0] | trained[1]
        if warming:
            self._steps_without_gradient += 1
            return metrics
        return metrics | self._check_correction(metrics, batch.metrics.get("staleness/max", 0.0))

    def _warn_of_equal_scores(self, metrics: Mapping[str, float], rollout: Mapping[str, float]) -> None:
        """Warns once that nothing is learned, where no token had an advantage for some steps."""
        learns = metrics["advantage/max"] != 0 or metrics["advantage/min"] != 0 or self._config.opd_top_k is not None
        self._steps_without_advantage = 0 if learns else self._steps_without_advantage + 1
        if self._steps_without_advantage == STEPS_WITHOUT_ADVANTAGE:
            logger.warning(
                "all advantages of the last %d steps were 0: the samples of each prompt had equal scores (on average "
                "%.3g in this step), so nothing was learned; `roll show %s` prints them",
                STEPS_WITHOUT_ADVANTAGE,
                rollout.get("rollout/reward_mean", 0.0),
                self._config.output_dir,
            )

    async def _with_critic(
        self, actor: Awaitable[dict[str, float]], critic: Callable[[Cluster[TrainWorker]], Awaitable[dict[str, float]]]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics of the actor's work and of the critic's; at the same time where they have their own devices."""
        if self._critic is None:
            return await actor, {}
        if self._config.critic_apart:
            done = await asyncio.gather(actor, critic(self._critic))
            return done[0], done[1]
        return await actor, await critic(self._critic)

    def _dump(self, data: DataProto, step: int) -> Awaitable[None]:
        """Writes the samples on a thread, while the weights are sent."""

        def write() -> None:
            folder, keep = self._config.rollout_dump_dir, self._config.rollout_dump_steps
            if folder is not None and keep != 0:
                dump_samples(data, Path(folder), step, keep)

        return asyncio.ensure_future(asyncio.to_thread(write))

    async def finish_step(self) -> dict[str, float]:
        """Waits until the samples are written; returns `memory/...`."""
        if self._dumping is not None:
            await self._dumping
            self._dumping = None
        return await super().finish_step()

    # 1. Log-probs

    def _given_by_training(self, data: DataProto) -> range:
        """The samples whose old log-probs the first optimizer step gives: its own, if nothing reads them before it.

        In the first step of a run there are none, because it compares both passes.
        """
        if not self._updated or self._separate_pass or not training_gives_old_log_probs(self._config):
            return range(0)
        size = self._config.actor_train.samples_per_optimizer_step
        first = live_steps(data, size)[0] * size
        return range(first, first + size)

    async def _add_log_probs(self, data: DataProto, given: range, clock: StepClock) -> dict[str, float]:
        """Adds `old_log_probs` [B, T] (log p) and, where a KL term is on, `ref_log_probs` [B, T]; no metrics.

        Old log-probs of the samples `given` by training are 0 until then. With `opd_top_k` also adds the teacher's most
        likely tokens, see `roll.algorithms.distillation`.
        """
        mask = data.batch["response_mask"]
        with clock.measure("old_log_probs"):
            if self._loss_config.bypass:
                data.batch["old_log_probs"] = data.batch["behavior_log_probs"].clone()
            else:
                data.batch["old_log_probs"] = torch.zeros(mask.shape)
                squares = self._config.uses_sum_pi_squared
                rows = [row for row in range(len(data)) if row not in given]
                if rows:
                    part = data.select_idxs(rows) if given else data
                    answer = await cluster_log_probs(self._actor, part, self._config.actor_train, squares)
                    data.batch["old_log_probs"][rows] = answer.batch["log_probs"] * mask[rows]
                if squares:  # with which training gives none
                    data.batch[SUM_PI_SQUARED] = answer.batch[SUM_PI_SQUARED] * mask
            if self._reference is not None:
                top_k = self._config.opd_top_k or 0
                answer = await cluster_log_probs(self._reference, data, self._config.reference, top_k=top_k)
                data.batch["ref_log_probs"] = answer.batch["log_probs"] * mask
                if top_k:
                    data.batch[TEACHER_TOP_IDS] = answer.batch["top_ids"]
                    data.batch[TEACHER_TOP_LOG_PROBS] = answer.batch["top_log_probs"]
            check_finite(data)
        return {}

    async def _add_values(self, data: DataProto, critic: Cluster[TrainWorker], clock: StepClock) -> dict[str, float]:
        """Adds `values` [B, T] of the critic as it is now, however old the samples are; no metrics."""
        with clock.measure("values"):
            answer = await forward(critic, TrainWorker.compute_values, data, self._config.critic)
            data.batch["values"] = answer.batch["values"] * data.batch["response_mask"]
            check_finite(data)
        return {}

    # 2. Samples that stay in the loss, and correction

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
            correction = batch_correction(
                correction, proximal, behavior, _learned(data).batch["response_mask"], options
            )
            data.batch["correction_weights"], data.batch["correction_kept"] = correction.weights, correction.kept
            weights, kept = correction.weights if options.weighted else None, correction.kept
        metrics = diagnostics(proximal, behavior, mask, weights, kept)
        if not self._updated:
            p99 = self._config.p99_logprob_mismatch
            check_engine(Mismatch.between(proximal, behavior, mask, p99), self._config)
        return metrics

    # 3. Advantages

    def _add_advantages(self, data: DataProto) -> dict[str, float]:
        """Adds `advantages` and `returns` [B, T]; adapts the KL coefficient."""
        options = self._loss_config.correction
        result = compute_advantages(
            data.batch["scores"],
            data.batch["group_ids"],
            data.batch["response_mask"],
            self._advantage_config,
            log_probs=data.batch.get("old_log_probs", None),
            ref_log_probs=data.batch.get("ref_log_probs", None),
            kl_coef=self._kl.coefficient,
            turns=read_turns(data.batch),
            learned=data.batch.get("learned", None),
            values=data.batch.get("values", None),
            greedy=read_greedy(data.batch),
            reward_parts=data.batch.get(REWARD_PARTS, None),
            sum_pi_squared=data.batch.get(SUM_PI_SQUARED, None),
            correction_weights=data.batch.get("correction_weights", None) if options.weighted else None,
            statistics=self._statistics,
            tag_names=data.non_tensor_batch[TAG].tolist() if TAG in data.non_tensor_batch else None,
        )
        self._statistics = result.statistics
        if self._config.add_token_level_kl:
            samples = int(data.batch["response_mask"].bool().any(-1).sum())
            self._kl.update(result.metrics["advantage/token_kl"], samples)
        data.batch["advantages"], data.batch["returns"] = result.advantages, result.returns
        if self._critic is not None:
            mask = _learned(data).batch["response_mask"]
            result.metrics["critic/explained_variance"] = explained_variance(data.batch["values"], result.returns, mask)
        return result.metrics

    def _add_high_covariance(self, data: DataProto, step: int) -> None:
        """Adds `high_covariance` [B, T] for the losses that read it."""
        if "old_log_probs" not in data.batch.keys():
            return
        mask, seed = _learned(data).batch["response_mask"], role_seed(self._config.seed, "high_covariance", step)
        chosen = self._loss_config.chosen_tokens(data.batch["old_log_probs"], data.batch["advantages"], mask, seed)
        if chosen is not None:
            data.batch["high_covariance"] = chosen

    # 4. Training

    async def _train(self, data: DataProto, given: range, clock: StepClock) -> dict[str, float]:
        """All optimizer steps of the batch; returns `actor/...`, and `correction/...` if that was not known before.

        `data` gets the old log-probs of the samples `given` by the first optimizer step, and the correction against
        them.
        """
        with clock.measure("train"):
            plans = training_plans(data, self._config.actor_train, self._actor.platform) * self._config.ppo_epochs
            steps, metrics = [], {}
            if given:
                steps.append(await self._first_optimizer_step(data, plans.pop(0), given))
                metrics = self._add_correction(data)
            if plans:
                steps += await self._optimizer_steps(data, plans)
        means = {metric_name(name): reduce_steps(name, [step[name] for step in steps]) for name in steps[0]}
        return means | metrics

    async def _first_optimizer_step(self, data: DataProto, plan: OptimizerStepPlan, given: range) -> dict[str, float]:
        """Metrics of the optimizer step that gives the old log-probs of its samples, which are written into `data`."""
        old = data.batch.pop("old_log_probs")  # incomplete until then, so a failure leaves none to be written
        config = replace(self._loss_config, first_step=True)
        shards = training_shards(self._training_data(data, config), plan)
        answers = await self._actor.call_shards(TrainWorker.train_step_with_log_probs, shards)
        log_probs = DataProto.concat([each for _, each in answers]).reorder(torch.tensor(plan.inverse))
        rows = list(given)
        old[rows] = log_probs.batch["log_probs"] * data.batch["response_mask"][rows]
        data.batch["old_log_probs"] = old
        check_finite(data)
        return answers[0][0]

    async def _optimizer_steps(self, data: DataProto, plans: list[OptimizerStepPlan]) -> list[dict[str, float]]:
        counted = data.batch["correction_kept"] if self._config.correction.renormalize else None
        data = self._training_data(data, self._loss_config)
        steps = []
        for plan in plans:
            answers = await self._actor.call_shards(TrainWorker.train_step, training_shards(data, plan, counted))
            steps.append(finalize(answers[0]))
            if not self._updated:
                check_first_update(steps[-1], self._loss_config, self._config)
                self._updated = True
        return steps

    async def _train_critic(self, data: DataProto, critic: Cluster[TrainWorker], clock: StepClock) -> dict[str, float]:
        """All optimizer steps of the critic on the batch; returns `critic/...`."""
        whole, data = data, data.select(*LOG_PROB_KEYS, "returns", "values")
        data.meta_info |= {"loss": "value", "loss_config": self._value_loss_config}
        steps: list[dict[str, float]] = []
        with clock.measure("train_critic"):
            for plan in training_plans(whole, self._config.critic, critic.platform) * self._config.ppo_epochs:
                steps.append((await critic.call_shards(TrainWorker.train_step, training_shards(data, plan)))[0])
        return {f"critic/{name}": reduce_steps(name, [step[name] for step in steps]) for name in steps[0]}

    def _training_data(self, data: DataProto, config: PolicySettings) -> DataProto:
        """What ranks need: all but tensors of turns, greedy responses and rewards, which only advantages use."""
        unused = {*TURN_KEYS, *GREEDY_KEYS, REWARD_PARTS, SUM_PI_SQUARED}
        if config.reads_turns:
            unused -= {"turn_index"}
        selected = data.select(*(key for key in data.tensors() if key not in unused))
        selected.meta_info |= {"loss": "policy", "loss_config": config}
        return selected

    # 5. Checks

    def _check_correction(self, metrics: Mapping[str, float], staleness: float) -> dict[str, float]:
        """`correction/no_op`: 1 if samples are stale and nothing was corrected, which is an error unless intended."""
        weights = None
        if self._loss_config.correction.weighted:
            weights = max(abs(metrics[WEIGHT_MAX] - 1), abs(metrics[WEIGHT_MEAN] - 1))
        stale = staleness > self._steps_without_gradient
        rejects = metrics.get(MASKED_FRACTION, 0.0) > 0
        no_op = stale and not rejects and corrects_nothing(metrics["actor/ratio_deviation_max"], weights, staleness)
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
        """Begins to write actor_train; writes the KL coefficient, statistics of scores and steps without a gradient."""
        await super().save(folder)
        state: dict[str, Any] = {
            "kl_coefficient": self._kl.coefficient,
            "steps_without_gradient": self._steps_without_gradient,
            "updated": self._updated,
        }
        if self._config.uses_running_statistics:
            state |= self._statistics.state_dict()
        (folder / LEARNER_STATE).write_text(json.dumps(state), encoding="utf-8")

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote; after an update of the policy there are no checks of a first step.

        A fixed KL coefficient is that of the configuration, which may have changed. Statistics of scores begin anew
        where the run that saved the checkpoint had none.
        """
        await super().load(folder)
        state = json.loads((folder / LEARNER_STATE).read_text(encoding="utf-8"))
        if self._config.target_kl is not None:
            self._kl.coefficient = float(state["kl_coefficient"])
        self._statistics = RunStatistics.from_state(state)
        self._steps_without_gradient = int(state["steps_without_gradient"])
        self._updated = bool(state.get("updated", True))


async def _nothing() -> dict[str, float]:
    return {}


def _learned(data: DataProto) -> DataProto:
    """The batch without the response tokens of samples that are left out of the loss; `data` itself is unchanged."""
    if "learned" not in data.batch.keys():
        return data
    batch = data.batch.clone(recurse=False)
    batch["response_mask"] = batch["response_mask"] & batch["learned"][:, None]
    if "correction_kept" in batch.keys():  # the correction counts all tokens, the loss only learned ones
        batch["correction_kept"] = batch["correction_kept"] & batch["response_mask"]
    return DataProto(batch, data.non_tensor_batch, data.meta_info)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the tokens of the mask [B, T]: 1 for exact values, 0 for constant ones.

    0 also where all returns are equal.
    """
    kept = mask.bool()
    targets = returns[kept].double()
    if targets.numel() < 2 or bool(targets.max() == targets.min()):
        return 0.0
    return float(1 - (targets - values[kept]).var() / targets.var())


def metric_name(name: str) -> str:
    """The name of a training metric in a run: those of the correction keep theirs, all others are the actor's."""
    return name if name.startswith("correction/") else f"actor/{name}"


def reduce_steps(name: str, values: list[float]) -> float:
    """One number for several optimizer steps: the largest for names ending in `_max`, the mean otherwise."""
    return max(values) if name.endswith("_max") else float(torch.tensor(values, dtype=torch.float64).mean())


def corrects_nothing(ratio_deviation: float, weight_deviation: float | None, staleness: float) -> bool:
    """Whether stale samples are learned from as if they were on-policy: every ratio and every weight in use is 1.

    Deviations are the largest |r - 1| over the batch, of the policy loss and of the correction's weights, if any.
    """
    return staleness > 0 and max(ratio_deviation, weight_deviation or 0.0) <= NO_OP_TOLERANCE
