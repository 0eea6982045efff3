"""Plays the episodes of groups: each at its own pace, or all turn by turn together where runs must repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from roll.datasets.templates import ConversationEncoder
from roll.distributed.env_pool.pool import EnvPool
from roll.distributed.env_pool.types import EnvFailure
from roll.pipeline.agentic.episode import Episode, EpisodeFailed, Task
from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.pipeline.agentic.side_by_side import give_up, side_by_side
from roll.pipeline.engine_pool import EnginePool
from roll.pipeline.rollout_types import Meter
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

Decode = Callable[[list[int]], str]
"""From sampled ids to the text an environment reads."""

Failure = EpisodeFailed | EnvFailure
"""What one episode can fail with; both have a `reason`."""


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

        What is not needed any more is given up, also where too many failed. With fewer than `wanted` the group has a
        `drop_reason`.
        """
        well: list[Episode] = []
        failures: list[Failure] = []

        async def finish(episode: Episode, engine: int) -> None:
            failure = await self._finish(episode, engine, meter)
            if failure is None:
                well.append(episode)
            else:
                failures.append(failure)

        with self._engines.home(len(episodes)) as engine:
            tasks = [asyncio.create_task(finish(episode, engine)) for episode in episodes]
            try:
                for ended in asyncio.as_completed(tasks):
                    await ended
                    if len(well) >= wanted or len(failures) > len(episodes) - wanted:
                        break
            finally:
                await give_up(tasks)
        self._settle(group, sorted(well[:wanted], key=episodes.index), wanted, failures)

    async def play_together(
        self, plays: Sequence[tuple[TrajectoryGroup, Sequence[Episode]]], wanted: int, meter: Meter
    ) -> None:
        """Plays all groups in lock-step: every turn waits for all, and all its requests are sent in one call.

        Of a group the first `wanted` that end well are taken in the order they were begun, however long they took.
        """
        everyone = [episode for _, episodes in plays for episode in episodes]
        failed: dict[Episode, Failure] = {}
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                await self._in_step(everyone, failed, meter)
        except TimeoutError:
            if not deadline.expired():
                raise
            failed |= {each: self._late() for each in everyone if each not in failed and each.trajectory.stop is None}
        finally:
            for episode in everyone:
                episode.leave()
        for group, episodes in plays:
            well = [episode for episode in episodes if episode not in failed]
            self._settle(group, well[:wanted], wanted, [failed[each] for each in episodes if each in failed])

    async def _in_step(self, everyone: list[Episode], failed: dict[Episode, Failure], meter: Meter) -> None:
        """Turn by turn to the end of all; who fails is put into `failed` and asked nothing more."""

        async def unless_it_fails(episode: Episode, work: Callable[..., Awaitable[None]], *args: Any) -> None:
            failure = await _failure(work, *args)
            if failure is not None:
                failed[episode] = failure

        with meter.measure("env"):
            await side_by_side(unless_it_fails(each, each.begin, self._environments) for each in everyone)
        while True:
            asked = [(each, each.request()) for each in everyone if each not in failed]
            turn = [(episode, request) for episode, request in asked if request is not None]
            if not turn:
                return
            with meter.measure("generate"):
                answers = await self._engines.generate([[request] for _, request in turn])
            with meter.measure("env"):
                await side_by_side(
                    unless_it_fails(episode, self._accept, episode, request, answer)
                    for (episode, request), [answer] in zip(turn, answers, strict=True)
                )

    async def _finish(self, episode: Episode, engine: int, meter: Meter) -> Failure | None:
        """Plays one episode to its end; what it failed with, if it did."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await _failure(self._play, episode, engine, meter)
        except TimeoutError:
            if not deadline.expired():
                raise
            return self._late()
        finally:
            episode.leave()

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

    def _late(self) -> EpisodeFailed:
        words = f"a trajectory was not over after {self._timeout_s:g} s (trajectory_timeout_s)"
        return EpisodeFailed("trajectory_timeout", words)

    def _settle(self, group: TrajectoryGroup, well: list[Episode], wanted: int, failures: list[Failure]) -> None:
        if len(well) == wanted:
            group.trajectories = [episode.trajectory for episode in well]
        else:
            group.drop_reason, group.failure = failures[0].reason, str(failures[0])
            self.last_failure = group.failure


async def _failure(work: Callable[..., Awaitable[None]], *args: Any) -> Failure | None:
    """Does the work of one episode; what it failed with, if it did. Any other exception is a mistake and goes on."""
    try:
        await work(*args)
    except (EpisodeFailed, EnvFailure) as failure:
        return failure
    return None
