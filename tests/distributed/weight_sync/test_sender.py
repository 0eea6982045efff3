"""A sender sends exactly the planned weights, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from roll.distributed.weight_sync.plan import WeightSpec, make_buckets
from roll.distributed.weight_sync.sender import SendError, StageWeights, WeightSender
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

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def slice_writers(self) -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
        return ((name, lambda target, value=value: target.copy_(value)) for name, value in self.tensors.items())


def sender() -> WeightSender:
    unused: Any = None
    weights: Any = Weights()
    made = WeightSender(WorkerRank.single("actor_train"), unused, unused)
    made._model_weights = weights
    return made


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
            result = made.fill_bucket(stages, index, receivers=2)
            assert result is not None and result.num_bytes == 8 and len(result.handles) == 2
            filled = made.filled_tensors(index, stages[0][index])
            assert [(found, tensor.tolist()) for found, tensor in filled] == [(name, [float(index)] * 2)]
            assert [tensor.tolist() for _, tensor in previous] == [[index - 1.0] * 2] * (index > 0)
            previous = filled
        assert made.fill_bucket(stages, 3, receivers=2) is None
        made.release_buckets()
        previous = []


def test_a_frozen_role_has_no_weights_to_send() -> None:
    unused: Any = None
    with pytest.raises(SendError, match="reference-0 has no weights to send"):
        WeightSender(WorkerRank.single("reference"), unused, unused).describe_weights()
