"""A real engine with the adapters of two policies at once: which request computes with which, and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine_log_probs import largest_difference
from policies_scenario import POLICIES, SOME
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
from roll.distributed.cluster import Cluster
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.ray_session import start_ray, stop_ray
from roll.distributed.resources import ResourceManager
from roll.distributed.train.weight_sender import StageAdapters
from roll.distributed.weights.adapters import AdapterSynchronizer
from roll.distributed.weights.report import UpdateReport
from roll.distributed.weights.synchronizer import WeightUpdateError
from roll.models.tiny import write_tiny_model
from roll.pipeline.learning.policies import PolicyRanks
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

pytestmark = pytest.mark.integration

DEVICES = {"actor_train": [0, 1], "actor_infer": [2]}
NAMES = list(POLICIES)


@dataclass
class Shared:
    """Two training ranks with the policies, and an engine."""

    train: Cluster[FaultyWorker]
    engine: Cluster[InferWorker]
    synchronizer: AdapterSynchronizer
    version: int = -1

    def update(self, **seeds: int) -> UpdateReport:
        """Gives the engine the next version, in which these policies have the adapters of other seeds."""
        for policy, seed in seeds.items():
            self.train.call(ALL, FaultyWorker.set_adapters, seed, policy).get()
        self.version += 1
        return asyncio.run(self.synchronizer.update_weights(self.version))

    def generate(self, policies: list[str], tokens: int = 24) -> list[tuple[GenerateRequest, GenerateResult]]:
        """One call of the engine, whose requests are of these policies in turn."""
        prompts = [[(7 * index + place) % 90 + 1 for place in range(3 + 2 * index)] for index in range(8)]
        requests = [
            GenerateRequest(f"{index}", prompt, SamplingParams(tokens), index, policy=policies[index % len(policies)])
            for index, prompt in enumerate(prompts)
        ]
        [answers] = self.engine.call(ALL, InferWorker.generate, requests).get()
        return list(zip(requests, answers, strict=True))

    def difference(self, pairs: list[tuple[GenerateRequest, GenerateResult]], asked: str, computed: str) -> float:
        """Of the log-probs of requests to one policy and those of another one's adapters on the ranks."""
        requests, answers = zip(*(pair for pair in pairs if pair[0].policy == asked), strict=True)
        return largest_difference(PolicyRanks(self.train, computed), requests, answers)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("run")
    megatron = MegatronTrainConfig(tensor_model_parallel_size=2)
    trained = ActorTrainConfig(
        model_args=TrainModelArguments(dtype="fp32", lora_target=SOME),
        strategy_args=MegatronTrainArguments(strategy_config=megatron),
        device_mapping=DEVICES["actor_train"],
    )
    config = RLVRConfig(
        output_dir=str(folder),
        pretrain=str(write_tiny_model(folder / "model", "qwen3")),
        prompt_length=32,
        response_length=64,
        async_generation_ratio=1,
        actor_train=trained,
        policies=POLICIES,
        sync_timeout_s=600,
        sync_retry_delay_s=0,
        max_sync_retries=0,
        rpc_timeout_s=1200,
    )
    start_ray(config, "cpu", 3)
    resources = ResourceManager("cpu", 3, DEVICES)
    train = Cluster("actor_train", FaultyWorker, trained, config, resources, trained.layout)
    role = ActorInferConfig(
        model_args=ModelArguments(dtype="fp32"),
        strategy_args=SGLangArguments(),
        max_running_requests=16,
        device_mapping=DEVICES["actor_infer"],
    )
    engine = Cluster("actor_infer", InferWorker, role, config, resources, role.layout)
    try:
        for call in [cluster.initialize() for cluster in (train, engine)]:
            call.get()
        synchronizer = AdapterSynchronizer(train, engine, config)
        asyncio.run(synchronizer.setup())
        yield Shared(train, engine, synchronizer)
    finally:
        for cluster in (train, engine):
            cluster.shutdown()
        resources.release()
        stop_ray()


def test_requests_of_a_mixed_batch_compute_with_the_adapters_of_their_own_policy(shared: Shared) -> None:
    """Also where only one of them has changed since the version before."""
    for seeds in ({"math": 1, "code": 2}, {"code": 3}, {"math": 4}):
        report = shared.update(**seeds)
        assert report.verified and report.pause_seconds == 0
        pairs = shared.generate(NAMES)
        assert [answer.error for _, answer in pairs] == [None] * len(pairs)
        assert {version for _, answer in pairs for version in answer.versions} == {shared.version}
        for asked in NAMES:
            for computed in NAMES:
                found = shared.difference(pairs, asked, computed)
                assert found < 1e-5 if computed == asked else found > 1e-2
    assert report.metrics()["lora/adapters_loaded"] == 2 * len(NAMES), "this version and the one before"


def test_a_request_of_no_policy_or_of_an_unknown_one_is_an_error(shared: Shared) -> None:
    shared.update(math=1, code=2)
    for name, of in (("", ""), ("poetry", " of policy poetry")):
        for _, answer in shared.generate([name]):
            assert answer.finish_reason == "abort" and not answer.response_ids
            assert answer.error == f"no adapter{of} is loaded, and the weights without one are not the policy"


def test_all_policies_stay_at_the_version_before_where_the_load_of_one_fails(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.update(math=1, code=2)
    send = shared.synchronizer.send

    def damaged(engines: list[int], version: int, stages: list[StageAdapters]) -> Any:
        last = replace(stages[-1], data=stages[-1].data[:-1] + bytes([stages[-1].data[-1] ^ 1]))
        return send(engines, version, [*stages[:-1], last])

    monkeypatch.setattr(shared.synchronizer, "send", damaged)
    with pytest.raises(WeightUpdateError, match=r"the adapter code@\d+\.\d+ arrived damaged"):
        asyncio.run(shared.synchronizer.update_weights(shared.version + 1))
    monkeypatch.undo()
    pairs = shared.generate(NAMES)
    assert {version for _, answer in pairs for version in answer.versions} == {shared.version}
    assert max(shared.difference(pairs, name, name) for name in NAMES) < 1e-5
