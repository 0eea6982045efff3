"""Whole scored groups between the end of their generation and the batch that takes them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ticket:
    """The right to generate for one prompt, and by when its samples must be learned from."""

    number: int
    """Position among all prompts ever submitted; seeds derive from it."""
    version: int
    """Weight version when it was submitted."""
    deadline: int
    """Version of the weights that learn from it at the latest."""


@dataclass(frozen=True)
class Taken(Generic[T]):
    """One finished prompt: what was made of its ticket."""

    ticket: Ticket
    item: T
    oldest_version: int
    """Weight version of its oldest token."""


class SampleBuffer(Generic[T]):
    """Finished prompts, the earliest deadline first, then the lowest number.

    Putting and popping cost O(log n). Memory is that of what waits: an entry removed for its age leaves one tuple
    behind until its deadline comes up.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._waiting: dict[int, Taken[T]] = {}
        self._order: list[tuple[int, int]] = []
        self._numbers_by_age: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Taken[T]]:
        """What waits, in the order it will be popped."""
        return iter(sorted(self._waiting.values(), key=lambda taken: (taken.ticket.deadline, taken.ticket.number)))

    def put(self, taken: Taken[T]) -> None:
        """Adds one."""
        number = taken.ticket.number
        self._waiting[number] = taken
        heapq.heappush(self._order, (taken.ticket.deadline, number))
        self._numbers_by_age.setdefault(taken.oldest_version, set()).add(number)

    def pop(self) -> Taken[T]:
        """Removes and gives the first.

        Raises:
            IndexError: nothing waits.
        """
        while True:
            _, number = heapq.heappop(self._order)
            if number in self._waiting:
                return self._remove(number)

    def expire(self, oldest_allowed: int) -> Iterable[Taken[T]]:
        """Removes and gives those with a token older than version `oldest_allowed`."""
        ages = [age for age in self._numbers_by_age if age < oldest_allowed]
        numbers = sorted(number for age in ages for number in self._numbers_by_age[age])
        return [self._remove(number) for number in numbers]

    def _remove(self, number: int) -> Taken[T]:
        taken = self._waiting.pop(number)
        numbers = self._numbers_by_age[taken.oldest_version]
        numbers.remove(number)
        if not numbers:
            del self._numbers_by_age[taken.oldest_version]
        return taken
