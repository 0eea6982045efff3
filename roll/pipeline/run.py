"""A whole run on one screen; read this first.

`run_once` assembles a run and ends it, `TrainingLoop.run` and `TrainingLoop.step` are what it does in between. `kinds/`
makes the parts: where samples come from (`rollout/rollouter.py`), how they change the weights (`learning/learner.py`),
and how the weights reach the engines (`distributed/weights/synchronizer.py`). `progress.py` keeps counters and
checkpoints, `launch.py` starts a run again after a process died.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from roll.base.errors import RunInterrupted
from roll.base.timers import StepClock
from roll.configs.pipeline import BaseConfig
from roll.pipeline.extensions import call_hook, load_extensions
from roll.pipeline.kinds import pipeline_of
from roll.pipeline.parts import Pipeline
from roll.pipeline.progress import RunProgress
from roll.pipeline.restarts import RunningLoop, continued
from roll.pipeline.session import Session
from roll.pipeline.summary import RunSummary, recorded, report_bottleneck
from roll.trackers import make_trackers

logger = logging.getLogger(__name__)


async def run_once(
    config: BaseConfig,
    session: Session,
    running: RunningLoop,
    summary: RunSummary,
    start: float,
    assemble: Callable[[BaseConfig], Pipeline] = pipeline_of,
) -> None:
    """The run from one start to its end, without another start; raises as `run_with_restarts` does.

    Session, running loop, summary and `start`, a time of `time.perf_counter`, are those of all starts.
    """
    running.starting()
    extensions = load_extensions(config)
    config = await continued(config, running)
    pipeline = assemble(config)
    try:
        logger.info("reading tokenizer and data")
        await pipeline.prepare()
        metrics = extensions.metrics(config) if extensions.metrics else None
        trackers = make_trackers(config, pipeline.plan, metrics)
        async with (
            recorded(trackers, summary, start, lambda error: running.starts_again_after(error, session)),
            session,
        ):
            with session.watch.deaths_as_causes():
                loop = await pipeline.build(session, trackers)
                await loop.resume()
                async with running.trains(loop, config, session, trackers, summary):
                    await loop.run()
                    summary.status = "finished"
                    summary.bottleneck = report_bottleneck(config.output_dir, pipeline.split, summary.resumed_at_step)
    finally:
        await pipeline.close()


class TrainingLoop(RunProgress):
    """Runs `max_steps` steps.

    The line of step k in metrics.jsonl describes the batch that step k learned from and, where a validation was due,
    the weights after it. Line 0 is the validation before the first step.
    """

    async def run(self) -> None:
        """Runs every remaining step. The first weight update is a handshake that tests the transfer before any work.

        Raises:
            RunInterrupted: `stop` was called; the last step is complete, and saved unless the run saves no checkpoints.
        """
        async with self._checkpoint_completed():
            await self._before_the_first_step(StepClock())
            logger.info("training, step %d of %d is next", self.state.step + 1, self._config.max_steps)
            self._training = True
            while not self._at_end and not self._stop.is_set():
                await self.step()
            self._training = False
            if self._stop.is_set():
                raise RunInterrupted(await self._save_last_step())
            await self._export()

    async def _before_the_first_step(self, clock: StepClock) -> None:
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
        self._record(clock)
        await self._samples.advance(self.state.version)

    async def step(self) -> None:
        """Takes one batch and learns from it; its metrics are logged also when the checkpoint cannot be written."""
        state, clock = self.state, StepClock()
        await self._complete_written_checkpoint()
        with clock.measure("wait_prev_gen"):
            batch = await self._while_idle(self._samples.next_batch())
        if batch is None:  # the run is asked to stop
            return
        for name, seconds in batch.seconds.items():
            clock.add(name, seconds)
        self._warn_of_length(batch.metrics.get("rollout/truncated_fraction", 0.0))
        metrics = batch.metrics | call_hook(self._batch_hook, batch, state.step + 1, clock)
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
            self._log_step(batch, metrics, clock)

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
