"""What the training loop asks of the parts that differ between pipelines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from roll.distributed.protocol import DataProto
    from roll.pipeline.clock import StepClock


@dataclass
class SampleBatch:
    """One batch to learn from, with the measures of how it came to be."""

    data: DataProto
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Prompt and response tokens, without padding."""
        return int(self.data.batch["attention_mask"].sum())


class SampleSource(Protocol):
    """Where samples come from. The loop does not know whether they were generated just now or ahead of time."""

    async def next_batch(self, version: int, clock: StepClock) -> SampleBatch:
        """The next batch, consumed at weight version `version`."""

    async def advance(self, version: int) -> None:
        """The weights of `version` are published, and validated where that was due: generation may go on from them."""

    async def validate(self, version: int) -> dict[str, float]:
        """`val/...` metrics of the weights last published, the same prompts and seeds every time."""

    async def state_dict(self) -> dict[str, Any]:
        """What must be remembered to go on without a seam; JSON-able."""

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""

    async def health(self) -> dict[str, Any]:
        """How the source is doing, JSON-able; empty where it has no state of its own."""


class Learner(Protocol):
    """How a batch becomes an update of the weights."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Updates the weights with the whole batch, as step number `step`; gives `actor/...` and related metrics."""

    async def memory(self) -> dict[str, float]:
        """`memory/...` of every trained role, in bytes."""

    async def save(self, folder: Path) -> None:
        """Writes weights, optimizer, schedule and RNG of every trained role."""

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""

    async def export_hf(self, folder: Path) -> None:
        """Writes the trained model as a HF folder."""


class Publisher(Protocol):
    """Brings the trained weights to whoever generates."""

    async def publish(self, version: int, clock: StepClock) -> dict[str, float]:
        """One verified transfer of the weights of `version`."""
