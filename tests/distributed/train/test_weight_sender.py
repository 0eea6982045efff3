"""A sender sends exactly the planned weights, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.distributed.train import weight_sender as module
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.train.weight_sender import SendError, StageWeights, WeightSender
from roll.distributed.weights.plan import WeightSpec, make_buckets
from roll.distributed.worker import WorkerRank

SPECS = [WeightSpec(name, (2,), "float32") for name in "abc"]


def named(names: str = "abc", shape: tuple[int, ...] = (2,)) -> Iterator[tuple[str, torch.Tensor]]:
    return iter([(name, torch.zeros(shape)) for name in names])


def count_taken(weights: StageWeights[torch.Tensor]) -> int:
    count = len([weights.take(spec) for spec in SPECS])
    weights.check_end()
    return count


def test_planned_weights_are_taken_in_order() -> None:
    assert count_taken(StageWeights(named())) == 3


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        ("acb", (2,), "planned b .* but the model yields c"),
        ("abc", (3,), r"planned a \(2,\), but the model yields a \(3,\)"),
        ("ab", (2,), "planned c, but the model yields fewer tensors than planned"),
        ("abcd", (2,), "the model yields d, which is not in the plan"),
    ],
)
def test_any_other_weight_is_refused(names: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(SendError, match=message):
        count_taken(StageWeights(named(names, shape)))


def test_draining_consumes_the_rest() -> None:
    weights = StageWeights(named())
    weights.take(SPECS[0])
    weights.drain()
    weights.check_end()


class Weights:
    """Three weights of one rank."""

    tensors = {name: torch.full((2,), float(index)) for index, name in enumerate("abc")}

    source = 0

    def __init__(self, frozen: str = "") -> None:
        self._frozen = frozenset(frozen)

    def takes_part(self, receivers: Any) -> bool:
        return True

    def frozen(self) -> frozenset[str]:
        return self._frozen

    def gathered(self, receivers: Any, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value) for name, value in self.tensors.items() if name not in without)

    def slice_writers(self, without: Collection[str] = ()) -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
        return ((name, lambda target, value=value: target.copy_(value)) for name, value in self.gathered([0], without))


def sender() -> WeightSender:
    here = SimpleNamespace(require=lambda *states: None)
    strategy: Any = SimpleNamespace(layout=ParallelLayout(), weights=Weights(), states=here)
    return WeightSender(WorkerRank("actor_train"), strategy, 1.0)


@pytest.mark.parametrize("shared", [True, False])
def test_buckets_are_filled_in_turn_and_the_previous_one_stays_valid(shared: bool) -> None:
    """With shared memory, as on a CPU, and with gathered tensors, as on a GPU."""
    made, stages = sender(), [make_buckets(SPECS, 8)]
    if shared:
        addresses = made.create_shm([8])
        assert addresses is not None
    previous: list[tuple[str, torch.Tensor]] = []
    for _ in range(2):
        for index, name in enumerate("abc"):
            result = made.fill_bucket(stages, index, [[0, 0]])
            assert result is not None and result.num_bytes == 8 and len(result.handles) == 2
            filled = made.filled_tensors(index, stages[0][index])
            assert [(found, tensor.tolist()) for found, tensor in filled] == [(name, [float(index)] * 2)]
            assert [tensor.tolist() for _, tensor in previous] == [[index - 1.0] * 2] * (index > 0)
            previous = filled
        assert made.fill_bucket(stages, 3, [[0, 0]]) is None
        made.release_buckets()
        previous = []


def test_a_bucket_is_one_broadcast_that_sglang_takes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    made, sent = sender(), []
    monkeypatch.setattr(module.dist, "broadcast", lambda tensor, **options: sent.append(tensor))
    group: Any = object()
    made._group = group
    result = made.broadcast_weights([make_buckets(SPECS, 16)], 0)
    assert result is not None and result.num_bytes == 24 and [len(flat) for flat in sent] == [16, 8]
    received = FlattenedTensorBucket([(spec.name, torch.empty(spec.shape)) for spec in SPECS[:2]])
    received.get_flattened_tensor().copy_(sent[0])
    assert {name: tensor.tolist() for name, tensor in received.reconstruct_tensors()} == {"a": [0, 0], "b": [1, 1]}


def test_a_broadcast_that_never_ends_on_the_gpu_fails_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's broadcasts return before they are done, so their end is waited for, up to the deadline."""
    made, started = sender(), []
    platform = SimpleNamespace(wait_for_device=lambda timeout_s: (_ for _ in ()).throw(TimeoutError("not done")))
    monkeypatch.setattr(module, "get_platform", lambda name: platform)
    monkeypatch.setattr(module.dist, "broadcast", lambda tensor, **options: started.append(options["group"]))
    group: Any = object()
    made._group = group
    with pytest.raises(SendError, match="actor_train-0: the engines have not received the weights: not done"):
        made.broadcast_weights([make_buckets(SPECS, 8)], 0)
    assert started == [group] * 3
    left: list[Any] = []
    monkeypatch.setattr(module, "leave_group", left.append)
    made.leave_broadcast_group()
    made.leave_broadcast_group()
    assert left == [group]


def test_a_frozen_role_has_no_weights_to_send() -> None:
    unused: Any = None
    with pytest.raises(SendError, match="reference-0 has no weights to send"):
        TrainWorker(WorkerRank("reference"), unused, unused).describe_weights()
