"""Prompt accounting: how many prompts are where (ledger), which finished ones wait (buffer), and their deadlines.

"Prompt" means a whole group: all responses to one prompt, or all trajectories of one environment.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

GENERATION_FAILED = "generation_failed"
"""Drop reason of a prompt of which a response could not be generated."""

STALE = "stale"
"""Drop reason of a prompt whose oldest token was older than `max_staleness`."""

EXPIRED = "expired"
"""Drop reason of a prompt that was submitted more than `max_age_s` before a batch was taken."""


class LedgerError(RuntimeError):
    """The counts of prompts do not add up: a bug, after which a run must end."""


@dataclass
class Ledger:
    """Counts of prompts over the whole run, by where they are now.

    Invariant: submitted = consumed + dropped (by reason) + buffered + in flight.
    """

    submitted: int = 0
    consumed: int = 0
    buffered: int = 0
    in_flight: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def submit(self, count: int = 1) -> None:
        self.submitted += count
        self.in_flight += count

    def finish(self, count: int = 1) -> None:
        self.in_flight -= count
        self.buffered += count
        self.check()

    def drop(self, reason: str, count: int = 1) -> None:
        """Records that prompts in flight are dropped."""
        self.in_flight -= count
        self.dropped[reason] += count
        self.check()

    def discard(self, reason: str, count: int = 1) -> None:
        """Records that buffered prompts are dropped."""
        self.buffered -= count
        self.dropped[reason] += count
        self.check()

    def consume(self, count: int = 1) -> None:
        """Records that buffered prompts became part of a batch."""
        self.buffered -= count
        self.consumed += count
        self.check()

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())

    def check(self) -> None:
        """Raises LedgerError unless the invariant holds and no count is negative."""
        accounted = self.consumed + self.dropped_total + self.buffered + self.in_flight
        if accounted != self.submitted or min(self.buffered, self.in_flight) < 0:
            raise LedgerError(f"submitted {self.submitted} prompts but {accounted} are accounted for: {self}")

    def metrics(self) -> dict[str, float]:
        """`ledger/...`, one entry for each reason a prompt was dropped for."""
        counts = {"submitted": self.submitted, "consumed": self.consumed}
        counts |= {"buffered": self.buffered, "in_flight": self.in_flight}
        counts |= {f"dropped_{reason}": count for reason, count in sorted(self.dropped.items())}
        return {f"ledger/{name}": float(count) for name, count in counts.items()}

    def sample_metrics(self, samples_per_prompt: int) -> dict[str, float]:
        """`queue/...` and `..._samples`: the same counts in samples; `generation_errors` counts prompts."""
        generated = self.submitted - self.in_flight - self.dropped[GENERATION_FAILED]
        counts = {
            "queue/size": self.buffered,
            "queue/total_produced": self.buffered + self.consumed,
            "queue/total_consumed": self.consumed,
            "queue/dropped_samples": self.dropped_total,
            "total_generated_samples": generated,
            "dropped_stale_samples": self.dropped[STALE],
            "dropped_expired_samples": self.dropped[EXPIRED],
        }
        samples = {name: float(count * samples_per_prompt) for name, count in counts.items()}
        return {**samples, "generation_errors": float(self.dropped[GENERATION_FAILED])}


T = TypeVar("T")


@dataclass(frozen=True)
class PromptRequest:
    """An admitted prompt, to be generated and learned from by its deadline.

    Attributes:
        number: position among all prompts submitted in the run; seeds derive from it.
        version: weight version when it was submitted.
        deadline: weight version by which its samples must be learned from.
        submitted_at_s: time when it was submitted, on the clock of the caller.
    """

    number: int
    version: int
    deadline: int
    submitted_at_s: float = 0.0


@dataclass(frozen=True)
class FinishedGroup(Generic[T]):
    """A prompt that is generated and scored.

    Attributes:
        request: the prompt.
        group: what was generated for it.
        oldest_version: weight version of its oldest token.
    """

    request: PromptRequest
    group: T
    oldest_version: int


class SampleBuffer(Generic[T]):
    """Finished groups that wait for a batch, the earliest deadline first, then the lowest number.

    Putting and popping cost O(log n). An entry removed for its age leaves one tuple in the heap until its deadline.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, FinishedGroup[T]] = {}
        self._order: list[tuple[int, int]] = []
        self._numbers_by_age: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[FinishedGroup[T]]:
        return iter(
            sorted(self._waiting.values(), key=lambda finished: (finished.request.deadline, finished.request.number))
        )

    def put(self, finished: FinishedGroup[T]) -> None:
        """Adds a group."""
        number = finished.request.number
        self._waiting[number] = finished
        heapq.heappush(self._order, (finished.request.deadline, number))
        self._numbers_by_age.setdefault(finished.oldest_version, set()).add(number)

    def pop(self) -> FinishedGroup[T]:
        """Removes and returns the first.

        Raises:
            IndexError: the buffer is empty.
        """
        while True:
            _, number = heapq.heappop(self._order)
            if number in self._waiting:
                return self._remove(number)

    def expire(self, oldest_allowed: int) -> Iterable[FinishedGroup[T]]:
        """Removes and returns the groups with a token older than version `oldest_allowed`."""
        ages = [age for age in self._numbers_by_age if age < oldest_allowed]
        numbers = sorted(number for age in ages for number in self._numbers_by_age[age])
        return [self._remove(number) for number in numbers]

    def expire_submitted_before(self, time_s: float) -> Iterable[FinishedGroup[T]]:
        """Removes and returns the groups whose prompt was submitted before that time; costs O(n)."""
        numbers = [number for number, each in self._waiting.items() if each.request.submitted_at_s < time_s]
        return [self._remove(number) for number in sorted(numbers)]

    def _remove(self, number: int) -> FinishedGroup[T]:
        finished = self._waiting.pop(number)
        numbers = self._numbers_by_age[finished.oldest_version]
        numbers.remove(number)
        if not numbers:
            del self._numbers_by_age[finished.oldest_version]
        return finished


class Deadlines:
    """Counts of prompts not consumed yet by deadline: outstanding (running or ready), and ready ones alone.

    There are at most ceil(async_generation_ratio) + 1 different deadlines at a time, so cost and memory do not grow
    with the number of prompts.
    """

    def __init__(self) -> None:
        self._outstanding: Counter[int] = Counter()
        self._ready: Counter[int] = Counter()

    def submit(self, deadline: int, count: int = 1) -> None:
        self._outstanding[deadline] += count

    def finish(self, deadline: int) -> None:
        self._ready[deadline] += 1

    def drop_running(self, deadline: int) -> None:
        self._lower(self._outstanding, deadline)

    def remove_ready(self, deadline: int) -> None:
        """Records that a ready prompt was consumed, or dropped for its age."""
        self._lower(self._outstanding, deadline)
        self._lower(self._ready, deadline)

    @staticmethod
    def _lower(counts: Counter[int], deadline: int) -> None:
        counts[deadline] -= 1
        if not counts[deadline]:
            del counts[deadline]

    def blocking_deadline(self, version: int, batch_size: int) -> int | None:
        """The earliest deadline that would be missed if the next batch did not wait for running prompts.

        Every prompt with a deadline of at most d must be consumed by this batch or by the (d - version) batches of the
        versions up to d that follow it. So this batch must hold at least

            need(d) = outstanding(deadline <= d) - (d - version) * batch_size

        prompts due by d. A batch filled earliest deadline first holds min(batch_size, ready(deadline <= d)) of them.
        It must wait exactly while that is less than need(d) for some d. For d = version the rule is: no prompt that is
        due now is left out.

        Args:
            version: weight version that learns from the batch.
            batch_size: prompts of a batch.

        Returns:
            The earliest d for which the batch must wait; None where it need not wait.
        """
        outstanding = ready = 0
        for deadline in sorted(self._outstanding):
            outstanding += self._outstanding[deadline]
            ready += self._ready[deadline]
            if min(batch_size, ready) < outstanding - max(0, deadline - version) * batch_size:
                return deadline
        return None
