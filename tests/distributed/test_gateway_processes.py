"""The gateway's processes, with actors that die on request in place of Ray's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from roll.base.events import EventLog
from roll.base.timers import StepClock
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError
from roll.distributed.gateway.gateway_processes import GatewayProcesses
from roll.gateway.server import GatewayServer
from roll.rollout.agents.sessions import ActivityTimers, GatewayDiedError, SessionAddress
from tests.gateway.conversations import byte_tokenizer, dialogue, spec
from tests.gateway.test_server import Engines, ask

TOKENIZER = byte_tokenizer()


class Actor:
    """A server that is called as a remote actor is."""

    def __init__(self, name: str, engines: Engines) -> None:
        self.name, self.server, self.died = name, GatewayServer(dialogue(TOKENIZER), engines), asyncio.Event()

    async def ready(self) -> None:
        """It is at once."""

    async def discard(self, key: str, why: str) -> None:
        self.server.discard(SessionAddress(self.server.base_url, key), why)

    async def call(self, method, *args):
        calls = {"serve": self.server.start, "active": self.server.activity.other_than}
        calls |= {"open": self.server.open, "finish": self.server.finish, "end_session": self.discard}
        answer = asyncio.ensure_future(calls[method.__name__](*args))
        death = asyncio.ensure_future(self.died.wait())
        await asyncio.wait([answer, death], return_when=asyncio.FIRST_COMPLETED)
        if self.died.is_set():
            answer.cancel()
            raise ClusterError(self.name, method.__name__, 0, PROCESS_DIED, "killed")
        death.cancel()
        return answer.result()

    call_batched = call

    async def die(self) -> None:
        self.died.set()
        await self.server.stop()

    def kill(self) -> None:
        self.died.set()


class Gateway(GatewayProcesses):
    """Two processes, which may be replaced twice."""

    def __init__(self, folder: Path, engines: Engines) -> None:
        self.actors: list[Actor] = []
        self.timers = ActivityTimers([])
        super().__init__(lambda name: self.start(name, engines), 2, self.timers, EventLog(folder), 2)

    def start(self, name: str, engines: Engines) -> Actor:
        self.actors.append(Actor(name, engines))
        return self.actors[-1]


def test_sessions_of_a_dead_process_fail_and_new_ones_are_served(tmp_path):
    async def run():
        engines = Engines("ab", "in")
        gateway = Gateway(tmp_path, engines)
        first, second = [await gateway.open(spec(TOKENIZER)) for _ in range(2)]
        assert first.base_url != second.base_url, "sessions are spread over the processes"
        await ask(second)
        await gateway.actors[0].die()
        with pytest.raises(GatewayDiedError):
            await gateway.finish(first)
        third = await gateway.open(spec(TOKENIZER))
        await ask(third)
        gateway.discard(third, "its agent failed")
        end = await gateway.finish(second)
        gateway.close()
        return len(gateway.actors), end

    actors, end = asyncio.run(run())
    assert actors == 3 and len(end.trajectory.turns) == 1
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["component"] == "gateway-0" and "1 session failed; another process serves after" in event["message"]


def test_a_death_after_the_last_restart_is_the_error_of_the_run(tmp_path):
    async def run():
        gateway = Gateway(tmp_path, Engines())
        for _ in range(3):
            await gateway.open(spec(TOKENIZER))
            for actor in gateway.actors:
                await actor.die()
            await asyncio.sleep(0.01)
        try:
            await gateway.open(spec(TOKENIZER))
        finally:
            gateway.close()

    with pytest.raises(ClusterError, match="killed"):
        asyncio.run(run())


def test_the_time_of_generation_is_that_in_which_requests_are_answered(tmp_path):
    async def run():
        engines, clock = Engines("ab"), StepClock()
        gateway = Gateway(tmp_path, engines)
        gateway.timers.timer = clock
        address = await gateway.open(spec(TOKENIZER))
        await asyncio.sleep(0.1)
        engines.hold.clear()
        asked = asyncio.create_task(ask(address))
        while not engines.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        engines.hold.set()
        await asked
        await gateway.finish(address)
        await asyncio.sleep(0.05)
        gateway.close()
        return clock.metrics()

    metrics = asyncio.run(run())
    assert 0 < metrics["time/generate"] < metrics["time/step"] - 0.1 and metrics["time/env"] > 0.1
