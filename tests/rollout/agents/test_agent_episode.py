"""One episode of an agent, with a gateway and agents that fail."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from roll.agents import Result
from roll.base.events import Repeats
from roll.rollout.agents.agent_episode import GATEWAY_TRIES, AgentEpisode, AgentRuns, AgentTask
from roll.rollout.agents.episode import EpisodeFailed
from roll.rollout.agents.sessions import (
    ActivityTimers,
    GatewayDiedError,
    SessionAddress,
    SessionEnd,
    SessionSpec,
    SessionTotals,
)
from roll.rollout.types import GenerateResult, SamplingParams, Trajectory
from roll.usercode.agents.pool import AgentFailure, AgentSpec


def answered() -> Trajectory:
    result = GenerateResult("r", [5, 1], [-0.5, -0.1], [3, 3], "stop")
    return Trajectory.of_response([2, 3], result, "five")


@dataclass
class FakeGateway:
    """Dies `deaths` times while a session is open."""

    end: SessionEnd
    deaths: int = 0
    opened: list[SessionSpec] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)

    async def open(self, spec):
        self.opened.append(spec)
        return SessionAddress("http://127.0.0.1:1/v1", f"sk-{len(self.opened)}")

    async def finish(self, address):
        if len(self.opened) <= self.deaths:
            raise GatewayDiedError("its process died")
        return self.end

    def discard(self, address, why):
        self.discarded.append(address.key)


@dataclass
class FakePool:
    """What every agent returns or raises."""

    outcome: Result | AgentFailure

    async def run(self, spec, seed, variables, timeout_s):
        assert variables["OPENAI_API_KEY"].startswith("sk-")
        if isinstance(self.outcome, AgentFailure):
            raise self.outcome
        return self.outcome


def play(end: SessionEnd, outcome=Result(0.5, {"turns": 1.0}), deaths: int = 0):  # noqa: B008
    gateway = FakeGateway(end, deaths)
    repeats = Repeats(logging.getLogger("test"))
    runs = AgentRuns(gateway, FakePool(outcome), ActivityTimers([]), SessionTotals(), repeats, 10.0)
    spec = SessionSpec("train-0-0", 1, 3, SamplingParams(8), 100)
    episode = AgentEpisode(AgentTask("Solver", AgentSpec("Solver"), 8, 3), 7, spec, runs)
    asyncio.run(episode.run(0))
    return episode, gateway


def test_the_reward_is_that_of_the_last_answer_and_metrics_those_of_the_result():
    episode, _ = play(SessionEnd(answered()))
    assert episode.trajectory.score == 0.5 and episode.trajectory.turns[-1].reward == 0.5
    assert episode.trajectory.metrics == {"turns": 1.0} and episode.trajectory.stop == "terminated"


def test_an_agent_is_run_again_with_its_seeds_where_the_gateway_died():
    episode, gateway = play(SessionEnd(answered()), deaths=GATEWAY_TRIES - 1)
    assert episode.trajectory.score == 0.5 and {spec.name for spec in gateway.opened} == {"train-0-0"}
    with pytest.raises(EpisodeFailed, match="its process died") as failed:
        play(SessionEnd(answered()), deaths=GATEWAY_TRIES)
    assert failed.value.reason == "gateway_died"


RAISED = AgentFailure("agent_raised", "my_agent.py:3: ValueError")


@pytest.mark.parametrize(
    ("end", "outcome", "reason"),
    [
        (SessionEnd(None), Result(1.0), "no_sample"),
        (SessionEnd(answered()), RAISED, "agent_raised"),
        (SessionEnd(answered(), ("requests_exhausted", "3 requests")), RAISED, "requests_exhausted"),
        (SessionEnd(None, ("generation_failed", "engine lost")), RAISED, "generation_failed"),
    ],
)
def test_an_episode_that_fails_has_the_reason_of_the_gateway_or_of_the_agent(end, outcome, reason):
    with pytest.raises(EpisodeFailed) as failed:
        play(end, outcome)
    assert failed.value.reason == reason


def test_an_agent_that_accepts_a_full_context_is_learned_from_as_cut():
    episode, _ = play(SessionEnd(answered(), ("context_length_exceeded", "full")))
    assert episode.trajectory.stop == "sequence_length" and episode.trajectory.score == 0.5
