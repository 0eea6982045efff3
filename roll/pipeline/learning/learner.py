"""From a batch of scored samples to an update of the weights: log-probs, correction, advantages, training, checks.

`RLLearner.learn` processes one batch. The numbered sections below are in the order in which it calls them, except that
the correction follows the first optimizer step where that gives the old log-probs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from roll.algorithms.advantages import (
    GREEDY_KEYS,
    REWARD_PARTS,
    SUM_PI_SQUARED,
    compute_advantages,
    learned_samples,
    read_greedy,
)
from roll.algorithms.aggregation import SAMPLE_WEIGHTS
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
from roll.algorithms.kl import KLController
from roll.algorithms.losses import ValueLossConfig
from roll.algorithms.options.policy_options import PolicySettings, traits_of
from roll.algorithms.shaping import RunStatistics
from roll.algorithms.turns import TURN_KEYS, read_turns
from roll.base.timers import StepClock
from roll.configs.learning.log_prob_passes import training_gives_old_log_probs
from roll.configs.learning.lora import base_is_reference
from roll.configs.pipeline import LearnerOptions, role_seed
from roll.datasets.batch import ROUTING, Batch
from roll.datasets.micro_batches import OptimizerStepPlan
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.learning.actor_learner import ActorLearner, metric_name
from roll.pipeline.learning.dump import dump_samples
from roll.pipeline.learning.logprob_checks import Mismatch, check_engine, check_finite, check_first_update
from roll.pipeline.learning.shards import (
    LOG_PROB_KEYS,
    cluster_log_probs,
    forward,
    live_steps,
    training_plans,
    training_shards,
)
from roll.rollout.rollout_batch import TAG
from roll.rollout.source import SampleBatch
from roll.trackers.sample_files import Largest, keep_samples, larger_values

if TYPE_CHECKING:
    from roll.distributed.calls.remote_call import ClusterClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
        config: LearnerOptions,
        actor: ClusterClient[TrainWorker],
        reference: ClusterClient[TrainWorker] | None,
        critic: ClusterClient[TrainWorker] | None = None,
    ) -> None:
        super().__init__(actor, critic)
        self._config = config
        self._reference = reference
        self._loss_config = config.policy
        self._value_loss_config = ValueLossConfig(config.value_clip, config.loss_agg_mode)
        self._advantage_config = config.advantages
        if config.opd_top_k is not None:  # the teacher is a term of the loss, not of the advantages
            self._advantage_config = replace(self._advantage_config, opd_kl_coef=0.0)
        self._kl = KLController(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self._statistics = RunStatistics()
        self._separate_pass = type(self) is not RLLearner
        self._temperature = config.actor_infer.generating_args.temperature
        self._recorded = Batch({})
        """The experts of this step's tokens, with `router_replay.mode: R2`."""
        self._written: Batch | None = None
        """The samples of this step with what is known of them, for `rollout_dump_dir`."""
        self._dumping: Awaitable[None] | None = None
        self._updated = False
        """Whether an optimizer step was made; the checks of the first step are over then."""
        self._steps_without_gradient = 0
        """Latest steps without a gradient: samples that are no older were drawn from the current policy."""
        self._steps_without_advantage = 0
        self._knows_steps = config.actor_train.training_args.lr_scheduler_type == "constant"
        """Whether nothing is left to say of optimizer steps that the learning-rate schedule does not count."""
        self._largest: Largest = {}
        """Steps whose samples stay, because a finding of the report names them."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """One update with the whole batch, in `ppo_epochs` passes of optimizer steps; returns its metrics.

        Raises:
            RunError: a log-prob is infinite or NaN, or in the first step those of engine, log-prob pass and training
                pass are too far apart.
        """
        data = batch.data
        warming = self._critic is not None and step <= self._config.critic_warmup
        given = range(0) if warming else self._given_by_training(data)
        log_probs, values = await self._with_critic(
            self._log_probs(data, given, clock), lambda critic: self._values(data, critic, clock)
        )
        old, data = log_probs["old_log_probs"], data.with_column(ROUTING, self._recorded)
        with clock.measure("advantages"):
            learned, metrics = self._learned(data)
            mask = data.batch["response_mask"] if learned is None else data.batch["response_mask"] & learned[:, None]
            corrected, apart = ({}, {}) if given else self._correction(data, old, mask)
            credited, shaped = self._advantages(data, learned, mask, log_probs | values | corrected)
            chosen = self._chosen_tokens(old, credited["advantages"], mask, step)
        metrics |= apart | shaped
        self._warn_of_equal_scores(metrics, batch.metrics)
        marked = {} if learned is None else {"learned": mask}
        ready = data.adding(log_probs | values | corrected | credited | chosen | marked)
        self._written = ready.without("old_log_probs") if given else ready
        try:
            trained, critic_trained = await self._with_critic(
                _nothing() if warming else self._train(ready, mask, given, clock),
                lambda critic: self._train_critic(ready, mask, critic, clock),
            )
        except Exception:
            await asyncio.gather(self._dump(step, bool(given)), return_exceptions=True)
            raise
        metrics |= trained | critic_trained
        self._largest = larger_values(self._largest, step, metrics)
        self._dumping = self._dump(step, bool(given))
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

    def _warn_of_more_steps(self, steps: int) -> None:
        """Warns once of a batch with more optimizer steps than the learning-rate schedule counts."""
        planned = self._config.optimizer_steps_per_batch
        if steps > planned and not self._knows_steps:
            self._knows_steps = True
            logger.warning(
                "a batch had %d optimizer steps, and the learning-rate schedule counts %d, so it ends early; raise "
                "custom_envs.<name>.branches",
                steps,
                planned,
            )

    async def _with_critic(
        self, actor: Awaitable[dict[str, T]], critic: Callable[[ClusterClient[TrainWorker]], Awaitable[dict[str, T]]]
    ) -> tuple[dict[str, T], dict[str, T]]:
        """What the actor's work and the critic's give; at the same time where they have their own devices."""
        if self._critic is None:
            return await actor, {}
        if self._config.critic_apart:
            done = await asyncio.gather(actor, critic(self._critic))
            return done[0], done[1]
        return await actor, await critic(self._critic)

    def _dump(self, step: int, first_gives_old: bool) -> Awaitable[None]:
        """Writes the samples on a thread, while the weights are sent; says whether training gave old log-probs."""
        config, data = self._config, self._written
        about = {"policy": asdict(self._loss_config), "length": config.max_sequence_length}
        about |= {"passes": config.ppo_epochs, "first_gives_old": first_gives_old}
        named = [number for _, number in self._largest.values()]

        def write() -> None:
            if self._keeps_samples and data is not None:
                folder, size = Path(str(config.rollout_dump_dir)), self._samples_per_step(data)
                dump_samples(data, folder, step, size, about)
                if config.rollout_dump_steps is not None:
                    keep_samples(folder, step, config.rollout_dump_steps, config.rollout_dump_every, named)

        return asyncio.ensure_future(asyncio.to_thread(write))

    def _samples_per_step(self, data: Batch) -> int:
        """Samples of an optimizer step of actor_train: of one of several policies, all that it has in the batch."""
        return len(data) if self._config.policies else self._config.actor_train.samples_per_optimizer_step

    @property
    def _keeps_samples(self) -> bool:
        return self._config.rollout_dump_dir is not None and self._config.rollout_dump_steps != 0

    async def finish_step(self) -> dict[str, float]:
        """Waits until the samples are written; returns `memory/...`."""
        await self.samples_written()
        return await super().finish_step()

    async def samples_written(self) -> None:
        """Waits until the samples of the step are written."""
        if self._dumping is not None:
            await self._dumping
            self._dumping = self._written = None

    # 1. Log-probs

    def _given_by_training(self, data: Batch) -> range:
        """Samples whose old log-probs the first optimizer step with real samples gives, instead of a pass of their own.

        In the first step of a run there are none, because it compares both passes.
        """
        if not self._updated or self._separate_pass or not training_gives_old_log_probs(self._config):
            return range(0)
        size = self._samples_per_step(data)
        first = live_steps(data, size)[0] * size
        return range(first, first + size)

    async def _log_probs(self, data: Batch, given: range, clock: StepClock) -> dict[str, Tensor]:
        """`old_log_probs` [B, T] (log p) and, where a KL term is on, `ref_log_probs` [B, T].

        Old log-probs of the samples `given` by training are 0. With `opd_top_k` there are also the teacher's most
        likely tokens, see `roll.algorithms.distillation`.
        """
        mask, behavior = data.batch["response_mask"], data.batch["behavior_log_probs"]
        with clock.measure("old_log_probs"):
            found = {"old_log_probs": behavior} if self._loss_config.bypass else await self._old_log_probs(data, given)
            if self._reference is not None:
                top_k, role = self._config.opd_top_k or 0, self._config.reference
                answer = await cluster_log_probs(self._reference, data, role, self._temperature, top_k=top_k)
                found["ref_log_probs"] = answer.batch["log_probs"] * mask
                if top_k:
                    found[TEACHER_TOP_IDS] = answer.batch["top_ids"]
                    found[TEACHER_TOP_LOG_PROBS] = answer.batch["top_log_probs"]
            elif base_is_reference(self._config):
                actor = self._config.actor_train
                answer = await cluster_log_probs(self._actor, data, actor, self._temperature, base=True)
                found["ref_log_probs"] = answer.batch["log_probs"] * mask
            check_finite(mask, {"behavior_log_probs": behavior, **found})
        return found

    async def _old_log_probs(self, data: Batch, given: range) -> dict[str, Tensor]:
        mask, squares = data.batch["response_mask"], self._config.uses_sum_pi_squared
        found, rows = {"old_log_probs": torch.zeros(mask.shape)}, [row for row in range(len(data)) if row not in given]
        if rows:
            part, role = data.select_idxs(rows) if given else data, self._config.actor_train
            records = role.router_replay.pass_records
            answer = await cluster_log_probs(
                self._actor, part, role, self._temperature, squares, records_routing=records
            )
            self._recorded = answer if records else self._recorded
            found["old_log_probs"][rows] = answer.batch["log_probs"] * mask[rows]
        if squares:  # with which training gives none
            found[SUM_PI_SQUARED] = answer.batch[SUM_PI_SQUARED] * mask
        return found

    async def _values(self, data: Batch, critic: ClusterClient[TrainWorker], clock: StepClock) -> dict[str, Tensor]:
        """`values` [B, T] of the critic as it is now, however old the samples are."""
        mask = data.batch["response_mask"]
        with clock.measure("values"):
            answer = await forward(critic, TrainWorker.compute_values, data, self._config.critic, self._temperature)
            values = answer.batch["values"] * mask
            check_finite(mask, {"values": values})
        return {"values": values}

    # 2. Samples that stay in the loss, and correction

    def _learned(self, data: Batch) -> tuple[Tensor | None, dict[str, float]]:
        """The samples that stay in the loss [B], where `max_len_mask` or `difficulty_mask` is on; and their share."""
        config, batch = self._config, data.batch
        if not config.max_len_mask and not config.difficulty_mask:
            return None, {}
        learned = learned_samples(
            batch["scores"], batch["group_ids"], batch["trajectory_ids"], batch["truncated"], config
        )
        real = batch["response_mask"].bool().any(-1)
        return learned, {"advantage/learned_samples": float((learned & real).sum() / real.sum().clamp(min=1))}

    def _correction(self, data: Batch, proximal: Tensor, learned: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Weights and kept tokens of the correction [B, T], and how far p is from mu.

        The correction counts all response tokens, its normalization only the `learned` ones [B, T], which stay in the
        loss. With bypass there is no p: the loss computes the correction against pi.
        """
        if self._loss_config.bypass:
            return {}, {}
        behavior, mask, options = data.batch["behavior_log_probs"], data.batch["response_mask"], self._config.correction
        found, weights, kept = {}, None, None
        if options.active:
            turns = data.batch.get("turn_index", None)
            correction = off_policy_correction(proximal, behavior, mask, options, turns)
            correction = batch_correction(correction, proximal, behavior, learned, options)
            found = {"correction_weights": correction.weights, "correction_kept": correction.kept}
            weights, kept = correction.weights if options.weighted else None, correction.kept
        self._check_engine(proximal, behavior, mask)
        return found, diagnostics(proximal, behavior, mask, weights, kept)

    def _check_engine(self, proximal: Tensor, behavior: Tensor, mask: Tensor) -> None:
        if not self._updated:
            check_engine(Mismatch.between(proximal, behavior, mask, self._config.p99_logprob_mismatch), self._config)

    # 3. Advantages

    def _advantages(
        self, data: Batch, learned: Tensor | None, mask: Tensor, found: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """`advantages` and `returns` [B, T] from the batch and what was `found` for it; adapts the KL coefficient."""
        result = compute_advantages(
            data.batch["scores"],
            data.batch["group_ids"],
            data.batch["response_mask"],
            self._advantage_config,
            log_probs=found["old_log_probs"],
            ref_log_probs=found.get("ref_log_probs"),
            kl_coef=self._kl.coefficient,
            turns=read_turns(data.batch),
            learned=learned,
            values=found.get("values"),
            greedy=read_greedy(data.batch),
            reward_parts=data.batch.get(REWARD_PARTS, None),
            sum_pi_squared=found.get(SUM_PI_SQUARED),
            correction_weights=found.get("correction_weights") if self._config.correction.weighted else None,
            statistics=self._statistics,
            tag_names=data.non_tensor_batch[TAG].tolist() if TAG in data.non_tensor_batch else None,
        )
        self._statistics = result.statistics
        if self._config.add_token_level_kl:
            samples = int(data.batch["response_mask"].bool().any(-1).sum())
            self._kl.update(result.metrics["advantage/token_kl"], samples)
        if self._critic is not None:
            result.metrics["critic/explained_variance"] = explained_variance(found["values"], result.returns, mask)
        return {"advantages": result.advantages, "returns": result.returns}, result.metrics

    def _chosen_tokens(self, old: Tensor, advantages: Tensor, mask: Tensor, step: int) -> dict[str, Tensor]:
        """`high_covariance` [B, T] for the losses that read it."""
        seed = role_seed(self._config.seed, "high_covariance", step)
        chosen = self._loss_config.chosen_tokens(old, advantages, mask, seed)
        return {} if chosen is None else {"high_covariance": chosen}

    # 4. Training

    async def _train(self, ready: Batch, mask: Tensor, given: range, clock: StepClock) -> dict[str, float]:
        """All optimizer steps on the tokens of `mask`; returns `actor/...`, and `correction/...` where that is new.

        The first one gives the old log-probs of the samples `given`, and the others are corrected against them.
        """
        steps: list[dict[str, float]] = []
        metrics: dict[str, float] = {}
        seen = {name: torch.zeros(mask.shape) for name in ("log_probs", "entropy")}
        with clock.measure("train"):
            data = self._training_data(ready, mask)
            size = self._samples_per_step(data)
            once = training_plans(data, self._config.actor_train, self._actor.platform, size)
            plans = once * self._config.ppo_epochs
            self._warn_of_more_steps(len(plans))
            if given:
                first, old = await self._first_optimizer_step(data, plans[0], given, seen)
                steps.append(first)
                self._written = ready = ready.adding({"old_log_probs": old})
                check_finite(mask, {"old_log_probs": old})
                corrected, metrics = self._correction(ready.adding({"response_mask": mask}), old, mask)
                self._written = ready = ready.adding(corrected)
                data = self._training_data(ready, mask)
            steps += await self._optimizer_steps(data, plans[len(steps) :], len(once) - len(steps), seen)
        if self._keeps_samples:
            self._written = ready.adding({"train_log_probs": seen["log_probs"], "entropy": seen["entropy"]})
        means = {metric_name(name): reduce_steps(name, [step[name] for step in steps]) for name in steps[0]}
        return means | metrics

    async def _first_optimizer_step(
        self, data: Batch, plan: OptimizerStepPlan, given: range, seen: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], Tensor]:
        """Metrics of the optimizer step that gives old log-probs of samples, and those of the whole batch [B, T]."""
        options = self._loss_options(replace(self._loss_config, first_step=True))
        shards = training_shards(data.without("old_log_probs"), plan, options)
        metrics = await self._update_and_see(shards, plan, seen)
        old, rows = data.batch["old_log_probs"].clone(), list(given)
        old[rows] = seen["log_probs"][rows] * data.batch["response_mask"][rows]
        return metrics, old

    async def _optimizer_steps(
        self, data: Batch, plans: list[OptimizerStepPlan], first: int, seen: Mapping[str, Tensor]
    ) -> list[dict[str, float]]:
        """Metrics of each; `seen` gets what the `first` of them saw, which are those of the first pass."""
        counted = data.batch["correction_kept"] if self._config.correction.renormalize else None
        options, steps = self._loss_options(self._loss_config), []
        for number, plan in enumerate(plans):
            shards = training_shards(data, plan, options, counted)
            if number < first and self._keeps_samples:
                metrics = await self._update_and_see(shards, plan, seen)
            else:
                metrics = (await self._actor.call_shards(TrainWorker.train_step, shards))[0]
            steps.append(finalize(metrics))
            if not self._updated:
                check_first_update(steps[-1], self._loss_config, self._config)
                self._updated = True
        return steps

    async def _update_and_see(
        self, shards: list[Batch], plan: OptimizerStepPlan, seen: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Metrics of an optimizer step; `seen` [B, T] gets what its forward passes gave for its samples."""
        answers = await self._actor.call_shards(TrainWorker.train_step_with_log_probs, shards)
        for indices, (_, given) in zip(plan.indices, answers, strict=True):
            for name, values in seen.items():
                values[list(indices)] = given.batch[name]
        return answers[0][0]

    async def _train_critic(
        self, ready: Batch, mask: Tensor, critic: ClusterClient[TrainWorker], clock: StepClock
    ) -> dict[str, float]:
        ready = ready.adding({"response_mask": mask})
        weights = [SAMPLE_WEIGHTS] if SAMPLE_WEIGHTS in ready else []
        data = ready.select(*LOG_PROB_KEYS, "returns", "values", *weights)
        options = {"temperature": self._temperature, "loss": "value", "loss_config": self._value_loss_config}
        steps: list[dict[str, float]] = []
        with clock.measure("train_critic"):
            for plan in training_plans(ready, self._config.critic, critic.platform) * self._config.ppo_epochs:
                shards = training_shards(data, plan, options)
                steps.append((await critic.call_shards(TrainWorker.train_step, shards))[0])
        names = [name for name in steps[0] if not name.startswith("moe/")]
        return {f"critic/{name}": reduce_steps(name, [step[name] for step in steps]) for name in names}

    def _training_data(self, ready: Batch, mask: Tensor) -> Batch:
        """What ranks need: tensors but those of turns, greedy responses and rewards, which only advantages use."""
        unused = {*TURN_KEYS, *GREEDY_KEYS, REWARD_PARTS, SUM_PI_SQUARED, "learned"}
        if self._loss_config.reads_turns:
            unused -= {"turn_index"}
        own = {"response_mask": mask}
        if "correction_kept" in ready:  # the correction counts all tokens, the loss only those of `mask`
            own["correction_kept"] = ready.batch["correction_kept"] & mask
        tensors = {name: each for name, each in ready.tensors().items() if name not in unused}
        return Batch(tensors | own).with_column(ROUTING, ready)

    def _loss_options(self, config: PolicySettings) -> dict[str, Any]:
        return {"temperature": self._temperature, "loss": "policy", "loss_config": config}

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
        (folder / LEARNER_STATE).write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        """What it knows beside the weights; JSON-able."""
        state: dict[str, Any] = {
            "kl_coefficient": self._kl.coefficient,
            "steps_without_gradient": self._steps_without_gradient,
            "updated": self._updated,
            "largest": self._largest,
        }
        if self._config.uses_running_statistics:
            state |= self._statistics.state_dict()
        return state

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        await super().load(folder)
        self.load_state_dict(json.loads((folder / LEARNER_STATE).read_text(encoding="utf-8")))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; after an update of the policy there are no checks of a first step.

        A fixed KL coefficient is that of the configuration, which may have changed. Statistics of scores begin anew
        where the run that saved the checkpoint had none.
        """
        if self._config.target_kl is not None:
            self._kl.coefficient = float(state["kl_coefficient"])
        self._statistics = RunStatistics.from_state(state)
        self._steps_without_gradient = int(state["steps_without_gradient"])
        self._updated = bool(state.get("updated", True))
        self._largest = {name: (value, step) for name, (value, step) in state.get("largest", {}).items()}


async def _nothing() -> dict[str, Any]:
    return {}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the tokens of the mask [B, T]: 1 for exact values, 0 for constant ones.

    0 also where all returns are equal.
    """
    kept = mask.bool()
    targets = returns[kept].double()
    if targets.numel() < 2 or bool(targets.max() == targets.min()):
        return 0.0
    return float(1 - (targets - values[kept]).var() / targets.var())


def reduce_steps(name: str, values: list[float]) -> float:
    """One number for several optimizer steps: the largest for names ending in `_max`, the mean otherwise."""
    return max(values) if name.endswith("_max") else float(torch.tensor(values, dtype=torch.float64).mean())


def corrects_nothing(ratio_deviation: float, weight_deviation: float | None, staleness: float) -> bool:
    """Whether stale samples are learned from as if they were on-policy: every ratio and every weight in use is 1.

    Deviations are the largest |r - 1| over the batch, of the policy loss and of the correction's weights, if any.
    """
    return staleness > 0 and max(ratio_deviation, weight_deviation or 0.0) <= NO_OP_TOLERANCE
