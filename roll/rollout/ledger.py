"""The account of prompts: nothing is lost and nothing is invented."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
