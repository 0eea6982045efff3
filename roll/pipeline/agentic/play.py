"""Plays the episodes of groups: each at its own pace, or all turn by turn together where runs must repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from roll.datasets.conversation import ConversationEncoder
from roll.pipeline.agentic.environments import EnvFailure, EnvPool
from roll.pipeline.agentic.episode import Episode, EpisodeFailed, Task
from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.pipeline.engine_pool import EnginePool
from roll.pipeline.rollout_types import Meter
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

Decode = Callable[[list[int]], str]
"""From sampled ids to the text an environment reads."""


class Player:
    """Gives groups their trajectories, from engines and environments."""

    def __init__(
        self,
        engines: EnginePool,
        environments: EnvPool,
        chat: ConversationEncoder,
        decode: Decode,
        sequence_length: int,
        timeout_s: float,
    ) -> None:
        """Takes the ways to both sides; `timeout_s` is the longest a trajectory may take."""
        self._engines, self._environments, self._chat, self._decode = engines, environments, chat, decode
        self._sequence_length, self._timeout_s = sequence_length, timeout_s
        self.last_failure: str | None = None
        """What the last group was dropped for, in words."""

    def episodes(
        self, group: TrajectoryGroup, purpose: str, task: Task, count: int, seed: int, sampling: SamplingParams
    ) -> list[Episode]:
        """`count` episodes of one group: the same environment, answers with seeds of their own."""
        return [
            Episode(
                f"{purpose}-{group.number}-{index}", task, group.seed, seed, sampling, self._sequence_length, self._chat
            )
            for index in range(count)
        ]

    async def play(self, group: TrajectoryGroup, episodes: Sequence[Episode], wanted: int, meter: Meter) -> None:
        """Plays side by side; the first `wanted` that end well are the group's, in the order they were begun.

        What is not needed any more is given up. With fewer than `wanted` the group has a `drop_reason`.
        """
        engine = self._engines.home()
        tasks = {asyncio.create_task(self._finish(episode, engine, meter)): episode for episode in episodes}
        done: list[Episode] = []
        try:
            for ended in asyncio.as_completed(tasks):
                await ended
                done = [episode for task, episode in tasks.items() if task.done() and task.result() is None]
                if len(done) >= wanted:
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        reasons = [task.result() for task in tasks if task.done() and not task.cancelled()]
        self._settle(group, done, wanted, [reason for reason in reasons if reason is not None])

    async def play_together(
        self, plays: Sequence[tuple[TrajectoryGroup, Sequence[Episode]]], wanted: int, meter: Meter
    ) -> None:
        """Plays all groups in lock-step: every turn waits for all, and all its requests are sent in one call."""
        failed: dict[Episode, str] = {}
        everyone = [episode for _, episodes in plays for episode in episodes]

        async def unless_it_fails(episode: Episode, work: Awaitable[None]) -> None:
            reason = await self._reason(work)
            if reason is not None:
                failed[episode] = reason

        with meter.measure("env"):
            await asyncio.gather(*(unless_it_fails(each, each.begin(self._environments)) for each in everyone))
        while True:
            asked = [(each, each.request()) for each in everyone if each not in failed]
            turn = [(episode, request) for episode, request in asked if request is not None]
            if not turn:
                break
            with meter.measure("generate"):
                answers = await self._engines.generate([[request] for _, request in turn])
            reactions = [
                unless_it_fails(episode, self._accept(episode, request, answer))
                for (episode, request), [answer] in zip(turn, answers, strict=True)
            ]
            with meter.measure("env"):
                await asyncio.gather(*reactions)
        for group, episodes in plays:
            done = [episode for episode in episodes if episode not in failed]
            self._settle(group, done, wanted, [failed[episode] for episode in episodes if episode in failed])
        await asyncio.gather(*(episode.close() for episode in everyone))

    async def _finish(self, episode: Episode, engine: int, meter: Meter) -> str | None:
        """Plays one episode to its end; the reason where it failed."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self._reason(self._play(episode, engine, meter))
        except TimeoutError:
            if not deadline.expired():
                raise
            self.last_failure = f"a trajectory was not over after {self._timeout_s:g} s (trajectory_timeout_s)"
            return "trajectory_timeout"
        finally:
            await episode.close()

    async def _play(self, episode: Episode, engine: int, meter: Meter) -> None:
        with meter.measure("env"):
            await episode.begin(self._environments)
        while (request := episode.request()) is not None:
            with meter.measure("generate"):
                [[answer]] = await self._engines.generate([[request]], engine)
            with meter.measure("env"):
                await self._accept(episode, request, answer)

    async def _accept(self, episode: Episode, request: GenerateRequest, answer: GenerateResult) -> None:
        await episode.accept(request, answer, self._decode(answer.response_ids))

    async def _reason(self, work: Awaitable[None]) -> str | None:
        """Awaits the work; a failure of this one episode becomes its reason."""
        try:
            await work
        except (EpisodeFailed, EnvFailure) as failure:
            self.last_failure = str(failure)
            return failure.reason
        return None

    @staticmethod
    def _settle(group: TrajectoryGroup, done: list[Episode], wanted: int, reasons: list[str]) -> None:
        if len(done) >= wanted:
            group.trajectories = [episode.trajectory for episode in done[:wanted]]
        else:
            group.drop_reason = reasons[0]
