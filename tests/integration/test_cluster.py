"""Clusters on Ray: dispatch, failures that name their rank, deadlines, devices that do not fit, no process left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_workers import AsyncEcho, Echo

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import RoleConfig
from roll.distributed.calls.remote_actor import RemoteActor
from roll.distributed.calls.remote_call import ALL
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError, deadline_scope
from roll.distributed.cluster import Cluster
from roll.distributed.processes import has_ended, log_file
from roll.distributed.ray_session import start_ray, stop_ray
from roll.distributed.resources import ResourceError, ResourceManager
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.integration


LAYOUT = ParallelLayout(tensor=2, data=2, pipeline=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> BaseConfig:
    folder = tmp_path_factory.mktemp("run")
    return BaseConfig(output_dir=str(folder), rpc_timeout_s=600, system_envs={"MINE": "yes"})


@pytest.fixture(scope="module")
def resources(config: BaseConfig) -> Iterator[ResourceManager]:
    start_ray(config, "cpu", num_devices=6)
    yield ResourceManager("cpu", 6, {"echo": [0, 1, 2, 3], "side": [4]})
    stop_ray()


def make(config: BaseConfig, resources: ResourceManager) -> Cluster[Echo]:
    return Cluster("echo", Echo, RoleConfig(device_mapping=[0, 1, 2, 3]), config, resources, LAYOUT)


@pytest.fixture(scope="module")
def echo(config: BaseConfig, resources: ResourceManager) -> Iterator[Cluster[Echo]]:
    cluster = make(config, resources)
    yield cluster
    cluster.shutdown()


def test_a_call_gives_the_ranks_it_names_the_same(echo: Cluster[Echo]) -> None:
    assert echo.call(ALL, Echo.same, "x", extra=3).get() == [(rank, "x", 3) for rank in range(4)]
    assert echo.call([2, 0], Echo.same, "y").get() == [(2, "y", 0), (0, "y", 0)]


def test_call_shards_gives_each_data_index_its_shard_and_collects_in_order(echo: Cluster[Echo]) -> None:
    assert asyncio.run(result_of(echo.call_shards(Echo.shard, [[0, 1, 2], [3, 4]]))) == [(0, [0, 1, 2]), (2, [3, 4])]
    with pytest.raises(ValueError, match="echo.shard: 1 shards; give one to each of 2 data ranks"):
        echo.call_shards(Echo.shard, [[0]])


async def result_of(call: Any) -> Any:
    return await call


def test_a_process_knows_its_cores_threads_and_environment(echo: Cluster[Echo]) -> None:
    found = echo.call(ALL, Echo.surroundings).get()[0]
    rank = echo.call(ALL, Echo.describe).get()[0]
    assert tuple(found["affinity"]) == rank.cores and found["threads"] == rank.threads
    assert found["env"] == {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rank.master_port),
        "MINE": "yes",
    }


def test_a_method_that_is_not_registered_is_refused_with_those_that_are(echo: Cluster[Echo]) -> None:
    with pytest.raises(AttributeError, match="echo has no method 'not_registered'; its workers register .*'same'"):
        echo.call(ALL, Echo.not_registered)


@pytest.mark.parametrize("waits", ["get", "await"])
def test_the_traceback_of_the_first_rank_that_raised_comes_first(
    echo: Cluster[Echo], waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.distributed.calls.remote_call.FAILURE_GRACE_S", PATIENCE_S)
    with pytest.raises(ClusterError) as caught:
        call = echo.call(ALL, Echo.stumble, 2, tmp_path / "first")
        call.get() if waits == "get" else asyncio.run(result_of(call))
    message = str(caught.value)
    assert message.startswith("echo.stumble failed on rank 2 (node 0, devices 2, log ")
    assert message.index("rank 2 lost its key") < message.index("then rank")
    assert (caught.value.rank, caught.value.kind, caught.value.method) == (2, "KeyError", "stumble")


def test_a_call_that_failed_within_a_call_fails_as_that_call(echo: Cluster[Echo]) -> None:
    with pytest.raises(ClusterError, match="^reward.score failed on rank 2$") as caught:
        echo.call(ALL, Echo.call_dead_rank).get()
    assert (caught.value.role, caught.value.rank, caught.value.process_failed) == ("reward", 2, True)


def test_an_error_for_the_user_arrives_as_its_sentence_and_its_traceback_is_in_the_log(
    config: BaseConfig, echo: Cluster[Echo]
) -> None:
    with pytest.raises(ClusterError, match="^pretrain: is not a folder; give one$"):
        echo.call(ALL, Echo.refuse).get()
    assert "Traceback" in Path(log_file(config, "echo-0")).read_text()


@pytest.mark.parametrize("waits", ["get", "await"])
def test_a_call_past_its_deadline_names_the_rank_without_an_answer(echo: Cluster[Echo], waits: str) -> None:
    [process] = map(psutil.Process, echo.call([1], Echo.process_id).get())
    process.suspend()
    try:
        with deadline_scope(time.monotonic() + 0.3):
            call = echo.call(ALL, Echo.same, 0)
        wait([answer for rank, answer in call._answers.items() if rank != 1])
        with pytest.raises(ClusterError, match=r"echo.same: no answer within 0[.\d]* s from rank 1 \(node 0,") as e:
            call.get() if waits == "get" else asyncio.run(result_of(call))
    finally:
        process.resume()
    assert e.value.kind == "Timeout"
    echo.call(ALL, Echo.same, 0).get()


def test_concurrent_workers_run_calls_concurrently(config: BaseConfig, resources: ResourceManager) -> None:
    cluster = Cluster("side", AsyncEcho, RoleConfig(device_mapping=[4]), config, resources, ParallelLayout())
    calls = [cluster.call(ALL, AsyncEcho.meet, 10) for _ in range(10)]
    assert sorted(call.get()[0] for call in calls) == [*range(10)], "each waits for the others"
    cluster.shutdown()


def test_a_dead_rank_is_named_and_shutdown_leaves_no_process(config: BaseConfig, resources: ResourceManager) -> None:
    cluster = make(config, resources)
    children = cluster.call(ALL, Echo.spawn).get()
    own = cluster.call(ALL, Echo.process_id).get()
    processes = [psutil.Process(process) for process in own + children]
    with pytest.raises(ClusterError) as caught:
        cluster.call(ALL, Echo.die, 3).get()
    assert (caught.value.rank, caught.value.kind) == (3, PROCESS_DIED)
    cluster.shutdown()
    assert all(has_ended(process) for process in processes)


def test_the_process_that_replaces_a_dead_one_is_ended_with_its_children(
    config: BaseConfig, resources: ResourceManager
) -> None:
    cluster = Cluster("side", AsyncEcho, RoleConfig(device_mapping=[4]), config, resources, ParallelLayout())
    cluster.initialize().get()
    first = cluster.local_processes[0]
    first.kill()
    first.wait()
    for responsive in (False, True):
        asyncio.run(cluster.restart(0, responsive))
        [child] = cluster.call(ALL, AsyncEcho.spawn).get()
        started = psutil.Process(child)
        assert cluster.local_processes[0].pid == started.ppid()
    cluster.shutdown()
    assert has_ended(started)


def test_a_process_that_dies_as_soon_as_it_has_started_is_named(
    config: BaseConfig, resources: ResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(process_id: int) -> Any:
        raise psutil.NoSuchProcess(process_id)

    cluster = make(config, resources)
    monkeypatch.setattr(psutil, "Process", gone)
    with pytest.raises(ClusterError, match="died as soon as it had started") as caught:
        asyncio.run(RemoteActor("rollouter", config, {}, list).ready())
    assert caught.value.kind == PROCESS_DIED
    with pytest.raises(ClusterError, match=r"echo.start failed on rank 0 .*\nthe process died as soon") as of_a_rank:
        cluster.initialize()
    assert of_a_rank.value.kind == PROCESS_DIED
    monkeypatch.undo()
    cluster.shutdown()


def test_devices_that_do_not_fit_fail_at_once_with_the_table(
    resources: ResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reservation is waited for."""
    monkeypatch.delattr("roll.distributed.resources.placement_group")
    with pytest.raises(ResourceError, match="needs 2 node") as caught:
        ResourceManager("cpu", 6, {"actor_train": [0, 1], "actor_infer": [6]})
    assert "no such node" in str(caught.value) and "actor_infer" in str(caught.value)
    with pytest.raises(ResourceError, match="fit"):
        ResourceManager("cpu", 8, {"actor_train": [0, 7]})


def test_a_ray_that_cannot_start_is_an_error_with_its_reason(config: BaseConfig) -> None:
    code = textwrap.dedent("""
        from roll.configs.pipeline import BaseConfig
        from roll.distributed.ray_session import RayStartError, start_ray
        try:
            start_ray(BaseConfig(), "cpu", 2)
        except RayStartError as error:
            print(error)
    """)
    expected = [
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "no Ray answers at RAY_ADDRESS=127.0.0.1:1"),
        ({"RAY_ADDRESS": "nowhere"}, "is not HOST:PORT"),
        ({"RAY_TMPDIR": "/proc/nowhere"}, "cannot start Ray on this machine for run 'roll': FileNotFoundError"),
    ]
    for variables, said in expected:
        environment = {**os.environ, **variables}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert said in run.stdout, run.stderr


def test_another_ray_on_this_machine_is_not_joined() -> None:
    code = textwrap.dedent("""
        from roll.configs.pipeline import BaseConfig
        from roll.distributed.ray_session import start_ray, stop_ray
        start_ray(BaseConfig(), "cpu", 2)
        stop_ray()
    """)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, for the sockets in it
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # as a Ray that has died leaves it
        environment = {**os.environ, "RAY_TMPDIR": folder}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


DRIVER = f"""
import signal, sys, time
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
from test_cluster import ALL, LAYOUT, BaseConfig, Cluster, Echo, ResourceManager, RoleConfig, start_ray, stop_ray
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    config = BaseConfig(output_dir=sys.argv[1])
    start_ray(config, "cpu", 4)
    resources = ResourceManager("cpu", 4, {{"echo": [0, 1, 2, 3]}})
    cluster = Cluster("echo", Echo, RoleConfig(device_mapping=[0, 1, 2, 3]), config, resources, LAYOUT)
    cluster.call(ALL, Echo.same, 1).get()
    print("ready", flush=True)
    sleeping = cluster.call(ALL, Echo.sleep, 0, 600.0)
    try:
        time.sleep(600)
    finally:
        cluster.shutdown()
        resources.release()
        stop_ray()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A driver with a cluster, in a process group of its own, and the processes that it has started."""
    (tmp_path / "driver.py").write_text(DRIVER)
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with run:
        try:
            assert run.stdout is not None and "ready" in run.stdout.readline()
            started = psutil.Process(run.pid).children(recursive=True)
            assert len(started) > 4
            yield run, started
        finally:
            run.kill()


def test_no_process_outlives_a_driver_that_was_killed(
    driver: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    run, started = driver
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not alive, [process.cmdline() for process in alive]


def test_a_signal_to_the_group_of_a_driver_leaves_ray_to_it(
    driver: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    """As `timeout` sends it: the driver then ends its processes in order, for which it needs Ray."""
    run, started = driver
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait() == 7
    assert not psutil.wait_procs(started, timeout=120)[1]
