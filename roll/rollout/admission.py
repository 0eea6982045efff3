"""Admission of prompts: how many generation may run ahead of training, and which finished ones form the next batch.

It is plain Python without a clock: the caller, `Rollouter` in `roll/rollout/rollouter.py`, submits at most
`admissible()` prompts, and reports every event, and the time where it matters. Three rules hold. Let B be the prompts
of a batch (`rollout_batch_size`; groups of agents), eta the async_generation_ratio, v the weight version that the
engines have (0 first) and n the version whose weights learn from the next batch (the number of batches taken so far:
v, or v + 1 while a taken batch is being learned from).

Admission: submitted - dropped <= floor((v + 1 + eta) * B), always. So generation is at most eta batches ahead of
training. A dropped prompt does not count, so a new prompt with its own deadline may be submitted.

Deadline: a prompt submitted at version u is learned from by version u + ceil(eta) at the latest.

Batch: B ready prompts, the earliest deadline first, then the lowest number. It waits while fewer are ready, or while
a deadline would be missed without a prompt that still runs (`Deadlines.blocking_deadline`). Otherwise it does not
wait for running prompts, so a long response delays training only when its deadline requires it.

Why no deadline is missed. Claim: for every d >= n, the prompts not yet consumed that are due by d are at most
(d - n + 1) * B, which is what the batches n to d hold.

- Submission keeps it. All prompts not consumed are submitted - dropped - n * B <= (v + 1 + eta - n) * B. The new ones
  are due at D = v + ceil(eta), and (v + 1 + eta - n) * B <= (D - n + 1) * B. For d < D nothing changed.
- Finishing changes no count, and dropping lowers one. A replacement is submitted like any other.
- Taking keeps it: `blocking_deadline` allows a batch only if it leaves at most (d - n) * B due by d, for every d.

At d = n: at most B prompts are due now, and the batch holds all of them. So every prompt is consumed in time or
dropped. Whether a running prompt ends at all is up to the caller's timeouts; `blocking` lists the prompts that the
next batch waits for. The rule at d = n alone (wait for what is due now) is not enough: with eta = 2 the first version
admits 3 * B prompts due at 2, and a batch 1 made of prompts due at 3 would leave 2 * B for batch 2.

Staleness follows: no token is older than the submission of its prompt, so it is at most ceil(eta) versions old when
it is learned from. The limit `max_staleness` (`max_staleness_allowed`) drops nothing in an unbroken run; it matters
when a checkpoint is resumed with a smaller ratio than that under which its prompts were admitted.

Freshness by time: with `max_age_s` (`max_sample_age_s`), `expire` drops ready groups whose prompt was submitted
longer ago. The caller calls it before it takes a batch, so no token learned from is older. New prompts may replace
the dropped ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Generic, TypeVar

from roll.configs.asynchronous import exact_ratio, versions_ahead
from roll.rollout.ledger import EXPIRED, STALE, Deadlines, FinishedGroup, Ledger, PromptRequest, SampleBuffer


class AdmissionError(RuntimeError):
    """A call violates the bounds of admission: a bug of the caller, after which a run must end."""


def admission_bound(batches: int, ratio: Fraction, batch_size: int) -> int:
    """Most prompts that may have been submitted so far, without dropped ones: floor((v + 1 + ratio) * batch_size).

    Args:
        batches: v, weight updates since the first version; 0 before the first update.
        ratio: batches that generation may run ahead; from `exact_ratio`.
        batch_size: prompts of one batch.
    """
    return math.floor((batches + 1 + ratio) * batch_size)


@dataclass(frozen=True)
class AdmissionSettings:
    """Bounds of admission; counts are prompts (groups of samples), ages are weight versions.

    Raises:
        ValueError: a value is out of range, or no batch could ever be taken with these values.

    Attributes:
        batch_size: prompts of one training batch.
        ratio: async_generation_ratio, any finite number of at least 0: batches that generation may run ahead.
        max_staleness: a group whose oldest token is more versions old than this when a batch is taken is dropped as
            `stale`; None: ceil(ratio), which admission guarantees anyway.
        max_age_s: seconds from the submission of a prompt after which `expire` drops its group; None: no limit.
        max_queue: prompts in flight and buffered together at which submission stops; none is evicted. None: no limit.
        min_batches: batches that must be ready before one is taken; fewer at the end of a run.
        total: prompts that the whole run consumes; no more are admitted. None: no end.
    """

    batch_size: int
    ratio: float
    max_staleness: int | None = None
    max_queue: int | None = None
    min_batches: int = 1
    total: int | None = None
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: {self.batch_size} is not at least 1")
        if self.max_staleness is not None and self.max_staleness < self.versions_ahead:
            raise ValueError(
                f"max_staleness: {self.max_staleness} would drop samples that async_generation_ratio {self.ratio:g} "
                f"admits; use at least {self.versions_ahead}"
            )
        most = math.floor(1 + self.max_lead)
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
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ValueError(f"max_age_s: {self.max_age_s} is not above 0")
        if self.total is not None and (self.total < 0 or self.total % self.batch_size):
            raise ValueError(f"total: {self.total} is not a whole number of batches of {self.batch_size}")

    @cached_property
    def max_lead(self) -> Fraction:
        """Batches that generation may run ahead: the ratio as an exact fraction."""
        return exact_ratio(self.ratio)

    @cached_property
    def versions_ahead(self) -> int:
        """ceil(ratio): versions between the submission of a prompt and its deadline."""
        return versions_ahead(self.ratio)

    @cached_property
    def staleness_limit(self) -> int:
        return self.versions_ahead if self.max_staleness is None else self.max_staleness


T = TypeVar("T")


class Admission(Generic[T]):
    """Admission, deadlines, buffer and ledger of one run; the rules are in the docstring of the module.

    Not thread-safe. A change costs O(log n) for each prompt and a query O(ceil(ratio)). Memory grows with the prompts
    in flight and buffered, not with the length of the run.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        """Starts with no prompt submitted."""
        self.settings = settings
        self.version = 0
        self.ledger = Ledger()
        self._running: dict[int, PromptRequest] = {}
        self._buffer: SampleBuffer[T] = SampleBuffer()
        self._deadlines = Deadlines()
        self._paused_for: Counter[str] = Counter()
        self._to_resubmit: list[PromptRequest] = []
        self.on_discard: Callable[[FinishedGroup[T], str], None] = lambda finished, reason: None
        """Called with every ready group that is dropped, and the reason."""

    @property
    def learning_version(self) -> int:
        """Version of the weights that learn from the next batch; each batch makes one version."""
        return self.ledger.consumed // self.settings.batch_size

    @property
    def pause_reasons(self) -> list[str]:
        """Why submission is paused; empty where it is not."""
        return sorted(+self._paused_for)

    def admissible(self) -> int:
        """Prompts that may be submitted now."""
        settings, ledger = self.settings, self.ledger
        if self.pause_reasons:
            return 0
        bound = admission_bound(self.version, settings.max_lead, settings.batch_size)
        if settings.total is not None:
            bound = min(bound, settings.total)
        room = bound - (ledger.submitted - ledger.dropped_total)
        if settings.max_queue is not None:
            room = min(room, settings.max_queue - ledger.buffered - ledger.in_flight)
        return max(0, room)

    def submit(self, count: int, now_s: float = 0.0) -> list[PromptRequest]:
        """Requests for `count` new prompts, which are in flight from now on.

        Args:
            count: prompts.
            now_s: the time, on any clock that a restart does not set back; only `expire` compares it.

        Raises:
            AdmissionError: more than `admissible` allows.
        """
        allowed = self.admissible()
        if not 0 <= count <= allowed:
            paused = f"; submission is paused for {', '.join(self.pause_reasons)}" if self.pause_reasons else ""
            raise AdmissionError(
                f"{count} prompts may not be submitted at version {self.version}, only {allowed}{paused}"
            )
        first, deadline = self.ledger.submitted, self.version + self.settings.versions_ahead
        requests = [PromptRequest(first + index, self.version, deadline, now_s) for index in range(count)]
        self.ledger.submit(count)
        for request in requests:
            self._run(request)
        return requests

    def finish(self, number: int, group: T, oldest_version: int) -> None:
        """Buffers a prompt in flight that is generated and scored, or drops it as stale if it is too old already.

        Raises:
            AdmissionError: that prompt is not in flight.
        """
        request = self._end(number, "finish")
        self.ledger.finish()
        self._keep(FinishedGroup(request, group, oldest_version))
        self._drop_stale()

    def drop(self, number: int, reason: str) -> PromptRequest:
        """Drops a prompt in flight that failed or was filtered, so that a new prompt may be submitted instead.

        Raises:
            AdmissionError: that prompt is not in flight.
        """
        request = self._end(number, f"drop ({reason})")
        self._deadlines.drop_running(request.deadline)
        self.ledger.drop(reason)
        return request

    def advance(self, version: int) -> None:
        """Records that the engines have the weights of `version`, so that more prompts may be submitted.

        Raises:
            AdmissionError: the version is older than the current one, or newer than the batches taken so far allow.
        """
        if not self.version <= version <= self.learning_version:
            raise AdmissionError(
                f"version {version} cannot follow version {self.version}: "
                f"the batches taken so far make versions up to {self.learning_version}"
            )
        self.version = version

    def ready(self) -> bool:
        """Whether `take` would succeed now."""
        return 0 < self._needed() <= len(self._buffer) and self._blocking_deadline() is None

    def blocking(self) -> list[PromptRequest]:
        """The running prompts that the next batch waits for, by number; none when it is ready.

        All prompts in flight while too few are ready, else those whose deadline the batch would miss without them.
        """
        if self._needed() > len(self._buffer):
            return [self._running[number] for number in sorted(self._running)]
        due = self._blocking_deadline()
        due_now = [request for request in self._running.values() if due is not None and request.deadline <= due]
        return sorted(due_now, key=lambda request: request.number)

    def expire(self, now_s: float) -> int:
        """Drops the ready groups whose prompt was submitted more than `max_age_s` ago; returns their number."""
        if self.settings.max_age_s is None:
            return 0
        return self._discard(self._buffer.expire_submitted_before(now_s - self.settings.max_age_s), EXPIRED)

    def take(self) -> list[FinishedGroup[T]]:
        """The next batch: `batch_size` prompts, the earliest deadline first, then the lowest number.

        Groups left in the buffer that are too old for the batch after it are dropped as stale.

        Raises:
            AdmissionError: not `ready`.
        """
        if not self.ready():
            raise AdmissionError(
                f"the batch for version {self.learning_version} is not ready: {len(self._buffer)} of "
                f"{self._needed()} prompts are ready, {len(self._running)} are in flight"
            )
        batch = [self._buffer.pop() for _ in range(self.settings.batch_size)]
        for finished in batch:
            self._deadlines.remove_ready(finished.request.deadline)
        self.ledger.consume(len(batch))
        self._drop_stale()
        return batch

    def pause(self, reason: str) -> None:
        """Pauses submission until `resume` was called as often with this reason, and with every other one."""
        self._paused_for[reason] += 1

    def resume(self, reason: str) -> None:
        """Ends one `pause`.

        Raises:
            AdmissionError: submission is not paused for this reason.
        """
        if not self._paused_for[reason]:
            raise AdmissionError(f"submission is not paused for {reason!r}, only for {self.pause_reasons}")
        self._paused_for[reason] -= 1

    def state_dict(self, encode: Callable[[T], Any]) -> dict[str, Any]:
        """Everything but the pauses, which belong to the process; plain values as far as `encode` gives them."""
        ledger = self.ledger
        return {
            "batch_size": self.settings.batch_size,
            "version": self.version,
            "submitted": ledger.submitted,
            "consumed": ledger.consumed,
            "dropped": dict(sorted(ledger.dropped.items())),
            "in_flight": [list(astuple(self._running[number])) for number in sorted(self._running)],
            "buffered": [
                {"request": list(astuple(f.request)), "oldest_version": f.oldest_version, "group": encode(f.group)}
                for f in self._buffer
            ],
        }  # fmt: skip

    @classmethod
    def restore(
        cls,
        settings: AdmissionSettings,
        state: dict[str, Any],
        decode: Callable[[Any], T],
        on_discard: Callable[[FinishedGroup[T], str], None] = lambda finished, reason: None,
    ) -> Admission[T]:
        """The admission that `state_dict` was taken from; prompts in flight still are, see `resubmit`.

        Ratio and limits may differ from those of the run that wrote it: prompts keep their deadlines. `on_discard` is
        called with each group that is too old for them.

        Raises:
            ValueError: it was written with another batch size.
        """
        if state["batch_size"] != settings.batch_size:
            raise ValueError(
                f"rollout_batch_size: batches of {settings.batch_size} prompts cannot continue from a checkpoint with "
                f"batches of {state['batch_size']}; use that size"
            )
        admission = cls(settings)
        admission.version, admission.on_discard = state["version"], on_discard
        admission.ledger = Ledger(
            state["submitted"], state["consumed"], len(state["buffered"]), len(state["in_flight"]),
            Counter(state["dropped"]),
        )  # fmt: skip
        admission.ledger.check()
        admission._to_resubmit = [PromptRequest(*fields) for fields in state["in_flight"]]
        for request in admission._to_resubmit:
            admission._run(request)
        for entry in state["buffered"]:
            finished = FinishedGroup(PromptRequest(*entry["request"]), decode(entry["group"]), entry["oldest_version"])
            admission._deadlines.submit(finished.request.deadline)
            admission._keep(finished)
        admission._drop_stale()
        return admission

    def resubmit(self, now_s: float = 0.0) -> list[PromptRequest]:
        """The requests in flight at a restart, to be generated again under their old numbers and deadlines; once.

        Nothing of what was generated for them is left, so their age counts from `now_s`.
        """
        requests, self._to_resubmit = [replace(request, submitted_at_s=now_s) for request in self._to_resubmit], []
        self._running |= {request.number: request for request in requests}
        return requests

    def _needed(self) -> int:
        """Prompts that must be ready before a batch is taken; 0 when the run has taken all of its batches."""
        settings = self.settings
        needed = settings.min_batches * settings.batch_size
        if settings.total is None:
            return needed
        return max(0, min(needed, settings.total - self.ledger.consumed))

    def _blocking_deadline(self) -> int | None:
        return self._deadlines.blocking_deadline(self.learning_version, self.settings.batch_size)

    def _run(self, request: PromptRequest) -> None:
        self._running[request.number] = request
        self._deadlines.submit(request.deadline)

    def _end(self, number: int, event: str) -> PromptRequest:
        request = self._running.pop(number, None)
        if request is None:
            raise AdmissionError(f"{event}: prompt {number} is not in flight; {len(self._running)} others are")
        return request

    def _keep(self, finished: FinishedGroup[T]) -> None:
        self._deadlines.finish(finished.request.deadline)
        self._buffer.put(finished)

    def _drop_stale(self) -> None:
        self._discard(self._buffer.expire(self.learning_version - self.settings.staleness_limit), STALE)

    def _discard(self, removed: Iterable[FinishedGroup[T]], reason: str) -> int:
        """Counts ready groups that were removed as dropped; returns their number."""
        count = 0
        for finished in removed:
            self._deadlines.remove_ready(finished.request.deadline)
            self.ledger.discard(reason)
            self.on_discard(finished, reason)
            count += 1
        return count
