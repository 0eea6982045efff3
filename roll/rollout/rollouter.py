"""The rollouter: keeps generation running as far ahead as admission allows, and returns batches.

With `async_generation_ratio` 0 it generates a batch when it is requested: synchronous training. In the background it
submits prompts whenever `Admission` admits them, and training takes what is ready. It knows neither Ray nor engines.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from roll.base.errors import RunError
from roll.base.timers import BusyTimer
from roll.configs.run_options import RolloutOptions
from roll.rollout.admission import Admission, AdmissionSettings
from roll.rollout.filters import StarvationLimit
from roll.rollout.ledger import EXPIRED, FinishedGroup, Ledger
from roll.rollout.recording import RolloutRecording
from roll.rollout.rollout_worker import RolloutWorker
from roll.rollout.source import SampleBatch
from roll.rollout.types import Group

logger = logging.getLogger(__name__)

ENGINES = "engines"
"""Name of the timer of the engines: generation for training and for validation, counted once where both run."""


def admission_settings(options: RolloutOptions, steps: int) -> AdmissionSettings:
    """Bounds of a run of `steps` batches in groups; loading has checked that they fit together."""
    bounds, groups = options.async_training, options.groups_per_batch
    queue = bounds.max_queue_size
    return AdmissionSettings(
        batch_size=groups,
        ratio=options.async_generation_ratio,
        max_staleness=bounds.max_staleness_allowed,
        max_queue=None if queue is None else queue // options.num_return_sequences_in_group,
        min_batches=bounds.min_batch_count,
        total=steps * groups,
        max_age_s=bounds.max_sample_age_s if options.async_generation_ratio > 0 else None,
    )


class Rollouter:
    """Submits, generates, buffers and returns groups; every wait has a deadline and names what it waits for.

    `async_training.rollouter_class` names a subclass.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        settings: AdmissionSettings,
        options: RolloutOptions,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        recording: RolloutRecording | None = None,
    ) -> None:
        """Generates nothing before the first `advance`; groups are aged by `wall_clock`, which outlives a restart."""
        self._recording = recording
        self.admission: Admission[Group] = Admission(settings)
        self.admission.on_discard = self._discarded
        self._worker, self._clock, self._wall_clock = worker, clock, wall_clock
        self._options, self._waits = options, options.async_training
        self._submits_batches = options.deterministic or not options.runs_in_background
        self._changed = asyncio.Condition()
        self._started = self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._timers = {name: BusyTimer(clock()) for name in (*worker.work, ENGINES)}
        self._starvation = StarvationLimit(settings.batch_size, options.max_resample_factor)
        self._failed = self._completed = 0
        self._last_failure: str | None = None
        self._ledgers: dict[str, Ledger] = {}
        """Of each policy; together they count what that of the run counts."""
        self._in_flight: dict[int, Group] = {}
        self._to_regenerate: list[Group] = []
        self._last_progress = clock()

    async def advance(self, version: int) -> None:
        """Records that the engines have the weights of `version`; the first call starts background generation."""
        async with self._changed:
            self.admission.advance(version)
            self._changed.notify_all()
        if not self._started:
            self._started = True
            for timer in self._timers.values():
                timer.interval(self._clock())
            if self._options.runs_in_background:
                self._start(self._submit_in_background)

    async def next_batch(self) -> SampleBatch | None:
        """The next batch, earliest deadline first; None once `stop` was called, also to a call that is waiting.

        Raises:
            RunError: too many groups failed, a filter starves the batch, or it was not ready within `batch_deadline_s`.
        """
        if not self._options.runs_in_background and not self.admission.ready():
            self._start(self._fill_batch)
        version = self.admission.learning_version
        await self._wait_until_ready()
        if self._stopped:
            return None
        taken = self.admission.take()
        if self._recording is not None:
            self._recording.taken(taken, version + 1, {name: self._timers[name] for name in self._worker.work})
        groups = [finished.group for finished in taken]
        for group in groups:
            self._ledger_of(group).consume()
        ages = [self._wall_clock() - finished.request.submitted_at_s for finished in taken]
        async with self._changed:
            self._changed.notify_all()
        self._failed = self._completed = 0
        self._last_progress = self._clock()
        self._starvation.reset()
        intervals = {name: timer.interval(self._clock()) for name, timer in self._timers.items()}
        seconds = {name: intervals[name].busy for name in self._worker.work}
        metrics = self._worker.metrics(groups, version)
        tokens = sum(group.generated_tokens for group in groups)
        metrics["rollout/tokens_per_second"] = tokens / max(seconds["generate"], 1e-9)
        metrics["throughput/rollout_idle"] = intervals[ENGINES].idle_share
        metrics |= {"time/sample_age_mean": statistics.fmean(ages), "time/sample_age_max": max(ages)}
        ledger = self.admission.ledger
        metrics |= ledger.metrics() | ledger.sample_metrics(self._options.num_return_sequences_in_group)
        for name, own in self._ledgers.items():
            metrics |= {f"{name}/{metric}": value for metric, value in own.metrics().items() if name}
        return SampleBatch(self._worker.batch(groups), metrics, seconds)

    async def next_batch_and_state(self) -> tuple[SampleBatch | None, bytes]:
        """As `next_batch`, with the pickled `state_dict` after it, from which another process can continue."""
        return await self.next_batch(), pickle.dumps(await self.state_dict())

    async def stop(self) -> None:
        """Lets no further batch be taken, so that `state_dict` is that of the steps that were learned from."""
        async with self._changed:
            self._stopped = True
            self._changed.notify_all()

    async def _fill_batch(self) -> None:
        while not self.admission.ready():
            groups = self._draw(self.admission.admissible())
            if not groups:
                raise RunError(f"no batch can be made: {self._state()}")
            await self._generate(groups)

    async def _submit_in_background(self) -> None:
        last = -self._waits.batch_generation_interval_s
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._to_regenerate or self.admission.admissible())
            await asyncio.sleep(max(0.0, last + self._waits.batch_generation_interval_s - self._clock()))
            last = self._clock()
            groups = self._draw(min(self.admission.admissible(), self.admission.settings.batch_size))
            for share in [groups] if self._submits_batches else [[group] for group in groups]:
                self._start(self._generate, share)

    def _draw(self, count: int) -> list[Group]:
        again, self._to_regenerate = self._to_regenerate, []
        drawn = self._worker.draw(self.admission.submit(count, self._wall_clock()))
        for group in drawn:
            self._ledger_of(group).submit()
        groups = [*again, *drawn]
        self._in_flight |= {group.number: group for group in groups}
        return groups

    async def _generate(self, groups: list[Group]) -> None:
        """Generates groups; the ledger counts each as finished, or as dropped with a reason."""
        await self._worker.generate(groups, "train", self)
        for group in groups:
            self._last_progress = self._clock()
            self._record(group)
            del self._in_flight[group.number]
        if self._failed > self._allowed_failures():
            raise RunError(self._failure_message())
        async with self._changed:
            self._changed.notify_all()

    def _record(self, group: Group) -> None:
        group.finished_s = self._wall_clock()
        if group.drop_reason is not None:
            self._failed += 1
            self._last_failure = group.failure
            self._drop(group, group.drop_reason)
            return
        self._completed += 1
        filtered = self._worker.filter_reason(group)
        if filtered is None:
            self._starvation.count_kept()
            self._ledger_of(group).finish()
            self.admission.finish(group.number, group, group.oldest_version)
            return
        reason, path = filtered
        starved = self._starvation.count_filtered(reason, path)
        if starved is not None:
            raise RunError(starved)
        self._drop(group, reason)

    def _drop(self, group: Group, reason: str) -> None:
        request = self.admission.drop(group.number, reason)
        self._ledger_of(group).drop(reason)
        if self._recording is not None:
            self._recording.dropped(request, group, reason)

    def _ledger_of(self, group: Group) -> Ledger:
        return self._ledgers.setdefault(self._worker.policy_of(group), Ledger())

    def _discarded(self, finished: FinishedGroup[Group], reason: str) -> None:
        self._ledger_of(finished.group).discard(reason)
        if self._recording is not None:
            self._recording.dropped(finished.request, finished.group, reason)

    def _allowed_failures(self) -> float:
        """Failures allowed since the last batch; a rate above 0 always allows one."""
        share = self._options.max_failure_rate * self._failure_base()
        return max(share, 1.0) if share else 0.0

    def _failure_base(self) -> int:
        return max(self.admission.settings.batch_size, self._completed)

    def _failure_message(self) -> str:
        return (
            f"{self._failed} {self._worker.unit}s failed since the last batch, more than max_failure_rate "
            f"{self._options.max_failure_rate:g} allows of {self._failure_base()}; dropped so far: "
            f"{dict(self.admission.ledger.dropped)}; last cause: {self._last_failure or 'see the engine log'}; "
            f"fix it, or raise max_failure_rate{self._worker.spares}"
        )

    async def _wait_until_ready(self) -> None:
        limit_s = self._waits.batch_deadline_s
        until = self._clock() + limit_s
        while not (self._error or self._stopped or await self._is_ready()):
            wait = min(self._waits.batch_timeout_s, until - self._clock())
            if wait <= 0:
                raise RunError(f"no batch within {limit_s:g} s (batch_deadline_s): {self._state()}")
            try:
                async with asyncio.timeout(wait), self._changed:
                    await self._changed.wait_for(self._may_go_on)
            except TimeoutError:
                logger.warning("still waiting for a batch: %s", self._state())
        if self._error is not None:
            raise self._error

    def _may_go_on(self) -> bool:
        return self._error is not None or self._stopped or self.admission.ready()

    async def _is_ready(self) -> bool:
        """Whether a batch can be taken now, after groups that are too old for it were dropped."""
        if self.admission.ready() and self.admission.expire(self._wall_clock()):
            async with self._changed:
                self._changed.notify_all()
        return self.admission.ready()

    def _state(self) -> str:
        admission, ledger, unit = self.admission, self.admission.ledger, self._worker.unit
        blocking = admission.blocking()
        shown = ", ".join(f"{unit} {each.number} of version {each.version}" for each in blocking[:3])
        reasons = admission.pause_reasons
        paused = f", submission is paused for {', '.join(reasons)}" if reasons else ""
        expired = ledger.dropped[EXPIRED]
        dropped = f", {expired} so far were dropped for their age (max_sample_age_s)" if expired else ""
        return (
            f"{ledger.buffered} of {admission.settings.batch_size} {unit}s are ready, {ledger.in_flight} are running; "
            f"it waits for {len(blocking)}{f' ({shown} ...)' if shown else ''}{paused}{dropped}"
        )

    async def validate(self) -> dict[str, float]:
        """`val/...` of the current weights; submission for training is paused until it ends."""
        start = self._clock()
        self.admission.pause("validation")
        try:
            with self.measure(ENGINES):
                metrics = await self._worker.validate()
        finally:
            self.admission.resume("validation")
            async with self._changed:
                self._changed.notify_all()
        return {**metrics, "val/seconds": self._clock() - start}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Counts the block as work of that name; overlapping blocks count once."""
        timers = [self._timers[each] for each in ((name, ENGINES) if name == "generate" else (name,))]
        for timer in timers:
            timer.enter(self._clock())
        try:
            yield
        finally:
            for timer in timers:
                timer.exit(self._clock())

    async def health(self) -> dict[str, Any]:
        """Prompts that are ready, running and blocking, why submission is paused, and seconds without progress."""
        admission = self.admission
        return {
            "buffered": admission.ledger.buffered,
            "in_flight": admission.ledger.in_flight,
            "blocking": len(admission.blocking()),
            "paused_for": admission.pause_reasons,
            "seconds_since_progress": round(self._clock() - self._last_progress, 3),
            "error": None if self._error is None else str(self._error),
        }

    async def state_dict(self) -> dict[str, Any]:
        """Ledger, buffer, groups in flight and position in the data, all of one moment; JSON-able."""
        again = {group.number: group for group in self._to_regenerate}
        return {
            "policy": self.admission.state_dict(Group.state_dict),  # the name in checkpoints; not the trained policy
            "in_flight": [group.state_dict() for group in {**self._in_flight, **again}.values()],
            "worker": self._worker.state_dict(),
            "ledgers": {name: vars(own) | {"dropped": dict(own.dropped)} for name, own in self._ledgers.items()},
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; groups in flight are generated again, under their old numbers and deadlines.

        Raises:
            RunError: it was taken with other data, another seed, or batches of another size.
        """
        try:
            self._worker.load_state_dict(state["worker"])
            self._ledgers = _ledgers_of(state)
            self.admission = Admission.restore(
                self.admission.settings,
                state["policy"],
                Group.from_state,
                lambda finished, reason: self._ledger_of(finished.group).discard(reason),
            )
            self.admission.on_discard = self._discarded
        except ValueError as error:
            raise RunError(f"resume_from_checkpoint: {error}") from error
        unfinished = {group.number: group for group in map(Group.from_state, state["in_flight"])}
        requests = self.admission.resubmit(self._wall_clock())
        self._to_regenerate = [replace(unfinished[each.number], version=each.version) for each in requests]

    async def close(self) -> None:
        """Ends generation and cancels what is in flight."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        self._worker.close()  # before the tasks are awaited: one may wait for an answer that never comes
        await asyncio.gather(*running, return_exceptions=True)

    def _start(self, work: Callable[..., Awaitable[None]], *args: Sequence[Group]) -> None:
        task = asyncio.create_task(self._keep_error(work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_error(self, work: Callable[..., Awaitable[None]], *args: Sequence[Group]) -> None:
        try:
            await work(*args)
        except Exception as error:
            self._error = self._error or error
            async with self._changed:
                self._changed.notify_all()


def _ledgers_of(state: dict[str, Any]) -> dict[str, Ledger]:
    """The ledger of each policy; those of older checkpoints have one policy."""
    run = state["policy"]
    counts = {name: run[name] for name in ("submitted", "consumed", "dropped")}
    only = {"": counts | {name: len(run[name]) for name in ("buffered", "in_flight")}}
    saved = state.get("ledgers", only)
    return {name: Ledger(**{**each, "dropped": Counter(each["dropped"])}) for name, each in saved.items()}
