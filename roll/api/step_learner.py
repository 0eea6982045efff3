"""The learner of a run with a loop of the caller: the parts of `RLLearner.learn`, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.correction import finalize
from roll.base.timers import StepClock
from roll.configs.learning.log_prob_passes import training_gives_old_log_probs
from roll.datasets.batch import ROUTING, Batch
from roll.distributed.calls.remote_call import ALL
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.learning.learner import RLLearner
from roll.pipeline.learning.shards import cluster_log_probs, training_plans, training_shards

Counts = tuple[float, float]
"""Tokens and sequences that a loss is divided by."""

PolicyInputs = tuple[Batch, Mapping[str, Any], Tensor | None]
"""A batch, the options of its training pass, and the tokens [B, T] that its loss is divided by; None: those learned."""


class StepLearner(RLLearner):
    """Adds gradients and takes optimizer steps when it is asked to; what it is given is a batch of any size."""

    def _check_engine(self, proximal: Tensor, behavior: Tensor, mask: Tensor) -> None:
        """The engine was compared when the run was opened; log-probs of a caller may be those of another model."""

    async def reset_optimizer(self) -> None:
        """Makes the optimizers as they were before the first step."""
        for cluster in self._trained.values():
            await cluster.call(ALL, TrainWorker.reset_optimizer)

    @contextlib.contextmanager
    def at(self, temperature: float | None) -> Iterator[None]:
        """In the block log-probs are those at this temperature; None: that of the configuration."""
        before = self._temperature
        self._temperature = before if temperature is None else temperature
        try:
            yield
        finally:
            self._temperature = before

    async def log_probs(self, data: Batch) -> Tensor:
        """Those of the current weights [B, T]."""
        answer = await cluster_log_probs(self._actor, data, self._config.actor_train, self._temperature)
        log_probs: Tensor = answer.batch["log_probs"] * data.batch["response_mask"]
        return log_probs

    async def estimate(self, data: Batch) -> tuple[Tensor, dict[str, float]]:
        """Advantages [B, T] of the batch by `adv_estimator`, and their metrics."""
        config, mask = self._config, data.batch["response_mask"]
        found = {"old_log_probs": torch.zeros(mask.shape)}
        if config.add_token_level_kl or config.uses_teacher or config.uses_sum_pi_squared:
            found = await self._log_probs(data, range(0), StepClock())
        credited, metrics = self._advantages(data, None, mask, found)
        return credited["advantages"], metrics

    async def policy_inputs(self, data: Batch, advantages: Tensor, old: Tensor | None, step: int) -> PolicyInputs:
        """What the policy loss of the configuration reads.

        Without `old` log-probs [B, T] the current policy is the old one, as in the first optimizer step of a batch.
        """
        mask, config = data.batch["response_mask"], self._loss_config
        given = old is None and self._updated and training_gives_old_log_probs(self._config)
        known = given or (old is not None and not self._config.uses_sum_pi_squared)
        found = await self._log_probs(data, range(len(data) if known else 0), StepClock())
        if old is not None and not config.bypass:
            found["old_log_probs"] = old * mask
        data = data.with_column(ROUTING, self._recorded)
        corrected = {} if given else self._correction(data, found["old_log_probs"], mask)[0]
        chosen = self._chosen_tokens(found["old_log_probs"], advantages, mask, step)
        ready = self._training_data(data.adding(found | corrected | chosen | {"advantages": advantages}), mask)
        if given:
            return ready.without("old_log_probs"), self._loss_options(replace(config, first_step=True)), None
        counted = ready.batch["correction_kept"] if self._config.correction.renormalize else None
        return ready, self._loss_options(config), counted

    async def backward(
        self, data: Batch, options: Mapping[str, Any], counted: Tensor | None = None, counts: Counts | None = None
    ) -> tuple[dict[str, float], Tensor]:
        """Adds the gradient of a loss over the batch; its metrics, and the log-probs [B, T] of the pass.

        The loss is divided by `counts`, or by what is `counted` [B, T] in this batch.
        """
        [plan] = training_plans(data, self._config.actor_train, self._actor.platform, len(data))
        shards = training_shards(data, plan, {"temperature": self._temperature, **options}, counted)
        if counts is not None:
            for shard in shards:
                [step] = shard.meta_info["optimizer_steps"]
                step |= dict(zip(("tokens", "sequences"), counts, strict=True))
        answers = await self._actor.call_shards(TrainWorker.forward_backward, shards)
        log_probs = torch.zeros(data.batch["input_ids"].shape)
        for indices, (_, found) in zip(plan.indices, answers, strict=True):
            log_probs[list(indices)] = found.batch["log_probs"]
        metrics = answers[0][0]
        return finalize(metrics), log_probs

    async def step(self, learning_rate: float | None, max_grad_norm: float | None) -> dict[str, float]:
        """Takes an optimizer step with the gradients so far; its metrics."""
        answers = await self._actor.call(ALL, TrainWorker.optimizer_step, learning_rate, max_grad_norm)
        self._updated = True
        return answers[0]
