"""A rollout process that dies is replaced at the state of the last batch: no prompt is lost or learned twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.base.events import EVENTS_FILE, EventLog
from roll.distributed.calls.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError
from roll.pipeline.rollout_client import RolloutClient
from roll.rollout.rollouter import Rollouter
from tests.processes import PATIENCE_S
from tests.rollout.test_rollouter import BATCH, Scripted, prompts_of, rollouter

STEPS = 6
BEFORE, AFTER = "before the call", "before the answer arrives"


class Processes:
    """Starts rollouters that die at given calls, counted over all of them."""

    def __init__(self, ratio: float, turns: list[int], deaths: dict[int, str]) -> None:
        self.ratio, self.turns, self.deaths = ratio, turns, deaths
        self.calls = self.cancelled = 0
        self.started: list[Process] = []

    def start(self) -> Process:
        self.started.append(Process(self))
        return self.started[-1]

    async def cancel_requests(self) -> None:
        assert self.started[-1].dead, "requests of a living process"
        self.cancelled += 1


class Process:
    """As a RemoteActor, in this process."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.dead = processes, False
        self.worker = Scripted(processes.turns)
        self.rollouter = rollouter(self.worker, processes.ratio, STEPS)

    async def ready(self) -> None:
        """Ready at once."""

    async def call(self, method: Any, *args: Any) -> Any:
        death = self.processes.deaths.get(self.processes.calls)
        self.processes.calls += 1
        self.die_if(death == BEFORE)
        if method is Rollouter.advance:
            self.worker.version = args[0]
        answer = await getattr(self.rollouter, method.__name__)(*args)
        self.die_if(death == AFTER)
        return answer

    def die_if(self, dies: bool) -> None:
        self.dead = self.dead or dies
        if self.dead:
            raise ClusterError("rollouter", "call", 0, PROCESS_DIED, "The actor died")

    def shutdown(self) -> None:
        assert self.dead


def client_of(processes: Processes, folder: Path, max_restarts: int = 99) -> RolloutClient:
    start: Any = processes.start
    return RolloutClient(start, processes.cancel_requests, EventLog(folder), max_restarts)


async def train(client: RolloutClient, bound: int) -> list[list[int]]:
    """The prompts of every batch; none is more than `bound` versions old."""
    batches = []
    await client.advance(0)
    for step in range(STEPS):
        batch = await client.next_batch()
        assert batch is not None and batch.metrics["staleness/max"] <= bound
        batches.append(prompts_of(batch))
        await asyncio.sleep(0)
        await client.advance(step + 1)
        if step % 2:
            await client.validate()
    return batches


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.5, 1.0, 2.7]),
    st.lists(st.integers(0, 30), min_size=1, max_size=11),
    st.dictionaries(st.integers(0, 25), st.sampled_from([BEFORE, AFTER]), max_size=5),
)
def test_whenever_it_dies_every_prompt_is_learned_from_once(tmp_path_factory, ratio, turns, deaths):
    async def run() -> None:
        folder = tmp_path_factory.mktemp("run")
        processes = Processes(ratio, turns, deaths)
        client = client_of(processes, folder)
        bound = processes.started[0].rollouter.admission.settings.versions_ahead
        used = [prompt for batch in await train(client, bound) for prompt in batch]
        assert sorted(used) == list(range(STEPS * BATCH))
        admission = processes.started[-1].rollouter.admission
        admission.ledger.check()
        assert (admission.ledger.submitted, admission.ledger.consumed) == (STEPS * BATCH, STEPS * BATCH)
        restarts = len(processes.started) - 1
        assert processes.cancelled == restarts
        log = folder / EVENTS_FILE
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        assert len(events) == restarts and {event["event"] for event in events} <= {"restarted", "restart failed"}
        for process in processes.started:
            await process.rollouter.close()

    asyncio.run(run())


def test_it_goes_on_from_the_state_of_a_checkpoint_when_it_dies_before_the_first_batch(tmp_path):
    async def run() -> None:
        state = await rollouter(Scripted([1]), 1.0, STEPS).state_dict()
        state["worker"]["drawn"] = 40
        processes = Processes(1.0, [1], {2: BEFORE})
        client = client_of(processes, tmp_path)
        await client.load_state_dict(state)
        await client.advance(0)
        batch = await client.next_batch()
        assert batch is not None and prompts_of(batch) == [40, 41, 42, 43]
        assert batch.metrics["faults/rollouter_restarts"] == 1

    asyncio.run(run())


def test_a_new_process_that_dies_before_it_has_the_state_is_replaced_too(tmp_path):
    async def run() -> None:
        processes = Processes(1.0, [1], {1: BEFORE, 2: AFTER, 3: BEFORE})
        client = client_of(processes, tmp_path)
        await client.advance(0)
        batch = await client.next_batch()
        assert batch is not None and prompts_of(batch) == [0, 1, 2, 3]
        assert len(processes.started) == 4 and batch.metrics["faults/rollouter_restarts"] == 3
        log = [json.loads(line)["event"] for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
        assert log == ["restart failed", "restart failed", "restarted"]

    asyncio.run(run())


def test_after_its_last_restart_its_death_ends_the_run(tmp_path):
    async def run() -> None:
        client = client_of(Processes(1.0, [1], {0: BEFORE, 1: BEFORE}), tmp_path, max_restarts=1)
        with pytest.raises(ClusterError, match="The actor died"):
            await client.advance(0)

    asyncio.run(run())


def test_restarts_count_on_when_the_run_starts_again(tmp_path):
    async def run() -> None:
        start: Any = Processes(1.0, [1], {1: BEFORE}).start
        processes = Processes(1.0, [1], {0: BEFORE})
        earlier = client_of(processes, tmp_path, max_restarts=1)
        await earlier.advance(0)
        client = RolloutClient(start, processes.cancel_requests, EventLog(tmp_path), 1, earlier)
        await client.advance(0)
        with pytest.raises(ClusterError, match="The actor died"):
            await client.next_batch()

    asyncio.run(run())


def test_only_death_is_answered_by_a_restart_and_health_never_fails(tmp_path):
    async def run() -> None:
        processes = Processes(1.0, [1], {})
        client = client_of(processes, tmp_path)

        async def late(*_: Any) -> None:
            raise ClusterError("rollouter", "call", 0, TIMEOUT, "no answer within 5 s")

        processes.started[0].call = late  # type: ignore[method-assign]
        with pytest.raises(ClusterError, match="no answer"):
            await client.advance(0)
        assert await client.health() == {"error": "rollouter-0: no answer within 5 s"}
        assert len(processes.started) == 1

    asyncio.run(run())


def test_the_death_of_a_process_that_it_had_called_does_not_replace_it(tmp_path):
    async def run() -> None:
        processes = Processes(1.0, [1], {})
        client = client_of(processes, tmp_path)

        async def reward_died(*_: Any) -> None:
            raise ClusterError("reward", "compute_values", 0, PROCESS_DIED, "gone")

        processes.started[0].call = reward_died  # type: ignore[method-assign]
        with pytest.raises(ClusterError) as caught:
            await asyncio.wait_for(client.next_batch(), PATIENCE_S)
        assert (caught.value.role, len(processes.started)) == ("reward", 1)

    asyncio.run(run())


@pytest.mark.parametrize("death", [BEFORE, AFTER])
def test_after_a_stop_the_process_that_replaces_a_dead_one_gives_no_batch(tmp_path, death):
    async def run() -> None:
        processes = Processes(1.0, [1], {3: death})
        client = client_of(processes, tmp_path)
        await client.advance(0)
        first = await client.next_batch()
        await client.stop()
        assert first is not None and await client.next_batch() is None
        assert len(processes.started) == 2
        assert processes.started[-1].rollouter.admission.ledger.consumed == BATCH

    asyncio.run(run())
