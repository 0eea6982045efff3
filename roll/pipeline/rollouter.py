"""Keeps generation going as far as the policy allows, and hands out batches. Knows neither Ray nor engines.

Inline, a batch is produced when it is asked for: that is synchronous training. In the background, prompts are
submitted whenever the policy admits them, and training takes what is ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

from roll.configs.errors import RunError
from roll.configs.pipeline import RLConfig
from roll.configs.queue import runs_in_background
from roll.pipeline.rollout_metrics import account_metrics
from roll.pipeline.rollout_types import ItemT, Producer, RolloutBatch
from roll.pipeline.training_loop import SampleBatch
from roll.rollout.filters import StarvationLimit
from roll.rollout.policy import PolicySettings, RolloutPolicy, Ticket
from roll.rollout.timers import Busy, StepClock


def policy_settings(config: RLConfig, items_per_batch: int, samples_per_item: int) -> PolicySettings:
    """Bounds of the run, in items; the rules of the configuration have checked that they go together."""
    asynchronous = config.async_training
    queue = asynchronous.max_queue_size
    return PolicySettings(
        batch_size=items_per_batch,
        ratio=config.async_generation_ratio,
        max_staleness=asynchronous.max_staleness_allowed,
        max_queue=None if queue is None else queue // samples_per_item,
        min_batches=asynchronous.min_batch_count,
        total=config.max_steps * items_per_batch,
    )


def rollout_options(config: RLConfig, samples_per_item: int) -> RolloutOptions:
    """How the rollouter behaves."""
    asynchronous = config.async_training
    return RolloutOptions(
        background=runs_in_background(config),
        together=config.deterministic or not runs_in_background(config),
        samples_per_item=samples_per_item,
        failure_rate=config.max_failure_rate,
        resample_factor=config.max_resample_factor,
        report_s=asynchronous.batch_timeout_s,
        deadline_s=asynchronous.batch_deadline_s,
        interval_s=asynchronous.batch_generation_interval_s,
        stale_from=asynchronous.staleness_threshold,
    )


logger = logging.getLogger(__name__)

ENGINES = "engines"
"""What keeps engines busy: generating for training and for validation, once where both go on."""


@dataclass(frozen=True)
class RolloutOptions:
    """How a rollouter behaves besides what the policy decides.

    Attributes:
        background: produce ahead of demand.
        together: what is admitted at one moment is generated in one call, so that runs repeat.
        samples_per_item: for counts in samples.
        failure_rate: share of the prompts of a batch that may be dropped for failures.
        resample_factor: groups that may be filtered for one batch, in batches.
        report_s: a batch that takes longer is reported, each time this passes.
        deadline_s: a batch that takes longer ends the run.
        interval_s: least time between submissions.
        stale_from: versions; samples older than this are counted as stale.
    """

    background: bool
    together: bool
    samples_per_item: int
    failure_rate: float
    resample_factor: float
    report_s: float
    deadline_s: float
    interval_s: float
    stale_from: int


class Rollouter(Generic[ItemT]):
    """Submits, produces, buffers, hands out; every wait has a deadline and names what it waits for."""

    def __init__(
        self,
        producer: Producer[ItemT],
        settings: PolicySettings,
        options: RolloutOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing: `advance` does, once the first weights are published."""
        self.policy: RolloutPolicy[ItemT] = RolloutPolicy(settings)
        self._producer, self._options, self._clock = producer, options, clock
        self._changed = asyncio.Condition()
        self._begun = False
        self._work: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._busy = {name: Busy(clock()) for name in (*producer.work, ENGINES)}
        self._starvation = StarvationLimit(settings.batch_size, options.resample_factor)
        self._failed = self._whole = 0
        self._in_flight: dict[int, ItemT] = {}
        self._again: list[ItemT] = []
        self._progress = clock()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Counts the block as work of that name; blocks that overlap count once."""
        names = (name, ENGINES) if name == "generate" else (name,)
        for busy in names:
            self._busy[busy].enter(self._clock())
        try:
            yield
        finally:
            for busy in names:
                self._busy[busy].exit(self._clock())

    async def advance(self, version: int) -> None:
        """The weights of `version` are published. The first call sets measuring and background production going."""
        async with self._changed:
            self.policy.advance(version)
            self._changed.notify_all()
        if not self._begun:
            self._begun = True
            for busy in self._busy.values():
                busy.lap(self._clock())
            if self._options.background:
                self._start(self._submit_always)

    async def take(self) -> RolloutBatch[ItemT]:
        """The next batch, earliest deadline first.

        Raises:
            RunError: too much failed, a filter starves the batch, or it was not ready within `deadline_s`.
        """
        if not self._options.background and not self.policy.ready():
            self._start(self._fill)
        version = self.policy.learning_version
        await self._until_ready()
        taken = [entry.item for entry in self.policy.take()]
        async with self._changed:
            self._changed.notify_all()
        self._failed = self._whole = 0
        self._progress = self._clock()
        self._starvation.taken()
        laps = {name: busy.lap(self._clock()) for name, busy in self._busy.items()}
        seconds = {name: laps[name].busy for name in self._producer.work}
        metrics = self._producer.metrics(taken, version)
        tokens = metrics["rollout/response_length_mean"] * len(taken) * self._options.samples_per_item
        metrics["rollout/tokens_per_second"] = tokens / max(seconds["generate"], 1e-9)
        metrics["throughput/rollout_idle"] = laps[ENGINES].idle_share
        metrics |= account_metrics(self.policy.ledger, taken, version, self._options)
        return RolloutBatch(self._producer.batch(taken), metrics, seconds)

    async def validate(self, version: int) -> dict[str, float]:
        """Measures the weights last published; nothing is submitted for training meanwhile."""
        start = self._clock()
        self.policy.hold("validation")
        try:
            with self.measure(ENGINES):
                metrics = await self._producer.validate(version)
        finally:
            self.policy.release("validation")
            async with self._changed:
                self._changed.notify_all()
        return {**metrics, "val/seconds": self._clock() - start}

    async def health(self) -> dict[str, Any]:
        """What is ready, running and awaited, what holds submission, and how long nothing has come or gone; JSON-able.

        Prompts are counted, not samples.
        """
        policy = self.policy
        return {
            "buffered": policy.ledger.buffered,
            "in_flight": policy.ledger.in_flight,
            "awaited": len(policy.awaited()),
            "held_by": sorted(policy.held_by),
            "seconds_since_progress": round(self._clock() - self._progress, 3),
            "error": None if self._error is None else str(self._error),
        }

    async def state_dict(self) -> dict[str, Any]:
        """The account, the buffer, what is in flight, and the data cursor, all of one moment."""
        again = {item.number: item for item in self._again}
        return {
            "policy": self.policy.state_dict(self._producer.encode),
            "in_flight": [self._producer.encode(item) for item in {**self._in_flight, **again}.values()],
            "producer": self._producer.state_dict(),
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; what was in flight is generated again, under its old numbers and deadlines.

        Raises:
            RunError: it was taken with other data, another seed, or batches of another size.
        """
        try:
            self._producer.load_state_dict(state["producer"])
            self.policy = RolloutPolicy.restore(self.policy.settings, state["policy"], self._producer.decode)
        except ValueError as error:
            raise RunError(f"resume_from_checkpoint: {error}") from error
        unfinished = {item.number: item for item in map(self._producer.decode, state["in_flight"])}
        self._again = [unfinished[ticket.number] for ticket in self.policy.resubmit()]

    async def close(self) -> None:
        """Ends production; what is in flight is given up."""
        running = list(self._work)
        for task in running:
            task.cancel()
        self._producer.close()  # before they are waited for: one may be waiting for what never answers
        await asyncio.gather(*running, return_exceptions=True)

    async def _fill(self) -> None:
        """Produces in waves until a batch is ready."""
        while not self.policy.ready():
            items = self._next(self.policy.admissible())
            if not items:
                raise RunError(f"no batch can be made: {self._state()}")
            await self._produce(items)

    async def _submit_always(self) -> None:
        """Submits whatever is admitted, until closed."""
        last = -self._options.interval_s
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._again or self.policy.admissible())
            await asyncio.sleep(max(0.0, last + self._options.interval_s - self._clock()))
            last = self._clock()
            items = self._next(min(self.policy.admissible(), self.policy.settings.batch_size))
            for share in [items] if self._options.together else [[item] for item in items]:
                self._start(self._produce, share)

    def _next(self, count: int) -> list[ItemT]:
        """What was in flight at a restart, then fresh prompts."""
        again, self._again = self._again, []
        items = [*again, *self._producer.draw(self.policy.submit(count))]
        self._in_flight |= {item.number: item for item in items}
        return items

    def _start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Lets work run beside everything else, until it ends or `close` ends it."""
        task = asyncio.create_task(self._noting_errors(work, *args))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _noting_errors(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """An exception belongs to whoever waits for the batch."""
        try:
            await work(*args)
        except Exception as error:
            self._error = self._error or error
            async with self._changed:
                self._changed.notify_all()

    async def _produce(self, items: list[ItemT]) -> None:
        """Every item ends as finished or dropped, with a reason, in the account."""
        await self._producer.produce(items, self)
        for item in items:
            self._progress = self._clock()
            reason = item.drop_reason
            if reason is not None:
                self._failed += 1
            else:
                self._whole += 1
                reason = self._filter(item)
            if reason is None:
                self.policy.finish(item.number, item, item.oldest_version)
            else:
                self.policy.drop(item.number, reason)
            del self._in_flight[item.number]
        if self._failed > self._allowed():
            raise RunError(self._failures())
        async with self._changed:
            self._changed.notify_all()

    def _filter(self, item: ItemT) -> str | None:
        filtered = self._producer.filtered(item)
        if filtered is None:
            self._starvation.keep()
            return None
        reason, path = filtered
        starved = self._starvation.filtered(reason, path)
        if starved is not None:
            raise RunError(starved)
        return reason

    async def _until_ready(self) -> None:
        until = self._clock() + self._options.deadline_s
        while self._error is None and not self.policy.ready():
            wait = min(self._options.report_s, until - self._clock())
            if wait <= 0:
                raise RunError(f"no batch within {self._options.deadline_s:g} s (batch_deadline_s): {self._state()}")
            try:
                async with asyncio.timeout(wait), self._changed:
                    await self._changed.wait_for(lambda: self._error is not None or self.policy.ready())
            except TimeoutError:
                logger.warning("still waiting for a batch: %s", self._state())
        if self._error is not None:
            raise self._error

    def _allowed(self) -> float:
        """Failures since the last batch; a rate above 0 allows one, however small the batch."""
        share = self._options.failure_rate * max(self.policy.settings.batch_size, self._whole)
        return max(share, 1.0) if share else 0.0

    def _failures(self) -> str:
        size = max(self.policy.settings.batch_size, self._whole)
        return (
            f"{self._failed} prompts failed since the last batch, more than max_failure_rate "
            f"{self._options.failure_rate:g} allows of {size}; dropped so far: {dict(self.policy.ledger.dropped)}; "
            f"last cause: {self._producer.last_failure or 'see the engine log'}"
        )

    def _state(self) -> str:
        """What there is and what is missing, for messages."""
        policy, awaited = self.policy, self.policy.awaited()
        shown = ", ".join(_named(ticket) for ticket in awaited[:3])
        held = f", submission held by {', '.join(policy.held_by)}" if policy.held_by else ""
        return (
            f"{policy.ledger.buffered} of {policy.settings.batch_size} prompts are ready, {policy.ledger.in_flight} "
            f"are running; it waits for {len(awaited)}{f' ({shown} ...)' if shown else ''}{held}"
        )


def _named(ticket: Ticket) -> str:
    return f"prompt {ticket.number} of version {ticket.version}"


Ask = Callable[..., Awaitable[Any]]
"""f(method, *args): calls a coroutine of the rollouter by name."""


class RolloutSamples:
    """A sample source that asks a rollouter."""

    def __init__(self, ask: Ask) -> None:
        """Takes the way to it."""
        self._ask = ask

    async def next_batch(self, version: int, clock: StepClock) -> SampleBatch:
        """The next batch; the rollouter knows which version learns from it."""
        batch = await self._ask("take")
        for name, seconds in batch.seconds.items():
            clock.add(name, seconds)
        return SampleBatch(batch.data, batch.metrics)

    async def advance(self, version: int) -> None:
        """New weights are published: generation may go further ahead."""
        await self._ask("advance", version)

    async def validate(self, version: int) -> dict[str, float]:
        """`val/...` metrics."""
        return await self._ask("validate", version)

    async def state_dict(self) -> dict[str, Any]:
        """See `Rollouter.state_dict`."""
        return await self._ask("state_dict")

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        await self._ask("load_state_dict", state)

    async def health(self) -> dict[str, Any]:
        """See `Rollouter.health`."""
        return await self._ask("health")


def here(rollouter: Rollouter[Any]) -> Ask:
    """Asks a rollouter of this process."""
    return lambda method, *args: getattr(rollouter, method)(*args)
