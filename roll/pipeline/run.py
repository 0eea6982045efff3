"""Runs a checked configuration: reads the inputs, starts the processes, trains, and writes the summary."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from roll.base.errors import RunError, RunInterrupted
from roll.base.events import DRIVER, EventLog, set_aside_events
from roll.base.terminal import EXIT_INTERRUPTED, TERMINATION, end_now, handle_interrupt, say
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import (
    BaseConfig,
    DPOConfig,
    RewardModelConfig,
    RLConfig,
    RLVRConfig,
    RLVREngineRewardConfig,
    SFTConfig,
)
from roll.configs.plan import Plan
from roll.configs.rewards import scoring_role
from roll.configs.trackers import METRICS_FILE
from roll.distributed.infer.engine_monitor import EnginesLostError
from roll.distributed.processes import gc_freeze, gc_unfreeze
from roll.distributed.ray_session import RayStartError
from roll.distributed.remote_errors import ClusterError
from roll.distributed.resources import ResourceError
from roll.distributed.weights.synchronizer import WeightUpdateError
from roll.pipeline.bottleneck_report import Split, bottleneck_report
from roll.pipeline.checkpoint import HF_FOLDER, CheckpointError, checkpoints_of
from roll.pipeline.extensions import load_extensions
from roll.pipeline.health import HealthFile, PeakMemory, ended_by, watched
from roll.pipeline.kinds.agentic import AgenticPipeline
from roll.pipeline.kinds.dpo import DPOPipeline
from roll.pipeline.kinds.reward_model import RewardModelPipeline
from roll.pipeline.kinds.rlvr import RLVRPipeline
from roll.pipeline.kinds.sft import SFTPipeline
from roll.pipeline.restarts import (
    RESTARTING,
    RunningLoop,
    failure_in_one_line,
    keep_template_time,
    record_killed_driver,
    record_training_again,
    rescheduled_roles,
    start_again,
    warn_of_changes,
    without_restart,
)
from roll.pipeline.session import Session
from roll.pipeline.training_loop import TrainingLoop
from roll.platforms import get_platform
from roll.trackers import TrackerGroup, make_trackers
from roll.trackers.files import RUN_FILE, DiskFullError, is_disk_full, read_metrics, replace_summary

logger = logging.getLogger(__name__)

USER_ERRORS = (
    RunError,
    RayStartError,
    ResourceError,
    ClusterError,
    EnginesLostError,
    WeightUpdateError,
)
"""Errors that the console shows as a message; all others are bugs and keep their traceback."""


class Pipeline(Protocol):
    """Assembles the training loop of one kind of run.

    Attributes:
        plan: for `run.json`.
    """

    plan: Plan

    async def prepare(self) -> None:
        """Reads and checks every input, before Ray starts."""

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The training loop, connected to the running clusters."""

    async def close(self) -> None:
        """Ends what `prepare` started."""


PIPELINES: dict[type[BaseConfig], Callable[[Any], Pipeline]] = {
    AgenticConfig: AgenticPipeline,
    RLVRConfig: RLVRPipeline,
    RLVREngineRewardConfig: RLVRPipeline,
    SFTConfig: SFTPipeline,
    DPOConfig: DPOPipeline,
    RewardModelConfig: RewardModelPipeline,
}


@dataclass
class RunSummary:
    """The end of a run, in `run.json`.

    Attributes:
        status: finished, interrupted or failed.
        steps: that are finished, with those before the run was resumed.
        resumed_at_step: finished steps when it was resumed; 0 if it was not.
        seconds: since then, with its start.
        peak_memory_bytes: of all processes together, in that time.
        validation: metrics by the finished steps at which they were taken, since the last start.
        bottleneck: the report on the split of devices.
    """

    status: str = "failed"
    steps: int = 0
    resumed_at_step: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    bottleneck: str = ""


def run_pipeline(config: BaseConfig, command: str = "roll run CONFIG") -> int:
    """Runs to the end and logs how it ended, where its results are and what can be done next.

    `configure_logging` has set up the log of the checked configuration, and `command` started the run.

    Returns:
        The exit code: 0, 1 after an error of USER_ERRORS, 130 when interrupted.
    """
    health = HealthFile(config)
    if not config.resume_from_checkpoint:
        set_aside_events(config.output_dir)
    try:
        summary = asyncio.run(run(config))
    except (KeyboardInterrupt, asyncio.CancelledError, RunInterrupted) as error:
        health.end("interrupted")
        saved = error.checkpoint if isinstance(error, RunInterrupted) else newest_complete(config)
        logger.warning("interrupted; %s", continuation(saved, command) if saved else "there is no checkpoint")
        return EXIT_INTERRUPTED
    except (*USER_ERRORS, OSError) as error:
        health.end("failed")
        if isinstance(error, OSError) and not is_disk_full(error):
            raise
        message = short_message(error, config)
        logger.error("%s", message)
        refused = isinstance(error, CheckpointError) or message.startswith("resume_from_checkpoint:")
        if not refused and (saved := newest_complete(config)) is not None:
            logger.info("%s", continuation(saved, command))
        return 1
    except BaseException:
        health.end("failed")
        raise
    logger.info("%s", "\n".join(next_steps(config, summary, command)))
    return 0


async def run(config: BaseConfig) -> RunSummary:
    """A whole run, which starts again from its newest intact checkpoint after a process died, `max_restarts` times.

    Engines that are not the cause keep running; see `Session`. Before it has read its first checkpoint it starts again
    as it was started, since those in its folder may be of an earlier run.

    The first Ctrl-C ends it in order, with a checkpoint of the last step; the second ends it at once.

    Raises:
        ConfigError: a class that the configuration names does not exist.
        RunInterrupted: by Ctrl-C, after a step.
        asyncio.CancelledError: by Ctrl-C before the first step, or by SIGTERM.
        Exception: one of USER_ERRORS when the run cannot continue; `status` in run.json is `failed`.
    """
    events, session, running = EventLog(config.output_dir), Session(config), RunningLoop()
    start, summary = time.perf_counter(), RunSummary()
    monitor = (load_extensions(config).monitor or HealthFile)(config)
    with interrupts(config, running):
        try:
            async with watched(running.health, monitor):
                try:
                    await _start_until_finished(config, session, running, summary, start, events)
                finally:
                    session.end()
        except BaseException as error:
            _record_end(error, config, summary, start, events)
            raise
    return summary


async def _start_until_finished(
    config: BaseConfig, session: Session, running: RunningLoop, summary: RunSummary, start: float, events: EventLog
) -> None:
    while True:
        session.may_start_again = running.restarts < config.max_restarts
        try:
            await run_once(config, session, running, summary, start)
            return
        except ClusterError as error:
            if not running.starts_again_after(error, session):
                raise without_restart(config, running, error) from error
            config = await start_again(config, session, running, error, events)


def _record_end(error: BaseException, config: BaseConfig, summary: RunSummary, start: float, events: EventLog) -> None:
    """Completes run.json where the run ended between two starts, and records the failure, which the console shows."""
    restarting = summary.status == RESTARTING
    if restarting:
        summary.status, summary.seconds = ended_by(error), time.perf_counter() - start
        try:
            replace_summary(Path(config.output_dir), vars(summary))
        except (OSError, ValueError, RunError) as problem:
            logger.warning("could not write to %s that the run is %s: %s", RUN_FILE, summary.status, problem)
    if ended_by(error) != "failed":
        return
    event, (component, cause) = "failed", failure_in_one_line(error)
    if is_disk_full(error):
        component, event, cause = DRIVER, "disk full", short_message(error, config)
    elif isinstance(error.__cause__, ClusterError) and isinstance(error, CheckpointError):
        event = "not restarted"
    events.record(component, event, cause, level=logging.DEBUG)


def short_message(error: BaseException, config: BaseConfig) -> str:
    """The message of an error; one line where a process of the run met a full disk."""
    if isinstance(error, DiskFullError) or not is_disk_full(error):
        return str(error)
    name = getattr(error, "filename", None)
    return str(DiskFullError(Path(name or config.output_dir)))


def newest_complete(config: BaseConfig) -> Path | None:
    """The newest complete checkpoint; its files are checked when a run continues from it."""
    return next(reversed(checkpoints_of(config).complete()), None)


def continuation(checkpoint: Path, command: str) -> str:
    """How to continue a run from its newest checkpoint."""
    return f"{checkpoint} is complete; continue with: {command} resume_from_checkpoint=true"


def finished_steps(summary: RunSummary) -> str:
    """How many steps took how long; those before the run was resumed are not in its seconds."""
    resumed_at, seconds = summary.resumed_at_step, f"{summary.seconds:.0f} s"
    if not resumed_at:
        return f"finished {summary.steps} steps in {seconds}"
    new = summary.steps - resumed_at
    steps = f"{new} step{'' if new == 1 else 's'}"
    return f"finished step {summary.steps} ({steps} in {seconds} since it was resumed at step {resumed_at})"


def next_steps(config: BaseConfig, summary: RunSummary, command: str) -> list[str]:
    """How the run ended, where its results are, and commands that show or continue it."""
    folder, saved = Path(config.output_dir), newest_complete(config)
    lines = [finished_steps(summary)]
    rows = {"results": f"{folder}/  ({METRICS_FILE}, {RUN_FILE}, logs)"}
    if isinstance(config, RLConfig) and config.rollout_dump_steps != 0:
        rows["samples"] = f"roll show {folder}"
    rows["curves"] = f"roll plot {folder}"
    if saved is not None:
        longer = re.sub(r" max_steps=\S+", "", command)
        rows["continue"] = f"{longer} resume_from_checkpoint=true max_steps={2 * summary.steps}"
        if rescheduled_roles(config):
            rows["continue"] += "  (the schedule is stretched over all steps, so the learning rate rises again)"
    if config.save_hf_model:
        rows["model"] = f"{folder / HF_FOLDER}  (a Hugging Face folder)"
    elif saved is not None:
        rows["export"] = f"{command} resume_from_checkpoint=true save_hf_model=true  (writes {folder / HF_FOLDER})"
    return [*lines, *(f"{'':11} {name:9} {text}" for name, text in rows.items())]


async def run_once(
    config: BaseConfig, session: Session, running: RunningLoop, summary: RunSummary, start: float
) -> None:
    """The run from one start to its end, without another start; raises as `run` does.

    Session, running loop, summary and `start`, a time of `time.perf_counter`, are those of all starts.
    """
    running.starting()
    events, extensions = EventLog(config.output_dir), load_extensions(config)
    checkpoint = await asyncio.to_thread(checkpoints_of(config).resume_path, config.resume_from_checkpoint)
    keep_template_time(config, checkpoint)
    if checkpoint is not None:  # chosen once, so that all parts of the run continue from the same one
        config = replace(config, resume_from_checkpoint=str(checkpoint))
        if not running.restarts:
            record_killed_driver(config, checkpoint, events)
            warn_of_changes(config, checkpoint)
    pipeline = PIPELINES[type(config)](config)
    try:
        logger.info("reading tokenizer and data")
        await pipeline.prepare()
        metrics = extensions.metrics(config) if extensions.metrics else None
        trackers = make_trackers(config, pipeline.plan, metrics)
        async with recorded(trackers, summary, start, lambda error: running.starts_again_after(error, session)):
            await _train(config, session, pipeline, trackers, running, summary)
    finally:
        await pipeline.close()


@contextlib.contextmanager
def interrupts(config: BaseConfig, running: RunningLoop) -> Iterator[None]:
    """Ctrl-C ends the run after its step and, the second time, at once; SIGTERM and SIGHUP cancel the run.

    The handler raises nothing, so nothing that is being started or ended, Ray for example, is left half-way.
    """
    task, events = asyncio.current_task(), asyncio.get_running_loop()
    count = itertools.count(1)
    assert task is not None

    def interrupt() -> None:
        if next(count) > 1:
            HealthFile(config).end("interrupted")
            end_now("interrupted a second time: ended at once")
        say("interrupted: ending the run and its processes; press Ctrl-C again to end at once")
        events.call_soon_threadsafe(running.stop, task)

    def cancel() -> None:
        events.call_soon_threadsafe(task.cancel)

    with handle_interrupt(interrupt), handle_interrupt(cancel, *TERMINATION):
        yield


@contextlib.asynccontextmanager
async def recorded(
    trackers: TrackerGroup, summary: RunSummary, start: float, starts_again_after: Callable[[BaseException], bool]
) -> AsyncIterator[None]:
    """Writes the summary of the run, whatever its end; an error in this does not replace that of the run."""
    failed = True
    with PeakMemory() as memory:
        try:
            yield
            failed = False
        except BaseException as error:
            summary.status = RESTARTING if starts_again_after(error) else ended_by(error)
            raise
        finally:
            summary.seconds = time.perf_counter() - start
            summary.peak_memory_bytes = max(summary.peak_memory_bytes, memory.peak_bytes)
            try:
                trackers.close(vars(summary))
            except Exception as error:
                if not failed:
                    raise
                logger.warning("closing the trackers failed: %s", error)


async def _train(
    config: BaseConfig,
    session: Session,
    pipeline: Pipeline,
    trackers: TrackerGroup,
    running: RunningLoop,
    summary: RunSummary,
) -> None:
    async with session:
        with session.watch.deaths_as_causes():
            loop = await pipeline.build(session, trackers)
            await loop.resume()
            if not session.resumed:
                summary.resumed_at_step = loop.state.step
            session.resumed = True
            if loop.state.step:
                trackers.resume(loop.state.step)
            try:
                gc_freeze()
                loop.restarts = running.restarts
                running.begin(loop)
                record_training_again(running, EventLog(config.output_dir))
                if "stdout" not in config.track_with:
                    logger.info(
                        "progress is in %s; track_with: [stdout] prints it here", Path(config.output_dir, METRICS_FILE)
                    )
                await loop.run()
                summary.status = "finished"
                summary.bottleneck = report_bottleneck(config, summary.resumed_at_step)
            finally:
                await running.end()
                gc_unfreeze()
                summary.steps = loop.state.step
                summary.validation = loop.validation


def report_bottleneck(config: BaseConfig, since: int = 0) -> str:
    """Logs and returns the bottleneck report of a finished run from step `since`; empty where nothing is generated."""
    if not isinstance(config, RLConfig):
        return ""
    lines = read_metrics(Path(config.output_dir) / METRICS_FILE)
    report = bottleneck_report([line for line in lines if line["step"] > since], split_of(config))
    if report:
        logger.info("%s", report)
    return report


def split_of(config: RLConfig) -> Split:
    """What the report on the bottleneck reads of a configuration."""
    generation = {*config.actor_infer.device_mapping}
    training = {rank for role in config.trained_roles().values() for rank in role.device_mapping}
    platform = get_platform(config.platform)
    cpu = platform.name == "cpu"
    keys = []
    for name, reward in config.rewards.items() if isinstance(config, RLVRConfig) else ():
        role = scoring_role(reward)
        keys += [f"rewards.{name}.world_size"] if role is None else [] if cpu else [f"{role}.device_mapping"]
    return Split(
        config.async_generation_ratio,
        len(generation),
        len(training),
        shared=generation == training,
        drains=config.in_flight_policy == "drain",
        critic_apart=config.critic_apart,
        cpu=cpu,
        own_cores=cpu and (config.num_devices_per_node or 0) <= platform.device_count(),
        groups=config.train_env_manager.num_env_groups if isinstance(config, AgenticConfig) else None,
        batch_groups=config.groups_per_batch,
        reward_keys=tuple(dict.fromkeys(keys)),
    )
