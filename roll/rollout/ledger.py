"""Prompt accounting: the ledger, the buffer of finished groups, and deadlines."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar


class LedgerError(RuntimeError):
    """A prompt was lost or invented: a bug, never a condition to go on from."""


@dataclass
class Ledger:
    """Counts of prompts over the whole run, by where they are now.

    The law: submitted = consumed + dropped (by reason) + buffered + in flight.
    """

    submitted: int = 0
    consumed: int = 0
    buffered: int = 0
    in_flight: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def submit(self, count: int = 1) -> None:
        """Prompts were sent to the engines."""
        self.submitted += count
        self.in_flight += count

    def finish(self, count: int = 1) -> None:
        """Prompts came back whole and scored, and wait to be consumed."""
        self.in_flight -= count
        self.buffered += count
        self.check()

    def drop(self, reason: str, count: int = 1) -> None:
        """Prompts in flight will never be consumed, for a reason."""
        self.in_flight -= count
        self.dropped[reason] += count
        self.check()

    def discard(self, reason: str, count: int = 1) -> None:
        """Buffered prompts will never be consumed, for a reason."""
        self.buffered -= count
        self.dropped[reason] += count
        self.check()

    def consume(self, count: int = 1) -> None:
        """Buffered prompts became part of a batch."""
        self.buffered -= count
        self.consumed += count
        self.check()

    @property
    def dropped_total(self) -> int:
        """Prompts dropped for any reason."""
        return sum(self.dropped.values())

    def check(self) -> None:
        """Raises LedgerError unless the law holds and no count is negative."""
        accounted = self.consumed + self.dropped_total + self.buffered + self.in_flight
        if accounted != self.submitted or min(self.buffered, self.in_flight) < 0:
            raise LedgerError(f"submitted {self.submitted} prompts but can account for {accounted}: {self}")

    def metrics(self) -> dict[str, float]:
        """`ledger/...`, one entry for each reason a prompt was dropped for."""
        counts = {"submitted": self.submitted, "consumed": self.consumed}
        counts |= {"buffered": self.buffered, "in_flight": self.in_flight}
        counts |= {f"dropped_{reason}": count for reason, count in sorted(self.dropped.items())}
        return {f"ledger/{name}": float(count) for name, count in counts.items()}

    def queue_metrics(self, samples_per_prompt: int) -> dict[str, float]:
        """`queue/...`: the same account in samples."""
        counts = {
            "size": self.buffered,
            "total_produced": self.buffered + self.consumed,
            "total_consumed": self.consumed,
            "dropped_samples": self.dropped_total,
        }
        return {f"queue/{name}": float(count * samples_per_prompt) for name, count in counts.items()}


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


class Deadlines:
    """Prompts that are not consumed yet, counted by deadline: all of them, and those that are ready.

    There are as many deadlines at a time as versions that generation may be ahead, plus one: cost and memory do not
    grow with the number of prompts.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._outstanding: Counter[int] = Counter()
        self._ready: Counter[int] = Counter()

    def submit(self, deadline: int, count: int = 1) -> None:
        """Prompts are in flight."""
        self._outstanding[deadline] += count

    def finish(self, deadline: int) -> None:
        """One became ready."""
        self._ready[deadline] += 1

    def drop_running(self, deadline: int) -> None:
        """One in flight went."""
        self._lower(self._outstanding, deadline)

    def remove_ready(self, deadline: int) -> None:
        """One that was ready went: consumed, or too old."""
        self._lower(self._outstanding, deadline)
        self._lower(self._ready, deadline)

    @staticmethod
    def _lower(counts: Counter[int], deadline: int) -> None:
        counts[deadline] -= 1
        if not counts[deadline]:
            del counts[deadline]

    def waits_for(self, version: int, batch_size: int) -> int | None:
        """The earliest deadline up to which too few prompts are ready for the batch that `version` learns from.

        With this batch and those of versions up to d, (d - version) of them besides this one, everything due by d must
        be consumed. So this batch must hold at least

            need(d) = outstanding(deadline <= d) - (d - version) * batch_size

        prompts due by d. A batch filled earliest deadline first holds min(batch_size, ready(deadline <= d)) of them,
        whatever d is, and it must wait exactly while that is less than need(d) for some d. For d = version this says:
        nothing due now is left behind. None: it need not wait.
        """
        outstanding = ready = 0
        for deadline in sorted(self._outstanding):
            outstanding += self._outstanding[deadline]
            ready += self._ready[deadline]
            if min(batch_size, ready) < outstanding - max(0, deadline - version) * batch_size:
                return deadline
        return None
