"""Dead and stopped processes are noticed without a call; the processes here are real and do nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from roll.base.events import EVENTS_FILE, EventLog
from roll.distributed import process_watch, ray_session
from roll.distributed.calls.remote_errors import PROCESS_DIED, TIMEOUT, CallContext, ClusterError
from roll.distributed.core_pinning import Topology
from roll.distributed.infer.engine_monitor import EnginesLostError
from roll.distributed.process_watch import ProcessWatch
from roll.distributed.resources import Node, ResourceManager
from roll.usercode.stopped import StopTimes, is_stopped
from tests.processes import PATIENCE_S


class Sleeping:
    """A cluster of ranks that sleep."""

    role = "actor_train"

    def __init__(self, ranks: int) -> None:
        self.children = [subprocess.Popen(["sleep", "600"]) for _ in range(ranks)]
        self.local_processes = {rank: psutil.Process(child.pid) for rank, child in enumerate(self.children)}

    def died(self, rank: int, text: str) -> ClusterError:
        return CallContext(self.role, "watch", {rank: "node 0"}).died(rank, text)

    def status(self, rank: int) -> str:
        return self.local_processes[rank].status()


@pytest.fixture
def cluster() -> Iterator[Sleeping]:
    sleeping = Sleeping(2)
    yield sleeping
    for child in sleeping.children:
        child.kill()
        child.wait()


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_waits_for_something_else_learns_of_a_dead_rank(cluster: Any, tmp_path: Path) -> None:
    async def scenario() -> ClusterError:
        watch = ProcessWatch([cluster], EventLog(tmp_path))
        watch.start()
        waiting = asyncio.create_task(watch.wait_for_death())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        cluster.children[1].kill()
        with pytest.raises(ClusterError) as caught:
            await waiting
        with pytest.raises(ClusterError):
            await watch.wait_for_death()
        await watch.close()
        return caught.value

    error = asyncio.run(scenario())
    assert (error.role, error.rank, error.kind) == ("actor_train", 1, PROCESS_DIED) and error.process_failed
    assert "actor_train-1: its process died" in str(error) and not (tmp_path / EVENTS_FILE).exists()


def test_a_stopped_rank_is_killed_and_its_death_names_the_reason(cluster: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [0.0]
        watch = ProcessWatch(
            [cluster], EventLog(tmp_path), clock=lambda: now[0], stop_times=StopTimes(is_stopped, 10, 99)
        )
        cluster.children[0].send_signal(signal.SIGSTOP)
        until(lambda: cluster.status(0) == psutil.STATUS_STOPPED)
        watch.look()
        now[0] = 9.9
        watch.look()
        assert cluster.status(0) == psutil.STATUS_STOPPED
        now[0] = 10.0
        watch.look()
        until(lambda: cluster.status(0) == psutil.STATUS_ZOMBIE)
        watch.look()
        with pytest.raises(ClusterError, match="actor_train-0: was stopped by a signal for 10 s"):
            await watch.wait_for_death()

    asyncio.run(scenario())
    [event] = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert (event["component"], event["event"]) == ("actor_train-0", "killed")
    assert cluster.status(1) != psutil.STATUS_ZOMBIE


def test_another_process_that_stays_stopped_is_killed_and_its_death_is_left_to_its_callers(
    cluster: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        processes = {"rollouter": cluster.local_processes[0]}
        watch = ProcessWatch([], EventLog(tmp_path), lambda: processes, stop_times=StopTimes(is_stopped, 0.0))
        cluster.children[0].send_signal(signal.SIGSTOP)
        until(lambda: cluster.status(0) == psutil.STATUS_STOPPED)
        watch.look()
        until(lambda: cluster.status(0) == psutil.STATUS_ZOMBIE)
        watch.look()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.wait_for_death(), 0.05)

    asyncio.run(scenario())
    assert "rollouter" in (tmp_path / EVENTS_FILE).read_text()


def test_the_death_of_a_rank_is_the_cause_of_an_error_of_another_one(cluster: Any, tmp_path: Path) -> None:
    """Only of errors that do not name a dead process themselves, and only while a rank is dead."""

    async def scenario() -> None:
        watch = ProcessWatch([cluster], EventLog(tmp_path))

        def raised(error: Exception) -> ClusterError:
            with pytest.raises(ClusterError) as caught, watch.deaths_as_causes():
                raise error
            assert caught.value is error or caught.value.__cause__ is error
            return caught.value

        def failed(kind: str) -> ClusterError:
            return ClusterError("actor_train", "train_step", 0, kind, "connection closed by peer")

        assert raised(failed("RuntimeError")).kind == "RuntimeError", "all ranks are alive"
        cluster.children[1].kill()
        until(lambda: cluster.status(1) == psutil.STATUS_ZOMBIE)
        death = raised(failed("RuntimeError"))
        assert (death.rank, death.kind) == (1, PROCESS_DIED) and death.process_failed
        assert raised(failed(TIMEOUT)).kind == TIMEOUT
        assert raised(ClusterError("actor_infer", "update", 0, PROCESS_DIED, "an engine died too")).rank == 1
        assert raised(EnginesLostError("Ray has lost the node of all engines and ranks")).rank == 1

    asyncio.run(scenario())


@pytest.fixture
def ray(cluster: Sleeping, monkeypatch: pytest.MonkeyPatch) -> dict[str, psutil.Process]:
    """Two processes that stand for those of Ray."""
    processes = dict(zip(("gcs_server", "raylet"), cluster.local_processes.values(), strict=True))
    monkeypatch.setattr(ray_session, "_own", SimpleNamespace(processes=processes))
    monkeypatch.setattr(process_watch, "INTERVAL_S", 0.01)
    return processes


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_death_of_a_process_of_ray_ends_what_the_run_waits_for(
    ray: dict[str, psutil.Process], tmp_path: Path, name: str, number: signal.Signals
) -> None:
    async def scenario() -> None:
        watch = ProcessWatch([], EventLog(tmp_path), stop_times=StopTimes(is_stopped, 0.05))
        watch.start()
        with pytest.raises(ClusterError, match=f"^{name}, a process of Ray, died$") as caught:
            with watch.deaths_as_causes():
                ray[name].send_signal(number)
                await asyncio.sleep(PATIENCE_S)
        assert caught.value.process_failed == (name == "raylet"), "the run starts again"
        await asyncio.sleep(0)  # nothing is left of the cancellation
        await watch.close()

    asyncio.run(scenario())
    until(lambda: ray["raylet"].status() == psutil.STATUS_ZOMBIE)
    happened = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert (happened[-1]["component"], happened[-1]["event"]) == (name, "died")


def test_the_death_of_a_process_of_ray_is_the_cause_of_errors_that_it_brings(
    ray: dict[str, psutil.Process], tmp_path: Path
) -> None:
    async def scenario() -> None:
        watch = ProcessWatch([], EventLog(tmp_path))
        ray["raylet"].kill()
        until(lambda: ray["raylet"].status() == psutil.STATUS_ZOMBIE)
        for error in (ClusterError("actor_train", "train_step", 0, PROCESS_DIED, "gone"), RuntimeError("socket")):
            with pytest.raises(ClusterError, match="^raylet, a process of Ray, died$"), watch.deaths_as_causes():
                raise error

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_dead_ray_is_not_called_to_learn_its_nodes(ray: dict[str, psutil.Process], name: str) -> None:
    resources = object.__new__(ResourceManager)
    resources.nodes = [Node(node, "host", Topology(())) for node in "ab"]
    ray[name].kill()
    until(lambda: ray[name].status() == psutil.STATUS_ZOMBIE)
    assert resources.lost_nodes() == [0, 1], "Ray would connect again for a minute, and end this process"


def test_an_interruption_stays_one(ray: dict[str, psutil.Process], tmp_path: Path) -> None:
    async def block(watch: ProcessWatch) -> None:
        with watch.deaths_as_causes():
            await asyncio.sleep(PATIENCE_S)

    async def scenario() -> None:
        task = asyncio.create_task(block(ProcessWatch([], EventLog(tmp_path))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_a_look_that_fails_for_any_reason_is_logged_and_the_watch_goes_on(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_watch, "INTERVAL_S", 0.01)
    failures: list[Exception] = [ValueError("half a line of /proc"), OSError("too many open files")]

    def others() -> dict[str, psutil.Process]:
        if failures:
            raise failures.pop()
        return {}

    async def scenario() -> None:
        watch = ProcessWatch([cluster], EventLog(tmp_path), others)
        watch.start()
        cluster.children[0].kill()
        with pytest.raises(ClusterError, match="actor_train-0: its process died"):
            await watch.wait_for_death()
        await watch.close()

    asyncio.run(scenario())
    assert "ValueError: half a line of /proc" in caplog.text and "OSError: too many open files" in caplog.text
    assert caplog.text.count("Traceback") == 1, "only the unexpected error has one"
