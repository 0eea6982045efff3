"""Dead and stopped processes are noticed without a call; the processes here are real and do nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.distributed import process_watch
from roll.distributed.engine_monitor import EnginesLostError
from roll.distributed.events import EVENTS_FILE, EventLog
from roll.distributed.process_watch import ProcessWatch, deaths_as_causes
from roll.distributed.remote_errors import PROCESS_DIED, TIMEOUT, CallContext, ClusterError
from roll.stopped_processes import StopTimes


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
    deadline = time.monotonic() + 10
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
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(ClusterError):
            await asyncio.wait_for(watch.wait_for_death(), 1)
        await watch.close()
        return caught.value

    error = asyncio.run(scenario())
    assert (error.role, error.rank, error.kind) == ("actor_train", 1, PROCESS_DIED) and error.process_failed
    assert "actor_train-1: its process died" in str(error) and not (tmp_path / EVENTS_FILE).exists()


def test_a_stopped_rank_is_killed_and_its_death_names_the_reason(cluster: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [0.0]
        watch = ProcessWatch([cluster], EventLog(tmp_path), clock=lambda: now[0], stop_times=StopTimes(10, 99))
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
        watch = ProcessWatch([], EventLog(tmp_path), lambda: processes, stop_times=StopTimes(0.0))
        cluster.children[0].send_signal(signal.SIGSTOP)
        until(lambda: cluster.status(0) == psutil.STATUS_STOPPED)
        watch.look()
        until(lambda: cluster.status(0) == psutil.STATUS_ZOMBIE)
        watch.look()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.wait_for_death(), 0.05)

    asyncio.run(scenario())
    assert "rollouter" in (tmp_path / EVENTS_FILE).read_text()


def test_the_death_of_a_rank_is_the_cause_of_an_error_of_another_one(cluster: Any) -> None:
    """Only of errors that do not name a dead process themselves, and only while a rank is dead."""

    def raised(kind: str) -> ClusterError:
        error = ClusterError("actor_train", "train_step", 0, kind, "connection closed by peer")
        with pytest.raises(ClusterError) as caught, deaths_as_causes({"actor_train": cluster}):
            raise error
        assert caught.value is error or caught.value.__cause__ is error
        return caught.value

    assert raised("RuntimeError").kind == "RuntimeError", "all ranks are alive"
    cluster.children[1].kill()
    until(lambda: cluster.status(1) == psutil.STATUS_ZOMBIE)
    death = raised("RuntimeError")
    assert (death.rank, death.kind) == (1, PROCESS_DIED) and death.process_failed
    assert raised(TIMEOUT).kind == TIMEOUT
    with (
        pytest.raises(ClusterError, match="actor_train-1: its process died"),
        deaths_as_causes({"actor_train": cluster}),
    ):
        raise ClusterError("actor_infer", "update", 0, PROCESS_DIED, "an engine died at the same time")
    with pytest.raises(ClusterError, match="actor_train-1: its process died"), deaths_as_causes({"a": cluster}):
        raise EnginesLostError("Ray has lost the node of all engines and ranks")


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
            await asyncio.wait_for(watch.wait_for_death(), 5)
        await watch.close()

    asyncio.run(scenario())
    assert "ValueError: half a line of /proc" in caplog.text and "OSError: too many open files" in caplog.text
    assert caplog.text.count("Traceback") == 1, "only the unexpected error has one"
