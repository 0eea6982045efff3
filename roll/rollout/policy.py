"""Who may generate next, and which finished prompts make the next batch: the policy of running ahead, without a clock.

Three rules. Let B be the prompts of a batch, eta the async_generation_ratio, v the published weight version (0 first)
and n the version whose weights learn from the next batch (the batches taken so far: v, or v + 1 while a taken batch is
being learned from).

Admission: submitted - dropped <= floor((v + 1 + eta) * B), always. At most so many may ever be on their way that
generation is eta batches ahead. A dropped prompt gives its place back, and whoever takes the place is a new prompt with
a deadline of its own.

Deadline: a prompt submitted at version u is learned from by version u + ceil(eta) at the latest.

Batch: B ready prompts, the earliest deadline first, then the lowest number. It waits while fewer are ready, or while a
deadline could no longer be met without a running prompt (`Deadlines.waits_for`); otherwise it does not wait for running
prompts, so a long response stalls nobody before it has to.

Why no deadline is missed. Claim: for every d >= n, the prompts not yet consumed that are due by d are at most
(d - n + 1) * B, which is what the batches n to d hold.

- Submission keeps it. All prompts not consumed are submitted - dropped - n * B <= (v + 1 + eta - n) * B. The new ones
  are due at D = v + ceil(eta), and (v + 1 + eta - n) * B <= (D - n + 1) * B. For d < D nothing changed.
- Finishing changes no count, and dropping lowers one. A replacement is submitted like any other.
- Taking keeps it: `waits_for` lets a batch go only if it leaves at most (d - n) * B due by d, for every d.

At d = n: at most B prompts are due now, and the batch holds all of them. So every prompt is consumed in time or
dropped; whether a running prompt ends at all is up to the caller's timeouts, and `awaited` names those that hold the
batch up. The rule at d = n alone (wait for what is due now) would not do: with eta = 2 the first version admits 3 * B
prompts due at 2, and a batch 1 made of prompts due at 3 would leave 2 * B for batch 2.

Staleness follows: no token is older than its prompt's submission, so it is at most ceil(eta) versions old when it is
learned from, and the backstop `max_staleness`, where it is not set lower, drops nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Generic, TypeVar

from roll.rollout.ledger import Deadlines, Ledger, SampleBuffer, Taken, Ticket

LARGEST_DENOMINATOR = 1_000_000
"""A ratio is taken as the nearest fraction with a denominator up to this: 0.1 * 3 is 3/10 and 0.29 is 29/100.

Binary floats would make floor((v + 1 + 0.29) * 100) come out one prompt short, and ceil(0.1 * 3 + 0.7) two.
"""


class PolicyError(RuntimeError):
    """The policy was asked for what its bounds forbid: a bug of the caller, never a condition to go on from."""


def exact_ratio(ratio: float) -> Fraction:
    """`async_generation_ratio` as the fraction that was meant (see LARGEST_DENOMINATOR).

    Raises:
        ValueError: it is negative, infinite or not a number.
    """
    if not math.isfinite(ratio) or ratio < 0:
        raise ValueError(f"async_generation_ratio: {ratio} is not a finite number of at least 0")
    return Fraction(ratio).limit_denominator(LARGEST_DENOMINATOR)


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
        return math.ceil(self.lead)

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


__all__ = ["PolicyError", "PolicySettings", "RolloutPolicy", "Taken", "Ticket"]

T = TypeVar("T")

STALE = "stale"
"""Reason of a prompt whose oldest token was older than `max_staleness`."""


class RolloutPolicy(Generic[T]):
    """Admission, deadlines, the buffer and the account of one run; see the module for the rules.

    Not for several threads at once. Every call costs O(log n) for a prompt and O(ceil(ratio)) for a question, and
    memory is that of what is in flight or buffered.
    """

    def __init__(self, settings: PolicySettings, version: int = 0) -> None:
        """Starts with nothing submitted.

        Args:
            settings: the bounds.
            version: the weights published first; above 0 where batches before it were learned from elsewhere.
        """
        self.settings = settings
        self.version = version
        self.ledger = Ledger()
        self._start = version
        self._running: dict[int, Ticket] = {}
        self._buffer: SampleBuffer[T] = SampleBuffer()
        self._deadlines = Deadlines()
        self._holds = Holds()
        self._to_resubmit: list[Ticket] = []

    @property
    def learning_version(self) -> int:
        """Version of the weights that learn from the next batch: each batch makes one version."""
        return self._start + self.ledger.consumed // self.settings.batch_size

    @property
    def held_by(self) -> list[str]:
        """The holds that are on."""
        return self._holds.names()

    def admissible(self) -> int:
        """Prompts that may be submitted now."""
        settings, ledger = self.settings, self.ledger
        if self._holds:
            return 0
        bound = admission_bound(self.version - self._start, settings.lead, settings.batch_size)
        if settings.total is not None:
            bound = min(bound, settings.total - self._start * settings.batch_size)
        room = bound - (ledger.submitted - ledger.dropped_total)
        if settings.max_queue is not None:
            room = min(room, settings.max_queue - ledger.buffered - ledger.in_flight)
        return max(0, room)

    def submit(self, count: int) -> list[Ticket]:
        """Tickets for `count` fresh prompts, which are in flight from now on.

        Raises:
            PolicyError: more than `admissible` allows.
        """
        allowed = self.admissible()
        if not 0 <= count <= allowed:
            held = f"; submission is held by {', '.join(self.held_by)}" if self._holds else ""
            raise PolicyError(f"{count} prompts may not be submitted at version {self.version}: {allowed} may{held}")
        first, deadline = self.ledger.submitted, self.version + self.settings.versions_ahead
        tickets = [Ticket(first + index, self.version, deadline) for index in range(count)]
        self.ledger.submit(count)
        for ticket in tickets:
            self._run(ticket)
        return tickets

    def finish(self, number: int, item: T, oldest_version: int) -> None:
        """A prompt in flight came back whole and scored; it waits, or is dropped as stale if it is too old already.

        Raises:
            PolicyError: that prompt is not in flight.
        """
        ticket = self._end(number, "finish")
        self.ledger.finish()
        self._keep(Taken(ticket, item, oldest_version))
        self._drop_stale()

    def drop(self, number: int, reason: str) -> None:
        """A prompt in flight will not come back or is not wanted; its place is free for a fresh prompt.

        Raises:
            PolicyError: that prompt is not in flight.
        """
        ticket = self._end(number, f"drop ({reason})")
        self._deadlines.drop_running(ticket.deadline)
        self.ledger.drop(reason)

    def advance(self, version: int) -> None:
        """The weights of `version` were published: generation draws from them from now on.

        Raises:
            PolicyError: it is older than the current one, or newer than the batches taken can have made.
        """
        if not self.version <= version <= self.learning_version:
            raise PolicyError(
                f"version {version} cannot follow version {self.version}: "
                f"the batches taken so far make versions up to {self.learning_version}"
            )
        self.version = version

    def ready(self) -> bool:
        """Whether `take` would succeed now."""
        return 0 < self._needed() <= len(self._buffer) and self._waits_for() is None

    def awaited(self) -> list[Ticket]:
        """The running prompts that hold the next batch up, by number; none when it is ready.

        All in flight while too few are ready, else those whose deadline would be missed if the batch went without them.
        """
        if self._needed() > len(self._buffer):
            return [self._running[number] for number in sorted(self._running)]
        due = self._waits_for()
        waited = [ticket for ticket in self._running.values() if due is not None and ticket.deadline <= due]
        return sorted(waited, key=lambda ticket: ticket.number)

    def take(self) -> list[Taken[T]]:
        """The next batch: `batch_size` prompts, the earliest deadline first, then the lowest number.

        What is left in the buffer and too old for the batch after it is dropped as stale.

        Raises:
            PolicyError: not `ready`.
        """
        if not self.ready():
            raise PolicyError(
                f"the batch for version {self.learning_version} is not ready: {len(self._buffer)} of "
                f"{self._needed()} prompts wait, {len(self._running)} are in flight"
            )
        batch = [self._buffer.pop() for _ in range(self.settings.batch_size)]
        for taken in batch:
            self._deadlines.remove_ready(taken.ticket.deadline)
        self.ledger.consume(len(batch))
        self._drop_stale()
        return batch

    def hold(self, reason: str) -> None:
        """Stops submission until `release` was called as often with the same reason, and for every other hold."""
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        """Lifts one hold.

        Raises:
            PolicyError: it is not on.
        """
        self._holds.remove(reason)

    def state_dict(self, encode: Callable[[T], Any]) -> dict[str, Any]:
        """Everything but the holds, which belong to the process: plain values as far as `encode` gives them."""
        ledger = self.ledger
        return {
            "batch_size": self.settings.batch_size,
            "start": self._start,
            "version": self.version,
            "submitted": ledger.submitted,
            "consumed": ledger.consumed,
            "dropped": dict(sorted(ledger.dropped.items())),
            "in_flight": [list(astuple(self._running[number])) for number in sorted(self._running)],
            "buffered": [
                {"ticket": list(astuple(t.ticket)), "oldest_version": t.oldest_version, "item": encode(t.item)}
                for t in self._buffer
            ],
        }  # fmt: skip

    @classmethod
    def restore(cls, settings: PolicySettings, state: dict[str, Any], decode: Callable[[Any], T]) -> RolloutPolicy[T]:
        """The policy that `state_dict` was taken from; what was in flight still is, see `resubmit`.

        The ratio and the limits may differ from those of the run that wrote it: old tickets keep their deadlines.

        Raises:
            ValueError: it was written with batches of another size.
        """
        if state["batch_size"] != settings.batch_size:
            raise ValueError(
                f"batch_size: {settings.batch_size} cannot go on from a checkpoint with batches of "
                f"{state['batch_size']} prompts; use {state['batch_size']}"
            )
        policy = cls(settings, state["start"])
        policy.version = state["version"]
        policy.ledger = Ledger(
            state["submitted"], state["consumed"], len(state["buffered"]), len(state["in_flight"]),
            Counter(state["dropped"]),
        )  # fmt: skip
        policy.ledger.check()
        policy._to_resubmit = [Ticket(*fields) for fields in state["in_flight"]]
        for ticket in policy._to_resubmit:
            policy._run(ticket)
        for entry in state["buffered"]:
            taken = Taken(Ticket(*entry["ticket"]), decode(entry["item"]), entry["oldest_version"])
            policy._deadlines.submit(taken.ticket.deadline)
            policy._keep(taken)
        policy._drop_stale()
        return policy

    def resubmit(self) -> list[Ticket]:
        """After `restore`, once: tickets that were in flight and must be generated again, number and deadline kept."""
        tickets, self._to_resubmit = self._to_resubmit, []
        return tickets

    def _needed(self) -> int:
        """Prompts that must be ready before a batch is taken; 0 when the run has had all of its batches."""
        settings = self.settings
        needed = settings.min_batches * settings.batch_size
        if settings.total is None:
            return needed
        return max(0, min(needed, settings.total - self._start * settings.batch_size - self.ledger.consumed))

    def _waits_for(self) -> int | None:
        return self._deadlines.waits_for(self.learning_version, self.settings.batch_size)

    def _run(self, ticket: Ticket) -> None:
        self._running[ticket.number] = ticket
        self._deadlines.submit(ticket.deadline)

    def _end(self, number: int, event: str) -> Ticket:
        ticket = self._running.pop(number, None)
        if ticket is None:
            raise PolicyError(f"{event}: prompt {number} is not in flight; {len(self._running)} others are")
        return ticket

    def _keep(self, taken: Taken[T]) -> None:
        self._deadlines.finish(taken.ticket.deadline)
        self._buffer.put(taken)

    def _drop_stale(self) -> None:
        for taken in self._buffer.expire(self.learning_version - self.settings.staleness_limit):
            self._deadlines.remove_ready(taken.ticket.deadline)
            self.ledger.discard(STALE)
