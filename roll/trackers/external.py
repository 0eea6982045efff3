"""Trackers that talk to a network: wandb, swanlab, mlflow, trackio and opentelemetry, each in a process of its own.

The run hands each step to a bounded queue and never waits: a thread writes the queue to the process, another reads what
it answers. A server that cannot be reached therefore delays nothing; it is reported once, and metrics.jsonl has every
step in any case. `external_process` is the other side, which reads samples and spans from the files of the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from roll.configs.trackers import PACKAGES, TRACKER_OPTIONS, TrackerOptions
from roll.hub.names import local_model
from roll.trackers import external_process
from roll.trackers.base import Tracker, register_tracker
from roll.trackers.files import without_secrets

logger = logging.getLogger(__name__)

QUEUE_STEPS = 10_000
"""Steps that wait for the process before further ones are left out; about 40 MB."""

LATE_S = 120.0
"""A step that the tracker has not accepted after this time is reported."""

CLOSE_S = 5.0
"""Time for the last steps at the end of the run; then the process is killed."""


class ExternalTracker(Tracker):
    """Sends the steps to a process that runs the tracker's package; the process starts with the first step.

    `config` is shown by the tracker, which keeps its local files in `output_dir`; `options` are its `tracker_kwargs`.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        config: TrackerOptions,
        output_dir: Path,
        close_s: float = CLOSE_S,
        late_s: float = LATE_S,
    ) -> None:
        self._name = name
        self._close_s = close_s
        self._late_s = late_s
        options, shown = dict(options), without_secrets(config)
        files = _sample_files(shown) if options.pop("samples", False) else None
        self._request = {
            "tracker": name,
            "options": options,
            "config": shown,
            "run_name": config.exp_name,
            "output_dir": str(output_dir.absolute()),
            "resumed_after": None,
            "samples": files,
        }
        self._environment = {**os.environ, **config.system_envs, "CUDA_VISIBLE_DEVICES": ""}
        self._log_path = Path(config.logging_dir or output_dir / "logs") / f"{name}.log"
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUE_STEPS)
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self._sent: list[tuple[int, float]] = []
        self._accepted = 0
        self._reported = False
        self._end: float | None = None

    def resume(self, step: int) -> None:
        self._request["resumed_after"] = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues one step; never waits and never raises because of the tracker."""
        if self._process is None:
            self._process = self._start()
        self._sent.append((step, time.monotonic()))
        line = json.dumps({"step": step, "metrics": {name: float(value) for name, value in metrics.items()}})
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._report(f"it does not keep up: step {step} and later ones are left out while its queue is full")
        waiting = self._sent[self._accepted :]
        if waiting and time.monotonic() - waiting[0][1] > self._late_s:
            self._report(f"it has not accepted step {waiting[0][0]} within {self._late_s:g} s")

    def stop(self) -> None:
        self._end = time.monotonic() + self._close_s
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def close(self) -> None:
        """Waits for the process to send the last steps, at most `close_s` after `stop`, and ends it."""
        process = self._process
        if process is None:
            return
        if self._end is None:
            self.stop()
        assert self._end is not None
        try:
            process.wait(max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            left = len(self._sent) - self._accepted
            missing = f"{left} of {len(self._sent)} steps were not accepted" if left else "all steps were accepted"
            self._report(f"it did not end within {self._close_s:g} s of the run's end; {missing}")
        _kill_tree(process)
        for thread in self._threads:
            thread.join(1.0)

    def _start(self) -> subprocess.Popen[bytes]:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", external_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )
        assert process.stdin is not None and process.stdout is not None
        self._queue.put_nowait(json.dumps(self._request))
        for target, pipe in ((self._write, process.stdin), (self._read, process.stdout)):
            thread = threading.Thread(target=target, args=(pipe,), name=f"tracker-{self._name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return process

    def _write(self, pipe: IO[bytes]) -> None:
        """Writes the queue until its end; a process that ended is reported by the reader."""
        with contextlib.suppress(OSError), pipe:
            while (line := self._queue.get()) is not None:
                pipe.write(f"{line}\n".encode())
                pipe.flush()

    def _read(self, pipe: IO[bytes]) -> None:
        """Reads the answers until the process ends: a step that was accepted, an error, or that all is sent."""
        is_complete = False
        with pipe:
            for line in pipe:
                answer = json.loads(line)
                self._accepted += "accepted" in answer
                is_complete |= "complete" in answer
                if "error" in answer:
                    self._report(answer["error"])
        if not is_complete:
            self._report("its process ended early")

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            logger.warning(
                "tracker %s: %s; the run continues, and metrics.jsonl has every step (details: %s)",
                self._name,
                reason,
                self._log_path,
            )


def _sample_files(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`SampleFiles` of a run; None for one that keeps no samples."""
    folder = config.get("rollout_dump_dir")
    if not folder or config["rollout_dump_steps"] == 0:
        return None
    model = config["actor_train"]["model_args"]["model_name_or_path"]
    return {
        "folder": str(Path(folder).absolute()),
        "every": config["rollout_dump_every"] or -(-config["max_steps"] // 10),
        "tokenizer": model and str(local_model(model).absolute() / "tokenizer.json"),
    }


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _register(name: str) -> None:
    @register_tracker(name)
    def make(config: TrackerOptions, output_dir: Path, options: dict[str, Any]) -> Tracker:
        return ExternalTracker(name, vars(TRACKER_OPTIONS[name](**options)), config, output_dir)


for _name in PACKAGES:
    _register(_name)
