"""One episode of an agent: a session of the gateway, in which a program of the user calls the policy."""

from __future__ import annotations

import time
from dataclasses import dataclass

from roll.base.events import Repeats
from roll.rollout.agents.episode import EpisodeFailed
from roll.rollout.agents.sessions import (
    ActivityTimers,
    Gateway,
    GatewayDiedError,
    SessionAddress,
    SessionEnd,
    SessionSpec,
    SessionTotals,
)
from roll.rollout.types import StopReason, Trajectory
from roll.usercode.agents.pool import AgentFailure, AgentPool, AgentSpec

GATEWAY_DIED, NO_SAMPLE = "gateway_died", "no_sample"
"""Drop reasons of groups."""

GATEWAY_TRIES = 3
"""Times an episode is played before its group is dropped, if the gateway process dies each time."""

GRACE_S = 5.0
"""How much later than an agent's deadline its episode ends, so that it is dropped as `agent_hung` with its place."""


@dataclass(frozen=True)
class AgentTask:
    """Settings shared by the episodes of one tag.

    Attributes:
        tag: name in `custom_envs`.
        spec: the agent.
        max_tokens: of one answer.
        max_requests: of one session.
        rows: of its task files; 0 without any.
    """

    tag: str
    spec: AgentSpec
    max_tokens: int
    max_requests: int | None
    rows: int = 0


@dataclass(frozen=True)
class AgentRuns:
    """What the episodes of agents share."""

    gateway: Gateway
    pool: AgentPool
    timers: ActivityTimers
    totals: SessionTotals
    warned: Repeats
    timeout_s: float

    def close(self) -> None:
        """Kills the agents, then ends the gateway."""
        self.pool.close()
        self.gateway.close()


class AgentEpisode:
    """One member of a group: `run` opens a session, runs the agent, and takes what the policy sampled for it."""

    grace_s = GRACE_S

    def __init__(self, task: AgentTask, problem: int, session: SessionSpec, runs: AgentRuns) -> None:
        """Sets up the episode; `problem` decides the agent's task, and the session has its name and its limits."""
        self.trajectory = Trajectory()
        self._task, self._problem, self._spec, self._runs = task, problem, session, runs
        self._address: SessionAddress | None = None

    async def run(self, engine: int | None) -> None:
        """Plays the episode, again where its gateway process died; its requests prefer the engine.

        Raises:
            EpisodeFailed: the agent or the gateway failed, or nothing was sampled.
        """
        for attempt in range(1, GATEWAY_TRIES + 1):
            try:
                return await self._play(engine)
            except GatewayDiedError as death:
                self._address = None
                if attempt == GATEWAY_TRIES:
                    raise EpisodeFailed(GATEWAY_DIED, f"{self._spec.name}: {death}") from death

    async def _play(self, engine: int | None) -> None:
        runs = self._runs
        address = self._address = await runs.gateway.open(self._spec.begun(engine, time.time() + runs.timeout_s))
        failure: AgentFailure | None = None
        try:
            result = await runs.pool.run(self._task.spec, self._problem, address.variables, runs.timeout_s)
        except AgentFailure as failed:
            failure = failed
        end = await runs.gateway.finish(address)
        self._address = None
        self._count(end)
        if failure is not None:
            reason, message = end.failure or (failure.reason, str(failure))
            raise EpisodeFailed(reason, message)
        if end.trajectory is None:
            raise EpisodeFailed(NO_SAMPLE, f"{self._spec.name}: the agent ended without an answer of the policy")
        self.trajectory = end.trajectory
        self.trajectory.turns[-1].reward = result.reward
        self.trajectory.metrics = dict(result.metrics)
        self.trajectory.stop = _stop(end)

    def _count(self, end: SessionEnd) -> None:
        self._runs.totals.add(end)
        for kind, message in end.warnings.items():
            self._runs.warned.warn(kind, f"custom_envs.{self._task.tag}: {message}")

    def start_close(self) -> None:
        """Ends the session where `run` did not; does not wait."""
        if self._address is not None:
            self._runs.gateway.discard(self._address, "trajectory_timeout_s, or another member of its group failed")
            self._address = None


def _stop(end: SessionEnd) -> StopReason:
    reasons: dict[str, StopReason] = {
        "context_length_exceeded": "sequence_length",
        "requests_exhausted": "truncated",
    }
    return reasons.get(end.failure[0] if end.failure else "", "terminated")
