"""The monitor restarts engines within limits; the clusters here fail on request, real ones do in test_engine_death."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.base.events import EVENTS_FILE, EventLog
from roll.distributed.calls.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError
from roll.distributed.cluster import NodeLostError
from roll.distributed.infer.engine_monitor import WINDOW_S, EngineMonitor, EnginesLostError, EngineState, RestartLimit


@given(st.lists(st.floats(0, 3 * WINDOW_S), min_size=1, max_size=30), st.integers(0, 4))
def test_no_more_restarts_within_an_hour_than_allowed(times: list[float], restarts: int) -> None:
    limit = RestartLimit(restarts, 1.0)
    allowed = [now for now in sorted(times) if limit.next_delay(now) is not None]
    for now in allowed:
        assert sum(now - WINDOW_S < each <= now for each in allowed) <= restarts
    for now in {*times} - {*allowed}:
        assert sum(now - WINDOW_S < each <= now for each in allowed) == restarts


def test_the_wait_before_a_restart_doubles_up_to_a_minute() -> None:
    limit = RestartLimit(9, 1.0)
    assert [limit.next_delay(0.0) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, None]
    assert limit.next_delay(WINDOW_S) == 0


class FailingEngines:
    """A cluster whose calls raise what `errors` has for (engine, method)."""

    role = "actor_infer"

    def __init__(self, engines: int) -> None:
        self.world_size = engines
        self.errors: dict[tuple[int, str], ClusterError] = {}
        self.restarts: list[tuple[int, bool]] = []
        """Engines whose processes were started again, and whether they had answered."""

    def fail(self, engine: int, method: str, kind: str, cause: str) -> None:
        self.errors[engine, method] = ClusterError(self.role, method, engine, kind, f"{cause}\nstack", cause)

    async def call(self, ranks: list[int], method: Any, *args: Any) -> list[None]:
        for rank in ranks:
            if (rank, method.__name__) in self.errors:
                raise self.errors[rank, method.__name__]
            if method.__name__ == "start_again":
                self.errors.pop((rank, "check_health"), None)
        return [None for _ in ranks]

    async def restart(self, rank: int, responsive: bool) -> None:
        self.restarts.append((rank, responsive))


def monitor_of(engines: FailingEngines, folder: Path, restarts: int = 2, **options: Any) -> EngineMonitor:
    """A monitor without waits."""
    config: Any = SimpleNamespace(
        max_engine_restarts=restarts,
        engine_restart_delay_s=0.0,
        health_check_interval_s=0.0,
        health_check_timeout_s=1.0,
    )
    cluster: Any = engines
    return EngineMonitor(cluster, config, EventLog(folder), **options)


def events(folder: Path) -> list[tuple[str, str]]:
    """Component and event of each line."""
    entries = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    return [(entry["component"], entry["event"]) for entry in entries]


async def run_tasks() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_engines_that_a_new_trainer_finds_running_wait_for_its_weights(tmp_path: Path) -> None:
    async def go() -> None:
        monitor = monitor_of(FailingEngines(2), tmp_path, waiting_since=3.0, clock=lambda: 5.0)
        assert monitor.started == [0, 1] and not monitor.serving
        await monitor.updated([0, 1])
        assert monitor.serving == [0, 1] and monitor.restarts == 0
        assert monitor.seconds_down == 4.0

    asyncio.run(go())
    assert events(tmp_path) == [("actor_infer-0", "serving again"), ("actor_infer-1", "serving again")]


def test_counts_and_limits_go_on_when_the_run_starts_again(tmp_path: Path) -> None:
    async def go() -> None:
        engines = FailingEngines(2)
        earlier = monitor_of(engines, tmp_path, restarts=1)
        await earlier.failed(1, "broken")
        await run_tasks()
        await earlier.updated([1])
        monitor = monitor_of(engines, tmp_path, restarts=1, waiting_since=0.0, earlier=earlier)
        assert (monitor.restarts, monitor.started) == (1, [0, 1])
        await monitor.failed(1, "broken again")
        await run_tasks()
        assert monitor.states == [EngineState.STARTED, EngineState.LOST]
        await monitor.updated([0])
        for cause in ("broken too", "broken once more"):
            await monitor.failed(0, cause)
            await run_tasks()
            await monitor.updated([0])
        with pytest.raises(EnginesLostError, match="the first cause: actor_infer-1: broken$"):
            await monitor.wait_until_lost()

    asyncio.run(go())


def test_an_engine_whose_node_is_gone_is_not_restarted_again(tmp_path: Path) -> None:
    class WithoutNode(FailingEngines):
        async def restart(self, rank: int, responsive: bool) -> None:
            self.restarts.append((rank, responsive))
            raise NodeLostError("Ray has lost its node 1 at 10.0.0.2")

    async def go() -> None:
        engines = WithoutNode(1)
        monitor = monitor_of(engines, tmp_path, restarts=5)
        engines.fail(0, "check_health", PROCESS_DIED, "The actor died")
        await monitor.restart_unresponsive(1.0)
        with pytest.raises(EnginesLostError, match="no engine left .*the first cause: actor_infer-0: "):
            await monitor.wait_for_engine()
        assert monitor.states == [EngineState.LOST] and engines.restarts == [(0, False)]
        await monitor.close()

    asyncio.run(go())
    assert events(tmp_path) == [("actor_infer-0", "failed"), ("actor_infer-0", "lost")]


def test_a_restart_that_fails_in_an_unknown_way_is_tried_again(tmp_path: Path) -> None:
    class Gone(FailingEngines):
        async def restart(self, rank: int, responsive: bool) -> None:
            await super().restart(rank, responsive)
            if len(self.restarts) == 1:
                raise psutil.NoSuchProcess(7)

    async def go() -> None:
        engines = Gone(1)
        monitor = monitor_of(engines, tmp_path)
        await monitor.failed(0, "broken", responsive=False)
        await run_tasks()
        assert monitor.started == [0] and len(engines.restarts) == 2
        await monitor.close()

    asyncio.run(go())
    assert [event for _, event in events(tmp_path)] == ["failed", "restart failed", "restarted"]


def test_a_health_check_that_fails_in_an_unknown_way_is_repeated(tmp_path: Path) -> None:
    engines = FailingEngines(1)
    engines.errors[0, "check_health"] = RuntimeError("Ray is confused")  # type: ignore[assignment]

    async def go() -> None:
        monitor = monitor_of(engines, tmp_path, sleep=asyncio.sleep)
        monitor.start()
        await run_tasks()
        assert monitor.serving == [0]
        engines.fail(0, "check_health", PROCESS_DIED, "gone")
        await monitor.wait_for_started()
        await monitor.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("kind", "answers"),
    [(PROCESS_DIED, False), (TIMEOUT, False), ("EngineNotRunningError", True), ("EngineError", True)],
)
def test_an_engine_that_fails_a_health_check_is_restarted_and_waits_for_weights(
    kind: str, answers: bool, tmp_path: Path
) -> None:
    """In the process of its worker where that answers, in a new one where it does not."""
    engines = FailingEngines(3)
    engines.fail(1, "check_health", kind, "process 7 died")
    monitor = monitor_of(engines, tmp_path)

    async def scenario() -> None:
        monitor.start()
        await monitor.wait_for_started()
        assert (monitor.serving, monitor.started, engines.restarts) == ([0, 2], [1], [] if answers else [(1, False)])
        assert monitor.metrics()["faults/engines_down"] == 0
        await monitor.updated([0, 1, 2])
        assert (monitor.serving, monitor.started) == ([0, 1, 2], [])
        await monitor.close()

    asyncio.run(scenario())
    assert events(tmp_path) == [("actor_infer-1", each) for each in ("failed", "restarted", "serving again")]
    assert monitor.metrics()["faults/engine_restarts"] == 1


def test_an_engine_without_weight_updates_serves_once_it_has_started(tmp_path: Path) -> None:
    engines = FailingEngines(1)
    monitor = monitor_of(engines, tmp_path, needs_weights=False)

    async def scenario() -> None:
        await monitor.failed(0, "broken")
        await run_tasks()
        assert monitor.serving == [0]

    asyncio.run(scenario())


def test_a_late_answer_during_a_weight_update_is_no_failure_but_a_death_is(tmp_path: Path) -> None:
    engines = FailingEngines(2)
    engines.fail(0, "check_health", "EngineError", "no answer within 1 s")
    engines.fail(1, "check_health", PROCESS_DIED, "gone")
    monitor = monitor_of(engines, tmp_path, restarts=0)

    async def scenario() -> None:
        with monitor.updating():
            await monitor.restart_unresponsive(1.0)
        await run_tasks()
        assert [each.value for each in monitor.states] == ["serving", "lost"]
        await monitor.restart_unresponsive(1.0)
        await run_tasks()
        assert [each.value for each in monitor.states] == ["lost", "lost"]

    asyncio.run(scenario())


def test_engines_that_fail_from_the_begin_of_a_weight_update_to_the_next_are_known(tmp_path: Path) -> None:
    monitor = monitor_of(FailingEngines(3), tmp_path)

    async def scenario() -> None:
        await monitor.failed(0, "before")
        with monitor.updating() as failed:
            await monitor.failed(1, "meanwhile")
            await run_tasks()
        await monitor.failed(2, "afterwards")
        assert failed == {1, 2} and 1 in monitor.started
        with monitor.updating() as failed:
            assert not failed

    asyncio.run(scenario())


def test_an_engine_whose_check_fails_during_a_weight_update_is_checked_again_after_the_interval(tmp_path: Path) -> None:
    engines = FailingEngines(1)
    engines.fail(0, "check_health", "EngineError", "busy")
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(60 if len(waits) == 3 else 0)

    monitor = monitor_of(engines, tmp_path, sleep=sleep)

    async def scenario() -> None:
        with monitor.updating():
            monitor.start()
            await run_tasks()
        await monitor.close()

    asyncio.run(scenario())
    assert len(waits) == 3 and not engines.restarts


def test_a_restart_that_fails_is_repeated_until_the_limit_and_the_run_ends_with_the_first_cause(tmp_path: Path) -> None:
    engines = FailingEngines(1)
    engines.fail(0, "start_again", "EngineError", "out of memory")
    monitor = monitor_of(engines, tmp_path, restarts=3)

    async def scenario() -> None:
        await monitor.failed(0, "process 7 of the engine died")
        with pytest.raises(EnginesLostError) as caught:
            await monitor.wait_for_engine()
        assert "max_engine_restarts: 3 of each" in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).endswith("the first cause: actor_infer-0: process 7 of the engine died")

    asyncio.run(scenario())
    assert [event for _, event in events(tmp_path)] == ["failed", *["restart failed"] * 3, "lost"]
    assert monitor.states == [EngineState.LOST]
    assert engines.restarts == [(0, True)] * 2, "only the first attempt is in the process that the worker has"


def test_a_run_goes_on_with_the_engines_that_are_left(tmp_path: Path) -> None:
    monitor = monitor_of(FailingEngines(2), tmp_path, restarts=0)

    async def scenario() -> None:
        await monitor.failed(0, "broken")
        await run_tasks()
        await monitor.wait_for_engine()
        assert (monitor.serving, monitor.states[0]) == ([1], EngineState.LOST)
        assert monitor.health() == {"actor_infer-0": "lost", "actor_infer-1": "serving"}

    asyncio.run(scenario())


def test_an_event_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    EventLog(tmp_path / "missing").record("actor_infer-0", "failed", "failed: gone")
    assert "actor_infer-0 failed: gone" in caplog.text and "events.jsonl: not written" in caplog.text
