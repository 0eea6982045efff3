"""A run over several nodes: two Ray nodes on this machine stand for two machines."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_workers import Echo
from doctor_workers import MatmulSlowOnNodeOne
from ray.cluster_utils import Cluster as RayNodes
from test_async_run import check_invariants

from roll.base.errors import RunError
from roll.base.terminal import EXIT_INTERRUPTED
from roll.cli import main
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import RoleConfig
from roll.distributed.calls.remote_call import ALL
from roll.distributed.cluster import Cluster
from roll.distributed.model_download import fetch_on_nodes
from roll.distributed.ray_session import CPU_SLOT, start_ray, stop_ray
from roll.distributed.resources import ResourceError, ResourceManager
from roll.tools.doctor import measure
from tests.configs.samples import SFT, write
from tests.hub_server import commit_of, serve_hub
from tests.integration.runs import (
    assert_nothing_is_left,
    finish,
    inputs_in,
    lines,
    processes_of,
    recipe,
    start,
    wait_for_event,
    wait_for_line,
)
from tests.processes import PATIENCE_S, name_of

pytestmark = pytest.mark.integration

GPUS = ("4,6", "5,7")
"""CUDA_VISIBLE_DEVICES of the two nodes; Ray counts the GPUs, and nothing uses one."""


NODE = {"num_cpus": 1, "num_gpus": 2, "resources": {CPU_SLOT: 2}, "object_store_memory": 100_000_000}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", GPUS[0])
        nodes = RayNodes(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", GPUS[1])
            nodes.add_node(**NODE)
        nodes.wait_for_nodes(PATIENCE_S)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", nodes.address)
            yield nodes
    finally:  # a head that stays, or its address in /tmp/ray, keeps others from starting Ray
        stop_ray()
        nodes.shutdown()


def test_devices_are_counted_through_the_nodes_of_a_joined_ray(two_nodes: RayNodes, tmp_path: Path) -> None:
    config = BaseConfig(output_dir=str(tmp_path), rpc_timeout_s=600, system_envs={"MINE": "yes"})
    start_ray(config, "cpu", 2)
    with pytest.raises(ResourceError, match="needs 3 node"):
        ResourceManager("cpu", 2, {"echo": [0, 4]})
    resources = ResourceManager("cpu", 2, {"echo": [0, 1, 2, 3]})
    with pytest.raises(ResourceError, match="another run holds them"):
        ResourceManager("cpu", 2, {"other": [0]})
    layout = ParallelLayout(data=2, tensor=2)
    echo = Cluster("echo", Echo, RoleConfig(device_mapping=[0, 1, 2, 3]), config, resources, layout)
    ranks = echo.call(ALL, Echo.describe).get()
    assert echo.nodes == {0, 1}
    assert [(rank.node, rank.devices, rank.master_address) for rank in ranks] == [
        (node, (device,), ranks[0].address) for node, device in ((0, 0), (0, 1), (1, 2), (1, 3))
    ]
    assert all(rank.address != "127.0.0.1" for rank in ranks)
    assert echo.call_shards(Echo.shard, [[1], [2]]).get() == [(0, [1]), (2, [2])]
    echo.shutdown()
    resources.release()


def test_the_other_node_fetches_a_model_by_name_and_a_failure_names_it(two_nodes: RayNodes, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (served / name).write_text("{}")
    config = BaseConfig(output_dir=str(tmp_path))
    with serve_hub() as hub:
        hub.add("models", "tiny/any", served)
        cache = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        config.system_envs = {**cache, "TRANSFORMERS_OFFLINE": "0"}
        start_ray(config, "cpu", 2)
        resources = ResourceManager("cpu", 2, {"actor_train": [0, 1, 2, 3]})
        asyncio.run(fetch_on_nodes(["tiny/any"], config, resources))
        commit = commit_of(served)
        assert (tmp_path / "cache/hub/models--tiny--any/snapshots" / commit / "model.safetensors").is_file()
        hub.status = 503
        config.system_envs["HF_HOME"] = str(tmp_path / "empty")
        (other,) = [node.address for node in resources.nodes if node.node_id != resources.this_node]
        with pytest.raises(RunError, match=f"node {other}: tiny/any is not a folder here .* answered 503"):
            asyncio.run(fetch_on_nodes(["tiny/any"], config, resources))
        resources.release()


def test_workers_have_the_gpus_of_their_node_and_the_nccl_settings(two_nodes: RayNodes, tmp_path: Path) -> None:
    config = BaseConfig(output_dir=str(tmp_path), rpc_timeout_s=600, deterministic=True)
    start_ray(config, "cuda", 2)
    resources = ResourceManager("cuda", 2, {"actor_train": [0, 1, 2, 3]})
    assert sorted(",".join(node.gpus) for node in resources.nodes) == sorted(GPUS)
    slots = [slot for slots in resources.device_slots("actor_train", 4) for slot in slots]
    for slot in slots:
        own, other = resources.visible_devices(slot).split(",")
        gpus = resources.nodes[slot.node].gpus
        assert own == gpus[slot.local_devices[0]] and {own, other} == set(gpus)
    role = RoleConfig(device_mapping=[0, 1, 2, 3], system_envs={"NCCL_NVLS_ENABLE": "1"})
    echo = Cluster("actor_train", Echo, role, config, resources, ParallelLayout(data=4))
    expected = {
        "CUDA_VISIBLE_DEVICES": list(map(resources.visible_devices, slots)),
        "NCCL_CUMEM_ENABLE": ["0"] * 4,
        "NCCL_NVLS_ENABLE": ["1"] * 4,  # the recipe's own wins
        "CUBLAS_WORKSPACE_CONFIG": [":4096:8"] * 4,
    }
    assert {name: echo.call(ALL, Echo.variable, name).get() for name in expected} == expected
    echo.shutdown()
    resources.release()


def test_the_doctor_measures_devices_and_links_and_names_the_node_whose_matrix_products_are_slow(
    two_nodes: RayNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SpeedWorker", MatmulSlowOnNodeOne)
    recipe = write(tmp_path, SFT.replace("device_mapping: [0, 1]", "device_mapping: 0-3"))
    keys = ["platform=cpu", "num_devices_per_node=2", "actor_train.model_args.dtype=fp32", f"output_dir={tmp_path}"]
    assert main(["doctor", str(recipe), *keys, "--seconds", "0.1", "--slower-than", "0.3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(rank["node"], rank["device"]) for rank in found["ranks"]] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert set(found["median"]) == {"matmul", "copy", "in_node", "across_nodes"}
    assert all(rank[name] > 0 for rank in found["ranks"] for name in found["median"])
    assert found["all_reduce"] > 0 and 1 in found["slow_nodes"]
    assert ["matmul" in rank["slow"] for rank in found["ranks"]] == [False, False, True, True]


def config_of_nodes(folder: Path, model: Path, **keys: Any) -> Path:
    """A run with its trainer on the first node, and engines on one device of each."""
    return recipe(
        inputs_in(folder / "data", model),
        folder,
        num_devices_per_node=2,
        actor_train__strategy_args__strategy_config={},
        actor_train__device_mapping=[0],
        actor_infer__device_mapping=[1, 2],
        verify_weights="always",
        save_steps=0,
        eval_steps=0,
        **keys,
    )


def test_an_engine_over_two_nodes_gets_every_update_and_is_restarted_on_both_when_it_dies_on_the_second(
    two_nodes: RayNodes, tiny_model_dir: Path, tmp_path: Path
) -> None:
    run = start(config_of_nodes(tmp_path, tiny_model_dir, actor_infer__num_gpus_per_worker=2, max_steps=1000))
    wait_for_line(run, tmp_path, 3)
    second = [process for process in processes_of(tmp_path) if "sglang::scheduler_TP1" in name_of(process)]
    second[0].kill()
    wait_for_event(run, tmp_path, "serving again")
    wait_for_event(run, tmp_path, f"node 1: process {second[0].pid} of the engine died")
    wait_for_line(run, tmp_path, lines(tmp_path)[-1]["step"] + 2)
    run.send_signal(signal.SIGINT)
    assert finish(run)[0] == EXIT_INTERRUPTED
    for metrics in lines(tmp_path):
        assert metrics["weight_update/verified"] == 1
        assert metrics["correction/log_prob_diff_max"] < 1e-4
    assert lines(tmp_path)[-1]["faults/engine_restarts"] == 1
    assert_nothing_is_left(tmp_path)


def test_a_lost_node_with_an_engine_is_survived(two_nodes: RayNodes, tiny_model_dir: Path, tmp_path: Path) -> None:
    keys = {"async_generation_ratio": 1, "deterministic": False, "max_steps": 1000, "actor_train__pg_variant": "tis"}
    run = start(config_of_nodes(tmp_path, tiny_model_dir, **keys))
    wait_for_line(run, tmp_path, 3)
    [second] = two_nodes.worker_nodes
    two_nodes.remove_node(second, allow_graceful=False)
    try:
        wait_for_event(run, tmp_path, "is not restarted: Ray has lost its node 1")
        wait_for_line(run, tmp_path, lines(tmp_path)[-1]["step"] + 2)
        run.send_signal(signal.SIGINT)
        assert finish(run)[0] == EXIT_INTERRUPTED
    finally:
        two_nodes.add_node(**NODE)
        two_nodes.wait_for_nodes(PATIENCE_S)
    check_invariants(lines(tmp_path), 1)
    assert lines(tmp_path)[-1]["faults/engines_down"] == 1
    assert_nothing_is_left(tmp_path)
