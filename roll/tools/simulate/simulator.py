"""A run on a virtual clock: the policy of running ahead as it is, with engines and a trainer that only take time."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.rollout.balance import Balancer
from roll.rollout.intervals import Busy
from roll.rollout.policy import PolicySettings, RolloutPolicy


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one batch outside the engines, each when nothing else runs."""

    train: float
    log_probs: float = 0.0
    overhead: float = 0.0
    """On the driver, between taking the batch and learning from it."""
    publish: float = 0.0
    publish_pause: float = 0.0
    """The end of a publish, in which engines stand still."""
    reward: float = 0.0
    """Scoring all groups of a batch, one after the other as they come back."""


@dataclass(frozen=True)
class Scenario:
    """Everything a simulated run depends on."""

    settings: PolicySettings
    samples_per_prompt: int
    engines: int
    slots: int
    """Requests that one engine runs at a time."""
    speed: DecodeSpeed
    costs: StepCosts
    lengths: Sequence[float]
    """Tokens of the responses, used in turn."""
    slowdown: float = 1.0
    """How much longer learning and generation take while both go on, where they share cores."""
    drain: bool = False
    """A publish waits until no request runs, and none begins meanwhile."""
    steps: int = 20
    """Batches that are measured."""


@dataclass(frozen=True)
class Outcome:
    """Means over the measured batches, from one publish to the next."""

    step_seconds: float
    wait_seconds: float
    """Of a step, the trainer's wait for its batch."""
    trainer_idle: float
    """Share of the time in which it neither learns nor computes log-probs."""
    rollout_idle: float
    """Share of the time in which no engine has a request."""
    staleness: dict[int, float] = field(default_factory=dict)
    """Share of the samples by the age of their oldest token, in versions."""

    @property
    def staleness_mean(self) -> float:
        """Mean age of a sample's oldest token."""
        return sum(age * share for age, share in self.staleness.items())


def simulate(scenario: Scenario) -> Outcome:
    """Plays the run until it is in its stride, then measures `steps` batches.

    Raises:
        RuntimeError: nothing is left that could happen, so the policy is stuck: a bug.
    """
    return _Simulation(scenario).play()


def generation_seconds(scenario: Scenario, batches: int = 8) -> float:
    """Mean seconds to generate one batch when nothing else runs, rewards not counted."""
    settings = PolicySettings(scenario.settings.batch_size, 0.0)
    alone = Scenario(
        settings, scenario.samples_per_prompt, scenario.engines, scenario.slots, scenario.speed, StepCosts(0.0),
        scenario.lengths, steps=batches,
    )  # fmt: skip
    return simulate(alone).step_seconds


class _Simulation:
    """Events in the order of their times; a scheduled end that was changed is recognised by its outdated stamp."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._policy: RolloutPolicy[None] = RolloutPolicy(scenario.settings)
        self._engines = [SimulatedEngine(scenario.speed, scenario.slots) for _ in range(scenario.engines)]
        self._balancer = Balancer(scenario.engines)
        self._stamps: Counter[object] = Counter()
        self._events: list[tuple[float, int, str, int, int]] = []
        self._scheduled = 0
        self._now = 0.0
        self._active = 0
        self._unfinished: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        self._scorer_free = 0.0
        self._trainer, self._rollout = Busy(0.0), Busy(0.0)
        self._phase = "wait"
        self._waiting_since = self._waited = 0.0
        self._work_left = 0.0
        self._work_at = 0.0
        self._published = 0
        self._ages: Counter[int] = Counter()

    def play(self) -> Outcome:
        """See `simulate`."""
        warm_up = 2 + 2 * self._scenario.settings.versions_ahead
        self._submit()
        start = self._until(warm_up)
        self._trainer.lap(start), self._rollout.lap(start)
        self._ages.clear()
        self._waited = 0.0
        end = self._until(warm_up + self._scenario.steps)
        samples = sum(self._ages.values())
        return Outcome(
            step_seconds=(end - start) / self._scenario.steps,
            wait_seconds=self._waited / self._scenario.steps,
            trainer_idle=self._trainer.lap(end).idle_share,
            rollout_idle=self._rollout.lap(end).idle_share,
            staleness={age: count / samples for age, count in sorted(self._ages.items())},
        )

    def _until(self, published: int) -> float:
        while self._published < published:
            if not self._events:
                raise RuntimeError(f"nothing can happen any more at batch {self._published}: {self._policy.ledger}")
            self._now, _, kind, index, stamp = heapq.heappop(self._events)
            if stamp == self._stamps[kind, index] or kind == "scored":
                getattr(self, f"_on_{kind}")(index)
        return self._now

    def _at(self, time: float, kind: str, index: int = 0) -> None:
        """Schedules an event in place of the one of the same kind and index, if there is one."""
        self._stamps[kind, index] += 1
        self._scheduled += 1
        if time < math.inf:
            heapq.heappush(self._events, (time, self._scheduled, kind, index, self._stamps[kind, index]))

    # Generation

    def _submit(self) -> None:
        scenario, touched = self._scenario, set()
        for ticket in self._policy.submit(self._policy.admissible()):
            self._unfinished[ticket.number] = scenario.samples_per_prompt
            engine = self._balancer.choose()
            self._balancer.add(engine, scenario.samples_per_prompt)
            touched.add(engine)
            for sample in range(scenario.samples_per_prompt):
                place = ticket.number * scenario.samples_per_prompt + sample
                self._engines[engine].put(ticket.number, scenario.lengths[place % len(scenario.lengths)])
        for engine in sorted(touched):
            self._on_engine(engine)

    def _on_engine(self, index: int) -> None:
        """Ends what is done on one engine, begins what waits, and schedules the next end."""
        engine = self._engines[index]
        before = engine.active
        engine.advance(self._now)
        whole = []
        for number in engine.ended():
            self._balancer.remove(index, 1)
            self._unfinished[number] -= 1
            if not self._unfinished[number]:
                whole.append(number)
        for number in engine.start():
            self._oldest.setdefault(number, self._policy.version)
        self._note_activity(before, engine.active)
        self._at(engine.next_end(), "engine", index)
        for number in whole:
            del self._unfinished[number]
            self._score(number)

    def _note_activity(self, before: bool, after: bool) -> None:
        if before == after:
            return
        (self._rollout.enter if after else self._rollout.exit)(self._now)
        was_generating = self._active > 0
        self._active += 1 if after else -1
        if was_generating != (self._active > 0):
            self._pace_trainer()
            if self._phase == "drain" and not self._active:
                self._begin_publish()

    def _each_engine(self, **changes: object) -> None:
        for index, engine in enumerate(self._engines):
            engine.advance(self._now)
            for name, value in changes.items():
                setattr(engine, name, value)
            self._on_engine(index)

    def _score(self, number: int) -> None:
        seconds = self._scenario.costs.reward / self._scenario.settings.batch_size
        self._scorer_free = max(self._now, self._scorer_free) + seconds
        self._at(self._scorer_free, "scored", number)

    def _on_scored(self, number: int) -> None:
        del self._stamps["scored", number]
        self._policy.finish(number, None, self._oldest.pop(number))
        self._take()

    # Training

    def _take(self) -> None:
        if self._phase != "wait" or not self._policy.ready():
            return
        version = self._policy.learning_version
        self._ages.update(version - taken.oldest_version for taken in self._policy.take())
        self._waited += self._now - self._waiting_since
        self._phase = "overhead"
        self._at(self._now + self._scenario.costs.overhead, "learn")
        self._submit()

    def _on_learn(self, _: int) -> None:
        self._phase = "learn"
        self._trainer.enter(self._now)
        self._work_left = self._scenario.costs.log_probs + self._scenario.costs.train
        self._work_at = self._now
        self._trainer_pace = self._pace()
        self._at(self._now + self._work_left * self._trainer_pace, "learned")
        if self._scenario.slowdown != 1:
            self._each_engine(stretch=self._scenario.slowdown)

    def _pace(self) -> float:
        return self._scenario.slowdown if self._active else 1.0

    def _pace_trainer(self) -> None:
        """Engines began or ceased to compete with learning: its end moves."""
        if self._phase != "learn" or self._scenario.slowdown == 1:
            return
        self._work_left = max(0.0, self._work_left - (self._now - self._work_at) / self._trainer_pace)
        self._work_at, self._trainer_pace = self._now, self._pace()
        self._at(self._now + self._work_left * self._trainer_pace, "learned")

    def _on_learned(self, _: int) -> None:
        self._trainer.exit(self._now)
        self._phase = "drain"
        self._each_engine(stretch=1.0, admitting=not self._scenario.drain)
        if self._phase == "drain" and not (self._scenario.drain and self._active):
            self._begin_publish()

    def _begin_publish(self) -> None:
        costs = self._scenario.costs
        self._phase = "publish"
        self._at(self._now + max(0.0, costs.publish - costs.publish_pause), "pause")
        self._at(self._now + max(costs.publish, costs.publish_pause), "published")

    def _on_pause(self, _: int) -> None:
        self._each_engine(paused=True)

    def _on_published(self, _: int) -> None:
        self._policy.advance(self._policy.learning_version)
        self._published += 1
        self._phase = "wait"
        self._waiting_since = self._now
        self._each_engine(paused=False, admitting=True)
        self._submit()
        self._take()


ROUNDING = 1e-9
"""Part of a token by which a request may be short of its end and still has ended: sums of floats differ by less."""


@dataclass(frozen=True)
class DecodeSpeed:
    """Seconds of one decode iteration, in which every running request gets one token: seconds * (1 + batch / doubling).

    The constant part is what is read whatever runs (weights, launches); the other grows with the batch. At a batch of
    `doubling_batch` an iteration takes twice as long as an empty one would.
    """

    seconds: float
    doubling_batch: float = math.inf

    def iteration(self, batch: int) -> float:
        """Seconds of one iteration with `batch` requests."""
        return self.seconds * (1 + batch / self.doubling_batch)


class SimulatedEngine:
    """One engine: up to `slots` requests run at a time, the others wait in order.

    All running requests gain tokens at the same pace, so one counter of iterations says when each of them ends: an
    event costs O(log slots). Call `advance` before anything is read or changed at a later time.
    """

    def __init__(self, speed: DecodeSpeed, slots: int) -> None:
        """Starts idle at time 0."""
        self._speed = speed
        self._slots = slots
        self._waiting: deque[tuple[int, float]] = deque()
        self._running: list[tuple[float, int, int]] = []
        self._iterations = 0.0
        self._at = 0.0
        self._started = 0
        self.stretch = 1.0
        """How much longer an iteration takes because somebody else uses the same cores; change after `advance`."""
        self.paused = False
        """Stands still; change after `advance`."""
        self.admitting = True
        """Lets waiting requests begin."""

    @property
    def active(self) -> bool:
        """Whether any request runs."""
        return bool(self._running)

    def put(self, request: int, tokens: float) -> None:
        """A request waits from now on."""
        self._waiting.append((request, tokens))

    def advance(self, now: float) -> None:
        """Lets time pass."""
        if self._running and not self.paused:
            self._iterations += (now - self._at) / (self._speed.iteration(len(self._running)) * self.stretch)
        self._at = now

    def ended(self) -> list[int]:
        """Removes and gives the requests that have all of their tokens."""
        done = []
        while self._running and self._running[0][0] <= self._iterations + ROUNDING * (1 + self._iterations):
            done.append(heapq.heappop(self._running)[2])
        return done

    def start(self) -> list[int]:
        """Begins what waits and has a slot; gives the requests."""
        begun = []
        while self.admitting and self._waiting and len(self._running) < self._slots:
            request, tokens = self._waiting.popleft()
            self._started += 1
            heapq.heappush(self._running, (self._iterations + tokens, self._started, request))
            begun.append(request)
        return begun

    def next_end(self) -> float:
        """When the next request ends if nothing changes; infinity if none does."""
        if self.paused or not self._running:
            return math.inf
        left = max(0.0, self._running[0][0] - self._iterations)
        return self._at + left * self._speed.iteration(len(self._running)) * self.stretch
