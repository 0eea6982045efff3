"""Runs a checked configuration to its end: starts it again after a failure, handles Ctrl-C, and logs how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

from roll.base.errors import RunError, RunInterrupted
from roll.base.events import DRIVER, EventLog, set_aside_events
from roll.base.terminal import EXIT_INTERRUPTED, TERMINATION, end_now, handle_interrupt, say
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.distributed.calls.remote_errors import ClusterError
from roll.distributed.infer.engine_monitor import EnginesLostError
from roll.distributed.ray_session import RayStartError
from roll.distributed.resources import ResourceError
from roll.distributed.weights.synchronizer import WeightUpdateError
from roll.pipeline.checkpoint import CheckpointError
from roll.pipeline.extensions import load_extensions
from roll.pipeline.health import HealthFile, ended_by, watched
from roll.pipeline.parts import Pipeline
from roll.pipeline.restarts import RESTARTING, RunningLoop, failure_in_one_line, start_again, without_restart
from roll.pipeline.run import run_once
from roll.pipeline.session import Session
from roll.pipeline.summary import RunSummary, continuation, newest_complete, next_steps
from roll.trackers.files import RUN_FILE, DiskFullError, is_disk_full, replace_summary

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
        summary = asyncio.run(run_with_restarts(config))
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
    has_samples = isinstance(config, RLConfig) and config.rollout_dump_steps != 0
    logger.info("%s", "\n".join(next_steps(config, summary, command, has_samples)))
    return 0


async def run_with_restarts(config: BaseConfig, assemble: Callable[[BaseConfig], Pipeline] | None = None) -> RunSummary:
    """A whole run, which starts again from its newest intact checkpoint after a process died, `max_restarts` times.

    Engines that are not the cause keep running; see `Session`. Before it has read its first checkpoint it starts again
    as it was started, since those in its folder may be of an earlier run.

    `assemble` makes the parts of each start; None: those of the configuration's pipeline.

    The first Ctrl-C or SIGTERM ends it in order, with a checkpoint of the last step; the second ends it at once.

    Raises:
        ConfigError: a class that the configuration names does not exist.
        RunInterrupted: by Ctrl-C or SIGTERM, after a step.
        asyncio.CancelledError: by Ctrl-C or SIGTERM before the first step.
        Exception: one of USER_ERRORS when the run cannot continue; `status` in run.json is `failed`.
    """
    once = run_once if assemble is None else partial(run_once, assemble=assemble)
    events, session, running = EventLog(config.output_dir), Session(config), RunningLoop()
    start, summary = time.perf_counter(), RunSummary()
    monitor = (load_extensions(config).monitor or HealthFile)(config)
    with interrupts(config, running):
        try:
            async with watched(running.health, monitor):
                try:
                    await _start_until_finished(config, session, running, summary, start, events, once)
                finally:
                    session.end()
        except BaseException as error:
            _record_end(error, config, summary, start, events)
            raise
    return summary


async def _start_until_finished(
    config: BaseConfig,
    session: Session,
    running: RunningLoop,
    summary: RunSummary,
    start: float,
    events: EventLog,
    once: Callable[[BaseConfig, Session, RunningLoop, RunSummary, float], Awaitable[None]],
) -> None:
    while True:
        session.may_start_again = running.restarts < config.max_restarts
        try:
            await once(config, session, running, summary, start)
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


@contextlib.contextmanager
def interrupts(config: BaseConfig, running: RunningLoop) -> Iterator[None]:
    """Ctrl-C, SIGTERM or SIGHUP ends the run after its step and, the second time, at once.

    The handler raises nothing, so nothing that is being started or ended, Ray for example, is left half-way.
    """
    task, events = asyncio.current_task(), asyncio.get_running_loop()
    count = itertools.count(1)
    assert task is not None

    def interrupt() -> None:
        if next(count) > 1:
            HealthFile(config).end("interrupted")
            end_now("interrupted a second time: ended at once")
        say("interrupted: ending the run and its processes; a second Ctrl-C or SIGTERM ends it at once")
        events.call_soon_threadsafe(running.stop, task)

    with handle_interrupt(interrupt, signal.SIGINT, *TERMINATION):
        yield
