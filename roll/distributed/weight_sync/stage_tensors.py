"""What a stage publishes, taken one by one in the order of the plan, and the damage that tests ask for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from roll.distributed.strategy.base import WeightSpec

T = TypeVar("T")

HANG_S = 6.0
"""Seconds that a fault of kind `hang` takes."""


class SendError(RuntimeError):
    """What the model yields is not what the plan says."""


@dataclass(frozen=True)
class Fault:
    """Damage done on purpose to one publish, so that tests can see it detected; it is never read from a config.

    Attributes:
        kind: `corrupt` changes one element after the checksum was taken, as a broken wire would; `drop` leaves the
            tensor out of the plan, as a mapping with a hole would; `fail` raises when the tensor's turn comes; `hang`
            lets `HANG_S` pass first.
        name: HF name of the tensor.
    """

    kind: Literal["corrupt", "drop", "fail", "hang"]
    name: str


class StageTensors(Generic[T]):
    """Takes what the strategy yields and sees that it is what was planned, no less and no more."""

    def __init__(self, named: Iterator[tuple[str, T]], fault: Fault | None) -> None:
        """Takes names in publishing order, each with the tensor or with what writes it."""
        self._named, self._fault = named, fault

    def take(self, spec: WeightSpec) -> T:
        """What belongs to the next planned tensor.

        Raises:
            SendError: the model yields another, or none.
        """
        name, value = self._next()
        if self._fault == Fault("drop", name):
            name, value = self._next()
        if self._fault == Fault("fail", name):
            raise SendError(f"{name}: told to fail")
        if self._fault == Fault("hang", name):
            time.sleep(HANG_S)
        if name != spec.name or (isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(spec.shape)):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ""
            raise SendError(f"planned {spec.name} {tuple(spec.shape)}, but the model yields {name} {shape}")
        return value

    def check_end(self) -> None:
        """Sees that the plan covers all.

        Raises:
            SendError: a tensor is left.
        """
        left = next(self._named, None)
        if left is not None and self._fault != Fault("drop", left[0]):
            raise SendError(f"the model yields {left[0]}, which is not in the plan")

    def drain(self) -> None:
        """Sees a gather through without using what comes."""
        for _ in self._named:
            pass

    def _next(self) -> tuple[str, T]:
        found = next(self._named, None)
        if found is None:
            raise SendError("the model yields fewer tensors than planned")
        return found


def damage(tensor: torch.Tensor) -> None:
    """Changes one element, as a broken wire would."""
    tensor.view(-1)[0] += 1
