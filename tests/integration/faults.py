"""A hook of a run that kills or stops processes of it at the steps that a file names; each fault happens once.

It also writes down which samples each step learns from.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from roll.base.events import EVENTS_FILE
from roll.distributed.weights.adapters import AdapterSynchronizer
from roll.distributed.weights.transport import Transport
from roll.pipeline.checkpoint import MARKER
from roll.rollout.source import SampleBatch
from tests.processes import command_of

FAULTS_FILE = "faults.txt"
"""Beside the output folder of the run: a step and a fault in each line, such as `3 kill actor_infer-1 scheduler`,
`4 kill reward_worker` or `5 spoil checkpoint`."""

HAPPENED_FILE = "faults_that_happened.txt"
"""In the same folder: a line for each fault that was carried out."""

LEARNED_FILE = "learned.jsonl"
"""In the same folder: `step` and `samples`, the ids of its samples, each time that a batch is learned from."""

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


def workers_of(owner: psutil.Process) -> list[psutil.Process]:
    """Processes of environments and rewards that belong to the rollout process, or to the driver."""
    found = [child for child in owner.children(recursive=True) if "roll.usercode.server" in command_of(child)]
    return [child for child in found if child.parent() not in found]  # not the watchdog of each, a fork of it


def complete_checkpoints(output: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; one that is about to be renamed has its marker and is not among them."""
    return sorted(marker.parent for marker in output.rglob(MARKER) if not marker.parent.suffix)


def spoil(output: Path, chance: random.Random) -> None:
    """Damages a file of the newest checkpoint: cut short, or overwritten in the middle."""
    newest = complete_checkpoints(output)[-1]
    file = chance.choice([path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 100])
    size = file.stat().st_size
    with file.open("r+b") as opened:
        if chance.random() < 0.5:
            opened.truncate(size // 2)
        else:
            opened.seek(size // 2)
            opened.write(bytes(chance.randrange(256) for _ in range(min(64, size // 3))))


class Killer:
    """Carries out the faults before the step that learns from a batch, or within the weight update after it."""

    def __init__(self, config: Any) -> None:
        self._output = Path(config.output_dir)
        self._file = self._output.parent / FAULTS_FILE

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float]:
        self._write_samples(batch, step)
        lines = self._file.read_text().splitlines()
        due = [line for line in lines if int(line.split()[0]) <= step and not self._is_down(line.split()[2])]
        self._file.write_text("\n".join(line for line in lines if line not in due))
        for line in due:
            _, how, name, *where = line.split()
            if how == "spoil":
                spoil(self._output, random.Random(step))
            elif name == "reward_worker":
                workers_of(process_of("rollouter"))[0].send_signal(SIGNALS[how])
            elif "in_update" in where:
                in_next_update(partial(self._send, SIGNALS[how], name, "scheduler" in where, line))
                continue
            else:
                process_of(name, "scheduler" in where).send_signal(SIGNALS[how])
            self._happened(line)
        return {}

    def _is_down(self, name: str) -> bool:
        """Whether it is an engine that failed and does not serve again yet; its next fault waits for a later step."""
        file = self._output / EVENTS_FILE
        events = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        own = [event["event"] for event in events if event["component"] == name]
        return name.startswith("actor_infer") and own[-1:] not in ([], ["serving again"])

    def _send(self, number: signal.Signals, name: str, scheduler: bool, line: str) -> None:
        process_of(name, scheduler).send_signal(number)
        self._happened(line)

    def _happened(self, line: str) -> None:
        with (self._output.parent / HAPPENED_FILE).open("a") as file:
            file.write(f"{line}\n")

    def _write_samples(self, batch: SampleBatch, step: int) -> None:
        sampled = batch.data.batch["response_mask"].bool().any(-1).tolist()
        samples = [str(name) for name, real in zip(batch.data.non_tensor_batch["id"], sampled, strict=True) if real]
        with (self._output.parent / LEARNED_FILE).open("a") as file:
            file.write(json.dumps({"step": step, "samples": samples}) + "\n")


def samples_learned(folder: Path) -> dict[int, list[str]]:
    """Ids of the samples of each step; a step that was repeated after a restart replaces the one before."""
    lines = [json.loads(line) for line in (folder / LEARNED_FILE).read_text().splitlines()]
    return {line["step"]: line["samples"] for line in lines}


def in_next_update(strike: Callable[[], None]) -> None:
    """Calls `strike` when the next transfer of weights, or of adapters, begins."""
    methods = {cls: "transfer" for cls in Transport.__subclasses__()} | {AdapterSynchronizer: "send"}
    originals = {cls: getattr(cls, name) for cls, name in methods.items()}

    def struck(name: str) -> Callable[..., Any]:
        async def send(owner: Any, *arguments: Any) -> Any:
            for cls, original in originals.items():
                setattr(cls, methods[cls], original)
            strike()
            return await getattr(owner, name)(*arguments)

        return send

    for cls, name in methods.items():
        setattr(cls, name, struck(name))
