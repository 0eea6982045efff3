"""A random run of admission and of an independent model of it, with invariants checked after every event."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest

from roll.rollout.admission import Admission, AdmissionError, AdmissionSettings
from roll.rollout.ledger import PromptRequest


@dataclass
class Model:
    """State of every prompt by number, kept independently of admission."""

    version: int = 0
    batches: int = 0
    running: dict[int, PromptRequest] = field(default_factory=dict)
    buffered: dict[int, tuple[PromptRequest, int]] = field(default_factory=dict)
    consumed: set[int] = field(default_factory=set)
    dropped: dict[int, str] = field(default_factory=dict)

    @property
    def submitted(self) -> int:
        return len(self.running) + len(self.buffered) + len(self.consumed) + len(self.dropped)


class Driver:
    """Draws events: submissions, ends in any order, drops, batches, weight updates, pauses, crashes; time passes.

    An event returns whether anything changed; only those are counted.
    """

    def __init__(self, ratio: str, draw: random.Random) -> None:
        self.draw = draw
        self.ratio = Fraction(ratio)
        self.batch_size = self.draw.randint(1, 9)
        most_batches = math.floor(1 + self.ratio)
        min_batches = self.draw.choice([1, 1, self.draw.randint(1, most_batches)])
        self.settings = AdmissionSettings(
            batch_size=self.batch_size,
            ratio=float(ratio),
            max_staleness=self.draw.choice([None, math.ceil(self.ratio), math.ceil(self.ratio) + 2]),
            max_queue=self.draw.choice([None, None, min_batches * self.batch_size + self.draw.randint(0, 12)]),
            min_batches=min_batches,
            total=self.draw.choice([None, self.draw.randint(most_batches, 60) * self.batch_size]),
            max_age_s=self.draw.choice([None, None, 20.0, 200.0]),
        )
        self.now = 1000.0
        self.admission: Admission[dict] = Admission(self.settings)
        self.model = Model()
        self.pauses: list[str] = []
        self.saved: tuple[str, Model] | None = None
        self.events: Counter[str] = Counter()
        self.drop_rate = self.draw.choice([0.0, 0.02, 0.3])

    def run(self, events: int) -> None:
        """Draws that many events, then ends the run."""
        self.play(events)
        self.run_dry()

    def play(self, events: int) -> None:
        """Draws that many events."""
        names = ["submit", "end", "end", "end", "take", "advance", "pause", "resume", "crash", "save"]
        weights = [10, 10, 10, 10, 10, 6, 1, 3, 0.3, 0.3]
        for name in self.draw.choices(names, weights, k=events):
            self.now += self.draw.choice([0.0, 0.5, 1.0])
            self.events[name] += getattr(self, name)()
            self.check()

    def submit(self) -> bool:
        allowed = self.admission.admissible()
        if self.pauses:
            assert allowed == 0
        with pytest.raises(AdmissionError):
            self.admission.submit(allowed + 1)
        first = self.model.submitted
        for offset, request in enumerate(self.admission.submit(self.draw.randint(0, allowed), self.now)):
            deadline = self.model.version + math.ceil(self.ratio)
            assert request == PromptRequest(first + offset, self.model.version, deadline, self.now)
            self.model.running[request.number] = request
        return self.model.submitted > first

    def end(self) -> bool:
        """Any running prompt ends, early or late, finished or dropped."""
        if not self.model.running:
            return False
        number = self.draw.choice(list(self.model.running))
        request = self.model.running.pop(number)
        if self.draw.random() < self.drop_rate:
            reason = self.draw.choice(["generation_failed", "reward_timeout", "filtered_zero_variance"])
            self.admission.drop(number, reason)
            self.model.dropped[number] = reason
        else:
            oldest = self.draw.randint(request.version, self.model.version)
            self.admission.finish(number, {"number": number}, oldest)
            self.model.buffered[number] = (request, oldest)
        return True

    def expire(self) -> None:
        """Drops ready prompts by their age, as before a batch is taken."""
        limit = self.settings.max_age_s
        old = [
            number
            for number, (request, _) in self.model.buffered.items()
            if limit is not None and self.now - request.submitted_at_s > limit
        ]
        assert self.admission.expire(self.now) == len(old)
        for number in old:
            del self.model.buffered[number]
            self.model.dropped[number] = "expired"

    def take(self) -> bool:
        self.expire()
        assert self.admission.ready() == self.batch_can_go()
        assert (not self.admission.blocking()) or not self.admission.ready()
        if not self.admission.ready():
            with pytest.raises(AdmissionError):
                self.admission.take()
            return False
        earliest = sorted((request.deadline, number) for number, (request, _) in self.model.buffered.items())
        batch = self.admission.take()
        assert [taken.request.number for taken in batch] == [number for _, number in earliest[: self.batch_size]]
        for taken in batch:
            request, oldest = self.model.buffered.pop(taken.request.number)
            assert (taken.request, taken.oldest_version, taken.group) == (request, oldest, {"number": request.number})
            assert request.deadline >= self.model.batches, "learned from after its deadline"
            assert self.model.batches - oldest <= math.ceil(self.ratio), "staler than the bound"
            age = self.now - request.submitted_at_s
            assert self.settings.max_age_s is None or age <= self.settings.max_age_s, "older than max_age_s"
            self.model.consumed.add(request.number)
        left = [*self.model.running.values(), *(request for request, _ in self.model.buffered.values())]
        assert all(request.deadline > self.model.batches for request in left), "a due prompt was left out"
        self.model.batches += 1
        return True

    def batch_can_go(self) -> bool:
        """Simulates the following batches: all other prompts, earliest deadline first, must fit into them."""
        needed = self.settings.min_batches * self.batch_size
        if self.settings.total is not None:
            needed = min(needed, self.settings.total - len(self.model.consumed))
        ready = sorted((request.deadline, number) for number, (request, _) in self.model.buffered.items())
        if needed <= 0 or len(ready) < needed:
            return False
        left = [deadline for deadline, _ in ready[self.batch_size :]]
        left += [request.deadline for request in self.model.running.values()]
        next_batch = self.model.batches + 1
        return all(deadline >= next_batch + i // self.batch_size for i, deadline in enumerate(sorted(left)))

    def advance(self) -> bool:
        with pytest.raises(AdmissionError):
            self.admission.advance(self.model.batches + 1)
        before = self.model.version
        self.model.version = self.draw.randint(before, self.model.batches)
        self.admission.advance(self.model.version)
        return self.model.version > before

    def pause(self) -> bool:
        self.pauses.append(self.draw.choice(["validation", "closing"]))
        self.admission.pause(self.pauses[-1])
        return True

    def resume(self) -> bool:
        if not self.pauses:
            return False
        self.admission.resume(self.pauses.pop(self.draw.randrange(len(self.pauses))))
        return True

    def state(self) -> str:
        return json.dumps(self.admission.state_dict(lambda item: item["number"]))

    def save(self) -> bool:
        self.saved = (self.state(), copy.deepcopy(self.model))
        return True

    def crash(self) -> bool:
        """Restores the last checkpoint, or the current state; prompts in flight are generated again."""
        state, model = self.saved or (self.state(), self.model)
        self.model = copy.deepcopy(model)
        self.admission = Admission.restore(self.settings, json.loads(state), lambda number: {"number": number})
        self.pauses = []
        assert self.state() == state
        again = {number: replace(each, submitted_at_s=self.now) for number, each in self.model.running.items()}
        assert self.admission.resubmit(self.now) == [again[number] for number in sorted(again)]
        assert self.admission.resubmit(self.now) == []
        self.model.running = again
        return True

    def check(self) -> None:
        """Checks the invariants that hold after every event."""
        model, ledger = self.model, self.admission.ledger
        ledger.check()
        counts = (len(model.consumed), len(model.buffered), len(model.running), len(model.dropped))
        assert (ledger.consumed, ledger.buffered, ledger.in_flight, ledger.dropped_total) == counts
        assert ledger.submitted == model.submitted
        alive = model.submitted - len(model.dropped)
        assert alive <= math.floor((model.version + 1 + self.ratio) * self.batch_size)
        assert self.settings.total is None or alive <= self.settings.total
        assert self.settings.max_queue is None or len(model.buffered) + len(model.running) <= self.settings.max_queue
        assert "stale" not in ledger.dropped, "admission alone bounds staleness"
        assert ledger.dropped["expired"] == list(model.dropped.values()).count("expired")

    def run_dry(self) -> None:
        """Ends all pauses and all prompts; the next batches must become ready."""
        while self.pauses:
            self.resume()
        self.drop_rate = 0.0
        target = self.model.batches + 5
        if self.settings.total is not None:
            target = min(target, self.settings.total // self.batch_size)
        while self.model.batches < target:
            self.model.version = self.model.batches
            self.admission.advance(self.model.version)
            self.expire()
            for request in self.admission.submit(self.admission.admissible(), self.now):
                self.model.running[request.number] = request
            while not self.admission.ready():
                assert self.admission.blocking(), "not ready, and nothing to wait for"
                self.end()
                self.check()
            self.take()
            self.check()
