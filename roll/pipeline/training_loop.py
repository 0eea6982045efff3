"""The training loop of every pipeline: take a batch, learn from it, update the engines' weights, validate, save.

RLVR, agents and SFT differ in where samples come from (`SampleSource`) and in what is learned (`Learner`). The loop
does not know whether samples were generated just now or ahead of time.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from roll.base.errors import RunError, RunInterrupted
from roll.configs.pipeline import BaseConfig
from roll.distributed.remote_errors import ClusterError
from roll.pipeline.checkpoint import HF_FOLDER, PipelineState, checkpoints_of, must_fit, step_of, write_folder
from roll.pipeline.learning.performance import PEAK_TFLOPS, Performance
from roll.rollout.source import SampleBatch, SampleSource
from roll.rollout.timers import StepClock

if TYPE_CHECKING:
    from roll.distributed.shared_devices import SharedDevices
    from roll.distributed.weights.report import UpdateReport
    from roll.pipeline.learning.engine_probe import EngineProbe
    from roll.trackers import TrackerGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOSTLY_CUT_OFF = 0.5
"""Share of a step's trajectories that end at the length limit above which the run warns, once."""


class Learner(Protocol):
    """How a batch becomes an update of the weights."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Updates the weights with the whole batch, as step number `step`; returns `actor/...` and related metrics."""

    async def finish_step(self) -> dict[str, float]:
        """Waits for background work of `learn`, such as writing samples; `memory/...` of trained roles, in bytes."""

    async def save(self, folder: Path) -> None:
        """Begins to write weights, optimizer, schedule and RNG of every trained role; `saved` waits for the end."""

    async def saved(self) -> float:
        """Waits until what `save` began is written, or raises the error with which that ended.

        Returns:
            Seconds that `learn` waited for it.
        """

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""

    async def export_hf(self, folder: Path) -> None:
        """Writes the trained model as a HF folder."""


@runtime_checkable
class BatchHook(Protocol):
    """Sees every batch before it is learned from.

    `async_training.batch_hook_class` names a class that is constructed with the run's config, on the driver.
    """

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float] | None:
        """Reads `batch` or changes the values of its tensors; it must keep its samples.

        Args:
            batch: `data.batch` has the tensors: `input_ids`, `attention_mask`, `position_ids`, `response_mask`,
                `behavior_log_probs` and `weight_version` [B, T], `scores` and `group_ids` [B], and those of turns.
                `data.non_tensor_batch["id"]` names the prompts. Padding samples have no token in `response_mask`.
            step: that learns from it.

        Returns:
            Metrics to add as `batch_hook/<name>`.
        """


class WeightUpdates(Protocol):
    """Transfers the trained weights to the engines; see `WeightSynchronizer`."""

    async def update_weights(self, version: int) -> UpdateReport:
        """All engines that run generate with the weights of `version` from now on."""

    async def while_idle(self, work: Coroutine[Any, Any, T], /) -> T:
        """The result of `work`, during which the trainer is idle: restarted engines get the weights meanwhile."""

    def health(self) -> dict[str, str]:
        """State of each engine by name."""


class TrainingLoop:
    """Runs `max_steps` steps.

    The line of step k in metrics.jsonl describes the batch that step k learned from and, where a validation was due,
    the weights after it. Line 0 is the validation before the first step.

    Attributes:
        state: counters, saved with every checkpoint.
        validation: validation metrics by the number of steps finished when they were taken.
        checkpoint: the last one that this run has written or resumed from.
        restarts: of the run before this loop.
    """

    def __init__(
        self,
        config: BaseConfig,
        samples: SampleSource,
        learner: Learner,
        synchronizer: WeightUpdates | None,
        trackers: TrackerGroup,
        target_reached: Callable[[dict[str, float]], bool] | None = None,
        batch_hook: BatchHook | None = None,
        devices: SharedDevices | None = None,
        engine_check: EngineProbe | None = None,
    ) -> None:
        """Connects the parts; `synchronizer` is None without engines, `devices` where nothing takes turns on them."""
        self._devices, self._engine_check = devices, engine_check
        self._config = config
        self._samples = samples
        self._learner = learner
        self._synchronizer = synchronizer
        self._trackers = trackers
        self._target_reached = target_reached or (lambda metrics: False)
        self._batch_hook = batch_hook
        self._checkpoints = checkpoints_of(config)
        self._performance = Performance(config)
        self.state = PipelineState()
        self.validation: dict[str, dict[str, float]] = {}
        self._last_step_at = time.monotonic()
        self._training = self._learning = self._warned = False
        self._written: int | None = None
        """The step of which the weights were written last, or are being written."""
        self._stop = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self.checkpoint: Path | None = None
        self.restarts = 0
        self._completing: asyncio.Task[Path] | None = None
        """The checkpoint whose files are being written, read for their checksums and flushed to the disk."""
        self._writing = False
        """Whether its files are still being written by the learner."""
        self._waited = 0.0
        """Seconds that the learner waited for a checkpoint and that are not in a step's metrics yet."""

    async def run(self) -> None:
        """Runs every remaining step. The first weight update is a handshake that tests the transfer before any work.

        Raises:
            RunInterrupted: `stop` was called; the last step is complete, and saved unless the run saves no checkpoints.
        """
        try:
            await self._run()
        except BaseException as error:
            if self._trainer_failed(error):
                await self._give_up_writing()
            try:
                await self._complete_checkpoint()
            except Exception as problem:
                logger.warning("the last checkpoint was not completed: %s", problem)
            raise
        await self._complete_checkpoint()

    async def _run(self) -> None:
        clock = StepClock()
        if self._synchronizer is not None:
            logger.info("sending the first weights to the engines")
        metrics = await self._update_weights(clock)
        if self._engine_check is not None and not self._at_end:
            logger.info("comparing the engines with the trainer")
            await self._while_idle(self._engine_check.sample())
            await self._to_trainer()
            await self._engine_check.compare()
            if self._devices is not None:  # the engines have discarded their weights
                await self._update_weights(clock)
        if self.state.step == 0 and self._config.eval_steps:
            logger.info("validating before step 1")
            metrics |= await self._validate(clock)
            self._log(metrics | clock.metrics())
        await self._samples.advance(self.state.version)
        logger.info("training, step %d of %d is next", self.state.step + 1, self._config.max_steps)
        self._training = True
        while not self._at_end and not self._stop.is_set():
            await self._step()
        self._training = False
        if self._stop.is_set():
            raise RunInterrupted(await self._save_last_step())
        if self._config.save_hf_model:
            logger.info("writing the model as a Hugging Face folder")
            await self._to_trainer()
            await write_folder(Path(self._config.output_dir) / HF_FOLDER, self._learner.export_hf)

    def stop(self) -> bool:
        """Lets `run` end after the step that is learned from at this moment; a batch that is waited for stays undrawn.

        Returns:
            False where no step is in progress and `run` does not end by itself.
        """
        if not self._training:
            return False
        if not self._stop.is_set():
            step = "finishing the step that is learned from" if self._learning else f"after step {self.state.step}"
            saving = "then saving it" if self._config.save_checkpoint else "without saving: save_checkpoint is false"
            logger.warning("interrupted: %s, %s", step, saving)
            self._stop.set()
            self._stopping = asyncio.create_task(self._samples.stop())
        return True

    async def _save_last_step(self) -> Path | None:
        if self._stopping is not None:
            await asyncio.gather(self._stopping, return_exceptions=True)
        await self._complete_checkpoint()
        step = self.state.step
        if self._config.save_checkpoint and step and not (self.checkpoint and step_of(self.checkpoint) == step):
            await self.save()
            await self._complete_checkpoint()
        return self.checkpoint

    async def _step(self) -> None:
        """Takes one batch and learns from it; its metrics are logged also when the checkpoint cannot be written."""
        state, clock = self.state, StepClock()
        if self._completing is not None and self._completing.done():
            await self._complete_checkpoint()
        with clock.measure("wait_prev_gen"):
            batch = await self._while_idle(self._samples.next_batch())
        if batch is None:
            return
        for name, seconds in batch.seconds.items():
            clock.add(name, seconds)
        self._warn_of_length(batch.metrics.get("rollout/truncated_fraction", 0.0))
        metrics = batch.metrics | self._show_to_hook(batch, clock)
        self._learning = True
        if self._devices is not None:
            with clock.measure("hand_over"):
                await self._devices.to_trainer()
        metrics |= await self._learner.learn(batch, state.step + 1, clock)
        state.step += 1
        state.version += 1
        try:
            if self._devices is not None and self._checkpoint_due:  # the trainer has them at this moment
                with clock.measure("checkpoint"):
                    await self._write_weights()
            metrics |= await self._update_weights(clock)
            self._learning = False
            if self._due(self._config.eval_steps):
                metrics |= await self._validate(clock)
            await self._samples.advance(state.version)
            metrics |= await self._learner.finish_step()
            if self._checkpoint_due:
                with clock.measure("checkpoint"):
                    await self.save()
        finally:
            if self._waited:
                clock.add("checkpoint_wait", self._waited)
                self._waited = 0.0
            times = clock.metrics()
            self._last_step_at = time.monotonic()
            self._log(metrics | self._performance.metrics(batch.data.batch, times, metrics.get(PEAK_TFLOPS)) | times)

    async def _while_idle(self, work: Coroutine[Any, Any, T]) -> T:
        return await (work if self._synchronizer is None else self._synchronizer.while_idle(work))

    async def _to_trainer(self) -> None:
        """Gives the trainer the devices that it shares with the engines; the next weight update returns them."""
        if self._devices is not None:
            await self._devices.to_trainer(finish_requests=False)

    @property
    def _checkpoint_due(self) -> bool:
        return self._config.save_checkpoint and self._due(self._config.save_steps or self._config.max_steps)

    def _warn_of_length(self, share: float) -> None:
        if share <= MOSTLY_CUT_OFF or self._warned:
            return
        self._warned, config = True, self._config
        what, key, fix = "responses", "response_length", "raise it"
        if config.pipeline == "agentic":
            what, key, fix = "trajectories", "sequence_length", "raise it, or lower max_tokens_per_step"
        step, value = self.state.step + 1, getattr(config, key)
        logger.warning("%s: %d cut off %.0f%% of the %s of step %d; %s", key, value, 100 * share, what, step, fix)

    def _show_to_hook(self, batch: SampleBatch, clock: StepClock) -> dict[str, float]:
        """`batch_hook/...` of the user's hook, if there is one.

        Raises:
            RunError: it failed, or it added or removed samples.
        """
        if self._batch_hook is None:
            return {}
        name, step, samples = type(self._batch_hook).__name__, self.state.step + 1, len(batch.data)
        with clock.measure("batch_hook"):
            try:
                metrics = dict(self._batch_hook.before_learning(batch, step) or {})
                metrics = {f"batch_hook/{key}": float(value) for key, value in metrics.items()}
            except Exception as error:
                cause = f"{_line_of_hook(error)}{error!r}"
                raise RunError(f"async_training.batch_hook_class: {name} failed in step {step}: {cause}") from error
        if len(batch.data) != samples:
            raise RunError(
                f"async_training.batch_hook_class: {name} changed the batch of step {step} from {samples} to "
                f"{len(batch.data)} samples, which do not fill its optimizer steps; to leave a sample out of the loss, "
                "set its response_mask to false"
            )
        return metrics

    async def _update_weights(self, clock: StepClock) -> dict[str, float]:
        if self._synchronizer is None:
            return {}
        with clock.measure("weight_update"):
            report = await self._synchronizer.update_weights(self.state.version)
        clock.add("weight_update_pause", report.pause_seconds)
        return report.metrics()

    async def _validate(self, clock: StepClock) -> dict[str, float]:
        with clock.measure("val"):
            metrics = await self._unless_stopped(self._while_idle(self._samples.validate()))
        if metrics is None:
            return {}
        self.validation[str(self.state.step)] = metrics
        self.state.reached = self._target_reached(metrics)
        return metrics

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None, and the work is cancelled, where `stop` is called before it ends."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due after the step just finished."""
        step = self.state.step
        return every > 0 and (step % every == 0 or self._at_end)

    @property
    def _at_end(self) -> bool:
        return self.state.finished(self._config.max_steps)

    def _log(self, metrics: Mapping[str, float]) -> None:
        counts = {"step": self.state.step, "version": self.state.version}
        restarts = {"faults/run_restarts": float(self.restarts)} if self.restarts else {}
        self._trackers.log(self.state.step, {**counts, **metrics, **restarts})

    async def save(self) -> None:
        """Begins the checkpoint of the current step; it is written and completed while the run continues."""
        if self._written != self.state.step:
            await self._to_trainer()
            await self._write_weights()
        self.state.samples = await self._samples.state_dict()
        self._writing = True
        complete = self._checkpoints.complete_step(self.state.step, replace(self.state).save, self._until_saved)
        self._completing = asyncio.create_task(complete)

    async def _until_saved(self) -> None:
        self._waited += await self._learner.saved()
        self._writing = False

    def _trainer_failed(self, error: BaseException | None) -> bool:
        """Whether this error, or one that caused it, says that a process of a trained role died or does not answer."""
        while error is not None:
            if isinstance(error, ClusterError) and error.process_failed and error.role in self._config.trained_roles():
                return True
            error = error.__cause__
        return False

    async def _give_up_writing(self) -> None:
        """Does not wait for weights that a failed trainer would have to write; files that are written are completed."""
        if self._completing is not None and self._writing:
            task, self._completing = self._completing, None
            task.cancel()
            await asyncio.wait([task])
            logger.warning("the last checkpoint was not completed: the trainer failed while it was written")

    async def _complete_checkpoint(self) -> None:
        if self._completing is not None:
            task, self._completing = self._completing, None
            self.checkpoint = await task

    async def _write_weights(self) -> None:
        """Begins to write what the learner has of a checkpoint; it counts once the state of the step is added.

        The checkpoint before is completed first: the learner writes one at a time.
        """
        await self._complete_checkpoint()

        async def write(folder: Path) -> None:
            await self._learner.save(folder)
            if self._config.save_hf_checkpoints:
                (folder / HF_FOLDER).mkdir()
                await self._learner.export_hf(folder / HF_FOLDER)

        await self._checkpoints.write(self.state.step, write)
        self._written = self.state.step

    async def resume(self) -> None:
        """Continues from the checkpoint that `resume_from_checkpoint` selects, if there is one.

        Raises:
            CheckpointError: the path is not a checkpoint, or the checkpoint does not fit this run.
        """
        folder = self._checkpoints.resume_path(self._config.resume_from_checkpoint)
        if folder is None:
            if self._config.resume_from_checkpoint:
                logger.warning("no complete checkpoint in %s: starting at step 0", self._config.output_dir)
            self._rename_old_checkpoints(None)
            return
        self.state = PipelineState.load(folder)
        await self._to_trainer()
        with must_fit(folder):
            await self._samples.load_state_dict(self.state.samples)
            await self._learner.load(folder)
        self._rename_old_checkpoints(folder)
        self.checkpoint = folder
        logger.info("resumed from %s at step %d, version %d", folder, self.state.step, self.state.version)

    def _rename_old_checkpoints(self, resumed: Path | None) -> None:
        moved = self._checkpoints.set_aside_others(resumed)
        if moved:
            logger.warning("renamed checkpoints of an earlier run: %s", ", ".join(map(str, moved)))

    async def health(self) -> dict[str, Any]:
        """Position of the driver, seconds since its last step, and the state of the sample source."""
        driver = {
            "step": self.state.step,
            "version": self.state.version,
            "seconds_since_step": round(time.monotonic() - self._last_step_at, 3),
        }
        engines = {} if self._synchronizer is None else {"engines": self._synchronizer.health()}
        return {"driver": driver, "rollouter": await self._samples.health(), **engines}


def _line_of_hook(error: Exception) -> str:
    """File and line of the hook's own code where an error came from; empty if the hook could not be called."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
