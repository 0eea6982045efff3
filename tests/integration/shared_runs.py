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

from tests.integration.runs import ROOT, START_DEADLINE_S


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
        ready, _, _ = select.select([self._server.stdout], [], [], START_DEADLINE_S)
        answer = self._server.stdout.readline() if ready else ""
        text = output.read_text() if output.exists() else ""
        if not answer.strip():
            self._kill()
            pytest.fail(f"the run did not end within {START_DEADLINE_S} s, or its server died:\n{text[-3000:]}")
        return int(answer), text

    def close(self) -> None:
        """Ends the server and its processes."""
        self.free_memory()

    def free_memory(self) -> None:
        """Lets the server end its processes; the next run starts another one."""
        if self._server is None:
            return
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(timeout=30)
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
