"""What both ways of publishing share on the training side: who sends what, and what is reported of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from roll.distributed.strategy.base import TrainStrategy, WeightSpec

if TYPE_CHECKING:
    from roll.configs.parallel_layout import ParallelLayout
    from roll.distributed.strategy.sglang_checksums import EngineChecksums


@dataclass(frozen=True)
class SourceInfo:
    """What the source of a pipeline stage tells the driver."""

    stage: int
    specs: list[WeightSpec]
    address: str


@dataclass(frozen=True)
class Sent:
    """What a source has sent.

    Attributes:
        num_bytes: that went out.
        checksums: by the engine's names, of what was meant to go out; empty unless asked for.
        handles: of a shared bucket, one for each engine rank in the order of engines; empty for a broadcast.
    """

    num_bytes: int
    checksums: dict[str, str] = field(default_factory=dict)
    handles: tuple[bytes, ...] = ()


class StageMember:
    """One training rank's part in publishing. Ranks of data index 0 take part; tensor rank 0 of them is the source.

    Attributes:
        stage: pipeline stage of this rank.
        takes_part: whether its slices are published.
        is_source: whether it sends.
    """

    def __init__(self, strategy: TrainStrategy, layout: ParallelLayout, rank: int, model_folder: Path) -> None:
        """Takes the strategy that holds the weights and the HF folder whose config.json says how engines cut them."""
        here = layout.coordinates(rank)
        self.strategy = strategy
        self.stage = here.pipeline
        self.takes_part = here.data == 0
        self.is_source = self.takes_part and here.tensor == 0
        self._folder = model_folder

    def new_checksums(self, ranks: int) -> EngineChecksums | None:
        """Empty sums for engines of `ranks` tensor-parallel ranks; None where none are wanted or this is no source."""
        if not ranks or not self.is_source:
            return None
        from roll.distributed.strategy.sglang_checksums import EngineChecksums

        return EngineChecksums(self._folder, ranks)
