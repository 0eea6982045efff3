"""Runs a checked configuration: reads the inputs, starts the processes, trains, and writes the summary."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.logging import RichHandler

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import ConfigError, Problem, RunError
from roll.configs.hub.inputs import fetch_inputs
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig, SFTConfig
from roll.configs.plan import Plan
from roll.datasets.records import DatasetError
from roll.distributed.env_pool.types import EnvWorkerError
from roll.distributed.processes import gc_freeze, gc_unfreeze
from roll.distributed.remote_errors import ClusterError
from roll.distributed.resources import RayStartError, ResourceError
from roll.distributed.weight_sync.synchronizer import WeightUpdateError
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
from roll.pipeline.bottleneck_report import Split, bottleneck_report
from roll.pipeline.checkpoint import checkpoint_folder
from roll.pipeline.extensions import load_extensions
from roll.pipeline.health import HealthFile, Monitor, PeakMemory, watched
from roll.pipeline.rlvr_pipeline import RLVRPipeline
from roll.pipeline.session import Session
from roll.pipeline.sft_pipeline import SFTPipeline
from roll.pipeline.training_loop import TrainingLoop
from roll.rewards.calling import RewardFunctionError
from roll.trackers import TrackerGroup, make_trackers
from roll.trackers.files import METRICS_FILE, read_metrics

logger = logging.getLogger(__name__)

USER_ERRORS = (
    RunError,
    DatasetError,
    RewardFunctionError,
    RayStartError,
    ResourceError,
    ClusterError,
    WeightUpdateError,
    EnvWorkerError,
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
    SFTConfig: SFTPipeline,
}


@dataclass
class RunSummary:
    """The end of a run, in `run.json`; `bottleneck` is the report on the split of devices."""

    status: str = "failed"
    steps: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    bottleneck: str = ""


def run_pipeline(config: BaseConfig) -> int:
    """Runs to the end and logs an error of USER_ERRORS to the console.

    Returns:
        The exit code: 0, 1 after such an error, 130 when interrupted.
    """
    configure_logging(config)
    try:
        fetch_inputs(config)
        asyncio.run(run(config))
    except USER_ERRORS as error:
        logger.error("%s", error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        logger.error("interrupted; continue from the last checkpoint with resume_from_checkpoint=true")
        return 130
    return 0


async def run(config: BaseConfig) -> RunSummary:
    """One run; its processes are ended in any case.

    Raises:
        ConfigError: a class that the configuration names does not exist.
        Exception: one of USER_ERRORS when the run cannot continue; `status` in run.json is `failed`.
    """
    _end_at_sigterm()
    start = time.perf_counter()
    extensions = load_extensions(config)
    checkpoint_folder(config).resume_path(config.resume_from_checkpoint)
    pipeline = PIPELINES[type(config)](config)
    try:
        await pipeline.prepare()
        metrics = extensions.metrics(config) if extensions.metrics else None
        trackers = make_trackers(config, pipeline.plan, metrics)
        monitor = (extensions.monitor or HealthFile)(config)
        summary = RunSummary()
        with PeakMemory() as memory:
            try:
                await _train(config, pipeline, trackers, monitor, summary)
            finally:
                summary.seconds = time.perf_counter() - start
                summary.peak_memory_bytes = memory.peak_bytes
                trackers.close(vars(summary))
    finally:
        await pipeline.close()
    return summary


def _end_at_sigterm() -> None:
    """Makes SIGTERM cancel the run, which ends its processes, as asyncio does for SIGINT."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _train(
    config: BaseConfig, pipeline: Pipeline, trackers: TrackerGroup, monitor: Monitor, summary: RunSummary
) -> None:
    async with Session(config) as session:
        loop = await pipeline.build(session, trackers)
        await loop.resume()
        if loop.state.step:
            trackers.resume(loop.state.step)
        try:
            gc_freeze()
            async with watched(loop.health, monitor):
                await loop.run()
            summary.status = "finished"
            summary.bottleneck = report_bottleneck(config)
        finally:
            gc_unfreeze()
            summary.steps = loop.state.step
            summary.validation = loop.validation


def report_bottleneck(config: BaseConfig) -> str:
    """Logs and returns the bottleneck report of the finished run; empty where nothing is generated."""
    if not isinstance(config, RLConfig):
        return ""
    generation, training = config.actor_infer.device_mapping, config.actor_train.device_mapping
    drains = config.in_flight_policy == "drain"
    split = Split(config.async_generation_ratio, len(generation), len(training), generation == training, drains)
    report = bottleneck_report(read_metrics(Path(config.output_dir) / METRICS_FILE), split)
    if report:
        logger.info("%s", report)
    return report


def configure_logging(config: BaseConfig) -> None:
    """Writes log messages of the project to the console and to `logging_dir/driver.log`.

    Raises:
        ConfigError: that file cannot be written.
    """
    folder = Path(config.logging_dir or Path(config.output_dir) / "logs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / "driver.log")
    except OSError as error:
        raise ConfigError(
            [Problem("logging_dir", f"{folder} cannot be written: {error}")], config.source.file
        ) from None
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("roll")
    root.setLevel(logging.INFO)
    root.handlers = [RichHandler(show_path=False, rich_tracebacks=False), file]
