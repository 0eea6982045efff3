"""Weight updates from real Megatron ranks to a real engine: parity of log-probs, verification, faults, clean end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from weight_sync_workers import Fault, FaultySynchronizer, FaultyWorker, OwnRankTransport

from roll.configs.arguments import ModelArguments, TrainModelArguments
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import (
    ActorInferConfig,
    ActorTrainConfig,
    MegatronTrainArguments,
    MegatronTrainConfig,
    SGLangArguments,
)
from roll.datasets.batch import Batch
from roll.distributed.calls.remote_call import ALL
from roll.distributed.calls.remote_errors import ClusterError
from roll.distributed.cluster import Cluster
from roll.distributed.infer.infer_worker import DOWN, InferWorker
from roll.distributed.processes import descendants
from roll.distributed.ray_session import start_ray, stop_ray
from roll.distributed.resources import ResourceManager
from roll.distributed.weights.broadcast import BroadcastTransport
from roll.distributed.weights.plan import spec_bytes
from roll.distributed.weights.report import Transfer, UpdateReport
from roll.distributed.weights.synchronizer import WeightSynchronizer, WeightUpdateError
from roll.distributed.worker import Worker
from roll.models.tiny import write_tiny_model
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

pytestmark = pytest.mark.integration

MODEL = {"tie_word_embeddings": True, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
ADAPTED = ["q_proj", "v_proj", "down_proj"]


def megatron(devices: list[int], lora: Sequence[str] = (), dtype: Any = "fp32", **sizes: int) -> ActorTrainConfig:
    return ActorTrainConfig(
        model_args=TrainModelArguments(dtype=dtype, lora_target=[*lora], lora_rank=4, lora_alpha=8),
        strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(**sizes)),
        device_mapping=devices,
    )


@dataclass
class World:
    """Two training clusters, one engine, and for each training cluster one synchronizer per transport."""

    config: RLVRConfig
    train: dict[str, Cluster[FaultyWorker]]
    engine: Cluster[InferWorker]
    synchronizers: dict[str, FaultySynchronizer]
    version: int = 0
    requests: int = 0


@contextlib.contextmanager
def world_of(
    folder: Path,
    model: str,
    trained: dict[str, ActorTrainConfig],
    engine_devices: list[int],
    paths: dict[str, Any],
    kind: type[FaultySynchronizer] = FaultySynchronizer,
    weight_update: Any = "full",
) -> Iterator[World]:
    """Training clusters of these roles beside one engine; `paths` are names of synchronizers with their transports."""
    dtype = next(iter(trained.values())).model_args.dtype
    config = RLVRConfig(
        output_dir=str(folder),
        pretrain=model,
        prompt_length=32,
        response_length=32,
        verify_weights="always",
        sync_timeout_s=600,
        sync_retry_delay_s=0,
        max_sync_retries=1,
        rpc_timeout_s=1200,
        model_update_buffer_size_mb=1,
        weight_update=weight_update,
    )
    devices = {role: worker.device_mapping for role, worker in trained.items()} | {"actor_infer": engine_devices}
    slots = 1 + max(device for own in devices.values() for device in own)
    start_ray(config, "cpu", slots)
    resources = ResourceManager("cpu", slots, devices)
    train = {
        role: Cluster(role, FaultyWorker, worker, config, resources, worker.layout) for role, worker in trained.items()
    }
    sglang = ActorInferConfig(
        model_args=ModelArguments(dtype=dtype),
        strategy_args=SGLangArguments(strategy_config={"load_format": "dummy"}),
        device_mapping=engine_devices,
        num_gpus_per_worker=len(engine_devices),
        max_running_requests=16,
    )
    engine = Cluster("actor_infer", InferWorker, sglang, config, resources, sglang.layout)
    clusters: list[Cluster[Worker]] = [*train.values(), engine]
    try:
        for call in [cluster.initialize() for cluster in clusters]:
            call.get()
        synchronizers = {
            path: kind(train[path.split()[0]], engine, config, *transport) for path, transport in paths.items()
        }
        for synchronizer in synchronizers.values():
            asyncio.run(synchronizer.setup())
        yield World(config, train, engine, synchronizers)
    finally:
        for cluster in clusters:
            cluster.shutdown()
        resources.release()
        stop_ray()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("run")
    trained = {
        "tp2": megatron([0, 1], tensor_model_parallel_size=2),
        "pp2": megatron([2, 3], pipeline_model_parallel_size=2),
        "lora": megatron([5], ADAPTED),
    }
    paths: dict[str, Any] = {
        "tp2": [BroadcastTransport],
        "pp2": [BroadcastTransport],
        "tp2 own rank": [OwnRankTransport],
        "tp2 shared": [],
        "pp2 shared": [],
        "lora": [],
        "lora broadcast": [BroadcastTransport],
    }
    with world_of(folder, str(write_tiny_model(folder / "model", "qwen2", **MODEL)), trained, [4], paths) as made:
        yield made


def update(world: World, path: str, fault: Fault | None = None) -> UpdateReport:
    """Updates to the next version with the synchronizer of this name."""
    world.version += 1
    synchronizer = world.synchronizers[path]
    if fault is not None:
        return asyncio.run(synchronizer.update_with(world.version, fault))
    return asyncio.run(synchronizer.update_weights(world.version))


def requests_of(world: World, temperature: float, count: int = 6) -> list[GenerateRequest]:
    """Prompts of different lengths under names of their own."""
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
    prompts = [[(7 * index + place) % 90 + 1 for place in range(3 + 2 * index)] for index in range(count)]
    world.requests += 1
    return [
        GenerateRequest(f"{world.requests}-{index}", prompt, sampling, seed=index)
        for index, prompt in enumerate(prompts)
    ]


def generate(world: World, temperature: float) -> list[tuple[list[int], GenerateResult]]:
    """Prompts and what the engine answers."""
    requests = requests_of(world, temperature)
    [answers] = world.engine.call(ALL, InferWorker.generate, requests).get()
    assert [answer.error for answer in answers] == [None] * len(requests)
    return [(request.prompt_ids, answer) for request, answer in zip(requests, answers, strict=True)]


def disagreement(world: World, role: str, temperature: float) -> float:
    """Largest difference between the engine's log-probs and those Megatron computes for the same tokens."""
    samples = generate(world, temperature)
    assert {version for _, answer in samples for version in answer.versions} == {world.version}
    width = max(len(prompt) + len(answer.response_ids) for prompt, answer in samples)
    shape = (len(samples), width)
    ids, mask, response = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    behavior = torch.zeros(shape)
    for row, (prompt, answer) in enumerate(samples):
        start, stop = len(prompt), len(prompt) + len(answer.response_ids)
        ids[row, :stop] = torch.tensor(prompt + answer.response_ids)
        mask[row, :stop], response[row, start:stop] = 1, 1
        behavior[row, start:stop] = torch.tensor(answer.log_probs)
    data = Batch(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.arange(width).expand(shape).contiguous(),
            "response_mask": response.bool(),
        },
        meta_info={"temperature": temperature, "micro_batches": [[0, 1, 2], [3, 4, 5]]},
    )
    train = world.train[role]
    scored, *_ = train.call_shards(FaultyWorker.compute_log_probs, [data] * train.layout.data).get()
    return ((scored.batch["log_probs"] - behavior) * response).abs().max().item()


def test_an_engine_on_dummy_weights_does_not_serve_before_the_first_update(world: World) -> None:
    with pytest.raises(ClusterError, match="actor_infer-0 is not serving: it started on dummy weights"):
        generate(world, 1.0)


@pytest.mark.parametrize("role", ["tp2", "pp2"])
def test_log_probs_agree_before_and_after_three_updates_by_broadcast(world: World, role: str) -> None:
    check_three_updates(world, role, role)


def check_three_updates(world: World, role: str, path: str) -> None:
    for _ in range(4):
        report = update(world, path)
        assert report.verified and report.attempts == 1
        assert disagreement(world, role, 1.0) < 1e-4
        assert disagreement(world, role, 0.7) < 1e-4
        world.train[role].call(ALL, FaultyWorker.scale_weights, 0.97).get()


@pytest.mark.parametrize("path", ["lora", "lora broadcast"])
def test_updates_after_the_first_send_the_layers_with_adapters_alone(world: World, path: str) -> None:
    """A fault in between makes the next update a whole one; every update is verified against all parameters."""
    whole = sum(spec_bytes(spec) for source in world.synchronizers[path]._transport.sources for spec in source.specs)
    layers = [
        spec_bytes(spec)
        for source in world.synchronizers[path]._transport.sources
        for spec in source.specs
        if any(name in spec.name for name in ("self_attn.q", "self_attn.k", "self_attn.v", "down_proj"))
        and not spec.name.endswith("bias")
    ]
    sent = []
    for seed in range(5):
        if seed == 3:
            with pytest.raises(WeightUpdateError, match="was not sent"):
                update(world, path, Fault("drop", "model.layers.3.mlp.down_proj.weight"))
        report = update(world, path)
        assert report.verified
        sent.append(report.bytes)
        assert disagreement(world, "lora", 1.0) < 1e-4
        world.train["lora"].call(ALL, FaultyWorker.move_adapters, seed).get()
    assert sent == [whole, sum(layers), sum(layers), whole, sum(layers)]


def test_weights_are_verified_once_where_configured(world: World) -> None:
    world.config.verify_weights = "first"
    reports = [update(world, "tp2") for _ in range(3)]
    world.config.verify_weights = "always"
    assert all(0 < report.pause_seconds <= report.seconds and not report.verified for report in reports)


@pytest.mark.parametrize("path", ["tp2", "tp2 shared"])
def test_requests_that_arrive_during_an_update_wait_for_the_new_weights(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(world, path)
    transport, arrived = world.synchronizers[path]._transport, []
    transfer = transport.transfer

    async def transfer_under_requests(checksums: bool) -> Transfer:
        arrived.append(world.engine.call(ALL, InferWorker.generate, requests_of(world, 1.0)))
        await asyncio.sleep(0.2)  # so that they reach the engine before the first tensor does
        return await transfer(checksums)

    monkeypatch.setattr(transport, "transfer", transfer_under_requests)
    update(world, path)
    [answers] = arrived[0].get()
    assert [(answer.error, set(answer.versions)) for answer in answers] == [(None, {world.version})] * len(answers)


FAULTS = [("corrupt", "differs: sent"), ("drop", "was not sent"), ("fail", "injected failure")]


@pytest.mark.parametrize("path", ["tp2", "pp2"])
@pytest.mark.parametrize(("kind", "message"), FAULTS)
def test_a_fault_is_detected_and_the_engine_does_not_serve_until_a_complete_update(
    world: World, path: str, kind: str, message: str
) -> None:
    check_fault(world, path, kind, message)


def check_fault(world: World, path: str, kind: Any, message: str) -> None:
    name = "model.layers.3.mlp.down_proj.weight"
    with pytest.raises(WeightUpdateError) as caught:
        update(world, path, Fault(kind, name))
    error = str(caught.value)
    assert message in error and "model.layers.3" in error and "2 attempt(s)" in error
    with pytest.raises(ClusterError, match="is not serving: weight update v"):
        generate(world, 1.0)
    update(world, path)
    assert disagreement(world, path.split()[0], 1.0) < 1e-4


@pytest.mark.parametrize("role", ["tp2", "pp2"])
def test_log_probs_agree_after_updates_through_shared_memory(world: World, role: str) -> None:
    check_three_updates(world, role, f"{role} shared")


@pytest.mark.parametrize(("kind", "message"), FAULTS)
def test_a_fault_in_shared_memory_is_detected(world: World, kind: str, message: str) -> None:
    check_fault(world, "pp2 shared", kind, message)


def test_an_update_that_hangs_ends_in_time_and_names_the_rank_without_an_answer(world: World, tmp_path: Path) -> None:
    hasty = dataclasses.replace(world.config, sync_timeout_s=15, max_sync_retries=0)
    synchronizer = WeightSynchronizer(world.train["tp2"], world.engine, hasty)
    asyncio.run(synchronizer.setup())
    fault = Fault("hang", "model.layers.3.mlp.down_proj.weight", until=str(tmp_path / "end"))
    world.train["tp2"].call(ALL, FaultyWorker.set_fault, fault).get()
    with pytest.raises(ClusterError, match=r"tp2.fill_bucket: no answer within .* s from rank [01] \("):
        asyncio.run(synchronizer.update_weights(world.version))
    (tmp_path / "end").touch()
    world.train["tp2"].call(ALL, FaultyWorker.set_fault, None).get()
    update(world, "tp2 shared")
    assert disagreement(world, "tp2", 1.0) < 1e-4


def test_an_engine_gets_its_weights_from_the_rank_on_its_own_device(world: World) -> None:
    world.train["tp2"].call(ALL, FaultyWorker.gather_as_on_a_gpu).get()
    check_three_updates(world, "tp2", "tp2 own rank")


def test_an_engine_is_started_again_in_the_process_of_its_worker(world: World) -> None:
    """The new engine has no state of the dead one, refuses a late end of its update, and leaves nothing open.

    So it is where the process that forks its scheduler dies too, twice, or is stopped. Its socket is in a folder of
    Ray's session, which is removed with it.
    """
    update(world, "tp2 shared")
    used = []
    for dies in ("scheduler", "fork_server", "fork_server", "stopped fork_server", "scheduler"):
        [numbers] = world.engine.call(ALL, InferWorker.process_ids).get()
        world.engine.call(ALL, InferWorker.begin_update, world.version).get()
        waiting = world.engine.call(ALL, InferWorker.generate, requests_of(world, 1.0))
        [server] = [
            child for child in psutil.Process(numbers[0]).children() if "fork_server" in "".join(child.cmdline())
        ]
        [socket] = [found.laddr for found in server.net_connections("unix") if found.laddr]
        assert str(socket).startswith(ray._private.worker._global_node.get_sockets_dir_path()), socket
        if dies == "stopped fork_server":
            server.suspend()
        for process in [server] if dies == "fork_server" else map(psutil.Process, numbers[1:]):
            process.kill()
        world.engine.call(ALL, InferWorker.start_again, True).get()
        with pytest.raises(ClusterError) as caught:
            waiting.get()
        assert caught.value.kind in DOWN
        with pytest.raises(ClusterError, match="it was restarted within the weight update"):
            world.engine.call(ALL, InferWorker.commit_update).get()
        assert not any(world.engine.call(ALL, InferWorker.is_serving).get())
        for path in ("tp2", "tp2 shared"):
            update(world, path)
            assert disagreement(world, "tp2", 1.0) < 1e-4
        [restarted] = world.engine.call(ALL, InferWorker.process_ids).get()
        assert restarted[0] == numbers[0] and not {*restarted[1:]} & {*numbers[1:]}
        assert len(restarted) == len(numbers)
        worker = psutil.Process(restarted[0])
        used.append((worker.num_fds(), worker.num_threads()))
    kept = 2 * (len(used) - 1)  # Python keeps pipes of dead processes
    descriptors, threads = zip(*used, strict=True)
    assert descriptors[-1] <= descriptors[0] + kept, used
    assert threads[-1] <= max(threads[:-1]), f"{used}: asyncio's own pool of threads may grow once, and then no more"


def test_an_engine_ends_with_the_worker_that_owns_it(world: World) -> None:
    [engine] = world.engine.call(ALL, InferWorker.process_ids).get()
    processes = descendants(psutil.Process(engine[0]))
    assert len(processes) >= 4, "the worker, the fork server, its scheduler, and what tracks Python's resources"
    processes[0].kill()
    assert not psutil.wait_procs(processes, timeout=120)[1]
    with pytest.raises(ClusterError) as caught:
        world.engine.call(ALL, InferWorker.resume).get()
    assert caught.value.kind == "ProcessDied"
