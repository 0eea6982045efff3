"""One process of the gateway: the HTTP server with its own pool of the run's engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roll.distributed.infer.infer_worker import EngineClient
from roll.gateway.server import Activity, GatewayServer
from roll.gateway.session import Dialogue
from roll.rollout.agents.sessions import ENGINE, SessionAddress
from roll.rollout.engine_pool import EnginePool
from roll.rollout.types import GenerateRequest, GenerateResult

SETTLE_S = 0.002
"""Shortest time between two messages about what a process does."""


@dataclass(frozen=True)
class EngineLimits:
    """The arguments of `EnginePool`."""

    retries: int
    max_running: int
    restarted: bool


class GatewayProcess(GatewayServer):
    """The object of a remote actor; its coroutines are called by `GatewayProcesses`."""

    def __init__(self, make_dialogue: Callable[[], Dialogue], engines: EngineClient, limits: EngineLimits) -> None:
        activity = Activity()
        counted = CountedEngines(engines.client, activity)
        self._pool = EnginePool(counted, limits.retries, limits.max_running, limits.restarted)
        super().__init__(make_dialogue(), self._sampled, activity)

    async def _sampled(self, requests: Sequence[GenerateRequest], engine: int | None) -> list[GenerateResult]:
        [results] = await self._pool.generate([list(requests)], engine)
        return results

    async def serve(self) -> None:
        """Listens on a free port of this machine."""
        await self.start()

    async def end_session(self, key: str, why: str) -> None:
        """Ends a session that is not over."""
        self.discard(SessionAddress(self.base_url, key), why)

    async def active(self, known: frozenset[str]) -> frozenset[str]:
        """What the process does, once that is not `known`; changes within SETTLE_S are one."""
        await self.activity.other_than(known)
        await asyncio.sleep(SETTLE_S)
        return self.activity.names


@dataclass(frozen=True)
class CountedEngines(EngineClient):
    """The engines, whose work is an activity."""

    activity: Activity

    async def generate(self, rank: int, requests: list[GenerateRequest], /) -> list[GenerateResult]:
        """As `EngineClient.generate`."""
        with self.activity.measure(f"{ENGINE}:{rank}"):
            return await super().generate(rank, requests)
