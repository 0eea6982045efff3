"""Weight updates by deltas to real engines in bf16: layouts, damaged deltas, attempts that fail, engines that die."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from test_weight_sync import ADAPTED, MODEL, World, generate, megatron, update, world_of
from weight_sync_workers import Fault, FaultySynchronizer, FaultyWorker

from roll.base.events import EVENTS_FILE
from roll.distributed.calls.remote_call import ALL
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.weights.broadcast import BroadcastTransport
from roll.distributed.weights.delta import RankDelta
from roll.distributed.weights.delta_sender import StageDelta
from roll.distributed.weights.delta_updates import DeltaSynchronizer
from roll.distributed.weights.plan import spec_bytes
from roll.distributed.weights.synchronizer import WeightUpdateError
from roll.models.tiny import write_tiny_model

pytestmark = pytest.mark.integration

NUDGE = 1e-5
"""Standard deviation of a change; the weights' is 0.02, where neighbours in bf16 are 1e-4 apart."""


class FaultyDeltas(FaultySynchronizer, DeltaSynchronizer):
    """Updates by deltas with a fault."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """An engine of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    trained = {
        "tp2": megatron([0, 1], dtype="bf16", tensor_model_parallel_size=2),
        "pp2": megatron([2, 3], dtype="bf16", pipeline_model_parallel_size=2),
        "lora": megatron([4], ADAPTED, dtype="bf16"),
    }
    paths: dict[str, Any] = {
        "tp2": [BroadcastTransport],
        "tp2 shared": [],
        "pp2": [BroadcastTransport],
        "pp2 shared": [],
        "lora": [],
    }
    model = str(write_tiny_model(folder / "model", "qwen2", **MODEL))
    with world_of(folder, model, trained, [5, 6], paths, FaultyDeltas, "delta") as made:
        yield made


def whole(world: World, path: str) -> int:
    """Bytes of all weights."""
    sources = world.synchronizers[path]._transport.sources
    return sum(spec_bytes(spec) for source in sources for spec in source.specs)


def nudge(world: World, path: str, seed: int = 0, size: float = NUDGE) -> None:
    world.train[path.split()[0]].call(ALL, FaultyWorker.nudge_weights, seed, size).get()


def is_delta(world: World, path: str) -> bool:
    """Whether the next update is one, after a small change; it is verified, and the engine serves then."""
    nudge(world, path)
    report = update(world, path)
    assert report.verified and report.attempts == 1
    assert {version for _, answer in generate(world, 1.0) for version in answer.versions} == {world.version}
    return 0 < report.bytes < whole(world, path) / 4


def check_five_updates(world: World, path: str, size: float) -> None:
    sent = [update(world, path).bytes, update(world, path).bytes]
    for seed in range(4):
        nudge(world, path, seed, size)
        report = update(world, path)
        assert report.verified and report.attempts == 1
        sent.append(report.bytes)
    first, unchanged, *deltas = sent
    assert first == whole(world, path) and unchanged == 0
    assert all(0 < each < first / 4 for each in deltas), sent
    assert is_delta(world, path)


@pytest.mark.parametrize("path", ["tp2", "tp2 shared", "pp2", "pp2 shared"])
def test_updates_after_the_first_send_what_has_changed(world: World, path: str) -> None:
    check_five_updates(world, path, NUDGE)


def test_merged_adapters_change_some_of_the_weights(world: World) -> None:
    check_five_updates(world, "lora", 1e-3)


def without_a_position(delta: RankDelta) -> RankDelta:
    """Without the last value of the first piece."""
    piece, *others = delta.pieces
    gaps, values = piece.count * piece.gap_bytes, piece.count * piece.value_dtype.itemsize
    data = delta.data[: gaps - piece.gap_bytes] + delta.data[gaps : gaps + values - piece.value_dtype.itemsize]
    return RankDelta((replace(piece, count=piece.count - 1), *others), data + delta.data[gaps + values :])


def with_a_shifted_position(delta: RankDelta) -> RankDelta:
    """The first value that can is one place further, the one after it is where it was."""
    piece = delta.pieces[0]
    assert piece.gap_bytes == 1, piece
    gaps = [*delta.data[: piece.count]]
    place = next(i for i in range(piece.count - 1) if gaps[i] < 255 and gaps[i + 1] > 0)
    gaps[place : place + 2] = gaps[place] + 1, gaps[place + 1] - 1
    return replace(delta, data=bytes(gaps) + delta.data[piece.count :])


def beyond_the_end(delta: RankDelta) -> RankDelta:
    return replace(delta, pieces=(replace(delta.pieces[0], size=delta.pieces[0].count), *delta.pieces[1:]))


MUTATIONS = {
    "dropped": (without_a_position, "differs: sent"),
    "shifted": (with_a_shifted_position, "differs: sent"),
    "beyond the end": (beyond_the_end, "the delta ends at value"),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_damaged_delta_is_found_and_whole_weights_follow(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (mutate, message) = "tp2 shared", MUTATIONS[kind]
    update(world, path)
    assert is_delta(world, path)
    synchronizer: Any = world.synchronizers[path]
    load, damaged = synchronizer.load, list[str]()

    async def damage(packed: list[StageDelta]) -> None:
        ranks = ray.get(packed[0].deltas)
        if not damaged and ranks[1].pieces:
            damaged.append(ranks[1].pieces[0].name)
            packed = [replace(packed[0], deltas=ray.put([ranks[0], mutate(ranks[1])])), *packed[1:]]
        await load(packed)

    monkeypatch.setattr(synchronizer, "load", damage)
    nudge(world, path)
    report = update(world, path)
    assert (report.attempts, report.bytes, len(damaged)) == (2, whole(world, path), 1)
    events = (Path(world.config.output_dir) / EVENTS_FILE).read_text().splitlines()
    assert message in events[-1] and damaged[0] in events[-1], events[-1]
    monkeypatch.undo()
    assert is_delta(world, path)


def test_whole_weights_follow_an_attempt_that_failed_half_way(world: World) -> None:
    path = "tp2"
    update(world, path)
    with pytest.raises(WeightUpdateError, match="injected failure"):
        update(world, path, Fault("fail", "model.layers.3.mlp.down_proj.weight"))
    assert update(world, path).bytes == whole(world, path)
    assert is_delta(world, path)


def test_an_engine_that_dies_between_updates_gets_whole_weights(world: World) -> None:
    path = "pp2 shared"
    update(world, path)
    assert is_delta(world, path)
    [numbers] = world.engine.call(ALL, InferWorker.process_ids).get()
    for number in numbers[1:]:
        psutil.Process(number).kill()
    nudge(world, path)
    report = update(world, path)
    assert report.verified and report.bytes == whole(world, path)
    assert is_delta(world, path)
