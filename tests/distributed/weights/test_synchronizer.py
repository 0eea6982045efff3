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
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.base.errors import RunError
from roll.base.events import EVENTS_FILE, EventLog
from roll.distributed.calls.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError, seconds_left
from roll.distributed.infer.engine_monitor import EngineMonitor, EnginesLostError, EngineState
from roll.distributed.process_groups import BroadcastGroup
from roll.distributed.train.weight_sender import StageSource
from roll.distributed.weights import synchronizer as module
from roll.distributed.weights import transport as transports
from roll.distributed.weights.broadcast import BroadcastTransport
from roll.distributed.weights.plan import WeightSpec
from roll.distributed.weights.report import Transfer, UpdateReport
from roll.distributed.weights.shared_memory import SharedMemoryTransport
from roll.distributed.weights.synchronizer import (
    VerificationError,
    WeightSynchronizer,
    WeightUpdateError,
    choose_transport,
)
from roll.distributed.weights.transport import Transport
from tests.processes import PATIENCE_S

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
            raise VerificationError(f"{name} broke", self.engines)

    async def call(self, ranks: list[int], method: Callable[..., Any], *args: Any) -> list[Any]:
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

        async def call(self, ranks: list[int] | None, method: Any, *args: Any) -> list[int | None]:
            groups.extend(args[0] if args else [])
            return [5555, None]

    train: Any = Devices([0, 1])
    infer: Any = Devices([0, 1] if shared else [2, 3])
    assert choose_transport(train, infer) is transport
    assert choose_transport(train, infer, "broadcast") is BroadcastTransport
    if transport is BroadcastTransport:
        with pytest.raises(RunError, match="weight_transport: shared_memory needs"):
            choose_transport(train, infer, "shared_memory")
    if backend is not None:
        made = BroadcastTransport(train, infer, 1.0, 1 << 20)
        made.sources = [StageSource(0, [], "10.0.0.1", frozenset())]
        asyncio.run(made.connect())
        assert {(group.backend, group.port, group.world_size) for group in groups} == {(backend, 5555, 3)}


def test_a_transport_of_the_user_is_registered_once_and_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(BroadcastTransport):
        """As a module of `custom_modules` registers it."""

    monkeypatch.setattr(transports, "TRANSPORTS", known := dict(transports.TRANSPORTS))
    monkeypatch.setattr(module, "TRANSPORTS", known)
    transports.register_transport("mine")(Mine)
    clusters: Any = SimpleNamespace(platform="cpu", nodes={0}, config=SimpleNamespace(device_mapping=[0]))
    assert module.choose_transport(clusters, clusters, "mine") is Mine
    with pytest.raises(ValueError, match="'mine' is registered already"):
        transports.register_transport("mine")(Mine)


def updated(
    world: World, retries: int = 2, timeout_s: float = 5.0, updates: int = 1, verify: str = "always", **config: Any
) -> tuple[UpdateReport | WeightUpdateError, WeightSynchronizer, list[float]]:
    """Outcome of the last of `updates` updates, the synchronizer, and the waits between attempts."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    settings: Any = SimpleNamespace(
        sync_timeout_s=timeout_s,
        model_update_buffer_size_mb=1,
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
    monkeypatch.setattr("roll.distributed.weights.synchronizer.STEP_GRACE_S", 0.0)
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
        """Starts a new process; in it, or in the one that there is, `start_again` starts the engine."""

    async def call(self, ranks: list[int], method: Callable[..., Any], *args: Any) -> list[Any]:
        if method.__name__ == "start_again":
            self.restarted += ranks
            self.dead.difference_update(ranks)
            return [None]
        return await super().call(ranks, method, *args)


SETTINGS: Any = SimpleNamespace(
    sync_timeout_s=5,
    model_update_buffer_size_mb=1,
    max_sync_retries=0,
    sync_retry_delay_s=0,
    verify_weights="first",
    in_flight_policy="retract",
    max_engine_restarts=2,
    engine_restart_delay_s=0,
    health_check_timeout_s=5,
    health_check_interval_s=0.01,
)
"""Configuration of a run in which two restarts of an engine are allowed."""

WorldT = TypeVar("WorldT", bound=World)


def restarting(engines: int, tmp_path: Path) -> tuple[Restarting, WeightSynchronizer, EngineMonitor]:
    """Engines, with the synchronizer and the monitor of a run."""
    world = Restarting(engines)
    cluster: Any = world
    monitor = EngineMonitor(cluster, SETTINGS, EventLog(tmp_path))
    return world, WeightSynchronizer(cluster, cluster, SETTINGS, cluster.transport, monitor=monitor), monitor


def with_trainer(
    world: WorldT, tmp_path: Path, max_sync_retries: int = 0
) -> tuple[WorldT, WeightSynchronizer, EngineMonitor]:
    """As `restarting`, with training ranks of another role than the engines."""
    settings: Any = SimpleNamespace(**{**vars(SETTINGS), "max_sync_retries": max_sync_retries})
    cluster: Any = world
    train: Any = Trainer()
    monitor = EngineMonitor(cluster, settings, EventLog(tmp_path))
    return world, WeightSynchronizer(train, cluster, settings, cluster.transport, monitor=monitor), monitor


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
            return await asyncio.wait_for(synchronizer.while_idle(batch()), PATIENCE_S)
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
        return await asyncio.wait_for(synchronizer.update_weights(1), PATIENCE_S)

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
            while monitor.states[0] is EngineState.RESTARTING:
                await asyncio.sleep(0.01)
        with pytest.raises(EnginesLostError):
            await asyncio.wait_for(synchronizer.while_idle(never()), PATIENCE_S)

    asyncio.run(scenario())


class Trainer:
    """Training ranks that only have a role, and send one tensor."""

    role = "actor_train"

    async def call(self, ranks: None, method: Any) -> list[StageSource]:
        return [StageSource(0, [WeightSpec("w", (1,), "float32")], "127.0.0.1", frozenset("w"))]


def trainer_error(kind: str, method: str) -> ClusterError:
    return ClusterError("actor_train", method, 0, kind, f"{method}: the rank is gone")


@pytest.mark.parametrize("update", ["update_weights", "while_idle"])
def test_a_trainer_found_dead_while_it_is_disconnected_ends_the_update_at_once(tmp_path: Path, update: str) -> None:
    """The attempt fails with an error of the engine, which is then awaited only if the trainer lives."""

    class Disconnected(Restarting):
        async def disconnect(self) -> None:
            if self.dead:
                raise trainer_error(PROCESS_DIED, "release_buckets")

    world = Disconnected(1)
    _, synchronizer, monitor = with_trainer(world, tmp_path)

    async def scenario() -> None:
        await synchronizer.update_weights(0)
        if update == "update_weights":
            work: Any = synchronizer.update_weights(1)
        else:
            await monitor.failed(0, "broken")
            work = synchronizer.while_idle(asyncio.sleep(60))
        world.during = {"transfer": lambda: world.dead.add(0)}
        with pytest.raises(ClusterError, match="release_buckets: the rank is gone"):
            await asyncio.wait_for(work, PATIENCE_S)
        await monitor.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("step", ["transfer", "disconnect"])
def test_a_trainer_that_does_not_answer_in_the_last_attempt_is_the_error_of_the_update(
    tmp_path: Path, step: str
) -> None:
    class Silent(Restarting):
        async def transfer(self, checksums: bool) -> Transfer:
            await self.step("transfer")
            raise trainer_error(TIMEOUT, "fill_bucket") if step == "transfer" else RuntimeError("the peer is gone")

        async def disconnect(self) -> None:
            await self.step("disconnect")
            if step == "disconnect":
                raise trainer_error(TIMEOUT, "release_buckets")

    world, synchronizer, _ = with_trainer(Silent(1), tmp_path, max_sync_retries=2)
    with pytest.raises(ClusterError, match="the rank is gone") as caught:
        asyncio.run(synchronizer.update_weights(0))
    assert caught.value.process_failed and world.steps.count("transfer") == 3
    assert world.steps[-1] == "abort" and not world.restarted


def test_restarted_engines_are_not_blamed_for_a_trainer_that_does_not_answer(tmp_path: Path) -> None:
    class Silent(Restarting):
        async def transfer(self, checksums: bool) -> Transfer:
            if self.restarted:
                raise trainer_error(TIMEOUT, "fill_bucket")
            return await super().transfer(checksums)

    world, synchronizer, monitor = with_trainer(Silent(1), tmp_path)

    async def scenario() -> None:
        await synchronizer.update_weights(0)
        await monitor.failed(0, "broken")
        with pytest.raises(ClusterError, match="fill_bucket: the rank is gone"):
            await asyncio.wait_for(synchronizer.while_idle(asyncio.sleep(60)), PATIENCE_S)

    asyncio.run(scenario())
    assert world.restarted == [0]


def test_an_engine_that_dies_before_the_first_update_is_recovered(tmp_path: Path) -> None:
    """The transport connects in the first attempt, which fails because the engine does not join the group."""

    class Joining(Restarting):
        async def connect(self) -> None:
            await super().connect()
            if self.dead:
                raise ClusterError(self.role, "join_broadcast_groups", 0, "EngineNotRunningError", "process 7 died")

    world, synchronizer, _ = with_trainer(Joining(1), tmp_path)
    world.dead.add(0)

    async def scenario() -> UpdateReport:
        await synchronizer.setup()
        return await synchronizer.update_weights(0)

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)).attempts == 2 and world.restarted == [0]


def test_one_late_answer_of_a_trainer_while_a_restarted_engine_gets_the_weights_is_repeated(tmp_path: Path) -> None:
    class Late(Restarting):
        answers = 0

        async def transfer(self, checksums: bool) -> Transfer:
            if self.restarted:
                self.answers += 1
                if self.answers == 1:
                    raise trainer_error(TIMEOUT, "fill_bucket")
            return await super().transfer(checksums)

    world, synchronizer, monitor = with_trainer(Late(1), tmp_path, max_sync_retries=1)

    async def until_it_serves_again() -> None:
        while not (world.restarted and monitor.serving):
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        await synchronizer.update_weights(0)
        await monitor.failed(0, "broken")
        await asyncio.wait_for(synchronizer.while_idle(until_it_serves_again()), PATIENCE_S)

    asyncio.run(scenario())
    assert world.answers == 2 and world.restarted == [0]


@pytest.mark.parametrize("waiting", ["for a batch", "for an engine"])
def test_a_part_of_the_run_that_has_failed_for_good_ends_the_wait(tmp_path: Path, waiting: str) -> None:
    """The judge has no engine left, while a batch waits for its scores or actor_infer for a restart."""
    world, _, monitor = restarting(1, tmp_path)
    judge: Any = World()
    judge.role = "judge"
    lost = EngineMonitor(judge, SETTINGS, EventLog(tmp_path), needs_weights=False, restarts=False)
    cluster: Any = world
    synchronizer = WeightSynchronizer(
        cluster, cluster, SETTINGS, cluster.transport, monitor=monitor, fatal_errors=[lost.wait_until_lost]
    )

    async def never(rank: int, responsive: bool) -> None:
        await asyncio.sleep(60)

    world.restart = never  # type: ignore[method-assign]

    async def scenario() -> None:
        await synchronizer.update_weights(0)
        await monitor.failed(0, "broken", responsive=False)
        if waiting == "for a batch":
            work: Any = synchronizer.while_idle(asyncio.sleep(60))
        else:
            work = synchronizer.update_weights(1)
        wait = asyncio.create_task(asyncio.wait_for(work, PATIENCE_S))
        await asyncio.sleep(0.05)
        await lost.failed(0, "out of memory")
        with pytest.raises(EnginesLostError, match="judge has no engine left.* judge-0: out of memory"):
            await wait
        await monitor.close()

    asyncio.run(scenario())


class RestartedWithin(Restarting):
    """Engine 1 dies within the first call of `method`, which ends only when the engine has been restarted."""

    monitor: EngineMonitor
    method = "transfer"

    async def die_in(self, method: str) -> None:
        if method == self.method:
            self.method = ""
            before = len(self.restarted)
            await self.monitor.failed(1, "killed")
            while len(self.restarted) == before or 1 not in self.monitor.started:
                await asyncio.sleep(0)

    async def transfer(self, checksums: bool) -> Transfer:
        dies = self.method == "transfer"
        await self.die_in("transfer")
        if dies:
            raise RuntimeError("the peer is gone")
        return await super().transfer(checksums)

    async def call(self, ranks: list[int], method: Callable[..., Any], *args: Any) -> list[Any]:
        answers = await super().call(ranks, method, *args)
        await self.die_in(method.__name__)
        return answers


async def until_all_serve(monitor: EngineMonitor) -> None:
    while len(monitor.serving) < len(monitor.states):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("update", ["update_weights", "while_idle"])
def test_an_attempt_in_which_an_engine_was_killed_and_restarted_is_not_counted(tmp_path: Path, update: str) -> None:
    world, synchronizer, monitor = with_trainer(RestartedWithin(2), tmp_path)
    world.monitor, world.method = monitor, ""

    async def scenario() -> None:
        await synchronizer.update_weights(0)
        if update == "update_weights":
            world.method = "transfer"
            assert (await synchronizer.update_weights(1)).attempts == 2
        else:
            await monitor.failed(1, "killed")
            world.method = "transfer"
            await synchronizer.while_idle(until_all_serve(monitor))
        assert monitor.serving == [0, 1]

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert world.restarted == ([1] if update == "update_weights" else [1, 1])


@pytest.mark.parametrize("update", ["update_weights", "while_idle"])
def test_an_engine_restarted_after_the_commit_waits_for_weights(tmp_path: Path, update: str) -> None:
    """Its new process has none, although the attempt succeeds."""
    world, synchronizer, monitor = with_trainer(RestartedWithin(2), tmp_path)
    world.monitor, world.method = monitor, ""

    async def scenario() -> None:
        await synchronizer.update_weights(0)
        if update == "while_idle":
            await monitor.failed(1, "killed")
        world.method = "commit_update"
        if update == "update_weights":
            assert (await synchronizer.update_weights(1)).attempts == 1
            assert (monitor.serving, monitor.started) == ([0], [1])
        await synchronizer.while_idle(until_all_serve(monitor))

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert world.took_part[-2:] == [[1], [1]] and world.steps.count("commit") == 3


def test_an_engine_that_never_holds_the_weights_that_were_sent_is_restarted_where_others_do(tmp_path: Path) -> None:
    class Damaged(Restarting):
        async def call(self, ranks: list[int], method: Callable[..., Any], *args: Any) -> list[Any]:
            answers = await super().call(ranks, method, *args)
            if method.__name__ == "checksums" and not self.restarted:
                answers = [{"w": "2"} if rank == 1 else answer for rank, answer in zip(ranks, answers, strict=True)]
            return answers

    world, synchronizer, monitor = with_trainer(Damaged(3), tmp_path, max_sync_retries=1)

    async def scenario() -> UpdateReport:
        report = await asyncio.wait_for(synchronizer.update_weights(0), PATIENCE_S)
        await monitor.close()
        return report

    assert asyncio.run(scenario()).attempts == 3 and world.restarted == [1]
    events = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [event["component"] for event in events[:3]] == ["weight update", "weight update", "actor_infer-1"]
    assert all("engine 1: w differs" in event["message"] for event in events[:3])


def test_engines_leave_a_broadcast_group_whose_trainer_does_not_and_the_next_attempt_has_a_new_one() -> None:
    calls: list[tuple[str, tuple[str, ...]]] = []

    class Members:
        platform, world_size, layout = "cpu", 1, SimpleNamespace(tensor=1)

        def __init__(self, device: int) -> None:
            self.config = SimpleNamespace(device_mapping=[device])

        async def call(self, ranks: list[int] | None, method: Any, *args: Any) -> list[int]:
            if method.__name__ == "leave_broadcast_group":
                raise trainer_error(TIMEOUT, "leave_broadcast_group")
            if ranks is not None:
                calls.append((method.__name__, tuple(group.name for group in args[0])))
            return [5555]

    async def scenario() -> None:
        train: Any = Members(0)
        infer: Any = Members(1)
        transport = BroadcastTransport(train, infer, 1.0, 1 << 20)
        transport.sources = [StageSource(0, [], "10.0.0.1", frozenset())]
        await transport.connect()
        with pytest.raises(ClusterError, match="leave_broadcast_group"):
            await transport.disconnect()
        await transport.connect()

    asyncio.run(scenario())
    (joined, first), (left, same), (again, second) = calls
    assert (joined, left, again) == ("join_broadcast_groups", "leave_broadcast_groups", "join_broadcast_groups")
    assert first == same != second
