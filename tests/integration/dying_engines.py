"""A hook of a run that kills its engines: fault injection for test_engine_death."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from roll.distributed.weight_sync.synchronizer import Transport
from roll.pipeline.training_loop import SampleBatch

SIGNALS_FILE = "faults.txt"
"""A step and a fault in each line, such as `3 kill scheduler 1`; in the output folder of the run."""


def engine_process(engine: int, scheduler: bool) -> psutil.Process:
    """The worker of an engine, or its scheduler, among the processes of this session."""
    session = os.getsid(0)
    owners = [
        process
        for process in psutil.Process().children(recursive=True)
        if "ConcurrentWorkerActor" in process.name() or "ConcurrentWorkerActor" in " ".join(process.cmdline())
    ]
    by_log = {
        Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem: process
        for process in owners
        if os.path.exists(f"/proc/{process.pid}/fd/1")
    }
    worker = by_log[f"actor_infer-{engine}"]
    if not scheduler:
        return worker
    found = [child for child in worker.children(recursive=True) if "sglang::scheduler" in child.name()]
    assert found, (session, worker)
    return found[0]


class Killer:
    """Kills what the faults file says: before the step that learns from a batch, or within its weight update."""

    def __init__(self, config: Any) -> None:
        text = Path(config.output_dir).parent.joinpath(SIGNALS_FILE).read_text()
        self._faults: dict[int, list[str]] = {}
        for line in text.splitlines():
            step, *words = line.split()
            self._faults.setdefault(int(step), []).append(" ".join(words))

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float]:
        for fault in self._faults.pop(step, []):
            how, what, engine, *when = fault.split()
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how]
            if when == ["in_update"]:
                self._in_next_update(number, what, int(engine))
            else:
                engine_process(int(engine), what == "scheduler").send_signal(number)
        return {}

    def _in_next_update(self, number: int, what: str, engine: int) -> None:
        """Replaces the transfer of every transport until the next one, which comes after the signal."""
        classes = [*Transport.__subclasses__()]
        originals = {cls: cls.transfer for cls in classes}

        async def transfer(transport: Transport, checksums: bool) -> Any:
            for cls, original in originals.items():
                cls.transfer = original  # type: ignore[method-assign]
            engine_process(engine, what == "scheduler").send_signal(number)
            return await transport.transfer(checksums)

        for cls in classes:
            cls.transfer = transfer  # type: ignore[method-assign]
