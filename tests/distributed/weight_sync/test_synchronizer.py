"""A weight update succeeds or has no effect: deadlines, retries, and engines that stay paused until one succeeds.

The clusters and the transport here fail on request; real ones are tested in tests/integration/test_weight_sync.py.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.engine_monitor import EngineMonitor, EnginesLostError
from roll.distributed.events import EVENTS_FILE, EventLog
from roll.distributed.process_groups import BroadcastGroup
from roll.distributed.remote_errors import PROCESS_DIED, ClusterError, seconds_left
from roll.distributed.weight_sync.report import Transfer, UpdateReport
from roll.distributed.weight_sync.sender import StageSource
from roll.distributed.weight_sync.synchronizer import (
    BroadcastTransport,
    SharedMemoryTransport,
    Transport,
    VerificationError,
    WeightSynchronizer,
    WeightUpdateError,
    choose_transport,
)

CALLS = {
    "pause": "pause",
    "begin_update": "begin",
    "end_update": "end",
    "flush_cache": "flush",
    "checksums": "verify",
    "commit_update": "commit",
    "resume": "resume",
    "abort_update": "abort",
}
"""Step of the transaction by the engine's method."""
STEPS = ("connect", "pause", "begin", "transfer", "end", "flush", "verify", "commit", "resume")
Faults = Sequence[tuple[str, str] | None]


class World:
    """Engines and a transport that record the steps; `faults` has for each attempt the step that fails and how."""

    def __init__(self, faults: Faults = (), engines: int = 1) -> None:
        self.faults, self.steps, self.attempt = list(faults), list[str](), 0
        self.during: dict[str, Callable[[], None]] = {}
        self.checksums = {"w": "1"}
        self.world_size, self.role = engines, "actor_infer"
        self.engines = list(range(engines))
        self.dead: set[int] = set()
        self.took_part: list[list[int]] = []

    async def step(self, name: str) -> None:
        self.steps.append(name)
        self.during.get(name, lambda: None)()
        fault = self.faults[self.attempt] if self.attempt < len(self.faults) else None
        if fault is not None and fault[0] == name:
            if fault[1] == "hang":
                await asyncio.sleep(60)
            raise VerificationError(f"{name} broke")

    async def call_some(self, method: Callable[..., Any], ranks: list[int], *args: Any) -> list[Any]:
        if method.__name__ == "check_health":
            if self.dead & {*ranks}:
                raise ClusterError("actor_infer", "check_health", ranks[0], PROCESS_DIED, "gone")
            return [None]
        self.took_part.append(ranks)
        await self.step(CALLS[method.__name__])
        if self.dead & {*ranks}:
            raise ClusterError("actor_infer", method.__name__, min(self.dead), PROCESS_DIED, "gone")
        return [self.checksums if method.__name__ == "checksums" else None for _ in ranks]

    def transport(self, *_: Any) -> Any:
        """Replaces the transport class."""
        return self

    async def connect(self) -> None:
        await self.step("connect")

    async def transfer(self, checksums: bool) -> Transfer:
        await self.step("transfer")
        return Transfer(10, {"w": "1"} if checksums else {})

    async def disconnect(self) -> None:
        await self.step("disconnect")
        self.attempt += 1


@pytest.mark.parametrize(
    ("platform", "nodes", "shared", "transport", "backend"),
    [
        ("cuda", 1, True, SharedMemoryTransport, None),
        ("cuda", 1, False, BroadcastTransport, "nccl"),
        ("cuda", 2, False, BroadcastTransport, "nccl"),
        ("cuda", 2, True, BroadcastTransport, "gloo"),
        ("cpu", 1, False, SharedMemoryTransport, None),
        ("cpu", 2, True, BroadcastTransport, "gloo"),
    ],
)
def test_the_way_of_weights_follows_from_where_the_clusters_are(
    platform: str, nodes: int, shared: bool, transport: type[Transport], backend: str | None
) -> None:
    """NCCL cannot have a training rank and an engine on one GPU in a group."""
    groups: list[BroadcastGroup] = []

    class Devices:
        world_size, layout = 2, SimpleNamespace(tensor=1)

        def __init__(self, devices: list[int]) -> None:
            self.platform, self.nodes, self.config = (
                platform,
                set(range(nodes)),
                SimpleNamespace(device_mapping=devices),
            )

        async def call_all(self, method: Any, *args: Any) -> list[int | None]:
            groups.extend(args[0] if args else [])
            return [5555, None]

        async def call_some(self, method: Any, ranks: list[int], *args: Any) -> None:
            groups.extend(args[0])

    train: Any = Devices([0, 1])
    infer: Any = Devices([0, 1] if shared else [2, 3])
    assert choose_transport(train, infer) is transport
    if backend is not None:
        config: Any = SimpleNamespace(sync_timeout_s=1, model_update_buffer_size_mb=1)
        made = BroadcastTransport(train, infer, config)
        made.sources = [StageSource(0, [], "10.0.0.1")]
        asyncio.run(made.connect())
        assert {(group.backend, group.port, group.world_size) for group in groups} == {(backend, 5555, 3)}


def updated(
    world: World, retries: int = 2, timeout_s: float = 5.0, updates: int = 1, verify: str = "always", **config: Any
) -> tuple[UpdateReport | WeightUpdateError, WeightSynchronizer, list[float]]:
    """Outcome of the last of `updates` updates, the synchronizer, and the waits between attempts."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    settings: Any = SimpleNamespace(
        sync_timeout_s=timeout_s,
        max_sync_retries=retries,
        sync_retry_delay_s=1.5,
        verify_weights=verify,
        in_flight_policy="retract",
        max_engine_restarts=0,
        engine_restart_delay_s=0,
        health_check_timeout_s=5,
        output_dir=tempfile.gettempdir(),
        **config,
    )
    engines: Any = world
    synchronizer = WeightSynchronizer(engines, engines, settings, engines.transport, sleep)
    try:
        for _ in range(updates - 1):
            asyncio.run(synchronizer.update_weights(2))
            world.steps.clear()
        return asyncio.run(synchronizer.update_weights(3)), synchronizer, waits
    except WeightUpdateError as error:
        return error, synchronizer, waits


def test_an_update_pauses_transfers_verifies_and_resumes_in_that_order() -> None:
    world = World()
    report, synchronizer, waits = updated(world)
    assert isinstance(report, UpdateReport) and world.steps == list(STEPS)
    assert (report.bytes, report.verified, report.attempts, waits) == (10, True, 1, [])
    assert 0 < report.pause_seconds <= report.seconds and not synchronizer.stale_weights


def test_the_first_update_is_verified_and_later_ones_where_configured() -> None:
    first, second, always = World(), World(), World()
    updated(first, verify="first")
    updated(second, verify="first", updates=2)
    updated(always, verify="always", updates=2)
    assert ["verify" in world.steps for world in (first, second, always)] == [True, False, True]


def test_weights_that_differ_fail_the_verification() -> None:
    world = World()
    world.checksums = {"w": "2"}
    error, _, _ = updated(world, retries=0)
    assert "VerificationError: engine 0: w differs: sent 1, engine holds 2" in str(error)


@settings(deadline=None)
@given(st.lists(st.sampled_from([None, *[(step, "raise") for step in STEPS]]), max_size=5), st.integers(0, 3))
def test_engines_resume_only_after_a_complete_attempt(faults: Faults, retries: int) -> None:
    world = World(faults)
    outcome, synchronizer, waits = updated(world, retries)
    attempts = [attempt.split() for attempt in " ".join(world.steps).split("disconnect")]
    planned = [*faults, *[None] * (retries + 1)][: retries + 1]
    if None in planned:
        failed = planned.index(None)
        assert isinstance(outcome, UpdateReport) and outcome.attempts == failed + 1 and outcome.failures == failed
        assert attempts[-1] == list(STEPS) and not synchronizer.stale_weights
    else:
        failed = retries + 1
        assert attempts[-1] == ["abort"] and f"{failed} attempt(s)" in str(outcome)
    assert waits == [1.5] * min(failed, retries)
    for fault, steps in zip(planned, attempts[:failed], strict=False):
        assert fault is not None and steps == list(STEPS[: STEPS.index(fault[0]) + 1])


@pytest.mark.parametrize(
    ("step", "state"),
    [
        ("connect", "no weights were sent"),
        ("pause", "no weights were sent"),
        ("begin", "the engines are paused and not serving"),
    ],
)
def test_the_error_tells_whether_the_engines_were_changed(step: str, state: str) -> None:
    error, _, _ = updated(World([(step, "raise")]), retries=0)
    assert state in str(error)


def test_the_calls_of_all_steps_share_the_deadline_of_the_attempt() -> None:
    world, left = World(), list[float]()
    world.during = {"connect": lambda: left.append(seconds_left(60.0)), "end": lambda: left.append(seconds_left(60.0))}
    updated(world, timeout_s=5.0)
    assert 0 < left[1] < left[0] <= 5.0 and seconds_left(60.0) == 60.0


def test_engines_with_stale_weights_are_not_resumed() -> None:
    world = World([("transfer", "raise")] * 3)
    error, synchronizer, _ = updated(world, retries=2)
    assert synchronizer.stale_weights and "resume" not in world.steps and "commit" not in world.steps
    assert str(error).count("transfer broke") == 3


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_hangs_is_ended_by_the_deadline_and_named(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.distributed.weight_sync.synchronizer.STEP_GRACE_S", 0.0)
    error, _, _ = updated(World([(step, "hang")]), retries=0, timeout_s=0.3)
    assert f"{step} was not done 0.3 s (sync_timeout_s) after the start" in str(error)


def test_failed_attempts_are_counted_in_the_metrics() -> None:
    report, _, _ = updated(World([("transfer", "raise")]), updates=2)
    assert isinstance(report, UpdateReport)
    metrics = report.metrics()
    assert (metrics["param_sync_count"], metrics["param_sync_requests"], metrics["sync_failures"]) == (4, 5, 1)


def test_an_engine_that_died_is_left_out_and_its_attempt_is_not_counted() -> None:
    """Without a retry left, the attempt that a death has spoilt would end the run."""
    world = World(engines=3)
    world.during = {"begin": lambda: world.dead.add(1)}
    report, synchronizer, _ = updated(world, retries=0)
    assert isinstance(report, UpdateReport) and report.attempts == 2 and not synchronizer.stale_weights
    assert world.took_part[0] == [0, 1, 2] and world.took_part[-1] == [0, 2]
    assert report.metrics()["faults/engines_down"] == 1


def test_an_update_without_any_engine_ends_with_the_cause_of_the_first_death() -> None:
    world = World()
    world.during = {"transfer": lambda: world.dead.add(0)}
    with pytest.raises(EnginesLostError, match="no engine left.*the first cause: actor_infer-0: its process died"):
        updated(world)


class Restarting(World):
    """Engines that can be started again."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines=engines)
        self.restarted: list[int] = []

    async def restart(self, rank: int, responsive: bool) -> None:
        self.restarted.append(rank)
        self.dead.discard(rank)

    async def call_some(self, method: Callable[..., Any], ranks: list[int], *args: Any) -> list[Any]:
        if method.__name__ == "start_again":
            return [None]
        return await super().call_some(method, ranks, *args)


def restarting(engines: int, tmp_path: Path) -> tuple[Restarting, WeightSynchronizer, EngineMonitor]:
    """Engines, with the synchronizer and the monitor of a run in which two restarts are allowed."""
    world = Restarting(engines)
    settings: Any = SimpleNamespace(
        sync_timeout_s=5,
        max_sync_retries=0,
        sync_retry_delay_s=0,
        verify_weights="first",
        in_flight_policy="retract",
        max_engine_restarts=2,
        engine_restart_delay_s=0,
        health_check_timeout_s=5,
        health_check_interval_s=0.01,
    )
    cluster: Any = world
    monitor = EngineMonitor(cluster, settings, EventLog(tmp_path))
    return world, WeightSynchronizer(cluster, cluster, settings, cluster.transport, monitor=monitor), monitor


def test_a_restarted_engine_gets_verified_weights_by_itself_while_the_trainer_waits(
    tmp_path: Path,
) -> None:
    world, synchronizer, monitor = restarting(2, tmp_path)

    async def scenario() -> list[str]:
        await synchronizer.update_weights(0)
        await synchronizer.update_weights(1)
        monitor.start()
        world.dead.add(1)
        world.steps.clear()
        world.took_part.clear()

        async def batch() -> list[str]:
            while monitor.serving != [0, 1] or not world.restarted:
                await asyncio.sleep(0.01)
            return list(world.steps)

        try:
            return await asyncio.wait_for(synchronizer.while_idle(batch()), 5)
        finally:
            await monitor.close()

    assert asyncio.run(scenario()) == ["disconnect", *STEPS]
    assert {tuple(ranks) for ranks in world.took_part} == {(1,)} and world.restarted == [1]
    events = [json.loads(line)["event"] for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert events == ["failed", "restarted", "serving again"]


def test_the_only_engine_is_waited_for_and_updated_once_it_has_started(tmp_path: Path) -> None:
    world, synchronizer, monitor = restarting(1, tmp_path)

    async def scenario() -> UpdateReport:
        await synchronizer.update_weights(0)
        world.during = {"transfer": lambda: None if world.restarted else world.dead.add(0)}
        return await asyncio.wait_for(synchronizer.update_weights(1), 5)

    report = asyncio.run(scenario())
    assert (report.version, report.attempts, report.verified) == (1, 2, True)
    assert monitor.serving == [0] and report.metrics()["faults/engine_restarts"] == 1


def test_an_error_of_the_wait_is_raised_and_the_wait_ends_where_no_engine_is_left(tmp_path: Path) -> None:
    world, synchronizer, monitor = restarting(1, tmp_path)

    async def fails() -> None:
        raise ValueError("no batch")

    async def never() -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        await synchronizer.update_weights(0)
        with pytest.raises(ValueError, match="no batch"):
            await synchronizer.while_idle(fails())
        for _ in range(3):
            await monitor.failed(0, "broken")
            await asyncio.sleep(0.05)
        with pytest.raises(EnginesLostError):
            await asyncio.wait_for(synchronizer.while_idle(never()), 5)

    asyncio.run(scenario())
