"""How far generation may run ahead: the bound on prompts submitted, and what it is counted from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from roll.configs.asynchronous import exact_ratio, versions_ahead


class PolicyError(RuntimeError):
    """The policy was asked for what its bounds forbid: a bug of the caller, never a condition to go on from."""


def admission_bound(batches: int, ratio: Fraction, batch_size: int) -> int:
    """Prompts that may ever have been submitted, dropped ones not counted: floor((v + 1 + ratio) * batch_size).

    Args:
        batches: v, weight versions published since the first; 0 before the first update.
        ratio: batches that generation may be ahead; from `exact_ratio`.
        batch_size: prompts of one batch.
    """
    return math.floor((batches + 1 + ratio) * batch_size)


@dataclass(frozen=True)
class PolicySettings:
    """What bounds the rollout side; every count is of prompts (groups of responses), every age of weight versions.

    Raises:
        ValueError: a value is out of range, or no batch could ever be taken with these values.
    """

    batch_size: int
    """Prompts of one training batch."""
    ratio: float
    """async_generation_ratio, any finite number of at least 0: batches that generation may be ahead."""
    max_staleness: int | None = None
    """A sample whose oldest token is more versions old than this when its batch is taken is dropped as `stale`; None:
    ceil(ratio), which admission keeps to by itself."""
    max_queue: int | None = None
    """Prompts in flight and buffered together at which submission stops; nothing is evicted. None: no limit."""
    min_batches: int = 1
    """Batches that must be ready before one is taken; at the end of a run, what remains of it."""
    total: int | None = None
    """Prompts that the whole run consumes; no more are admitted. None: no end."""

    def __post_init__(self) -> None:
        """Checks the values together."""
        if self.batch_size < 1:
            raise ValueError(f"batch_size: {self.batch_size} is not at least 1")
        if self.max_staleness is not None and self.max_staleness < self.versions_ahead:
            raise ValueError(
                f"max_staleness: {self.max_staleness} would drop samples that async_generation_ratio {self.ratio:g} "
                f"admits; use at least {self.versions_ahead}"
            )
        most = math.floor(1 + self.lead)
        if not 1 <= self.min_batches <= most:
            raise ValueError(
                f"min_batches: {self.min_batches} is not within 1 to {most}, the whole batches that "
                f"async_generation_ratio {self.ratio:g} admits at a time"
            )
        if self.max_queue is not None and self.max_queue < self.min_batches * self.batch_size:
            raise ValueError(
                f"max_queue: {self.max_queue} prompts hold less than the {self.min_batches} x {self.batch_size} that "
                f"must be ready before a batch is taken; use at least {self.min_batches * self.batch_size}"
            )
        if self.total is not None and (self.total < 0 or self.total % self.batch_size):
            raise ValueError(f"total: {self.total} is not a whole number of batches of {self.batch_size}")

    @cached_property
    def lead(self) -> Fraction:
        """The ratio, exact."""
        return exact_ratio(self.ratio)

    @cached_property
    def versions_ahead(self) -> int:
        """ceil(ratio): versions between the submission of a prompt and its deadline."""
        return versions_ahead(self.ratio)

    @cached_property
    def staleness_limit(self) -> int:
        """`max_staleness`, settled."""
        return self.versions_ahead if self.max_staleness is None else self.max_staleness


class Holds:
    """Named reasons not to submit; each is lifted as often as it was set."""

    def __init__(self) -> None:
        """Starts with none."""
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """Whether any is on."""
        return bool(self._counts)

    def add(self, reason: str) -> None:
        """Sets one."""
        self._counts[reason] += 1

    def remove(self, reason: str) -> None:
        """Lifts one.

        Raises:
            PolicyError: it is not set.
        """
        if not self._counts[reason]:
            raise PolicyError(f"hold {reason!r} is released but not set; set are {self.names()}")
        self._counts[reason] -= 1
        self._counts += Counter()

    def names(self) -> list[str]:
        """The reasons that are set, for messages."""
        return sorted(name for name, count in self._counts.items() if count)
