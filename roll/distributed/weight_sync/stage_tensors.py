"""The tensors of one publish in the order of the plan: checked, summed, and damaged where a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from roll.distributed.strategy.base import WeightSpec

if TYPE_CHECKING:
    from roll.distributed.strategy.sglang_checksums import EngineChecksums


class SendError(RuntimeError):
    """What the model yields is not what the plan says."""


@dataclass(frozen=True)
class Fault:
    """Damage done on purpose to one publish, so that tests can see it detected; it is never read from a config.

    Attributes:
        kind: `corrupt` changes one element after the checksum was taken, as a broken wire would; `drop` leaves the
            tensor out of the plan, as a mapping with a hole would; `fail` raises when the tensor's turn comes.
        name: HF name of the tensor.
    """

    kind: Literal["corrupt", "drop", "fail"]
    name: str


class StageTensors:
    """Hands out the stage's tensors one by one; every rank that gathers must ask for all of them."""

    def __init__(
        self,
        gathered: Iterator[tuple[str, torch.Tensor | None]],
        checksums: EngineChecksums | None,
        fault: Fault | None,
    ) -> None:
        """Takes what `TrainStrategy.source_weights` yields, and the sums to add to where they are wanted."""
        self._gathered, self._checksums, self._fault = gathered, checksums, fault

    def take(self, spec: WeightSpec) -> torch.Tensor | None:
        """The next tensor, which must be the one planned; None on ranks that only gather.

        Raises:
            SendError: the model yields another, or none.
        """
        name, tensor = next(self._gathered, ("nothing", None))
        if self._fault == Fault("drop", name):
            name, tensor = next(self._gathered, ("nothing", None))
        if self._fault == Fault("fail", name):
            raise SendError(f"{name}: told to fail")
        if name != spec.name or (tensor is not None and tuple(tensor.shape) != tuple(spec.shape)):
            shape = () if tensor is None else tuple(tensor.shape)
            raise SendError(f"planned {spec.name} {tuple(spec.shape)}, but the model yields {name} {shape}")
        if tensor is None:
            return None
        if self._checksums is not None:
            self._checksums.add(name, tensor)
        return _corrupted(tensor) if self._fault == Fault("corrupt", name) else tensor

    def check_end(self) -> None:
        """Sees that the plan covers all.

        Raises:
            SendError: a tensor is left.
        """
        left = next(self._gathered, None)
        if left is not None and self._fault != Fault("drop", left[0]):
            raise SendError(f"the model yields {left[0]}, which is not in the plan")

    def checksums(self) -> dict[str, str]:
        """Sums of what was meant to go out, by the engine's names; empty where none were wanted."""
        return {} if self._checksums is None else self._checksums.result()

    def drain(self) -> None:
        """Sees the gather through without using what comes."""
        for _ in self._gathered:
            pass


def _corrupted(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.clone()
    damaged.view(-1)[0] += 1
    return damaged
