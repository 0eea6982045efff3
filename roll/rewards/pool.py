"""Scores samples in processes that can be killed, so that no reward function can stall or corrupt a run."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple

from pebble import ProcessExpired, ProcessPool

from roll.configs.pipeline import RewardConfig
from roll.rewards import reward_process
from roll.rewards.reward_process import Item, RewardFunctionError, RewardOutcome, SelfTest
from roll.terminal import block_interrupts

CHUNK_SIZE = 16
"""Samples sent to a process at a time: enough that sending them costs less than scoring them, few enough that little is
scored again when one of them fails."""

START_TIMEOUT_S = 120.0
"""Deadline for a process to import the reward function; importing math-verify on a busy machine takes seconds."""

ArgsT = TypeVarTuple("ArgsT")
ResultT = TypeVar("ResultT")

__all__ = ["RewardFunctionError", "RewardPool", "RewardSelfTestError"]


class RewardSelfTestError(RuntimeError):
    """A reward function gives wrong scores for its own known samples."""


class RewardPool:
    """`world_size` processes that run one reward function, with a deadline of `timeout_s` seconds per sample.

    Samples are sent in chunks. When a chunk passes the deadline or its process dies, the process is killed and the
    samples are scored again one by one, each with its own deadline, so that only the failing sample fails. Every
    failure is an outcome with a reason, never a score.

    Use a pool from one asyncio loop at a time. Processes are spawned, so each imports the main script of the driver
    first: import heavy modules inside functions there.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Starts no process; processes start with `start` or the first `score`."""
        self._config = config
        self._pool = ProcessPool(
            max_workers=config.world_size,
            initializer=reward_process.start,
            initargs=(config,),
            context=multiprocessing.get_context("spawn"),
        )
        self._pending: set[Future[Any]] = set()
        self._self_test: SelfTest | None = None

    async def start(self) -> None:
        """Waits until a process has imported the reward function.

        Raises:
            RewardFunctionError: the function does not exist, or its import failed or took longer than START_TIMEOUT_S.
        """
        if self._self_test is not None:
            return
        try:
            with block_interrupts():
                probing = asyncio.wrap_future(self._schedule(START_TIMEOUT_S, reward_process.probe))
            error, self_test = await asyncio.wait_for(probing, START_TIMEOUT_S)
        except (TimeoutError, ProcessExpired) as failure:
            name = self._config.function
            raise RewardFunctionError(f"reward function {name!r}: its process did not start: {failure!r}") from failure
        if error:
            raise RewardFunctionError(error)
        self._self_test = self_test

    async def self_test(self) -> int:
        """Scores the known samples that the module of the function has as SELF_TEST, and returns their number.

        Raises:
            RewardFunctionError: as `start`.
            RewardSelfTestError: lists the samples with a wrong score.
        """
        await self.start()
        samples = self._self_test or ()
        outcomes = await self.score([(response, ground_truth) for response, ground_truth, _ in samples])
        wrong = []
        for (response, ground_truth, right), outcome in zip(samples, outcomes, strict=True):
            expected = self._config.correct_score if right else self._config.wrong_score
            if outcome.score != expected:
                got = outcome.score if outcome.reason is None else f"{outcome.reason} ({outcome.detail})"
                wrong.append(f"{response!r} against {ground_truth!r} should score {expected}, got {got}")
        if wrong:
            raise RewardSelfTestError(f"{self._config.function} fails its self-test: " + "; ".join(wrong))
        return len(samples)

    async def score(self, items: Sequence[Item]) -> list[RewardOutcome]:
        """Scores (response, ground truth) pairs; one outcome per item, in order."""
        await self.start()
        size = max(1, min(CHUNK_SIZE, len(items) // (2 * self._config.world_size)))
        chunks = [items[first : first + size] for first in range(0, len(items), size)]
        scored = await asyncio.gather(*(self._score_chunk(chunk) for chunk in chunks))
        return [outcome for outcomes in scored for outcome in outcomes]

    def close(self) -> None:
        """Kills the processes, waits for their end and cancels running `score` calls. Safe to call twice."""
        for future in tuple(self._pending):
            future.cancel()
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    async def __aenter__(self) -> RewardPool:
        try:
            await self.start()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _score_chunk(self, items: Sequence[Item]) -> list[RewardOutcome]:
        timeout_s = self._config.timeout_s
        try:
            return await asyncio.wrap_future(self._schedule(timeout_s, reward_process.score_chunk, items))
        except TimeoutError:
            failure = RewardOutcome(None, "timeout", f"took longer than timeout_s = {timeout_s:g}")
        except ProcessExpired as death:
            failure = RewardOutcome(None, "raised", f"its process died with exit code {death.exitcode}")
        if len(items) == 1:
            return [failure]
        single = await asyncio.gather(*(self._score_chunk([item]) for item in items))
        return [outcome for outcomes in single for outcome in outcomes]

    def _schedule(self, timeout_s: float, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> Future[ResultT]:
        future: Future[ResultT] = self._pool.schedule(function, args=args, timeout=timeout_s)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future
