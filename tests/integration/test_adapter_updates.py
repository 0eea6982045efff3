"""Adapters sent to real engines: what they compute, which request has which version, when a version ends, faults."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from engine_log_probs import largest_difference
from weight_sync_workers import FaultyWorker

from roll.configs.arguments import ModelArguments, TrainModelArguments
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import (
    ActorInferConfig,
    ActorTrainConfig,
    MegatronTrainArguments,
    MegatronTrainConfig,
    SGLangArguments,
)
from roll.distributed.calls.remote_call import ALL
from roll.distributed.calls.remote_errors import ClusterError
from roll.distributed.cluster import Cluster
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.ray_session import start_ray, stop_ray
from roll.distributed.resources import ResourceManager
from roll.distributed.train.weight_sender import StageAdapters
from roll.distributed.weights.adapters import AdapterSynchronizer
from roll.distributed.weights.report import UpdateReport
from roll.distributed.weights.synchronizer import WeightUpdateError
from roll.models.tiny import write_tiny_model
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

pytestmark = pytest.mark.integration

MODEL = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 4096}
DEVICES = {"actor_train": [0, 1], "actor_infer": [2], "wide": [3, 4]}
SOME = ["q_proj", "v_proj", "up_proj", "down_proj"]
"""Without some of the tensors that an engine computes at once with these."""

LONG = 1500
"""Tokens of responses that take longer than several updates."""

RATIO = 2

ROUNDING = 5e-5
"""Above the difference of two fp32 engines, which depends on the processor: up to 2.4e-5; of other adapters, 0.8."""


@dataclass
class World:
    """Two training ranks, engines of one and of two devices, and a synchronizer for each."""

    config: RLVRConfig
    train: Cluster[FaultyWorker]
    engines: dict[str, Cluster[InferWorker]]
    synchronizers: dict[str, AdapterSynchronizer]
    version: int = -1
    requests: int = 0


def role_of(**options: Any) -> ActorInferConfig:
    return ActorInferConfig(
        model_args=ModelArguments(dtype="fp32"), strategy_args=SGLangArguments(), max_running_requests=16, **options
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("run")
    trained = ActorTrainConfig(
        model_args=TrainModelArguments(dtype="fp32", lora_target=SOME, lora_rank=4, lora_alpha=8),
        strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(tensor_model_parallel_size=2)),
        device_mapping=DEVICES["actor_train"],
        lora_update="adapter",
    )
    config = RLVRConfig(
        output_dir=str(folder),
        pretrain=str(write_tiny_model(folder / "model", "qwen3", **MODEL)),
        prompt_length=32,
        response_length=LONG,
        async_generation_ratio=RATIO,
        actor_train=trained,
        sync_timeout_s=600,
        sync_retry_delay_s=0,
        max_sync_retries=0,
        rpc_timeout_s=1200,
    )
    start_ray(config, "cpu", 5)
    resources = ResourceManager("cpu", 5, DEVICES)
    train = Cluster("actor_train", FaultyWorker, trained, config, resources, trained.layout)
    roles = {
        "actor_infer": role_of(device_mapping=DEVICES["actor_infer"]),
        "wide": role_of(device_mapping=DEVICES["wide"], num_gpus_per_worker=2),
    }
    engines = {name: Cluster(name, InferWorker, role, config, resources, role.layout) for name, role in roles.items()}
    try:
        for call in [cluster.initialize() for cluster in (train, *engines.values())]:
            call.get()
        synchronizers = {name: AdapterSynchronizer(train, engine, config) for name, engine in engines.items()}
        for synchronizer in synchronizers.values():
            asyncio.run(synchronizer.setup())
        yield World(config, train, engines, synchronizers)
    finally:
        for cluster in (train, *engines.values()):
            cluster.shutdown()
        resources.release()
        stop_ray()


def update(world: World, seed: int, engine: str = "actor_infer") -> UpdateReport:
    """Gives the engine the next version, whose adapters are those of a seed."""
    world.train.call(ALL, FaultyWorker.set_adapters, seed).get()
    world.version += 1
    return asyncio.run(world.synchronizers[engine].update_weights(world.version))


def requests_of(world: World, tokens: int = 12, count: int = 6) -> list[GenerateRequest]:
    world.requests += 1
    sampling = SamplingParams(max_new_tokens=tokens)
    prompts = [[(7 * index + place) % 90 + 1 for place in range(3 + 2 * index)] for index in range(count)]
    return [
        GenerateRequest(f"{world.requests}-{index}", prompt, sampling, seed=index)
        for index, prompt in enumerate(prompts)
    ]


def start(world: World, requests: list[GenerateRequest], engine: str = "actor_infer") -> Any:
    """A call in progress, whose requests the engine has."""
    call = world.engines[engine].call(ALL, InferWorker.generate, requests)
    world.engines[engine].call(ALL, InferWorker.is_serving).get()  # sent after it on the same connection
    return call


def answers_of(call: Any) -> list[GenerateResult]:
    [answers] = call.get()
    assert [answer.error for answer in answers] == [None] * len(answers)
    return answers


def disagreement(
    world: World, requests: list[GenerateRequest], answers: list[GenerateResult], base: bool = False
) -> float:
    return largest_difference(world.train, requests, answers, base)


def test_an_engine_refuses_requests_before_its_first_adapter(world: World) -> None:
    with pytest.raises(ClusterError, match="actor_infer-0 is not serving: it has no adapter yet"):
        start(world, requests_of(world)).get()


@pytest.mark.parametrize("engine", ["actor_infer", "wide"])
def test_log_probs_are_those_of_the_trainer_after_each_update(world: World, engine: str) -> None:
    for seed in range(6):
        report = update(world, seed, engine)
        assert report.verified and report.attempts == 1 and report.pause_seconds == 0
        requests = requests_of(world)
        answers = answers_of(start(world, requests, engine))
        assert {version for answer in answers for version in answer.versions} == {world.version}
        assert disagreement(world, requests, answers) < ROUNDING
        assert (disagreement(world, requests, answers, base=True) < ROUNDING) == (seed == 0)


def test_requests_of_three_versions_run_at_once_and_each_keeps_its_own(world: World) -> None:
    running = []
    for seed in (1, 2, 3):
        update(world, seed)
        requests = requests_of(world, LONG, count=2)
        running.append((seed, world.version, requests, start(world, requests)))
    assert not any(answer.done() for answer in running[0][3]._answers.values()), "the oldest runs beside the newest"
    for seed, version, requests, call in running:
        answers = answers_of(call)
        assert [set(answer.versions) for answer in answers] == [{version}] * len(answers)
        assert [len(answer.response_ids) for answer in answers] == [LONG] * len(answers)
        for other in (1, 2, 3):
            world.train.call(ALL, FaultyWorker.set_adapters, other).get()
            assert (disagreement(world, requests, answers) < ROUNDING) == (other == seed)


def loaded(report: UpdateReport) -> float:
    return report.metrics()["lora/adapters_loaded"]


def test_a_version_is_unloaded_when_it_is_old_and_its_last_request_has_ended(world: World) -> None:
    for seed in range(RATIO + 1):
        update(world, seed)
    requests = requests_of(world, LONG, count=1)
    call = start(world, requests)
    oldest = world.version
    counts = [loaded(update(world, seed)) for seed in range(1, RATIO + 3)]
    [answer] = answers_of(call)
    assert set(answer.versions) == {oldest} and len(answer.response_ids) == LONG
    assert counts == [RATIO + 1] * RATIO + [RATIO + 2] * 2
    assert loaded(update(world, 1)) == RATIO + 1


def test_sixty_updates_leave_no_more_adapters_and_no_more_memory(world: World) -> None:
    [numbers] = world.engines["actor_infer"].call(ALL, InferWorker.process_ids).get()

    def memory() -> int:
        return sum(psutil.Process(number).memory_info().rss for number in numbers)

    counts, sizes = [], []
    for seed in range(60):
        report = update(world, seed)
        counts.append(loaded(report))
        sizes.append(memory())
    assert counts == [RATIO + 1] * 60
    grown = statistics.median(sizes[50:]) - statistics.median(sizes[10:20])
    assert grown < 40 * report.bytes / 2, "less than half of what was sent since"


@pytest.mark.parametrize("fault", ["damaged", "another rank", "a stage is missing"])
def test_an_engine_serves_the_version_before_where_a_load_fails(
    world: World, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(world, 1)
    synchronizer, before = world.synchronizers["actor_infer"], world.version
    messages = {
        "damaged": "arrived damaged",
        "another rank": "is incompatible with the current LoRA memory pool",
        "a stage is missing": "the stages do not send every adapter once",
    }
    call, send = world.train.call, synchronizer.send

    def called(ranks: Any, method: Any, *arguments: Any) -> Any:
        return nothing() if method is FaultyWorker.pack_adapters else call(ranks, method, *arguments)

    def sent(engines: list[int], version: int, stages: list[StageAdapters]) -> Any:
        return send(engines, version, [spoilt(stage, fault) for stage in stages])

    if fault == "a stage is missing":
        monkeypatch.setattr(world.train, "call", called)
    else:
        monkeypatch.setattr(synchronizer, "send", sent)
    with pytest.raises(WeightUpdateError, match=messages[fault]):
        asyncio.run(synchronizer.update_weights(before + 1))
    monkeypatch.undo()
    requests = requests_of(world)
    answers = answers_of(start(world, requests))
    assert {version for answer in answers for version in answer.versions} == {before}
    assert disagreement(world, requests, answers) < ROUNDING
    update(world, 2)


async def nothing() -> list[list[StageAdapters]]:
    return [[], []]


def spoilt(stage: StageAdapters, fault: str) -> StageAdapters:
    if fault == "damaged":
        return dataclasses.replace(stage, data=stage.data[:-1] + bytes([stage.data[-1] ^ 1]))
    return dataclasses.replace(stage, config=stage.config | {"r": 64})


def test_a_started_engine_refuses_requests_until_it_gets_the_newest_version(world: World) -> None:
    update(world, 1)
    engine, synchronizer = world.engines["actor_infer"], world.synchronizers["actor_infer"]
    waiting = start(world, requests_of(world, LONG))
    [numbers] = engine.call(ALL, InferWorker.process_ids).get()
    for number in numbers[1:]:
        psutil.Process(number).kill()
    with pytest.raises(ClusterError, match="process .* of the engine died"):
        waiting.get()
    engine.call(ALL, InferWorker.start_again, True).get()
    with pytest.raises(ClusterError, match="it has no adapter yet"):
        start(world, requests_of(world)).get()
    asyncio.run(synchronizer.update_weights(world.version))  # from what was gathered before
    requests = requests_of(world)
    answers = answers_of(start(world, requests))
    assert {version for answer in answers for version in answer.versions} == {world.version}
    assert disagreement(world, requests, answers) < ROUNDING


def test_engines_that_a_trainer_leaves_have_none_of_its_adapters(world: World) -> None:
    """The next trainer may train the same version to other adapters."""
    update(world, 1)
    engine = world.engines["actor_infer"]
    engine.call(ALL, InferWorker.leave_trainer, True).get()
    world.train.call(ALL, FaultyWorker.set_adapters, 2).get()
    world.synchronizers["actor_infer"]._packed = None
    asyncio.run(world.synchronizers["actor_infer"].update_weights(world.version))
    requests = requests_of(world)
    assert disagreement(world, requests, answers_of(start(world, requests))) < ROUNDING
