"""What a run says at its end: the summary in run.json, the report on the split of devices, and the next commands."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from roll.configs.run_options import CheckpointOptions, LoopOptions
from roll.configs.trackers import METRICS_FILE
from roll.pipeline.bottleneck_report import Split, bottleneck_report
from roll.pipeline.checkpoint import HF_FOLDER, MERGED_FOLDER, checkpoints_of
from roll.pipeline.health import PeakMemory, ended_by
from roll.pipeline.restarts import RESTARTING, rescheduled_roles
from roll.trackers import TrackerGroup
from roll.trackers.files import RUN_FILE, read_metrics

logger = logging.getLogger(__name__)


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


def newest_complete(config: CheckpointOptions) -> Path | None:
    """The newest complete checkpoint; its files are checked when a run continues from it."""
    return next(reversed(checkpoints_of(config).complete()), None)


def continuation(checkpoint: Path, command: str) -> str:
    return f"{checkpoint} is complete; continue with: {command} resume_from_checkpoint=true"


def finished_steps(summary: RunSummary) -> str:
    """How many steps took how long; those before the run was resumed are not in its seconds."""
    resumed_at, seconds = summary.resumed_at_step, f"{summary.seconds:.0f} s"
    if not resumed_at:
        return f"finished {summary.steps} steps in {seconds}"
    new = summary.steps - resumed_at
    steps = f"{new} step{'' if new == 1 else 's'}"
    return f"finished step {summary.steps} ({steps} in {seconds} since it was resumed at step {resumed_at})"


def next_steps(config: LoopOptions, summary: RunSummary, command: str, has_samples: bool = False) -> list[str]:
    """How the run ended, where its results are, and commands that show or continue it."""
    folder, saved = Path(config.output_dir), newest_complete(config)
    lines = [finished_steps(summary)]
    rows = {"results": f"{folder}/  ({METRICS_FILE}, {RUN_FILE}, logs)"}
    if has_samples:
        rows["samples"] = f"roll show {folder}" + (" --policy NAME" if getattr(config, "policies", None) else "")
    rows["page"] = f"roll report {folder}"
    rows["curves"] = f"roll plot {folder}"
    if saved is not None:
        longer = re.sub(r" max_steps=\S+", "", command)
        rows["continue"] = f"{longer} resume_from_checkpoint=true max_steps={2 * summary.steps}"
        if rescheduled_roles(config):
            rows["continue"] += "  (the schedule is stretched over all steps, so the learning rate rises again)"
    if config.save_hf_model:
        kind = "a PEFT adapter" if config.actor_train.model_args.trains_adapters else "a Hugging Face folder"
        rows["model"] = f"{folder / HF_FOLDER}  ({kind})"
    elif saved is not None:
        rows["export"] = f"{command} resume_from_checkpoint=true save_hf_model=true  (writes {folder / HF_FOLDER})"
    if config.save_merged_hf_model:
        rows["merged"] = f"{folder / MERGED_FOLDER}  (a Hugging Face folder)"
    return [*lines, *(f"{'':11} {name:9} {text}" for name, text in rows.items())]


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


def report_bottleneck(output_dir: str, split: Split | None, since: int = 0) -> str:
    """Logs and returns the bottleneck report of a finished run from step `since`; empty where nothing is generated."""
    if split is None:
        return ""
    lines = read_metrics(Path(output_dir) / METRICS_FILE)
    report = bottleneck_report([line for line in lines if line["step"] > since], split)
    if report:
        logger.info("%s", report)
    return report
