"""What a training loop keeps beside its steps: counters, checkpoints, the request to stop, and the lines it logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from roll.base.timers import StepClock
from roll.configs.run_options import LoopOptions
from roll.distributed.calls.remote_errors import ClusterError
from roll.pipeline.checkpoint import (
    HF_FOLDER,
    MERGED_FOLDER,
    PipelineState,
    checkpoints_of,
    must_fit,
    step_of,
    write_folder,
)
from roll.pipeline.learning.performance import PEAK_TFLOPS, Performance
from roll.pipeline.parts import BatchHook
from roll.rollout.source import SampleBatch, SampleSource
from roll.trackers.recording import TRAINER, Recording

if TYPE_CHECKING:
    from roll.distributed.shared_devices import SharedDevices
    from roll.distributed.weights.synchronizer import WeightSynchronizer
    from roll.pipeline.learning.actor_learner import ActorLearner
    from roll.pipeline.learning.engine_probe import EngineProbe
    from roll.trackers import TrackerGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOSTLY_CUT_OFF = 0.5
"""Share of a step's trajectories that end at the length limit above which the run warns, once."""


class RunProgress:
    """How far a run is, and how that is saved, stopped and logged.

    Attributes:
        state: counters, saved with every checkpoint.
        validation: validation metrics by the number of steps finished when they were taken.
        checkpoint: the last one that this run has written or resumed from.
        restarts: of the run before this loop.
    """

    def __init__(
        self,
        config: LoopOptions,
        samples: SampleSource,
        learner: ActorLearner,
        synchronizer: WeightSynchronizer | None,
        trackers: TrackerGroup,
        target_reached: Callable[[dict[str, float]], bool] | None = None,
        batch_hook: BatchHook | None = None,
        devices: SharedDevices | None = None,
        engine_check: EngineProbe | None = None,
        performance: Performance | None = None,
    ) -> None:
        """Connects the parts; without engines there is no synchronizer and no check of them.

        `target_reached` says whether validation metrics end the run; trainer and engines take turns on `devices`.
        """
        self._config, self._samples, self._learner, self._synchronizer = config, samples, learner, synchronizer
        self._devices, self._trackers = devices, trackers
        self._target_reached = target_reached or (lambda metrics: False)
        self._batch_hook, self._engine_check = batch_hook, engine_check
        self._checkpoints, self._performance = checkpoints_of(config), performance
        self._recording = Recording(config.output_dir)
        self.state = PipelineState()
        self.validation: dict[str, dict[str, float]] = {}
        self.checkpoint: Path | None = None
        self.restarts = 0
        self._last_step_at = time.monotonic()
        self._training = self._learning = self._warned = False
        self._stop = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._written: int | None = None
        """The step of which the weights were written last, or are being written."""
        self._completing: asyncio.Task[Path] | None = None
        """The checkpoint whose files are being written, read for their checksums and flushed to the disk."""
        self._writing = False
        """Whether its files are still being written by the learner."""
        self._waited = 0.0
        """Seconds that the learner waited for a checkpoint and that are not in a step's metrics yet."""

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

    @property
    def _checkpoint_due(self) -> bool:
        return self._config.save_checkpoint and self._due(self._config.save_steps or self._config.max_steps)

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due after the step just finished."""
        step = self.state.step
        return every > 0 and (step % every == 0 or self._at_end)

    @property
    def _at_end(self) -> bool:
        return self.state.finished(self._config.max_steps)

    async def _while_idle(self, work: Coroutine[Any, Any, T]) -> T:
        return await (work if self._synchronizer is None else self._synchronizer.while_idle(work))

    async def _to_trainer(self) -> None:
        """Gives the trainer the devices that it shares with the engines; the next weight update returns them."""
        if self._devices is not None:
            await self._devices.to_trainer(finish_requests=False)

    def _log_step(self, batch: SampleBatch, metrics: Mapping[str, float], clock: StepClock) -> None:
        if self._waited:
            clock.add("checkpoint_wait", self._waited)
            self._waited = 0.0
        self._record(clock)
        times = clock.metrics()
        self._last_step_at = time.monotonic()
        speed = {}
        if self._performance is not None:
            speed = self._performance.metrics(batch.data.batch, times, metrics.get(PEAK_TFLOPS))
        self._log({**metrics, **speed, **times})

    def _record(self, clock: StepClock) -> None:
        self._recording.spans(TRAINER, self.state.step, clock.spans)

    def _log(self, metrics: Mapping[str, float]) -> None:
        counts = {"step": self.state.step, "version": self.state.version, "time/unix": time.time()}
        restarts = {"faults/run_restarts": float(self.restarts)} if self.restarts else {}
        self._trackers.log(self.state.step, {**counts, **metrics, **restarts})

    def _warn_of_length(self, share: float) -> None:
        if share <= MOSTLY_CUT_OFF or self._warned:
            return
        self._warned, config = True, self._config
        what, key, fix = "responses", "response_length", "raise it"
        if config.pipeline == "agentic":
            what, key, fix = "trajectories", "sequence_length", "raise it, or lower max_tokens_per_step"
        step, value = self.state.step + 1, getattr(config, key)
        logger.warning("%s: %d cut off %.0f%% of the %s of step %d; %s", key, value, 100 * share, what, step, fix)

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

    @contextlib.asynccontextmanager
    async def _checkpoint_completed(self) -> AsyncIterator[None]:
        """Completes the last checkpoint at the end of the block, however it ends."""
        try:
            yield
        except BaseException as error:
            if self._trainer_failed(error):
                await self._give_up_writing()
            try:
                await self._complete_checkpoint()
            except Exception as problem:
                logger.warning("the last checkpoint was not completed: %s", problem)
            raise
        await self._complete_checkpoint()

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

    async def _complete_written_checkpoint(self) -> None:
        if self._completing is not None and self._completing.done():
            await self._complete_checkpoint()

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

    async def _export(self) -> None:
        if self._config.save_hf_model:
            logger.info("writing the model as a Hugging Face folder")
            await self._to_trainer()
            await write_folder(Path(self._config.output_dir) / HF_FOLDER, self._learner.export_hf)
        if self._config.save_merged_hf_model:
            logger.info("writing the model with its adapters as a Hugging Face folder")
            await self._to_trainer()
            await write_folder(Path(self._config.output_dir) / MERGED_FOLDER, self._learner.export_merged)

    async def resume(self) -> None:
        """Continues from the checkpoint that `resume_from_checkpoint` selects, if there is one.

        Raises:
            CheckpointError: the path is not a checkpoint, or the checkpoint does not fit this run.
        """
        folder = self._checkpoints.resume_path(self._config.resume_from_checkpoint)
        if folder is None:
            if self._config.resume_from_checkpoint:
                logger.warning("no complete checkpoint in %s: starting at step 0", self._config.output_dir)
            self._recording.begin(0)
            self._rename_old_checkpoints(None)
            return
        self.state = PipelineState.load(folder)
        await self._to_trainer()
        with must_fit(folder):
            await self._samples.load_state_dict(self.state.samples)
            await self._learner.load(folder)
        self._recording.begin(self.state.step)
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
