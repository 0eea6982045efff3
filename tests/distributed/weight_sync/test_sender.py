"""The weights a model yields must be exactly the planned ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from roll.distributed.weight_sync.plan import WeightSpec
from roll.distributed.weight_sync.sender import SendError, StageWeights

SPECS = [WeightSpec(name, (2,), "float32") for name in "abc"]


def named(names: str = "abc", shape: tuple[int, ...] = (2,)) -> Iterator[tuple[str, torch.Tensor]]:
    return iter([(name, torch.zeros(shape)) for name in names])


def taken(weights: StageWeights[torch.Tensor]) -> int:
    count = len([weights.take(spec) for spec in SPECS])
    weights.check_end()
    return count


def test_planned_weights_are_taken_in_order() -> None:
    assert taken(StageWeights(named())) == 3


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
        taken(StageWeights(named(names, shape)))


def test_draining_consumes_the_rest() -> None:
    weights = StageWeights(named())
    weights.take(SPECS[0])
    weights.drain()
    weights.check_end()
