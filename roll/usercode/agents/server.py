"""The side of a process of agents: forks a contained process for each episode and waits for its result.

The process imports the libraries that an agent imports, never a module of the user. So an episode starts in
milliseconds, with variables, modules and globals of its own.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

from roll.agents.agent import Result
from roll.configs.user_code import is_users_file, shown_path, user_folders
from roll.usercode.agents.episode import PROCESS_LIMIT, AgentJob, become
from roll.usercode.containment import TOO_MANY_PROCESSES, contain

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

AgentReason = Literal["agent_raised", "agent_hung", "agent_died"]
"""Why an agent failed: it raised or gave no result, passed its deadline, or its process ended."""

LOGGED_BYTES = 64 * 2**10
"""Bytes that an agent may print into the log; the rest of its output is discarded."""

KEPT_BYTES = 8 * 2**10
"""Last bytes of the output that a message may quote from."""

LONGEST_ANSWER = 2**20
"""Bytes of a result."""

STACK_S = 0.5
"""Seconds for an agent that hangs to print its stack."""

LAZY = {"openai": ("openai.resources.chat.completions", "httpcore", "certifi")}
"""What libraries import with their first request."""

FRAME = re.compile(r'File "(.+)", line (\d+) in ')
"""A frame of a stack that `faulthandler` prints, innermost first."""


@dataclass(frozen=True)
class AgentTrouble:
    """Why an episode has no result; `place` tells causes apart: a file and line, or an exit code."""

    reason: AgentReason
    message: str
    place: str = ""


@dataclass
class _Episode:
    """A process of an agent: a descriptor of it, the ends of its pipes that are read here, and what was read."""

    pid: int
    process: int
    answer: int
    output: int
    answered: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)
    logged: int = 0

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def close(self) -> None:
        for descriptor in (self.process, self.answer, self.output):
            os.close(descriptor)


class AgentServer:
    """The episodes of one process, each started by one of its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a process is forked: no other thread is in the middle of an import then."""
        self._running: dict[int, _Episode] = {}
        self._stopped: set[int] = set()
        self._imported: set[str | None] = {None}

    def run(self, job: AgentJob) -> Result | AgentTrouble:
        """Runs an episode in a process of its own, to its end or deadline."""
        with self._lock:
            if job.agent not in self._imported:
                self._imported.add(job.agent)
                _import_libraries(job.agent or "")
                gc.freeze()
            if job.key in self._stopped:
                self._stopped.remove(job.key)
                return AgentTrouble("agent_died", "it was cancelled before it started")
            episode = self._running[job.key] = _fork(job)
        try:
            return _outcome(job, episode, _attend(episode, job.timeout_s))
        finally:
            with self._lock:
                del self._running[job.key]
                episode.close()

    def stop(self, key: int) -> None:
        """Kills the process of an episode and what it has started; its `run` returns then."""
        with self._lock:
            if key in self._running:
                self._running[key].signal(signal.SIGKILL)
            else:
                self._stopped.add(key)


AGENTS = AgentServer()


def contain_agents() -> None:
    """Contains a process of agents; SIGUSR1 prints the stack of every thread."""
    contain(adopt=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def serve_agent(method: Callable[Concatenate[AgentServer, P], ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    return method(AGENTS, *args, **kwargs)


def _import_libraries(agent: str) -> None:
    """Imports what the module of an agent and other modules of the user import, and none of the latter."""
    modules, seen = [agent.partition(":")[0]], set[str]()
    while modules:
        seen.add(name := modules.pop())
        source = _users_source(name)
        if source is not None:
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                modules += set(_imports(ast.parse(source.read_bytes()), name)) - seen
            continue
        for part in (name, *LAZY.get(name, ())):
            with contextlib.suppress(BaseException):
                importlib.import_module(part)


def _users_source(module: str) -> Path | None:
    relative = Path(*module.split("."))
    names = (relative.with_suffix(".py"), relative / "__init__.py")
    files = (Path(folder, name) for folder in user_folders() for name in names)
    return next((file for file in files if file.is_file() and is_users_file(str(file))), None)


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _fork(job: AgentJob) -> _Episode:
    answer, write_answer = os.pipe()
    output, write_output = os.pipe()
    driver, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            become(job, driver, write_answer, write_output)
        finally:
            os._exit(1)
    os.close(write_answer)
    os.close(write_output)
    return _Episode(pid, os.pidfd_open(pid), answer, output)


def _attend(episode: _Episode, timeout_s: float) -> str | None:
    """Reads what an agent writes until its process ends; where in its code it was, if it passed its deadline."""
    until, hung_at = time.monotonic() + timeout_s, None
    found = select.poll()
    for descriptor in (episode.process, episode.answer, episode.output):
        found.register(descriptor, select.POLLIN)
    ready: list[int] = []
    while episode.process not in ready:
        left_s = until - time.monotonic()
        if hung_at is None and left_s <= 0:
            hung_at = _place_of_hanging(episode)
            episode.signal(signal.SIGKILL)
        ready = [number for number, _ in found.poll(1000 * max(0.1, min(left_s, 3600.0)))]
        for descriptor in {episode.answer, episode.output}.intersection(ready):
            if not _read(episode, descriptor):
                found.unregister(descriptor)
    for descriptor in (episode.answer, episode.output):  # processes that it left may hold the pipes open
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while _read(episode, descriptor):
                pass
    return hung_at


def _read(episode: _Episode, descriptor: int) -> bool:
    """Reads without waiting for more; false at the end of the pipe."""
    data = os.read(descriptor, 2**16)
    if descriptor == episode.answer:
        episode.answered += data[: LONGEST_ANSWER - len(episode.answered)]
        return bool(data)
    shown = data[: LOGGED_BYTES - episode.logged]
    episode.logged += len(shown)
    with contextlib.suppress(OSError):
        os.write(2, shown)
    episode.printed = (episode.printed + data)[-KEPT_BYTES:]
    return bool(data)


def _place_of_hanging(episode: _Episode) -> str:
    """Where in the user's code an agent is, as `file:line`; empty where that cannot be told."""
    episode.printed.clear()
    episode.signal(signal.SIGUSR1)
    until, found = time.monotonic() + STACK_S, select.poll()
    found.register(episode.output, select.POLLIN)
    while (left_s := until - time.monotonic()) > 0 and found.poll(1000 * left_s):
        if not _read(episode, episode.output):
            break
    frames = FRAME.findall(episode.printed.decode(errors="replace"))
    return next((f"{shown_path(file)}:{line}" for file, line in frames if is_users_file(file)), "")


def _exit_code(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # killed with everything that this process has started, and reaped there
        return -signal.SIGKILL


def _outcome(job: AgentJob, episode: _Episode, hung_at: str | None) -> Result | AgentTrouble:
    code = _exit_code(episode.pid)
    if hung_at is not None:
        message = f"{hung_at}: it was not over after {job.timeout_s:g} s".removeprefix(": ")
        return AgentTrouble("agent_hung", message, hung_at)
    try:
        answered = json.loads(bytes(episode.answered))
    except ValueError:
        how = f"its process ended with exit code {code}, without a result"
        if code == -TOO_MANY_PROCESSES:
            how = f"it started more than {PROCESS_LIMIT} processes"
        return AgentTrouble("agent_died", how, str(code))
    if "failure" not in answered:
        return Result(answered["reward"], answered["metrics"])
    message = answered["failure"]
    return AgentTrouble("agent_raised", message, message.partition(": ")[0])
