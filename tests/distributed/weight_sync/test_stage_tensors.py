"""What the model yields must be what was planned; damage asked for is done, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from roll.distributed.weight_sync.plan import WeightSpec
from roll.distributed.weight_sync.sender import Fault, SendError, StageTensors, damage

SPECS = [WeightSpec(name, (2,), "float32") for name in "abc"]


def named(names: str = "abc", shape: tuple[int, ...] = (2,)) -> Iterator[tuple[str, torch.Tensor]]:
    return iter([(name, torch.zeros(shape)) for name in names])


def taken(tensors: StageTensors, specs: list[WeightSpec]) -> int:
    count = len([tensors.take(spec) for spec in specs])
    tensors.check_end()
    return count


def test_what_was_planned_is_taken_in_order() -> None:
    assert taken(StageTensors(named(), None), SPECS) == 3


@pytest.mark.parametrize(
    ("names", "shape", "said"),
    [
        ("acb", (2,), "planned b .* but the model yields c"),
        ("abc", (3,), r"planned a \(2,\), but the model yields a \(3,\)"),
        ("ab", (2,), "fewer tensors than planned"),
        ("abcd", (2,), "the model yields d, which is not in the plan"),
    ],
)
def test_anything_else_is_refused(names: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(SendError, match=said):
        taken(StageTensors(named(names, shape), None), SPECS)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_dropped_tensor_is_skipped_wherever_it_stands(name: str) -> None:
    left = [spec for spec in SPECS if spec.name != name]
    assert taken(StageTensors(named(), Fault("drop", name)), left) == 2


def test_a_failure_comes_when_its_tensor_has_its_turn() -> None:
    tensors = StageTensors(named(), Fault("fail", "b"))
    tensors.take(SPECS[0])
    with pytest.raises(SendError, match="b: told to fail"):
        tensors.take(SPECS[1])
    tensors.drain()


def test_damage_changes_one_element() -> None:
    tensor = torch.zeros(2, 3)
    damage(tensor)
    assert tensor.count_nonzero() == 1
