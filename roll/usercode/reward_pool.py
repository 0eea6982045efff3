"""Scores samples in processes that can be killed, so that no reward function can stall or corrupt a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple

from pebble import ProcessExpired, ProcessPool
from pebble.common.types import RemoteTraceback
from pebble.pool.base_pool import PoolStatus
from pebble.pool.process import dictionary_values

from roll.base.terminal import block_interrupts
from roll.configs.built_in_rewards import is_comparison
from roll.configs.rewards import DEFAULT_CONCURRENCY, RewardConfig
from roll.rewards.calling import TOO_LONG, RewardFunctionError, RewardOutcome, RewardRequest
from roll.usercode import reward_process
from roll.usercode.containment import TOO_MANY_PROCESSES, TOO_MUCH_MEMORY
from roll.usercode.failed_calls import FailedGroups, HungCalls
from roll.usercode.output import RewardOutput
from roll.usercode.reward_process import Call, LoadedReward, RetiredProcess, score_chunk
from roll.usercode.stopped import INTERVAL_S, STOPPED_TOO_LONG, StopTimes, is_stopped

logger = logging.getLogger(__name__)

CHUNK_SIZE = 16
"""Samples sent to a process at a time: enough that sending them costs less than scoring them, few enough that little is
scored again when one of them fails."""

ASYNC_GRACE_S = 5.0
"""Added to the deadline of a chunk of coroutines, each of which has its own: after it the loop itself is blocked. The
chunk of a coroutine function has DEFAULT_CONCURRENCY samples, which are scored again only if their process fails."""

START_TIMEOUT_S = 120.0
"""Deadline for a process to import the reward function; importing torch on a busy machine takes seconds."""

POLL_S = 0.5
"""How often a call that waits for its answer checks that the pool can give it."""

CALLS_AHEAD = 2
"""Calls of a process that another call may wait for: of a chunk, and of a call that is made alone."""

DIED_IDLE = "its processes died without a call; starting them again"
"""Cause of the usual restart of a pool."""

MAX_RESTARTS = 3
"""Times in a row that the processes may die without a call before the reward fails."""

OTHER_ANSWER = "I do not know."
"""A response with which a reward is tried; it holds no answer."""

_Score = Callable[[Sequence[Call]], list[list[RewardOutcome]] | RetiredProcess]

ArgsT = TypeVarTuple("ArgsT")
ResultT = TypeVar("ResultT")

__all__ = ["RewardFunctionError", "RewardPool", "RewardSelfTestError"]


class RewardSelfTestError(RuntimeError):
    """A reward function fails, or gives wrong scores for its own known samples."""


class MissingRewardError(RewardFunctionError):
    """The module of a reward function, or one that it imports, is not on this machine."""


class RewardPool:
    """`world_size` processes that run one reward function, with a deadline of `timeout_s` seconds per call.

    Calls are sent in chunks, one to each process at a time. When a chunk passes the deadline or its process dies, the
    process is killed and the calls are made again one by one, each with its own deadline, so that only the failing call
    fails, or is wrong where the function is a built-in comparison; so they are where an exception ends them all (see
    `score_chunk`). A call whose process dies while it is
    alone, as by the kernel where memory is short, or that ends so alone, is made once more, but not after its deadline
    or a limit of the reward ended the process. Every failure is an outcome with a reason, never a score. Processes that
    die without a call are replaced, and calls that waited for them are made again. A process that has been stopped by a
    signal for STOPPED_GRACE_S while calls wait is killed, and a deadline that passed while it was stopped counts as its
    death.

    The rest of a group with a failed response is not scored, and a response that hung alone is not tried again soon:
    see `HungCalls`. What the processes print goes to stderr, up to the limit of `RewardOutput`.

    Use a pool from one asyncio loop at a time. Processes are spawned, so each imports the main script of the driver
    first: import heavy modules inside functions there.
    """

    def __init__(
        self,
        config: RewardConfig,
        replaced: Callable[[str], None] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Starts no process; processes start with `launch`, `start` or the first `score`.

        `replaced` is called with the cause when a process is replaced, which is logged otherwise. `decode` makes
        `prompt_text` of `prompt_ids` for a function that reads it.
        """
        self._config, self._replaced, self._decode = config, replaced, decode
        self._output = RewardOutput(config.function)
        self._pool = self._make_pool()
        self._restarts = 0
        self._retired: set[int] = set()
        self._stop_times: StopTimes[int] = StopTimes()
        self._looked_at = 0.0
        self._killed: set[int] = set()
        """Processes that were killed because they stayed stopped by a signal."""
        self._seen_stopped: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        """Calls whose process was seen stopped by a signal."""
        self._closed = False
        self._pending: dict[Future[Any], float] = {}
        """Calls without an answer, with their deadlines in seconds."""
        self._probing: Future[LoadedReward] | None = None
        self._loaded: LoadedReward | None = None
        self._hung = HungCalls(frozenset())
        self._turns: _Turns | None = None

    def _make_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._config.world_size,
            initializer=reward_process.start,
            initargs=(self._config, self._output.writer),
            context=multiprocessing.get_context("spawn"),
        )

    def launch(self) -> None:
        """Starts the processes without waiting for them."""
        if self._probing is None:
            self._output.start()
            with block_interrupts():
                self._probing = self._schedule(START_TIMEOUT_S, reward_process.probe)

    async def start(self) -> LoadedReward:
        """Waits until a process has imported the reward function.

        Raises:
            RewardFunctionError: the function does not exist, or its import failed or took longer than START_TIMEOUT_S.
        """
        if self._loaded is not None:
            return self._loaded
        try:
            self.launch()
            assert self._probing is not None
            async with asyncio.timeout(START_TIMEOUT_S):  # unlike wait_for it never swallows a cancellation
                loaded = await self._answer(self._probing)
        except BrokenProcessPool:
            self._probing = None
            return await self.start()
        except (TimeoutError, ProcessExpired) as failure:
            name = self._config.function
            raise RewardFunctionError(f"reward function {name!r}: its process did not start: {failure!r}") from failure
        if loaded.error:
            raise (MissingRewardError if loaded.missing else RewardFunctionError)(loaded.error)
        self._loaded, self._hung = loaded, HungCalls(loaded.reads)
        return loaded

    async def self_test(self, first: Sequence[RewardRequest] = ()) -> int:
        """Scores known samples, and returns their number: SELF_TEST of the function's module, and `first`.

        Args:
            first: the first prompts of the data, without responses. Each is scored with its ground truth and with
                OTHER_ANSWER as response; the scores may be any.

        Raises:
            RewardFunctionError: as `start`.
            RewardSelfTestError: lists the samples with a wrong score, or has the first failure.
        """
        loaded = await self.start()
        for request in first:
            truth = request.ground_truth
            answer = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
            await self._try(replace(request, responses=(answer, OTHER_ANSWER)))
        outcomes = await self.score([_known(response, truth) for response, truth, _ in loaded.self_test])
        wrong = []
        for (response, truth, right), (outcome,) in zip(loaded.self_test, outcomes, strict=True):
            expected = self._config.correct_score if right else self._config.wrong_score
            if outcome.score != expected:
                got = outcome.score if outcome.reason is None else f"{outcome.reason} ({outcome.detail})"
                wrong.append(f"{response!r} against {truth!r} should score {expected}, got {got}")
        if wrong:
            raise RewardSelfTestError(f"{self._config.function} fails its self-test: " + "; ".join(wrong))
        return len(loaded.self_test) + len(first)

    async def _try(self, request: RewardRequest) -> None:
        for called, index in _calls(request, await self.start()):
            outcomes = await self._call_alone((called, index), reward_process.try_chunk)
            if isinstance(outcomes, _NoOutcomes):
                outcomes = [outcomes.failure]
            failure = next((outcome for outcome in outcomes if outcome.reason is not None), None)
            if failure is not None and is_comparison(self._config.function):
                raise RewardSelfTestError(f"row {request.id}: {failure.detail}")
            if failure is not None:
                given = (
                    f"the responses {called.responses}"
                    if index is None
                    else f"the response {called.responses[index]!r}"
                )
                raise RewardSelfTestError(
                    f"{failure.detail}\n    {self._config.function} was called with {given} for the first prompt of "
                    f"its data ({request.id})"
                )

    async def score(self, requests: Sequence[RewardRequest]) -> list[list[RewardOutcome]]:
        """Scores every response of every request; the outcomes of each request, in order."""
        if self._closed:
            raise RuntimeError(f"reward function {self._config.function!r}: its pool is closed")
        loaded = await self.start()
        if "prompt_text" in loaded.reads and self._decode is not None:
            requests = [replace(each, prompt_text=self._decode(each.prompt_ids)) for each in requests]
        groups = [_calls(request, loaded) for request in requests]
        calls = [call for group in groups for call in group]
        share = len(calls) // (2 * self._config.world_size)
        if loaded.is_async:
            share = -(-len(calls) // self._config.world_size)
        size = max(1, min(DEFAULT_CONCURRENCY if loaded.is_async else CHUNK_SIZE, share))
        chunks = [calls[first : first + size] for first in range(0, len(calls), size)]
        failed = FailedGroups({id(call): number for number, group in enumerate(groups) for call in group})
        scored = await asyncio.gather(*(self._score_chunk(chunk, failed) for chunk in chunks))
        outcomes = iter([self._final(each) for of_chunk in scored for of_call in of_chunk for each in of_call])
        return [[next(outcomes) for _ in request.responses] for request in requests]

    def _final(self, outcome: RewardOutcome) -> RewardOutcome:
        """An outcome, or the score of a response that takes a built-in comparison too long."""
        if self._is_too_long(outcome):
            return RewardOutcome(self._config.wrong_score, metrics={TOO_LONG: 1.0})
        return outcome

    def _is_too_long(self, outcome: RewardOutcome) -> bool:
        return outcome.reason == "timeout" and is_comparison(self._config.function)

    def close(self) -> None:
        """Kills the processes, waits for their end and cancels running `score` calls. Safe to call twice."""
        self._closed = True
        for future in tuple(self._pending):
            future.cancel()
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()
        self._output.close()

    async def __aenter__(self) -> RewardPool:
        try:
            await self.start()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _score_chunk(self, calls: Sequence[Call], failed: FailedGroups) -> list[list[RewardOutcome]]:
        """The outcomes of each call; calls are made only where they are not known to fail."""
        async with self._turn().of_chunks:
            failures = [self._known_failure(call, failed) for call in calls]
            needed = [call for call, failure in zip(calls, failures, strict=True) if failure is None]
            made = iter(await self._score_needed(needed, failed))
            return [
                next(made) if failure is None else reward_process.failed(failure, *call)
                for call, failure in zip(calls, failures, strict=True)
            ]

    async def _score_needed(self, calls: Sequence[Call], failed: FailedGroups) -> Iterable[list[RewardOutcome]]:
        if len(calls) > 1:
            outcomes = await self._call(calls, score_chunk)
            if not isinstance(outcomes, _NoOutcomes):
                return outcomes
        return await asyncio.gather(*(self._score_alone(call, failed) for call in calls))

    async def _score_alone(self, call: Call, failed: FailedGroups) -> list[RewardOutcome]:
        """The outcomes of one call, unless it is known meanwhile that it fails."""
        async with self._turn().of_single_calls:
            failure = self._known_failure(call, failed)
            if failure is not None:
                return reward_process.failed(failure, *call)
            outcomes = await self._call_alone(call, score_chunk)
            if isinstance(outcomes, _NoOutcomes):
                if outcomes.failure.reason == "timeout":
                    self._hung.add(call, outcomes.failure)
                outcomes = reward_process.failed(outcomes.failure, *call)
            failure = next((outcome for outcome in outcomes if outcome.reason is not None), None)
            if failure is not None and not self._is_too_long(failure):
                failed.add(call, failure)
            return outcomes

    def _known_failure(self, call: Call, failed: FailedGroups) -> RewardOutcome | None:
        if self._closed:
            raise asyncio.CancelledError
        return failed.failure(call) or self._hung.failure(call)

    async def _call_alone(self, call: Call, score: _Score) -> list[RewardOutcome] | _NoOutcomes:
        """The outcomes of one call, made again once where its process died."""
        outcomes = await self._call([call], score)
        if isinstance(outcomes, _NoOutcomes) and outcomes.may_succeed:
            outcomes = await self._call([call], score)
        return outcomes if isinstance(outcomes, _NoOutcomes) else outcomes[0]

    async def _call(self, calls: Sequence[Call], score: _Score) -> list[list[RewardOutcome]] | _NoOutcomes:
        loaded = await self.start()
        timeout_s = self._config.timeout_s
        if loaded.is_async:
            timeout_s = timeout_s * -(-len(calls) // reward_process.concurrency(self._config)) + ASYNC_GRACE_S
        stopped = RewardOutcome(None, "raised", f"{loaded.where}: the process of the reward was stopped by a signal")
        call = None
        try:
            call = self._schedule(timeout_s, score, calls)
            outcomes = reward_process.checked_answer(await self._answer(call), calls)
            self._restarts = 0
            if not isinstance(outcomes, RetiredProcess):
                late = any(outcome.reason == "timeout" for of_call in outcomes for outcome in of_call)
                return _NoOutcomes(stopped, may_succeed=True) if late and call in self._seen_stopped else outcomes
            self._retired.add(outcomes.process)
            missing = _NoOutcomes(outcomes.failure, may_succeed=True)
        except BrokenProcessPool:  # no process had a call when they died, so no call is the cause
            return await self._call(calls, score)
        except TimeoutError:
            missing = _NoOutcomes(reward_process.timed_out(loaded.where, self._config), may_succeed=False)
            if call in self._seen_stopped:
                missing = _NoOutcomes(stopped, may_succeed=True)
        except ProcessExpired as death:
            if death.pid in self._retired:  # it ended before it made the calls
                self._retired.remove(death.pid)
                return await self._call(calls, score)
            if death.pid in self._killed:  # it was reported then
                return _NoOutcomes(stopped, may_succeed=True)
            exceeded = {
                -TOO_MANY_PROCESSES: f"started more than child_process_limit = {self._config.child_process_limit} "
                "processes",
                -TOO_MUCH_MEMORY: "takes, with what it has started, more than process_memory_limit_mb = "
                f"{self._config.process_memory_limit_mb} MiB of memory",
            }.get(death.exitcode)
            cause = exceeded or f"died with exit code {death.exitcode}"
            text = f"{loaded.where}: the process of the reward {cause}"
            missing = _NoOutcomes(RewardOutcome(None, "raised", text), may_succeed=exceeded is None)
        except BaseException as error:
            if not isinstance(error.__cause__, RemoteTraceback):  # raised here, not in the process
                raise
            text = f"{loaded.where}: an exception escaped in the process of the reward: {type(error).__name__}"
            missing = _NoOutcomes(RewardOutcome(None, "raised", text), may_succeed=True)
        if self._replaced is not None:
            self._replaced(missing.failure.detail or "")
        return missing

    async def _answer(self, call: Future[ResultT]) -> ResultT:
        """The answer of a call that was scheduled.

        Pebble does not notice a call that waits in the queue of a pool that has broken, or whose process died after it
        had taken the call and before it said so: then the pool is replaced, and its calls fail with BrokenProcessPool.
        """
        answer = asyncio.wrap_future(call)
        since = time.monotonic()
        self._kill_stopped()
        try:
            while not (await asyncio.wait([answer], timeout=POLL_S))[0]:
                self._kill_stopped()
                if call.running() and (process := self._process_of(call)) is not None and is_stopped(process):
                    self._seen_stopped.add(call)
                if call.running() or call.done() or self._closed:
                    continue
                longest_s = CALLS_AHEAD * (max(self._pending.values(), default=0.0) + START_TIMEOUT_S)
                if not self._pool.active:
                    self._restart(DIED_IDLE)
                elif time.monotonic() - since > longest_s:
                    self._restart(f"no process has taken a call for {longest_s:g} s; starting them again")
            return answer.result()
        finally:
            answer.cancel()

    def _kill_stopped(self) -> None:
        """Kills processes that stay stopped by a signal: an idle one takes no call, and a call in one does not end."""
        now = time.monotonic()
        if now - self._looked_at < INTERVAL_S:
            return
        self._looked_at = now
        processes = dictionary_values(self._pool._pool_manager.worker_manager.workers)
        stopped = [process.pid for process in processes if is_stopped(process.pid)]
        for number in self._stop_times.overdue(now, stopped):
            self._killed.add(number)
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            self._report(f"one of its processes {STOPPED_TOO_LONG}")

    def _process_of(self, call: Future[Any]) -> int | None:
        tasks = dictionary_values(self._pool._pool_manager.task_manager.tasks)
        return next((task.worker_id for task in tasks if task.future is call), None)

    def _report(self, cause: str) -> None:
        if self._replaced is not None:
            self._replaced(cause)
        else:
            logger.warning("reward function %r: %s", self._config.function, cause)

    def _turn(self) -> _Turns:
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns.loop is not loop:
            processes = self._config.world_size
            self._turns = _Turns(loop, asyncio.Semaphore(processes), asyncio.Semaphore(processes))
        return self._turns

    def _restart(self, cause: str) -> None:
        """Replaces a broken pool; pebble breaks when a process dies while no process has a call.

        Raises:
            RewardFunctionError: that happened MAX_RESTARTS times without a call that was answered.
        """
        self._restarts += 1
        name = self._config.function
        if self._restarts > MAX_RESTARTS:
            raise RewardFunctionError(f"reward function {name!r}: its processes died {self._restarts} times in a row")
        self._report(cause)
        broken, self._pool = self._pool, self._make_pool()
        self._retired.clear()
        self._killed.clear()
        broken.stop()  # type: ignore[no-untyped-call]
        broken.join()
        for future in tuple(self._pending):  # pebble fails only the calls that it had sent to a process
            with contextlib.suppress(InvalidStateError):
                future.set_exception(BrokenProcessPool("the processes of the pool died"))
        with block_interrupts():
            _ = self._pool.active  # starts it

    def _schedule(self, timeout_s: float, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> Future[ResultT]:
        if not self._closed and self._pool._context.status is not PoolStatus.CREATED and not self._pool.active:
            self._restart(DIED_IDLE)
        try:
            future: Future[ResultT] = self._pool.schedule(function, args=args, timeout=timeout_s)
        except RuntimeError as error:
            if self._closed:
                raise
            raise BrokenProcessPool(str(error)) from error
        self._pending[future] = timeout_s
        future.add_done_callback(lambda done: self._pending.pop(done, None))
        return future


@dataclass(frozen=True)
class _NoOutcomes:
    """No outcomes: the calls passed their deadline, their process died, or an exception ended them all.

    Attributes:
        failure: why.
        may_succeed: when they are made again, since the cause may be outside of them.
    """

    failure: RewardOutcome
    may_succeed: bool


@dataclass(frozen=True)
class _Turns:
    """How many chunks and single calls are made at a time, over all `score` calls of a pool.

    A chunk keeps its turn until each of its calls has outcomes: the next chunk starts when it is known which hang.
    """

    loop: asyncio.AbstractEventLoop
    of_chunks: asyncio.Semaphore
    of_single_calls: asyncio.Semaphore


def _calls(request: RewardRequest, loaded: LoadedReward) -> list[Call]:
    """The calls that score a request, in the order of its responses, without ids that the function does not read."""
    unread: dict[str, Any] = {name: () for name in ("prompt_ids", "response_ids") if name not in loaded.reads}
    request = replace(request, **unread)
    if loaded.per_group:
        return [(request, None)]
    if loaded.sees_group:
        return [(request, index) for index in range(len(request.responses))]
    return [
        (replace(request, responses=(response,), response_ids=request.response_ids[index : index + 1]), 0)
        for index, response in enumerate(request.responses)
    ]


def _known(response: str, truth: Any) -> RewardRequest:
    """A sample of SELF_TEST; its second value is the ground truth, or the row for a reward that reads columns."""
    if isinstance(truth, Mapping):
        return RewardRequest((response,), str(truth.get("ground_truth", "")), row=truth)
    return RewardRequest((response,), str(truth))
