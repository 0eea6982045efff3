"""A checked configuration becomes a run: inputs first, then processes, then the loop, then the record."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.logging import RichHandler

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import ConfigError, Problem
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig, SFTConfig
from roll.datasets.records import DatasetError
from roll.distributed.env_pool.types import EnvWorkerError
from roll.distributed.processes import gc_freeze, gc_unfreeze
from roll.distributed.remote_call import ClusterError
from roll.distributed.resources import RayStartError, ResourceError
from roll.distributed.weight_sync.synchronizer import WeightUpdateError
from roll.pipeline.advice import Split, advise
from roll.pipeline.agentic.pipeline import AgenticPipeline
from roll.pipeline.checkpoint import checkpoint_folder
from roll.pipeline.errors import RunError
from roll.pipeline.extensions import load_extensions
from roll.pipeline.health import HealthFile, Monitor, watched
from roll.pipeline.memory import PeakMemory
from roll.pipeline.rlvr.pipeline import RLVRPipeline
from roll.pipeline.session import Session
from roll.pipeline.sft.pipeline import SFTPipeline
from roll.pipeline.training_loop import TrainingLoop
from roll.rewards.pool import RewardFunctionError, RewardSelfTestError
from roll.trackers import TrackerGroup, make_trackers
from roll.trackers.jsonl import FILE_NAME, read_metrics

logger = logging.getLogger(__name__)

EXPLAINED = (
    RunError,
    DatasetError,
    RewardFunctionError,
    RewardSelfTestError,
    RayStartError,
    ResourceError,
    ClusterError,
    WeightUpdateError,
    EnvWorkerError,
)
"""Errors whose message says what to do; anything else is a bug and keeps its traceback."""

PIPELINES: dict[type[BaseConfig], Any] = {
    AgenticConfig: AgenticPipeline,
    RLVRConfig: RLVRPipeline,
    SFTConfig: SFTPipeline,
}


@dataclass
class RunSummary:
    """How a run ended: what `run.json` and the last console line say; `advice` is on the split of devices."""

    status: str = "failed"
    steps: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    advice: str = ""


def run_pipeline(config: BaseConfig) -> int:
    """Runs to the end.

    Returns:
        The exit code: 0, 1 after an error that has been explained on the console, 130 when interrupted.
    """
    configure_logging(config)
    try:
        asyncio.run(run(config))
    except EXPLAINED as error:
        logger.error("%s", error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        logger.error("interrupted; go on from the last checkpoint with resume_from_checkpoint=true")
        return 130
    return 0


async def run(config: BaseConfig) -> RunSummary:
    """One run, its processes ended whatever happens.

    Raises:
        ConfigError: a class that the configuration names is not there.
        Exception: one of EXPLAINED when the run cannot go on; run.json says `failed`.
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
    """Lets SIGTERM cancel the run, which ends its processes; asyncio does so for an interrupt from the keyboard."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _train(
    config: BaseConfig, pipeline: Any, trackers: TrackerGroup, monitor: Monitor, summary: RunSummary
) -> None:
    async with Session(config) as session:
        loop: TrainingLoop = await pipeline.build(session, trackers)
        await loop.resume()
        if loop.state.step:
            trackers.resume(loop.state.step)
        try:
            gc_freeze()
            async with watched(loop.health, monitor):
                await loop.run()
            summary.status = "finished"
            summary.advice = split_advice(config)
        finally:
            gc_unfreeze()
            summary.steps = loop.state.step
            summary.validation = loop.validation


def split_advice(config: BaseConfig) -> str:
    """What the finished run says about its devices and its ratio, logged too; empty where nobody generates."""
    if not isinstance(config, RLConfig):
        return ""
    generation, training = config.actor_infer.device_mapping, config.actor_train.device_mapping
    drains = config.in_flight_policy == "drain"
    split = Split(config.async_generation_ratio, len(generation), len(training), generation == training, drains)
    told = advise(read_metrics(Path(config.output_dir) / FILE_NAME), split)
    if told:
        logger.info("%s", told)
    return told


def configure_logging(config: BaseConfig) -> None:
    """Project messages to the console and to `logging_dir/driver.log`.

    Raises:
        ConfigError: that cannot be written.
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
