"""Which rank of a role does what: Megatron's order tensor, data, pipeline (fastest first)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankCoordinates:
    """Place of one rank in each parallel dimension."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of one role; world size is their product."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the role."""
        return self.tensor * self.data * self.pipeline

    def coordinates(self, rank: int) -> RankCoordinates:
        """Where `rank` stands: rank = tensor + T * (data + D * pipeline)."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        return RankCoordinates(tensor=tensor, data=rest % self.data, pipeline=rest // self.data)

    def rank(self, tensor: int, data: int, pipeline: int) -> int:
        """Inverse of `coordinates`."""
        return tensor + self.tensor * (data + self.data * pipeline)
