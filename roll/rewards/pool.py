"""Scores samples in processes that can be killed, so that no reward function can stall or spoil a run."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pebble import ProcessExpired, ProcessPool

from roll.configs.pipeline import RewardConfig
from roll.rewards import reward_process
from roll.rewards.reward_process import Item, RewardFunctionError, RewardOutcome

CHUNK_SIZE = 16
"""Samples sent to a process at a time: enough that the trip costs less than the scoring, few enough that a guilty
sample makes little work be done again."""

START_TIMEOUT_S = 120.0
"""Longest wait for a process to import the reward function; importing math-verify on a busy machine takes seconds."""

__all__ = ["RewardFunctionError", "RewardPool", "RewardSelfTestError"]


class RewardSelfTestError(RuntimeError):
    """A reward function got its own known answers wrong."""


class RewardPool:
    """`world_size` processes running one reward function, each sample under a deadline of `timeout_s` seconds.

    Samples travel in chunks. A chunk that passes the deadline, or whose process dies, is killed and its samples are
    scored again one by one, each with the whole deadline to itself, so that only the guilty one fails. Every failure
    is an outcome with a reason, never a score.

    Start it and score from one asyncio loop at a time. `close` kills what runs. Processes are spawned, so each imports
    the driver's main script first: keep heavy imports of such a script inside its functions.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Prepares the pool; processes start with `start`, or with the first `score`."""
        self._config = config
        self._pool = ProcessPool(
            max_workers=config.world_size,
            initializer=reward_process.start,
            initargs=(config,),
            context=multiprocessing.get_context("spawn"),
        )
        self._pending: set[Future] = set()
        self._self_test: tuple[tuple[str, str, bool], ...] | None = None

    async def start(self) -> None:
        """Waits until a process has imported the reward function.

        Raises:
            RewardFunctionError: there is no such function, or importing it failed or passed START_TIMEOUT_S.
        """
        if self._self_test is not None:
            return
        try:
            probing = asyncio.wrap_future(self._schedule(reward_process.probe, timeout_s=START_TIMEOUT_S))
            error, pairs = await asyncio.wait_for(probing, START_TIMEOUT_S)
        except (TimeoutError, ProcessExpired) as failure:
            name = self._config.function
            raise RewardFunctionError(f"reward function {name!r}: its process did not start: {failure!r}") from failure
        if error:
            raise RewardFunctionError(error)
        self._self_test = pairs

    async def self_test(self) -> int:
        """Scores the known pairs that the function's module offers as SELF_TEST; returns how many there were.

        SELF_TEST is a sequence of (response, ground truth, whether it is right).

        Raises:
            RewardFunctionError: as `start`.
            RewardSelfTestError: naming each pair that was not scored as it should be.
        """
        await self.start()
        pairs = self._self_test or ()
        outcomes = await self.score([(response, ground_truth) for response, ground_truth, _ in pairs])
        wrong = []
        for (response, ground_truth, right), outcome in zip(pairs, outcomes, strict=True):
            expected = self._config.correct_score if right else self._config.wrong_score
            if outcome.score != expected:
                got = outcome.score if outcome.reason is None else f"{outcome.reason} ({outcome.detail})"
                wrong.append(f"{response!r} against {ground_truth!r} should score {expected}, got {got}")
        if wrong:
            raise RewardSelfTestError(f"{self._config.function} fails its self-test: " + "; ".join(wrong))
        return len(pairs)

    async def score(self, items: Sequence[Item]) -> list[RewardOutcome]:
        """Outcomes of (response, ground truth) pairs, in order; always as many as there are items."""
        await self.start()
        size = max(1, min(CHUNK_SIZE, len(items) // (2 * self._config.world_size)))
        chunks = [items[first : first + size] for first in range(0, len(items), size)]
        scored = await asyncio.gather(*(self._score_chunk(chunk) for chunk in chunks))
        return [outcome for outcomes in scored for outcome in outcomes]

    def close(self) -> None:
        """Kills the processes and waits for their end; cancels whoever still awaits a score. Safe to call twice."""
        for future in tuple(self._pending):
            future.cancel()
        self._pool.stop()
        self._pool.join()

    async def __aenter__(self) -> RewardPool:
        """Starts the pool."""
        try:
            await self.start()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the pool."""
        self.close()

    async def _score_chunk(self, items: Sequence[Item]) -> list[RewardOutcome]:
        timeout_s = self._config.timeout_s
        try:
            return await asyncio.wrap_future(self._schedule(reward_process.score_chunk, items, timeout_s=timeout_s))
        except TimeoutError:
            failure = RewardOutcome(None, "timeout", f"took longer than timeout_s = {timeout_s:g}")
        except ProcessExpired as death:
            failure = RewardOutcome(None, "raised", f"its process died with exit code {death.exitcode}")
        if len(items) == 1:
            return [failure]
        single = await asyncio.gather(*(self._score_chunk([item]) for item in items))
        return [outcome for outcomes in single for outcome in outcomes]

    def _schedule(self, function: Callable, *args: Any, timeout_s: float) -> Future:
        future = self._pool.schedule(function, args=args, timeout=timeout_s)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future
