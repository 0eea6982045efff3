"""Agents in processes that can be killed, with a deadline for every episode: none can stall or corrupt a run."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roll.agents.agent import Result
from roll.agents.tasks import read_tasks, task_of
from roll.base.events import EventLog, Repeats
from roll.configs.environments import CustomEnvConfig
from roll.usercode.agents.episode import AgentJob
from roll.usercode.agents.server import AgentReason, AgentServer, AgentTrouble, contain_agents, serve_agent
from roll.usercode.pool import ProcessStoppedError, UserProcessPool
from roll.usercode.process import ProcessEndedError, UserProcess, do_nothing

CAPACITY = 16
"""Agents of one process by default."""

GRACE_S = 30.0
"""Seconds from the deadline of an episode until the process that should have ended it is killed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentSpec:
    """What runs for a tag of `custom_envs`, and the files of its tasks."""

    tag: str
    agent: str | None = None
    command: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @classmethod
    def of_entry(cls, tag: str, entry: CustomEnvConfig) -> AgentSpec:
        return cls(tag, entry.agent, tuple(entry.command), tuple(entry.tasks.file_name))

    @property
    def name(self) -> str:
        return self.agent or " ".join(self.command)


class AgentFailure(RuntimeError):
    """An agent failed, so its episode has no result. The message begins with the user's file and line if known."""

    def __init__(self, reason: AgentReason, message: str) -> None:
        super().__init__(message)
        self.reason: AgentReason = reason


class AgentPool:
    """Runs agents, each episode in a process of its own, which ends with the episode.

    Every failure is an `AgentFailure` with a reason, never a reward. Use a pool from one asyncio loop.

    Attributes:
        processes: each forks the processes of up to `capacity` episodes.
        failures: number of failed episodes by reason.
    """

    def __init__(
        self,
        workers: int,
        start_timeout_s: float,
        *,
        capacity: int = CAPACITY,
        log: str | None = None,
        variables: Mapping[str, str] | None = None,
        events: EventLog | None = None,
    ) -> None:
        """Starts no process; they start with the first `run`.

        Args:
            workers: number of processes.
            start_timeout_s: deadline for the start of a process.
            capacity: episodes of one process at a time.
            log: file for what the agents print, or None.
            variables: environment variables of the processes.
            events: log of the processes that are replaced.
        """
        launch = partial(_launch, capacity, log, variables or {})
        self.processes = UserProcessPool(workers, launch, self._report, capacity, start_timeout_s)
        self.failures: Counter[AgentReason] = Counter()
        self._events, self._repeats, self._keys = events, Repeats(logger), itertools.count()
        self._tasks: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    async def run(
        self, spec: AgentSpec, seed: int, variables: Mapping[str, str], timeout_s: float = math.inf
    ) -> Result:
        """Runs one episode; where all processes are full it waits, in order of arrival.

        Cancelling the call kills the agent and what it has started.

        Args:
            spec: what to run.
            seed: decides the task.
            variables: environment variables of this episode only.
            timeout_s: deadline of the episode.

        Raises:
            AgentFailure: it raised, hung or died.
            DatasetError: a task file cannot be read.
            PoolBrokenError: no process starts.
        """
        if spec.files not in self._tasks:
            self._tasks[spec.files] = await asyncio.to_thread(read_tasks, spec.files)
        task = task_of(self._tasks[spec.files], seed)
        job = AgentJob(next(self._keys), spec.agent, spec.command, task, seed, variables, timeout_s)
        process = await self.processes.take()
        try:
            found, _ = await self.processes.answer(process, timeout_s + GRACE_S, serve_agent, AgentServer.run, job)
        except asyncio.CancelledError:
            process.call(serve_agent, AgentServer.stop, job.key)
            raise
        except (ProcessEndedError, ProcessStoppedError, TimeoutError) as death:
            why = f"its process {process.pid} died: {death or 'it did not answer'}"
            if self.processes.retire(process, now=True):
                self._report(f"{spec.name}: {why}")
            found = AgentTrouble("agent_died", why)
        finally:
            self.processes.give_back(process)
        if isinstance(found, AgentTrouble):
            raise self._failure(spec, seed, found)
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """Kills the processes and waits for their end. Safe to call twice."""
        self.processes.close()

    def _failure(self, spec: AgentSpec, seed: int, trouble: AgentTrouble) -> AgentFailure:
        """Counts a failure, and logs the first from each place in a run, unless closing the pool caused it."""
        first, *code = trouble.message.split("\n")
        message = "\n".join([f"{first} (agent {spec.name} with seed {seed})", *code])
        if not self.processes.closed:
            self.failures[trouble.reason] += 1
            if self._events is not None:
                self._repeats.warn(f"{trouble.reason} {trouble.place}", f"{trouble.reason}: {message}")
        return AgentFailure(trouble.reason, message)

    def _report(self, cause: str) -> None:
        if self._events is None:
            logger.error("agents: replaces a process: %s", cause)
        else:
            self._events.process_replaced("agents", cause)


def _launch(capacity: int, log: str | None, variables: Mapping[str, str]) -> UserProcess:
    """A process with a thread for each agent, and one more that stops agents."""
    start = partial(UserProcess, contain_agents, do_nothing, threads=capacity + 1, variables=variables)
    if log is None:
        return start()
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with Path(log).open("ab") as file:
        return start(output=file.fileno())
