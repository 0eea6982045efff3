"""Where the batches of a run come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from roll.datasets.batch import Batch


@dataclass
class SampleBatch:
    """One batch to learn from.

    Attributes:
        data: its tensors.
        metrics: of its generation.
        seconds: by kind of work, the time since the previous batch in which such work was running.
    """

    data: Batch
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class SampleSource(Protocol):
    """Where samples come from: a rollouter, the client of one in another process, or the pairs of SFT."""

    async def next_batch(self) -> SampleBatch | None:
        """The next batch; None once `stop` was called, also to a call that is waiting."""

    async def stop(self) -> None:
        """Lets no further batch be taken, so that `state_dict` is that of the steps that were learned from."""

    async def advance(self, version: int) -> None:
        """Called once the engines have the weights of `version` and a due validation is done: generation continues."""

    async def validate(self) -> dict[str, float]:
        """`val/...` of the current weights, with the same prompts and seeds every time."""

    async def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to continue exactly; JSON-able."""

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""

    async def health(self) -> dict[str, Any]:
        """State for health.json; empty where the source has none."""
