"""A run over all of its starts: its training loop while it runs, and what happens between two starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.base.errors import RunError
from roll.base.events import DRIVER, EventLog
from roll.configs.pipeline import BaseConfig
from roll.configs.run_options import TrainerOptions
from roll.configs.trackers import METRICS_FILE
from roll.distributed.calls.remote_errors import WATCH, ClusterError, one_line
from roll.distributed.processes import gc_freeze, gc_unfreeze, log_file
from roll.distributed.ray_session import RAY_PROCESSES
from roll.pipeline.checkpoint import CheckpointError, checkpoints_of, step_of
from roll.pipeline.health import INTERVAL_S, Health, read_in_time
from roll.pipeline.session import Session
from roll.trackers.files import RUN_FILE, read_metrics, without_secrets

if TYPE_CHECKING:
    from roll.pipeline.run import TrainingLoop
    from roll.pipeline.summary import RunSummary
    from roll.trackers import TrackerGroup

logger = logging.getLogger(__name__)

RESTARTING = "restarting"
"""Status in run.json between two starts."""

NOT_LEARNED_FROM = {
    *("source", "resume_from_checkpoint", "max_steps", "exp_name", "output_dir", "logging_dir", "checkpoint_dir"),
    *("track_with", "tracker_kwargs", "save_hf_model", "save_merged_hf_model", "save_steps", "logging_steps"),
    *("rollout_dump_dir", "rollout_dump_steps", "rollout_dump_every", "max_ckpt_to_keep", "save_hf_checkpoints"),
    "profiler_output_dir",
}
"""Sections whose change in a resumed run is usual, and changes nothing that is learned."""

SHOWN_CHANGES, SHOWN_CHARACTERS = 8, 40
"""Changed keys that a resumed run names, and the longest text of a value there."""


class RunningLoop:
    """Calls the training loop of a run only while the loop runs; keeps counts over all starts of the run.

    Attributes:
        interrupted: whether the run was asked to end, so that it does not start again.
        restarts: starts after the first.
        first_step: finished steps when this start began to train.
        last_step: finished steps when the training loop ended.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.restarts = self.first_step = self.last_step = 0
        self._loop: TrainingLoop | None = None
        self._ended = False
        self._failed_at: float | None = None
        self._last: Health = {"stage": "starting"}

    def starting(self) -> None:
        self._loop, self._ended = None, False

    def begin(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self.first_step = self.last_step = loop.state.step

    @contextlib.asynccontextmanager
    async def trains(
        self, loop: TrainingLoop, config: BaseConfig, session: Session, trackers: TrackerGroup, summary: RunSummary
    ) -> AsyncIterator[None]:
        """The block in which `loop` trains; afterwards `summary` has its steps."""
        if not session.resumed:
            summary.resumed_at_step = loop.state.step
        session.resumed = True
        if loop.state.step:
            trackers.resume(loop.state.step)
        try:
            gc_freeze()
            loop.restarts = self.restarts
            self.begin(loop)
            record_training_again(self, EventLog(config.output_dir))
            if "stdout" not in config.track_with:
                file = Path(config.output_dir, METRICS_FILE)
                logger.info("progress is in %s; track_with: [stdout] prints it here", file)
            yield
        finally:
            await self.end()
            gc_unfreeze()
            summary.steps, summary.validation = loop.state.step, loop.validation

    async def end(self) -> None:
        """Keeps the last health, since Ray would start again for a call after the run has ended it."""
        if self._loop is not None:
            self.last_step = self._loop.state.step
            self._last, self._loop, self._ended = await read_in_time(self._loop.health, INTERVAL_S), None, True

    async def health(self) -> Health:
        return self._last if self._loop is None else await self._loop.health()

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Ends the run that `task` runs: after its step, before its first step at once; it may be ending already."""
        self.interrupted = True
        if not self._ended and (self._loop is None or not self._loop.stop()):
            task.cancel()

    def starts_again_after(self, error: BaseException, session: Session) -> bool:
        failed = isinstance(error, ClusterError) and error.process_failed
        return failed and session.may_start_again and not self.interrupted

    def failed(self, cause: str) -> None:
        """Records that a process of the run has failed and the run will start again."""
        self.starting()
        self.restarts += 1
        self._failed_at = time.monotonic()
        self._last = {"stage": "starting again", "cause": cause}

    def seconds_down(self) -> float | None:
        """Seconds since that failure, once; None where there was none."""
        failed_at, self._failed_at = self._failed_at, None
        return None if failed_at is None else time.monotonic() - failed_at

    def continue_at(self, step: int) -> int:
        """Records that the next start begins with so many finished steps; returns how many steps are repeated."""
        repeated = max(0, self.last_step - step)
        self.first_step = self.last_step = step
        return repeated


def failure_in_one_line(error: BaseException) -> tuple[str, str]:
    """The component that failed, a process or else the driver, and the cause; for events.jsonl."""
    if isinstance(error, ClusterError):
        component = f"{error.role}-{error.rank}"
        when = "between two calls" if error.method == WATCH else f"in {error.method}"
        return component, f"failed {when}: {one_line(error).removeprefix(f'{component}: ')}"
    return DRIVER, " ".join(str(error).split()) if isinstance(error, RunError) else one_line(error)


def without_restart(config: BaseConfig, running: RunningLoop, error: ClusterError) -> ClusterError:
    """The error of a process that failed after the last restart, in one line; any other error as it is."""
    if not error.process_failed or running.interrupted or running.restarts < config.max_restarts:
        return error
    component, cause = failure_in_one_line(error)
    spent = (
        f"the restarts are spent (max_restarts {config.max_restarts})" if config.max_restarts else "max_restarts is 0"
    )
    log = "" if error.role in RAY_PROCESSES else f"; its log is {log_file(config, component)}"
    cause = f"{cause.partition(': ')[2]}; {spent}{log}"
    return ClusterError(error.role, error.method, error.rank, error.kind, f"{component} failed: {cause}", cause)


async def start_again(
    config: BaseConfig, session: Session, running: RunningLoop, error: ClusterError, events: EventLog
) -> BaseConfig:
    """Records the failure of a process and chooses where the run continues: the configuration of its next start.

    Raises:
        CheckpointError: all checkpoints are damaged; the message begins with the failure.
    """
    component, cause = failure_in_one_line(error)
    log = Path(log_file(config, component))
    events.record(component, "failed", f"{cause}; its log is {log}" if log.is_file() else cause)
    running.failed(f"{component} {cause}")
    saved = None
    if session.resumed:
        try:  # on a thread, since checksums of large checkpoints take minutes
            saved = await asyncio.to_thread(checkpoints_of(config).resume_path, True)
        except CheckpointError as damaged:
            message = f"{component} {cause}; the run cannot start again: {damaged}"
            raise CheckpointError(message) from error
    repeated = running.continue_at(running.first_step if saved is None else step_of(saved))
    events.record(
        DRIVER,
        "run restarted",
        f"starts the run again {_starting_point(config, session, saved)} "
        f"(restart {running.restarts} of {config.max_restarts}); finished steps that are repeated: {repeated}",
        steps_lost=repeated,
    )
    return config if saved is None else replace(config, resume_from_checkpoint=str(saved))


async def continued(config: BaseConfig, running: RunningLoop) -> BaseConfig:
    """The configuration of a start, with the path of the checkpoint from which all parts of the run continue."""
    checkpoint = await asyncio.to_thread(checkpoints_of(config).resume_path, config.resume_from_checkpoint)
    keep_template_time(config, checkpoint)
    if checkpoint is None:
        return config
    config = replace(config, resume_from_checkpoint=str(checkpoint))
    if not running.restarts:
        record_killed_driver(config, checkpoint, EventLog(config.output_dir))
        warn_of_changes(config, checkpoint)
    return config


def record_training_again(running: RunningLoop, events: EventLog) -> None:
    """Records how long it took from the failure of a process until the run trains again; nothing in its first start."""
    seconds = running.seconds_down()
    if seconds is not None:
        events.record(DRIVER, "training again", f"trains again after {seconds:.1f} s", seconds, logging.INFO)


def record_killed_driver(config: BaseConfig, checkpoint: Path, events: EventLog) -> None:
    """Records that the run continues from a checkpoint of its own after its driver was killed.

    Then run.json, which this start has not replaced yet, does not say how the run ended.
    """
    folder = Path(config.output_dir)
    if checkpoint.resolve() not in [path.resolve() for path in checkpoints_of(config).complete()]:
        return
    try:
        summary = json.loads((folder / RUN_FILE).read_text())["summary"]
        if summary is not None and summary["status"] != RESTARTING:
            return
        finished = max((int(line["step"]) for line in read_metrics(folder / METRICS_FILE)), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return
    repeated = max(0, finished - step_of(checkpoint))
    message = f"continues from {checkpoint}; the driver before was killed; finished steps that are repeated: {repeated}"
    events.record(DRIVER, "resumed after it was killed", message, steps_lost=repeated)


def keep_template_time(config: BaseConfig, checkpoint: Path | None) -> None:
    """Sets the time that chat templates take for now: of the run that wrote the checkpoint, or of this first start."""
    before = _config_before(config, checkpoint).get("template_time") if checkpoint is not None else None
    config.template_time = config.template_time or before or datetime.now().isoformat(timespec="seconds")


def _config_before(config: BaseConfig, checkpoint: Path) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint; empty where its run.json is not there."""
    own = checkpoint.resolve() in [path.resolve() for path in checkpoints_of(config).complete()]
    folder = Path(config.output_dir) if own else checkpoint.parent.parent
    try:
        before: dict[str, Any] = json.loads((folder / RUN_FILE).read_text())["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return before


def warn_of_changes(config: BaseConfig, checkpoint: Path) -> None:
    """Warns of keys that have other values than in the run that wrote the checkpoint, as far as its run.json is there.

    Weights and optimizer come from the checkpoint, so some of them have no effect. Called before run.json is replaced.
    """
    before, now = _config_before(config, checkpoint), without_secrets(config)
    try:
        changes = changed_values(before, now, {*before["source"]["given"], *now["source"]["given"]})
        old_steps, roles = before["max_steps"], rescheduled_roles(config)
    except (KeyError, TypeError, AttributeError):
        return
    if old_steps != config.max_steps and roles:
        logger.warning(
            "max_steps was %d and is %d: the learning rate of %s follows the schedule of the new number of steps",
            old_steps, config.max_steps, " and ".join(roles),
        )  # fmt: skip
    if changes:
        shown = ", ".join(changes[:SHOWN_CHANGES])
        more = f", and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
        logger.warning(
            "changed since the run that wrote %s: %s%s; weights and optimizer come from the checkpoint",
            checkpoint, shown, more,
        )  # fmt: skip


def rescheduled_roles(config: TrainerOptions) -> list[str]:
    """Roles whose learning rate at a step depends on `max_steps`."""
    arguments = {role: worker.training_args for role, worker in config.trained_roles().items()}
    return [role for role, each in arguments.items() if each.lr_scheduler_type != "constant" or each.warmup_ratio]


def changed_values(
    before: Mapping[str, Any], now: Mapping[str, Any], given: Collection[str], path: str = ""
) -> list[str]:
    """`key: old -> new` for each key of two nested configurations with different values, in the order of `now`.

    A key that only one of them has counts if it is in `given`, or a key below it: others came with another version.
    """
    changes = []
    for name in [*now, *(name for name in before if name not in now)]:
        key, old, value = f"{path}{name}", before.get(name), now.get(name)
        if key in NOT_LEARNED_FROM or old == value:
            continue
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            changes += changed_values(old, value, given, f"{key}.")
        elif (name in before and name in now) or any(f"{each}.".startswith(f"{key}.") for each in given):
            changes.append(f"{key}: {_cut(old)} -> {_cut(value)}")
    return changes


def _cut(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _starting_point(config: BaseConfig, session: Session, checkpoint: Path | None) -> str:
    if checkpoint is None and isinstance(config.resume_from_checkpoint, str):
        point = f"from {config.resume_from_checkpoint} again, since it has no checkpoint of its own"
    elif not session.resumed:
        point = "as before, since it had not begun to train"
    elif checkpoint is None:
        point = "from the beginning, since it has no checkpoint"
    else:
        point = f"from {checkpoint}"
    return f"{point} with the engines that run" if session.kept else point
