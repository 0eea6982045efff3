"""Scores samples in processes that can be killed, so that no reward function can stall or corrupt a run."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from roll.configs.scoring.built_in_rewards import is_comparison
from roll.configs.scoring.rewards import DEFAULT_CONCURRENCY, RewardConfig
from roll.rewards.calling import TOO_LONG, RewardFunctionError, RewardOutcome, RewardRequest
from roll.usercode import reward_process
from roll.usercode.containment import TOO_MANY_PROCESSES, TOO_MUCH_MEMORY
from roll.usercode.failed_calls import FailedGroups, HungCalls
from roll.usercode.output import RewardOutput
from roll.usercode.pool import START_TIMEOUT_S, PoolBrokenError, ProcessStoppedError, UserProcessPool
from roll.usercode.process import ProcessEndedError, UserProcess
from roll.usercode.reward_process import Call, LoadedReward, score_chunk
from roll.usercode.server import CallError

logger = logging.getLogger(__name__)

CHUNK_SIZE = 16
"""Samples sent to a process at a time: enough that sending them costs less than scoring them, few enough that little is
scored again when one of them fails."""

ASYNC_GRACE_S = 5.0
"""Added to the deadline of a chunk of coroutines, each of which has its own: after it the loop itself is blocked. The
chunk of a coroutine function has DEFAULT_CONCURRENCY samples, which are scored again only if their process fails."""

OTHER_ANSWER = "I do not know."
"""A response with which a reward is tried; it holds no answer."""

_Score = Callable[[Sequence[Call]], list[list[RewardOutcome]]]


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

    Use a pool from one asyncio loop at a time.
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
        self._pool = UserProcessPool(config.world_size, self._launch, self._report)
        self._loaded: LoadedReward | None = None
        self._hung = HungCalls(frozenset())
        self._turns: _Turns | None = None

    def _launch(self) -> UserProcess:
        prepare, start = [partial(each, self._config) for each in (reward_process.contain_reward, reward_process.start)]
        return UserProcess(prepare, start, output=self._output.writer.fileno())

    def launch(self) -> None:
        self._output.start()
        self._pool.start()

    async def start(self) -> LoadedReward:
        """Waits until a process has imported the reward function.

        Raises:
            RewardFunctionError: the function does not exist, or its import failed or took longer than START_TIMEOUT_S.
        """
        if self._loaded is not None:
            return self._loaded
        self.launch()
        try:
            loaded, _ = await self._in_pool(START_TIMEOUT_S, reward_process.probe)
        except (TimeoutError, ProcessEndedError, ProcessStoppedError, CallError) as failure:
            name = self._config.function
            raise RewardFunctionError(f"reward function {name!r}: its process did not start: {failure!r}") from failure
        if loaded.error:
            raise (MissingRewardError if loaded.missing else RewardFunctionError)(loaded.error)
        self._loaded, self._hung = loaded, HungCalls(loaded.reads)
        return self._loaded

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
        if self._pool.closed:
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
        self._pool.close()
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
        if self._pool.closed:
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
        try:
            answer, was_stopped = await self._in_pool(timeout_s, score, calls)
        except ProcessStoppedError:  # it was reported then
            return _NoOutcomes(stopped, may_succeed=True)
        except TimeoutError:
            missing = _NoOutcomes(reward_process.timed_out(loaded.where, self._config), may_succeed=False)
        except ProcessEndedError as death:
            missing = self._death(loaded, death.exit_code)
        except CallError as error:
            missing = _NoOutcomes(RewardOutcome(None, "raised", str(error)), may_succeed=True)
        else:
            outcomes = reward_process.checked_answer(answer, calls)
            late = any(outcome.reason == "timeout" for of_call in outcomes for outcome in of_call)
            return _NoOutcomes(stopped, may_succeed=True) if late and was_stopped else outcomes
        self._report(missing.failure.detail, of_call=True)
        return missing

    async def _in_pool(self, timeout_s: float, function: Callable[..., Any], *args: Any) -> tuple[Any, bool]:
        try:
            return await self._pool.call(timeout_s, function, *args)
        except PoolBrokenError as error:
            raise RewardFunctionError(f"reward function {self._config.function!r}: {error}") from error

    def _death(self, loaded: LoadedReward, exit_code: int) -> _NoOutcomes:
        config = self._config
        exceeded = {
            -TOO_MANY_PROCESSES: f"started more than child_process_limit = {config.child_process_limit} processes",
            -TOO_MUCH_MEMORY: "takes, with what it has started, more than process_memory_limit_mb = "
            f"{config.process_memory_limit_mb} MiB of memory",
        }.get(exit_code)
        text = f"{loaded.where}: the process of the reward {exceeded or f'died with exit code {exit_code}'}"
        return _NoOutcomes(RewardOutcome(None, "raised", text), may_succeed=exceeded is None)

    def _report(self, cause: str, of_call: bool = False) -> None:
        if self._replaced is not None:
            self._replaced(cause)
        elif not of_call:
            logger.warning("reward function %r: %s", self._config.function, cause)

    def _turn(self) -> _Turns:
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns.loop is not loop:
            processes = self._config.world_size
            self._turns = _Turns(loop, asyncio.Semaphore(processes), asyncio.Semaphore(processes))
        return self._turns


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
