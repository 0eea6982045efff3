"""Discrete-event simulation of a run: the real admission of prompts, with simulated engines and a simulated trainer.

`roll.rollout.admission` admits prompts, keeps finished groups and forms batches, as in `roll run`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll.base.timers import BusyTimer
from roll.rollout.admission import Admission, AdmissionSettings
from roll.rollout.engine_pool import Balancer
from roll.rollout.request_order import RequestOrder

ROUNDING = 1e-9
"""Fraction of a token by which a request counts as finished early, to absorb rounding errors of float sums."""


@dataclass(frozen=True)
class DecodeSpeed:
    """Seconds of one decode iteration, which gives every running request one token.

    An iteration takes `seconds * (1 + batch / doubling_batch)`: a constant part (reading weights, kernel launches) and
    a part that grows with the batch. At `doubling_batch` requests both parts are equal.
    """

    seconds: float
    doubling_batch: float = math.inf

    def iteration(self, batch: int) -> float:
        return self.seconds * (1 + batch / self.doubling_batch)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step outside the engines, each measured alone.

    Attributes:
        train: training on one batch.
        log_probs: log-probs of one batch.
        overhead: on the driver, between taking a batch and training on it.
        weight_update: sending new weights to the engines, the pause included.
        weight_update_pause: end of a weight update, during which engines generate nothing.
        reward: scoring all groups of one batch, one after the other.
    """

    train: float
    log_probs: float = 0.0
    overhead: float = 0.0
    weight_update: float = 0.0
    weight_update_pause: float = 0.0
    reward: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """Input of a simulation.

    Attributes:
        settings: of admission.
        samples_per_prompt: responses sampled for each prompt.
        engines: number of engines.
        slots: requests that one engine runs at a time.
        newer: most of them that start beside requests of older prompts that are due; None: no limit.
        speed: of an engine.
        costs: of the other parts of a step.
        lengths: response lengths in tokens, used cyclically.
        slowdown: factor on training and generation while both run, for a machine where they share cores.
        drain: whether a weight update waits until no request runs, and no request starts meanwhile.
        steps: batches to measure.
    """

    settings: AdmissionSettings
    samples_per_prompt: int
    engines: int
    slots: int
    speed: DecodeSpeed
    costs: StepCosts
    lengths: Sequence[float]
    slowdown: float = 1.0
    newer: int | None = None
    drain: bool = False
    steps: int = 20


@dataclass(frozen=True)
class Outcome:
    """Means over the measured batches, each from one weight update to the next.

    Attributes:
        step_seconds: duration of a step.
        wait_seconds: part of it in which the trainer waits for a batch.
        trainer_idle: fraction of time without training and log-probs.
        rollout_idle: fraction of time in which no engine runs a request.
        staleness: fraction of samples by staleness of their oldest token, in versions.
    """

    step_seconds: float
    wait_seconds: float
    trainer_idle: float
    rollout_idle: float
    staleness: dict[int, float] = field(default_factory=dict)


def simulate(scenario: Scenario) -> Outcome:
    """Simulates a run until it is in steady state, then measures `steps` batches.

    Raises:
        RuntimeError: no event is left, so admission is deadlocked: a bug.
    """
    return _Simulation(scenario).run()


def generation_seconds(scenario: Scenario, batches: int = 8) -> float:
    """Mean seconds to generate one batch when nothing else runs, without rewards."""
    alone = replace(
        scenario,
        settings=AdmissionSettings(scenario.settings.batch_size, 0.0),
        costs=StepCosts(train=0.0),
        slowdown=1.0,
        newer=None,
        drain=False,
        steps=batches,
    )
    return simulate(alone).step_seconds


class SimulatedEngine:
    """One engine with continuous batching: up to `slots` requests run at a time, the others wait, the oldest first.

    All running requests gain tokens at the same rate, so one counter of iterations gives the end of each, and an event
    costs O(log slots). Call `advance` before reading or changing anything at a later time.

    Attributes:
        stretch: factor on the duration of an iteration, while training uses the same cores.
        due: requests of versions up to this one are due in the next batch.
        paused: whether running requests gain no tokens.
        admitting: whether waiting requests may start.
    """

    def __init__(self, speed: DecodeSpeed, slots: int, newer: int | None = None) -> None:
        self._speed = speed
        self._order: RequestOrder[tuple[int, float]] = RequestOrder(slots, newer)
        self._running: list[tuple[float, int, int, int]] = []
        self._iterations = 0.0
        self._now = 0.0
        self._started = 0
        self.stretch = 1.0
        self.due = math.inf
        self.paused = False
        self.admitting = True

    @property
    def active(self) -> bool:
        return bool(self._running)

    def submit(self, request: int, tokens: float, version: int = 0) -> None:
        """Queues a request for a response of `tokens` tokens to a prompt submitted at `version`."""
        self._order.add(version, (request, tokens))

    def advance(self, now: float) -> None:
        if self._running and not self.paused:
            self._iterations += (now - self._now) / (self._speed.iteration(len(self._running)) * self.stretch)
        self._now = now

    def pop_finished(self) -> list[int]:
        """Removes and returns the requests that have all of their tokens."""
        finished = []
        while self._running and self._running[0][0] <= self._iterations + ROUNDING * (1 + self._iterations):
            *_, request, version = heapq.heappop(self._running)
            self._order.end(version)
            finished.append(request)
        return finished

    def start_waiting(self) -> list[int]:
        """Starts the waiting requests that may run now; returns those started."""
        started = []
        for version, (request, tokens) in self._order.start(self.due) if self.admitting else ():
            self._started += 1
            heapq.heappush(self._running, (self._iterations + tokens, self._started, request, version))
            started.append(request)
        return started

    def next_end(self) -> float:
        """Time at which the next request finishes if nothing changes; infinity if none runs."""
        if self.paused or not self._running:
            return math.inf
        iterations = max(0.0, self._running[0][0] - self._iterations)
        return self._now + iterations * self._speed.iteration(len(self._running)) * self.stretch


class _Simulation:
    """Event loop of a simulation.

    Events are handled in the order of their times. Rescheduling an event leaves the earlier entry in the heap, where
    its outdated stamp marks it as void. The trainer goes through the phases wait, overhead, learn, drain, update.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._admission: Admission[None] = Admission(scenario.settings)
        self._engines = [
            SimulatedEngine(scenario.speed, scenario.slots, scenario.newer) for _ in range(scenario.engines)
        ]
        self._balancer = Balancer(scenario.engines)
        self._events: list[tuple[float, int, str, int, int]] = []
        self._stamps: Counter[object] = Counter()
        self._scheduled = 0
        self._now = 0.0
        # Generation
        self._active_engines = 0
        self._unfinished: dict[int, int] = {}
        self._oldest_version: dict[int, int] = {}
        self._scorer_free_at = 0.0
        # Training
        self._phase = "wait"
        self._waiting_since = self._waited = 0.0
        self._work_left = 0.0
        self._work_left_at = 0.0
        self._trainer_slowdown = 1.0
        self._updates = 0
        # Measurement
        self._trainer, self._rollout = BusyTimer(0.0), BusyTimer(0.0)
        self._staleness: Counter[int] = Counter()

    def run(self) -> Outcome:
        """Simulates a warm-up and then the scenario's steps; only the latter are measured."""
        self._set_due()
        warm_up = 2 + 2 * self._scenario.settings.versions_ahead
        self._submit()
        start = self._run_until(warm_up)
        self._trainer.interval(start)
        self._rollout.interval(start)
        self._staleness.clear()
        self._waited = 0.0
        end = self._run_until(warm_up + self._scenario.steps)
        samples = sum(self._staleness.values())
        return Outcome(
            step_seconds=(end - start) / self._scenario.steps,
            wait_seconds=self._waited / self._scenario.steps,
            trainer_idle=self._trainer.interval(end).idle_share,
            rollout_idle=self._rollout.interval(end).idle_share,
            staleness={age: count / samples for age, count in sorted(self._staleness.items())},
        )

    def _run_until(self, updates: int) -> float:
        """Handles events until that many weight updates have finished; returns the time."""
        handlers = {
            "engine": self._on_engine,
            "scored": self._on_scored,
            "learn": self._on_learn,
            "learned": self._on_learned,
            "pause": self._on_pause,
            "updated": self._on_updated,
        }
        while self._updates < updates:
            if not self._events:
                raise RuntimeError(f"no event is left after weight update {self._updates}: {self._admission.ledger}")
            self._now, _, kind, index, stamp = heapq.heappop(self._events)
            if stamp == self._stamps[kind, index] or kind == "scored":
                handlers[kind](index)
        return self._now

    def _schedule(self, time: float, kind: str, index: int = 0) -> None:
        """Schedules an event; replaces a scheduled event of the same kind and index."""
        self._stamps[kind, index] += 1
        self._scheduled += 1
        if time < math.inf:
            heapq.heappush(self._events, (time, self._scheduled, kind, index, self._stamps[kind, index]))

    # Generation

    def _submit(self) -> None:
        scenario, used = self._scenario, set()
        for request in self._admission.submit(self._admission.admissible()):
            self._unfinished[request.number] = scenario.samples_per_prompt
            engine = self._balancer.choose()
            self._balancer.add(engine, scenario.samples_per_prompt)
            used.add(engine)
            for sample in range(scenario.samples_per_prompt):
                index = request.number * scenario.samples_per_prompt + sample
                length = scenario.lengths[index % len(scenario.lengths)]
                self._engines[engine].submit(request.number, length, request.version)
        for engine in sorted(used):
            self._on_engine(engine)

    def _on_engine(self, index: int) -> None:
        """Finishes and starts requests of one engine, and schedules its next event."""
        engine = self._engines[index]
        was_active = engine.active
        engine.advance(self._now)
        finished_groups = []
        for number in engine.pop_finished():
            self._balancer.remove(index, 1)
            self._unfinished[number] -= 1
            if not self._unfinished[number]:
                finished_groups.append(number)
        for number in engine.start_waiting():
            self._oldest_version.setdefault(number, self._admission.version)
        self._track_activity(was_active, engine.active)
        self._schedule(engine.next_end(), "engine", index)
        for number in finished_groups:
            del self._unfinished[number]
            self._score(number)

    def _track_activity(self, was_active: bool, active: bool) -> None:
        """Records that an engine became busy or idle; if that holds for all engines, the trainer's pace changes."""
        if was_active == active:
            return
        (self._rollout.enter if active else self._rollout.exit)(self._now)
        was_generating = self._active_engines > 0
        self._active_engines += 1 if active else -1
        if was_generating != (self._active_engines > 0):
            self._repace_trainer()
            if self._phase == "drain" and not self._active_engines:
                self._begin_update()

    def _change_engines(self, **attributes: Any) -> None:
        """Sets attributes of all engines at the current time."""
        for index, engine in enumerate(self._engines):
            engine.advance(self._now)
            for name, value in attributes.items():
                setattr(engine, name, value)
            self._on_engine(index)

    def _set_due(self) -> None:
        """Tells the engines which prompts are due, after the version of the weights changed."""
        for engine in self._engines:
            engine.due = self._admission.version - self._scenario.settings.versions_ahead

    def _score(self, number: int) -> None:
        seconds = self._scenario.costs.reward / self._scenario.settings.batch_size
        self._scorer_free_at = max(self._now, self._scorer_free_at) + seconds
        self._schedule(self._scorer_free_at, "scored", number)

    def _on_scored(self, number: int) -> None:
        del self._stamps["scored", number]
        self._admission.finish(number, None, self._oldest_version.pop(number))
        self._take_batch()

    # Training

    def _take_batch(self) -> None:
        if self._phase != "wait" or not self._admission.ready():
            return
        version = self._admission.learning_version
        self._staleness.update(version - group.oldest_version for group in self._admission.take())
        self._waited += self._now - self._waiting_since
        self._phase = "overhead"
        self._schedule(self._now + self._scenario.costs.overhead, "learn")
        self._submit()

    def _on_learn(self, _: int) -> None:
        self._phase = "learn"
        self._trainer.enter(self._now)
        self._work_left = self._scenario.costs.log_probs + self._scenario.costs.train
        self._schedule_learned()
        if self._scenario.slowdown != 1:
            self._change_engines(stretch=self._scenario.slowdown)

    def _schedule_learned(self) -> None:
        """Schedules the end of training from the work left and the current pace."""
        self._work_left_at = self._now
        self._trainer_slowdown = self._scenario.slowdown if self._active_engines else 1.0
        self._schedule(self._now + self._work_left * self._trainer_slowdown, "learned")

    def _repace_trainer(self) -> None:
        """Moves the end of training, because engines started or stopped to share its cores."""
        if self._phase != "learn" or self._scenario.slowdown == 1:
            return
        self._work_left = max(0.0, self._work_left - (self._now - self._work_left_at) / self._trainer_slowdown)
        self._schedule_learned()

    def _on_learned(self, _: int) -> None:
        self._trainer.exit(self._now)
        self._phase = "drain"
        self._change_engines(stretch=1.0, admitting=not self._scenario.drain)
        if self._phase == "drain" and not (self._scenario.drain and self._active_engines):
            self._begin_update()

    def _begin_update(self) -> None:
        costs = self._scenario.costs
        self._phase = "update"
        self._schedule(self._now + max(0.0, costs.weight_update - costs.weight_update_pause), "pause")
        self._schedule(self._now + max(costs.weight_update, costs.weight_update_pause), "updated")

    def _on_pause(self, _: int) -> None:
        self._change_engines(paused=True)

    def _on_updated(self, _: int) -> None:
        self._admission.advance(self._admission.learning_version)
        self._updates += 1
        self._phase = "wait"
        self._waiting_since = self._now
        self._set_due()
        self._change_engines(paused=False, admitting=True)
        self._submit()
        self._take_batch()
