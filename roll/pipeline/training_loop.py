"""The one training loop. What differs between pipelines is behind `SampleSource` and `Learner`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.pipeline import BaseConfig
from roll.pipeline.checkpoint import checkpoint_folder
from roll.pipeline.clock import StepClock
from roll.pipeline.errors import RunError
from roll.pipeline.interfaces import Learner, Publisher, SampleSource
from roll.pipeline.state import PipelineState
from roll.pipeline.throughput import throughput

if TYPE_CHECKING:
    from roll.trackers import TrackerGroup

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Takes a batch, learns, publishes, validates, saves, reports; `max_steps` times.

    The line of step k in metrics.jsonl describes the batch that step k learned from and, where a validation was due,
    the weights after it. Line 0 is the validation before the first step.
    """

    def __init__(
        self,
        config: BaseConfig,
        samples: SampleSource,
        learner: Learner,
        publisher: Publisher | None,
        trackers: TrackerGroup,
        reached: Callable[[dict[str, float]], bool] | None = None,
    ) -> None:
        """Takes the parts.

        Args:
            config: of the run.
            samples: where batches come from.
            learner: what they update.
            publisher: None where nobody generates.
            trackers: where lines go.
            reached: whether validation metrics are what the run was for, so that it ends early; None: never.
        """
        self._config = config
        self._samples = samples
        self._learner = learner
        self._publisher = publisher
        self._trackers = trackers
        self._reached = reached or (lambda metrics: False)
        self._checkpoints = checkpoint_folder(config)
        self._devices = len({rank for role in config.device_roles().values() for rank in role.device_mapping}) or 1
        self.state = PipelineState()
        self.validation: dict[str, dict[str, float]] = {}
        """Validation metrics by the number of steps finished when they were taken."""
        self._stepped = time.monotonic()

    async def run(self) -> None:
        """Runs every remaining step; the first publish is a handshake that proves the path before any work."""
        clock = StepClock()
        metrics = await self._publish(clock)
        if self.state.step == 0 and self._config.eval_steps:
            metrics |= await self._validate(clock)
            self._trackers.log(0, {"step": 0, "version": 0, **metrics, **clock.metrics()})
        await self._samples.advance(self.state.version)
        while not self._at_end:
            metrics = await self._step()
            self._stepped = time.monotonic()
            self._trackers.log(self.state.step, metrics)
        if self._config.save_hf_model:
            await self._learner.export_hf(Path(self._config.output_dir) / "hf_model")

    async def _step(self) -> dict[str, float]:
        state, clock = self.state, StepClock()
        with clock.measure("wait_prev_gen"):
            batch = await self._samples.next_batch(state.version, clock)
        metrics = batch.metrics | await self._learner.learn(batch, state.step + 1, clock)
        state.step += 1
        state.version += 1
        metrics |= await self._publish(clock)
        if self._due(self._config.eval_steps):
            metrics |= await self._validate(clock)
        await self._samples.advance(state.version)
        if self._config.save_checkpoint and self._due(self._config.save_steps or self._config.max_steps):
            with clock.measure("checkpoint"):
                await self.save()
        metrics |= await self._learner.memory()
        times = clock.metrics()
        metrics |= throughput(batch.tokens, self._devices, times)
        own = {"global_steps": float(state.step), "current_param_version": float(state.version)}
        return {"step": state.step, "version": state.version, **own, **metrics, **times}

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due after the step just finished."""
        step = self.state.step
        return every > 0 and (step % every == 0 or self._at_end)

    @property
    def _at_end(self) -> bool:
        return self.state.reached or self.state.step >= self._config.max_steps

    async def _publish(self, clock: StepClock) -> dict[str, float]:
        if self._publisher is None:
            return {}
        with clock.measure("publish"):
            return await self._publisher.publish(self.state.version, clock)

    async def _validate(self, clock: StepClock) -> dict[str, float]:
        with clock.measure("val"):
            metrics = await self._samples.validate(self.state.version)
        self.validation[str(self.state.step)] = metrics
        self.state.reached = self._reached(metrics)
        return metrics

    async def save(self) -> Path:
        """Writes a complete checkpoint of the current step."""
        self.state.samples = await self._samples.state_dict()

        async def write(folder: Path) -> None:
            await self._learner.save(folder)
            self.state.save(folder)

        return await self._checkpoints.save(self.state.step, write)

    async def health(self) -> dict[str, Any]:
        """Where the driver is and how long it has been there, and what the sample source says of itself."""
        driver = {
            "step": self.state.step,
            "version": self.state.version,
            "seconds_since_step": round(time.monotonic() - self._stepped, 3),
        }
        return {"driver": driver, "rollouter": await self._samples.health()}

    async def resume(self) -> None:
        """Goes on from the checkpoint that `resume_from_checkpoint` names, if there is one.

        Raises:
            RunError: it is none, or one of a run that this one cannot go on from.
        """
        folder = self._checkpoints.resume_path(self._config.resume_from_checkpoint)
        if folder is None:
            if self._config.resume_from_checkpoint:
                logger.warning("no complete checkpoint in %s: starting at step 0", self._config.output_dir)
            self._set_aside(None)
            return
        self.state = PipelineState.load(folder)
        try:
            await self._samples.load_state_dict(self.state.samples)
            await self._learner.load(folder)
        except (ValueError, KeyError) as error:
            told = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise RunError(f"resume_from_checkpoint: {folder} does not fit this run: {told}") from error
        self._set_aside(folder)
        logger.info("resumed from %s at step %d, version %d", folder, self.state.step, self.state.version)

    def _set_aside(self, resumed: Path | None) -> None:
        moved = self._checkpoints.begin(resumed)
        if moved:
            logger.warning("checkpoints of an earlier run are set aside: %s", ", ".join(map(str, moved)))
