"""A hook of a run that kills or stops processes of it at the steps that a file names; each fault happens once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from roll.distributed.weight_sync.synchronizer import Transport
from roll.pipeline.training_loop import SampleBatch

FAULTS_FILE = "faults.txt"
"""Beside the output folder of the run: a step and a fault in each line, such as `3 kill actor_infer-1 scheduler`."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def process_of(name: str, scheduler: bool = False, driver: psutil.Process | None = None) -> psutil.Process:
    """The process that prints to the log `name`, or the scheduler of the engine that it owns, of the run of `driver`.

    Raises:
        LookupError: there is none.
    """
    for process in (driver or psutil.Process()).children(recursive=True):
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.stem == name and "sglang" not in process.name() and "multiprocessing" not in str(process.cmdline()):
                if not scheduler:
                    return process
                return next(child for child in process.children(recursive=True) if "sglang::sched" in child.name())
        except (OSError, psutil.Error, StopIteration):
            continue
    raise LookupError(f"no process of {name}")


class Killer:
    """Carries out the faults before the step that learns from a batch, or within the weight update after it."""

    def __init__(self, config: Any) -> None:
        self._file = Path(config.output_dir).parent / FAULTS_FILE

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float]:
        lines = self._file.read_text().splitlines()
        self._file.write_text("\n".join(line for line in lines if int(line.split()[0]) != step))
        for line in lines:
            at, how, name, *where = line.split()
            if int(at) == step:
                if "in_update" in where:
                    in_next_update(SIGNALS[how], name, "scheduler" in where)
                else:
                    process_of(name, "scheduler" in where).send_signal(SIGNALS[how])
        return {}


def in_next_update(number: signal.Signals, name: str, scheduler: bool) -> None:
    """Sends the signal when the next transfer of weights begins."""
    originals = {cls: cls.transfer for cls in Transport.__subclasses__()}

    async def transfer(transport: Transport, checksums: bool) -> Any:
        for cls, original in originals.items():
            cls.transfer = original  # type: ignore[method-assign]
        process_of(name, scheduler).send_signal(number)
        return await transport.transfer(checksums)

    for cls in originals:
        cls.transfer = transfer  # type: ignore[method-assign]
