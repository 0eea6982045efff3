"""Weight updates by deltas of a mixture of experts, from ranks that have some of the experts each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_delta_updates import NUDGE, FaultyDeltas, check_five_updates
from test_weight_sync import World, megatron, world_of

from roll.distributed.weights.broadcast import BroadcastTransport
from roll.models.tiny import write_tiny_model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("run")
    trained = {"ep2": megatron([0, 1], dtype="bf16", expert_model_parallel_size=2)}
    paths: dict[str, Any] = {"ep2": [BroadcastTransport], "ep2 shared": []}
    model = str(write_tiny_model(folder / "model", "qwen3_moe", num_hidden_layers=2))
    with world_of(folder, model, trained, [2], paths, FaultyDeltas, "delta") as made:
        yield made


@pytest.mark.parametrize("path", ["ep2", "ep2 shared"])
def test_experts_of_several_ranks_are_one_parameter_of_the_engine(mixtures: World, path: str) -> None:
    check_five_updates(mixtures, path, NUDGE)
