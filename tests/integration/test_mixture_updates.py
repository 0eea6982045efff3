"""Weight updates of a mixture of experts to a real engine, from ranks that have all experts and from ranks of some."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from test_weight_sync import World, check_three_updates, disagreement, megatron, update, world_of
from weight_sync_workers import Fault, FaultyWorker, OwnRankTransport

from roll.distributed.calls.remote_call import ALL
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.weights.broadcast import BroadcastTransport
from roll.distributed.weights.plan import PlanError
from roll.distributed.weights.synchronizer import WeightUpdateError
from roll.models.tiny import write_tiny_model

pytestmark = pytest.mark.integration

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
"""Of the second expert rank, which is another data rank than the one that sends."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("run")
    trained = {"ep1": megatron([0]), "ep2": megatron([1, 2], expert_model_parallel_size=2)}
    paths: dict[str, Any] = {
        "ep1": [BroadcastTransport],
        "ep1 shared": [],
        "ep2": [BroadcastTransport],
        "ep2 shared": [],
        "ep2 own rank": [OwnRankTransport],
    }
    model = write_tiny_model(folder / "model", "qwen3_moe", num_hidden_layers=2)
    with world_of(folder, str(model), trained, [3], paths) as made:
        yield made


@pytest.mark.parametrize("path", ["ep1", "ep1 shared", "ep2", "ep2 shared"])
def test_log_probs_agree_after_updates_that_are_verified(mixtures: World, path: str) -> None:
    check_three_updates(mixtures, path.split()[0], path)


def test_one_changed_expert_is_one_parameter_of_the_engine_that_differs(mixtures: World) -> None:
    for path in ("ep2", "ep2 shared"):
        with pytest.raises(WeightUpdateError) as caught:
            update(mixtures, path, Fault("corrupt", EXPERT))
        assert "model.layers.1.mlp.experts.w2_weight@0 differs: sent" in str(caught.value)
        assert str(caught.value).count("differs: sent") == 2, "once in each of two attempts"
        update(mixtures, path)
    assert disagreement(mixtures, "ep2", 1.0) < 3e-5


@pytest.mark.parametrize("path", ["ep2", "ep2 shared"])
def test_a_missing_expert_is_named(mixtures: World, path: str) -> None:
    with pytest.raises(WeightUpdateError, match=rf"{EXPERT} was not sent"):
        update(mixtures, path, Fault("drop", EXPERT))
    update(mixtures, path)


def test_an_expert_that_does_not_exist_and_one_that_is_not_sent_are_refused_before_an_update(mixtures: World) -> None:
    train = mixtures.train["ep2"]
    faults: dict[Any, str] = {"drop": rf"{EXPERT} is sent by no stage", "add": r"experts\.9\..* is not of the model"}
    for kind, message in faults.items():
        fault = Fault(kind, EXPERT)
        train.call(ALL, FaultyWorker.set_fault, fault).get()
        with pytest.raises(PlanError, match=message):
            asyncio.run(mixtures.synchronizers["ep2"].setup())
    train.call(ALL, FaultyWorker.set_fault, None).get()
    assert all(mixtures.engine.call(ALL, InferWorker.is_serving).get())


def test_an_engine_gets_experts_from_the_rank_on_its_own_device(mixtures: World) -> None:
    mixtures.train["ep2"].call(ALL, FaultyWorker.gather_as_on_a_gpu).get()
    check_three_updates(mixtures, "ep2", "ep2 own rank")
