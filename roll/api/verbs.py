"""What `roll.open` does, as coroutines on its event loop; `OpenRun` has the same from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.api.responses import PerToken, Response, ResponseRows
from roll.base.errors import RunError
from roll.base.timers import StepClock
from roll.pipeline.checkpoint import PipelineState, must_fit, write_folder
from roll.pipeline.run import TrainingLoop

if TYPE_CHECKING:
    from roll.api.step_learner import PolicyInputs, StepLearner
    from roll.api.user_samples import AnyPrompt, UserSamples
    from roll.configs.pipeline import RLVRConfig
    from roll.distributed.weights.synchronizer import WeightSynchronizer

LossResult = Tensor | tuple[Tensor, dict[str, float]]
OwnLoss = Callable[[list[Tensor]], LossResult]
"""Log-probs of each response's ids [ids], with gradient -> the loss, 0-d, and metrics if there are any."""

RESTARTED_POLL_S = 1.0
"""Interval at which restarted engines get the weights, unless `update_weights` comes first."""

IN_LOSS: ContextVar[bool] = ContextVar("in_loss", default=False)
"""Whether a loss of the caller runs, for which the trainer waits."""

SFT_OPTIONS = {"loss": "sft", "loss_config": None}
GRADIENT_OPTIONS = {"loss": "gradient", "loss_config": None}


@dataclass(frozen=True)
class PassResult:
    """What a training pass gave.

    Attributes:
        log_probs: of each response's ids [ids], float32, before the step; 0 where an id is not learned from.
        metrics: `loss` and what the loss reports.
    """

    log_probs: list[Tensor] = field(repr=False)
    metrics: dict[str, float]


class Verbs(TrainingLoop):
    """A training loop whose steps the caller makes; its parts are those of `roll run`.

    Calls of the trainer run one after another, in their order; `sample` runs at the same time.
    """

    _config: RLVRConfig
    _samples: UserSamples
    _learner: StepLearner
    _synchronizer: WeightSynchronizer
    opened: Callable[[Verbs], None]
    """Called once, when the engines serve."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._order, self.closed = asyncio.Lock(), asyncio.Event()
        self._gradients = False
        """Whether an optimizer step is to come."""
        self._current = self._serving = False
        """Whether the engines have the weights of the trainer, and the devices that they may share with it."""

    async def run(self) -> None:
        """Sends the first weights, compares the engines, and does what it is asked to until `closed` is set.

        Raises:
            ClusterError: a training rank died.
            EnginesLostError: no engine runs, and none is restarted.
        """
        async with self._checkpoint_completed():
            await self._before_the_first_step(StepClock())
            self._current = self._serving = True
            self.opened(self)
            await self._synchronizer.unless_failed(self._until_closed())

    async def _until_closed(self) -> None:
        tasks = [asyncio.ensure_future(self.closed.wait()), asyncio.ensure_future(self._serve_restarted())]
        try:
            for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_restarted(self) -> bool:
        while True:
            await self._synchronizer.wait_for_restarted()
            async with self._order:
                if self._current:
                    await self._synchronizer.update_restarted()
            await asyncio.sleep(RESTARTED_POLL_S)

    @contextlib.asynccontextmanager
    async def _trainer(self) -> AsyncIterator[None]:
        async with self._order:
            if self._devices is not None:
                self._serving = False
                await self._devices.to_trainer()
            yield

    def _rows(self, responses: Sequence[Response], scores: Sequence[float] = ()) -> ResponseRows:
        return ResponseRows.of(responses, self._config.actor_train.layout.data, scores)

    async def next_prompts(self, count: int | None = None) -> list[Any]:
        """The next `count` prompts of the run's data, in its order; by default `rollout_batch_size`.

        Raises:
            RunError: the configuration names no data.
        """
        return self._samples.next_prompts(count or self._config.rollout_batch_size)

    async def sample(
        self, /, prompts: Sequence[AnyPrompt], n: int = 1, *, seed: int | None = None, **params: Any
    ) -> list[Response]:
        """Responses of the engines, `n` for each prompt, in the order of the prompts.

        Args:
            prompts: texts or lists of messages, which the run's template is applied to; lists of token ids; or those of
                `next_prompts`.
            n: responses to each prompt.
            seed: by default derived from the run's seed and how many prompts were sampled before.
            params: `temperature`, `top_p`, `top_k`, `max_new_tokens`, `stop` and other fields of `SamplingParams`; by
                default those of `actor_infer.generating_args`.

        Raises:
            RunError: a prompt is too long, an argument is wrong, a response failed, or they took too long.
        """
        if not self._serving:
            await self._serve_again()
        limit_s = self._config.async_training.batch_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._samples.sample(prompts, n, seed, params)
        except TimeoutError:
            engines = self._synchronizer.health()
            raise RunError(f"sample: no answer within {limit_s:g} s (batch_deadline_s); engines: {engines}") from None

    async def _serve_again(self) -> None:
        """Gives the engines their devices again, with the weights that they had.

        Raises:
            RunError: the trainer has others, or gradients that it would lose.
        """
        async with self._order:
            if self._serving:
                return
            if self._gradients or not self._current:
                raise RunError("sample: the trainer has the devices of the engines; call update_weights first")
            await self._update_weights(StepClock())
            self._serving = True

    async def score(self, responses: Iterable[Response]) -> list[float]:
        """The rewards of the configuration, for responses to prompts of `next_prompts`.

        Raises:
            RunError: a response is to another prompt, or a reward failed.
        """
        return await self._samples.score([*responses])

    async def log_probs(self, responses: Sequence[Response], *, temperature: float | None = None) -> list[Tensor]:
        """Log-probs of each response's ids [ids] under the trainer's weights, without gradient."""
        async with self._trainer():
            return await self._log_probs(self._rows(responses), temperature)

    async def _log_probs(self, rows: ResponseRows, temperature: float | None) -> list[Tensor]:
        with self._learner.at(temperature):
            return rows.collect(await self._learner.log_probs(rows.data))

    async def advantages(self, responses: Sequence[Response], scores: Sequence[float]) -> list[Tensor]:
        """Advantages of each response's ids [ids], by `adv_estimator` of the configuration over all of these groups."""
        async with self._trainer():
            rows = self._rows(responses, scores)
            return rows.collect((await self._learner.estimate(rows.data))[0])

    async def forward_backward(
        self,
        responses: Sequence[Response],
        advantages: PerToken | None = None,
        *,
        loss: str | OwnLoss | None = None,
        gradients: PerToken | None = None,
        scores: Sequence[float] = (),
        old_log_probs: PerToken | None = None,
        batch: Sequence[Response] | None = None,
        temperature: float | None = None,
    ) -> PassResult:
        """Adds the gradient of a loss over the responses to those of the calls since the last `optim_step`.

        Args:
            responses: any number.
            advantages: one for each response, or for each of its ids; for the policy loss of the configuration.
            loss: instead of that loss: `sft`, the mean negative log-likelihood; or a function of the log-probs of each
                response [ids], whose value is 0-d. It runs in this process; only its gradient goes to the ranks.
            gradients: instead of a loss, its derivative by each log-prob, which takes one pass less.
            scores: of the responses, for policy losses that read them.
            old_log_probs: of the proximal policy, where several optimizer steps learn from a batch; by default the
                current weights are the proximal policy.
            batch: the responses of all calls of the optimizer step, whose number and tokens the policy loss and `sft`
                are divided by; by default `responses`.
            temperature: that log-probs are taken at; by default that of `actor_infer.generating_args`.

        Raises:
            RunError: arguments do not fit together.
            ClusterError: a rank failed; `NonFiniteError` in its message: the loss is not finite.
        """
        _require_one_of(advantages, loss, gradients)
        async with self._trainer():
            rows, own = self._rows(responses, scores), None
            if callable(loss):
                gradients, own = await self._differentiate(loss, rows, temperature)
            with self._learner.at(temperature):
                inputs: PolicyInputs = rows.data, SFT_OPTIONS, None
                if gradients is not None:
                    data = rows.data.adding({"gradients": rows.spread("gradients", gradients)})
                    inputs = data, GRADIENT_OPTIONS, None
                elif advantages is not None:
                    old = None if old_log_probs is None else rows.spread("old_log_probs", old_log_probs)
                    credited = rows.spread("advantages", advantages)
                    inputs = await self._learner.policy_inputs(rows.data, credited, old, self.state.step + 1)
                self._gradients = False  # a pass that fails drops those of earlier ones
                metrics, log_probs = await self._learner.backward(*inputs, None if batch is None else _counts(batch))
            self._gradients = True
            return PassResult(rows.collect(log_probs), metrics if own is None else {**metrics, **own})

    async def _differentiate(
        self, loss: OwnLoss, rows: ResponseRows, temperature: float | None
    ) -> tuple[list[Tensor], dict[str, float]]:
        """The derivative of a loss of the caller by each log-prob, and its value and metrics."""
        log_probs = [each.requires_grad_() for each in await self._log_probs(rows, temperature)]
        IN_LOSS.set(True)  # for this call alone, which is a task of its own
        result = await asyncio.to_thread(loss, log_probs)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
            raise RunError("loss: returned no 0-d tensor that depends on the log-probs; return one, such as their sum")
        found = torch.autograd.grad(value, log_probs, allow_unused=True)
        pairs = zip(found, log_probs, strict=True)
        gradients = [torch.zeros_like(each) if one is None else one for one, each in pairs]
        if not all(bool(each.isfinite().all()) for each in gradients):
            raise RunError(f"loss: is {float(value.detach()):g}, with a gradient that is not finite")
        return gradients, {**metrics, "loss": float(value.detach())}

    async def optim_step(
        self, *, learning_rate: float | None = None, max_grad_norm: float | None = None
    ) -> dict[str, float]:
        """One optimizer step with the gradients so far; `grad_norm` before clipping, and `lr`.

        The learning rate is by default that of the schedule of `actor_train.training_args`; 0 in place of a largest
        norm clips nothing.

        Raises:
            RunError: there are no gradients.
            ClusterError: a rank failed; `NonFiniteError` in its message: the norm is not finite, no weight changed.
        """
        for name, value in {"learning_rate": learning_rate, "max_grad_norm": max_grad_norm}.items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise RunError(f"optim_step.{name}: {value}; give a finite number of at least 0")
        async with self._trainer():
            if not self._gradients:
                raise RunError("optim_step: there are no gradients; call forward_backward before it")
            self._gradients = False
            metrics = await self._learner.step(learning_rate, max_grad_norm)
            self.state.step += 1
            self._current = False
            return metrics

    async def update_weights(self) -> int:
        """Gives the engines the weights of the trainer, and returns their version; running responses go on with them.

        Raises:
            WeightUpdateError: it failed, and so did its retries.
        """
        async with self._order:
            if self._gradients and self._devices is not None:
                raise RunError("update_weights: gradients would leave the shared devices; call optim_step before it")
            self.state.version += 1
            await self._update_weights(StepClock())
            self._current = self._serving = True
            await self._samples.advance(self.state.version)
            return self.state.version

    async def save_state(self) -> Path:
        """Writes a checkpoint, and returns its folder once it is complete.

        The newest `max_ckpt_to_keep` are kept, and one of the same step is replaced.
        """
        async with self._trainer():
            self._written = None
            await self.save()
            await self._complete_checkpoint()
            assert self.checkpoint is not None
            return self.checkpoint

    async def load_state(self, folder: str | Path, *, optimizer: bool = True) -> None:
        """Restores trainer and counters from a checkpoint; `update_weights` gives the engines its weights.

        Without `optimizer` Adam begins again.

        Raises:
            CheckpointError: it is none, is damaged, or does not fit the run.
        """
        async with self._trainer():
            found = self._checkpoints.resume_path(str(folder))
            assert found is not None
            state = PipelineState.load(found)
            with must_fit(found):
                await self._samples.load_state_dict(state.samples)
                await self._learner.load(found)
            if not optimizer:
                await self._learner.reset_optimizer()
            self.state = replace(state, version=max(state.version, self.state.version))  # each has other weights
            self._gradients = self._current = False

    async def save_hf(self, folder: str | Path) -> Path:
        """Writes the weights as a Hugging Face folder, or adapters as a PEFT folder, and returns it."""
        async with self._trainer():
            await write_folder(Path(folder), self._learner.export_hf)
            return Path(folder)


def _require_one_of(advantages: object, loss: object, gradients: object) -> None:
    given = {"advantages": advantages, "loss": loss, "gradients": gradients}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1 or not (callable(loss) or loss in (None, "sft")):
        found = f"{' and '.join(named) or 'none'} of advantages, gradients and loss"
        raise RunError(f"forward_backward: {found}; give one of them, a loss as 'sft' or a function")


def _counts(responses: Sequence[Response]) -> tuple[float, float]:
    """Learned ids, and responses."""
    tokens = sum(len(each.ids) if each.mask is None else sum(each.mask) for each in responses)
    return float(tokens), float(len(responses))
