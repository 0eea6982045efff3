"""Whole runs whose processes are shared: `run_server` in a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT
from tests.processes import PATIENCE_S


class SharedRuns:
    """Runs one configuration after another; a server that did not answer is replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._runs = 0

    def run(self, config: Path, *overrides: str) -> tuple[int, str]:
        """Exit code and output of `roll run`; a run past its deadline fails the test."""
        if self._server is None:
            self._server = self._start()
        self._runs += 1
        output = self._folder / f"output-{self._runs}.txt"
        command = {"arguments": ["run", str(config), *overrides], "output": str(output)}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        ready, _, _ = select.select([self._server.stdout], [], [], PATIENCE_S)
        answer = self._server.stdout.readline() if ready else ""
        text = output.read_text() if output.exists() else ""
        if not answer.strip():
            self._kill()
            pytest.fail(f"the run did not end within {PATIENCE_S:g} s, or its server died:\n{text[-3000:]}")
        return int(answer), text

    def succeed(self, config: Path, *overrides: str) -> None:
        """A run that ends well."""
        code, output = self.run(config, *overrides)
        assert code == 0, output

    def learn(self, example: str, model: Path, folder: Path, train: Path, validation: Path, *overrides: str) -> None:
        """A recipe of `examples` that learns from stored rows, 16 at a time and without a warm-up."""
        self.succeed(
            ROOT / "examples" / example,
            f"pretrain={model}",
            f"output_dir={folder}/run",
            f"actor_train.data_args.file_name=[{train}]",
            f"validation.data_args.file_name=[{validation}]",
            "actor_train.training_args.per_device_train_batch_size=16",
            "actor_train.training_args.learning_rate=0.01",
            "actor_train.training_args.warmup_steps=0",
            "num_devices_per_node=3",
            "track_with=[]",
            *overrides,
        )

    def free_memory(self) -> None:
        """Lets the server end its processes; the next run starts another one."""
        if self._server is None:
            return
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(timeout=PATIENCE_S)
            self._server = None
        except subprocess.TimeoutExpired:
            self._kill()

    def _start(self) -> subprocess.Popen[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.integration.run_server"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "server.txt").open("a"),
            text=True,
            start_new_session=True,
        )

    def _kill(self) -> None:
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._server = None
