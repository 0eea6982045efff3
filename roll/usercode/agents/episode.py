"""What the process of one episode does: runs the agent or the program, and writes its result."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from roll.agents.agent import Agent, Result
from roll.agents.outcome import SHOWN_OUTPUT, OutcomeError, checked_result, result_of_line
from roll.configs.user_code import failure_text, import_named
from roll.usercode.containment import contain, kill_descendants, kill_remaining

PROCESS_LIMIT = 1000
"""Processes that one episode may have at a time; with more, it ends."""

LONGEST_LINE = 2**20
"""Bytes of the last line of a program that are read."""


@dataclass(frozen=True)
class AgentJob:
    """One episode of an agent: of the class `agent` (`module:Class`), or else of the program `command`."""

    key: int
    agent: str | None
    command: tuple[str, ...]
    task: Mapping[str, Any]
    seed: int
    variables: Mapping[str, str]
    timeout_s: float


def become(job: AgentJob, driver: int, answer: int, output: int) -> None:
    """Makes this process, which was just forked, that of an episode; does not return.

    Args:
        job: the episode.
        driver: the process that forked this one.
        answer: descriptor to which the result or the failure is written, as JSON.
        output: descriptor for what the agent prints.
    """
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != answer:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    os.environ.update(job.variables)
    contain(PROCESS_LIMIT, driver=driver)
    faulthandler.register(signal.SIGUSR1)
    _write(answer, _answer(job))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    kill_remaining()
    os._exit(0)


def _answer(job: AgentJob) -> dict[str, Any]:
    try:
        found = _run_command(job) if job.command else _run_class(job.agent or "", job)
        return {"reward": found.reward, "metrics": dict(found.metrics)}
    except OutcomeError as error:
        return {"failure": str(error)}
    except BaseException as error:  # sys.exit, and panics of extensions in Rust
        traceback.print_exc()
        return {"failure": failure_text(error)}


def _write(descriptor: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(descriptor, data) :]


def is_agent_class(value: Any) -> bool:
    """Whether a value is a class of agents that can be made."""
    return isinstance(value, type) and issubclass(value, Agent) and not inspect.isabstract(value)


def _run_class(agent: str, job: AgentJob) -> Result:
    _, cls = import_named(agent, is_agent_class)
    found = cls().run(dict(job.task), job.seed)
    if inspect.iscoroutine(found):
        found = asyncio.run(found)
    return checked_result(found, cls.run)


def _run_command(job: AgentJob) -> Result:
    """Runs a program to its end; what it has started ends with it, even if that holds its output open."""
    with tempfile.NamedTemporaryFile("w", prefix="task-", suffix=".json") as file:
        json.dump(dict(job.task), file, default=str)
        file.flush()
        command = [word.replace("{task_file}", file.name).replace("{seed}", str(job.seed)) for word in job.command]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as program:
            output, errors = (_LastLine(stream) for stream in (program.stdout, program.stderr))
            code = program.wait()
            kill_descendants()
            line, error = output.text(), errors.text()  # before the end of the block closes what they read
    if code:
        raise OutcomeError(f"{command[0]} ended with exit code {code}; it printed: {(error or line)[-SHOWN_OUTPUT:]}")
    return result_of_line(line)


class _LastLine:
    """Prints the output of a program and keeps its last line that is not empty."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._stream, self._last = stream, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """The line, once the output is closed."""
        self._thread.join()
        return self._last.decode(errors="replace").strip()

    def _read(self) -> None:
        assert self._stream is not None
        while line := self._stream.readline(LONGEST_LINE):
            self._last = line if line.strip() else self._last
            os.write(1, line)
