"""Publishing from real Megatron ranks to a real engine: parity of log-probs, verification, faults, no process left."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
from weight_sync_workers import ScalingWorker

from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import (
    ActorInferConfig,
    ActorTrainConfig,
    MegatronTrainArguments,
    MegatronTrainConfig,
    ModelArguments,
    SGLangArguments,
    TrainModelArguments,
)
from roll.distributed.cluster import Cluster
from roll.distributed.infer_worker import InferWorker
from roll.distributed.pending import ClusterError
from roll.distributed.protocol import DataProto
from roll.distributed.resources import ResourceManager, start_ray, stop_ray
from roll.distributed.weight_sync.publisher import BroadcastTransport, WeightPublisher
from roll.distributed.weight_sync.stage_tensors import Fault
from roll.distributed.weight_sync.transaction import GRACE_S, PublishError, PublishReport, Transfer
from roll.models.tiny import write_tiny_model
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

pytestmark = pytest.mark.integration

SLOTS = 6
MODEL = {"tie_word_embeddings": True, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
DEVICES = {"tp2": [0, 1], "pp2": [2, 3], "actor_infer": [4]}


def megatron(devices: list[int], **sizes: int) -> ActorTrainConfig:
    return ActorTrainConfig(
        model_args=TrainModelArguments(dtype="fp32"),
        strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(**sizes)),
        device_mapping=devices,
    )


@dataclass
class World:
    """Everything the tests share: two training clusters, one engine, and two publishers from each."""

    config: RLVRConfig
    clusters: dict[str, Cluster]
    publishers: dict[str, WeightPublisher]
    version: int = 0
    requests: int = 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("run")
    config = RLVRConfig(
        output_dir=str(folder),
        pretrain=str(write_tiny_model(folder / "model", "qwen2", **MODEL)),
        prompt_length=32,
        response_length=32,
        verify_weights="always",
        sync_timeout_s=30,
        sync_retry_delay_s=0,
        max_sync_retries=1,
        start_timeout_s=240,
        rpc_timeout_s=240,
        model_update_buffer_size_mb=1,
    )
    start_ray(config, "cpu", SLOTS)
    resources = ResourceManager("cpu", SLOTS, DEVICES)
    roles = {
        "tp2": (ScalingWorker, megatron(DEVICES["tp2"], tensor_model_parallel_size=2)),
        "pp2": (ScalingWorker, megatron(DEVICES["pp2"], pipeline_model_parallel_size=2)),
        "actor_infer": (
            InferWorker,
            ActorInferConfig(
                model_args=ModelArguments(dtype="fp32"),
                strategy_args=SGLangArguments(strategy_config={"load_format": "dummy"}),
                device_mapping=DEVICES["actor_infer"],
                max_running_requests=16,
            ),
        ),
    }
    clusters = {
        role: Cluster(role, cls, worker, config, resources, worker.layout) for role, (cls, worker) in roles.items()
    }
    try:
        starting = [cluster.initialize() for cluster in clusters.values()]
        for pending in starting:
            pending.get()
        engine = clusters["actor_infer"]
        publishers = {
            "tp2": WeightPublisher(clusters["tp2"], engine, config, BroadcastTransport),
            "pp2": WeightPublisher(clusters["pp2"], engine, config, BroadcastTransport),
            "tp2 shared": WeightPublisher(clusters["tp2"], engine, config),
            "pp2 shared": WeightPublisher(clusters["pp2"], engine, config),
        }
        for publisher in publishers.values():
            asyncio.run(publisher.setup())
        yield World(config, clusters, publishers)
    finally:
        for cluster in clusters.values():
            cluster.shutdown()
        resources.release()
        stop_ray()


def publish(world: World, way: str, fault: Fault | None = None) -> PublishReport:
    """The next version, from this training cluster and by this way."""
    world.version += 1
    return asyncio.run(world.publishers[way].publish(world.version, fault))


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
    [answers] = world.clusters["actor_infer"].generate([requests]).get()
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
    data = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.arange(width).expand(shape).contiguous(),
            "response_mask": response.bool(),
        },
        meta_info={"temperature": temperature, "micro_batches": [[0, 1, 2], [3, 4, 5]]},
    )
    [scored] = world.clusters[role].compute_log_probs([data]).get()
    return ((scored.batch["log_probs"] - behavior) * response).abs().max().item()


def test_an_engine_on_dummy_weights_serves_nothing_before_the_first_publish(world: World) -> None:
    with pytest.raises(ClusterError, match="actor_infer-0 serves nothing: it started on dummy weights"):
        generate(world, 1.0)


@pytest.mark.parametrize("role", ["tp2", "pp2"])
def test_log_probs_agree_before_and_after_three_publishes(world: World, role: str) -> None:
    check_three_publishes(world, role, role)


def check_three_publishes(world: World, role: str, way: str) -> None:
    for _ in range(4):
        report = publish(world, way)
        assert report.verified and report.attempts == 1
        assert disagreement(world, role, 1.0) < 1e-4
        assert disagreement(world, role, 0.7) < 1e-4
        world.clusters[role].scale_weights(0.97).get()


def test_weights_are_verified_once_where_that_is_asked_for(world: World) -> None:
    world.config.verify_weights = "first"
    reports = [publish(world, "tp2") for _ in range(3)]
    world.config.verify_weights = "always"
    assert all(0 < report.pause_seconds <= report.seconds and not report.verified for report in reports)


@pytest.mark.parametrize("way", ["tp2", "tp2 shared"])
def test_requests_that_arrive_during_a_publish_wait_for_the_new_weights(
    world: World, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(world, way)
    transport, arrived = world.publishers[way]._transport, []
    transfer = transport.transfer

    async def transfer_under_requests(digest: bool) -> Transfer:
        arrived.append(world.clusters["actor_infer"].generate([requests_of(world, 1.0)]))
        await asyncio.sleep(0.2)  # so that they reach the engine before the first tensor does
        return await transfer(digest)

    monkeypatch.setattr(transport, "transfer", transfer_under_requests)
    publish(world, way)
    [answers] = arrived[0].get()
    assert [(answer.error, set(answer.versions)) for answer in answers] == [(None, {world.version})] * len(answers)


DAMAGE = [("corrupt", "arrived different"), ("drop", "was not published"), ("fail", "told to fail")]


@pytest.mark.parametrize("way", ["tp2", "pp2"])
@pytest.mark.parametrize(("kind", "said"), DAMAGE)
def test_damage_is_detected_and_the_engine_serves_nothing_until_a_whole_publish(
    world: World, way: str, kind: str, said: str
) -> None:
    check_damage(world, way, kind, said)


def check_damage(world: World, way: str, kind: str, said: str) -> None:
    name = "model.layers.3.mlp.down_proj.weight"
    with pytest.raises(PublishError) as caught:
        publish(world, way, Fault(kind, name))
    message = str(caught.value)
    assert said in message and "model.layers.3" in message and "2 attempt(s)" in message
    with pytest.raises(ClusterError, match="serves nothing"):
        generate(world, 1.0)
    publish(world, way)
    assert disagreement(world, way.split()[0], 1.0) < 1e-4


@pytest.mark.parametrize("role", ["tp2", "pp2"])
def test_log_probs_agree_after_publishes_through_shared_memory(world: World, role: str) -> None:
    check_three_publishes(world, role, f"{role} shared")


@pytest.mark.parametrize(("kind", "said"), DAMAGE)
def test_damage_in_shared_memory_is_detected(world: World, kind: str, said: str) -> None:
    check_damage(world, "pp2 shared", kind, said)


def test_a_publish_that_hangs_ends_in_time_and_names_whom_it_waited_for(world: World) -> None:
    hasty = dataclasses.replace(world.config, sync_timeout_s=2, max_sync_retries=0)
    publisher = WeightPublisher(world.clusters["tp2"], world.clusters["actor_infer"], hasty)
    asyncio.run(publisher.setup())
    start = time.monotonic()
    with pytest.raises(PublishError, match=r"tp2.fill_shared_weights: no answer within .* s from rank [01] \("):
        asyncio.run(publisher.publish(world.version, Fault("hang", "model.layers.3.mlp.down_proj.weight")))
    assert time.monotonic() - start < 3 * hasty.sync_timeout_s + 2 * GRACE_S
    publish(world, "tp2 shared")
    assert disagreement(world, "tp2", 1.0) < 1e-4


def test_an_engine_ends_with_the_worker_that_owns_it(world: World) -> None:
    [engine] = world.clusters["actor_infer"].process_ids().get()
    processes = [psutil.Process(process) for process in engine]
    assert len(processes) >= 3
    processes[0].kill()
    assert not psutil.wait_procs(processes, timeout=20)[1]
    with pytest.raises(ClusterError) as caught:
        world.clusters["actor_infer"].resume().get()
    assert caught.value.kind == "ProcessDied"
