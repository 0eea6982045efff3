"""What the rollouter and its producer hand to each other and to the training loop."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from roll.distributed.protocol import DataProto
    from roll.rollout.policy import Ticket


class Item(Protocol):
    """What a producer makes of one ticket: a prompt and its scored samples."""

    @property
    def number(self) -> int:
        """That of its ticket."""

    @property
    def drop_reason(self) -> str | None:
        """Why it cannot be learned from; None where it can."""

    @property
    def scores(self) -> list[float]:
        """Raw reward of each sample."""

    @property
    def oldest_version(self) -> int:
        """Weight version of its oldest token."""


ItemT = TypeVar("ItemT", bound=Item)


class Meter(Protocol):
    """Takes the time that work of one name keeps running, however much of it overlaps."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Counts the block as work of that name."""


class Unmeasured:
    """A meter for work that nobody asks the time of."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()


class Producer(Protocol[ItemT]):
    """How samples come to be: what differs between single responses and agents.

    Attributes:
        work: kinds of work it measures, `generate` among them; a batch tells the seconds of each.
    """

    work: tuple[str, ...]

    def draw(self, tickets: Iterable[Ticket]) -> list[ItemT]:
        """The next prompts of the data, one for each ticket, nothing generated yet."""

    async def produce(self, items: list[ItemT], meter: Meter) -> None:
        """Generates and scores; afterwards each item is complete or has a `drop_reason`."""

    def filtered(self, item: ItemT) -> tuple[str, str] | None:
        """Why a complete item is not worth learning from, and the filter's path in the configuration; None keeps it."""

    async def validate(self, version: int) -> dict[str, float]:
        """`val/...` metrics of the weights last published, the same prompts and seeds every time."""

    def batch(self, items: list[ItemT]) -> DataProto:
        """The tensors the learner takes."""

    def metrics(self, items: list[ItemT], version: int) -> dict[str, float]:
        """`rollout/...` and `staleness/...` of a batch learned from by the weights of `version`."""

    @property
    def last_failure(self) -> str | None:
        """What the last item was dropped for, in words."""

    def encode(self, item: ItemT) -> Any:
        """An item as plain values, ready for JSON."""

    def decode(self, state: Any) -> ItemT:
        """The item that `encode` was given."""

    def state_dict(self) -> dict[str, Any]:
        """The data cursor."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""

    def close(self) -> None:
        """Ends every process it started."""


@dataclass(frozen=True)
class RolloutBatch(Generic[ItemT]):
    """One batch on its way to the learner.

    Attributes:
        data: its tensors.
        metrics: how it came to be.
        seconds: by the producer's kinds of work: time since the batch before in which such work was running.
    """

    data: DataProto
    metrics: dict[str, float]
    seconds: dict[str, float]
