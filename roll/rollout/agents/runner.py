"""Runs the episodes of groups: independently, or in lockstep for deterministic runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace

from roll.base.timers import Timer
from roll.datasets.templates import ConversationEncoder
from roll.rollout.agents.agent_episode import AgentEpisode, AgentRuns, AgentTask
from roll.rollout.agents.episode import Episode, EpisodeFailed, Task
from roll.rollout.agents.sessions import SessionSpec
from roll.rollout.engine_pool import EnginePool
from roll.rollout.rollout_worker import TIMED_OUT, Purpose
from roll.rollout.types import GenerateRequest, GenerateResult, Group, SamplingParams
from roll.usercode.env_pool import EnvFailure, EnvPool

Decode = Callable[[list[int], tuple[str, ...]], str]
"""From sampled ids, and the stop strings of their request, to the text that an environment reads."""

AnyEpisode = Episode | AgentEpisode

EpisodeFailure = EpisodeFailed | EnvFailure
"""Failures of one episode; both have a `reason`."""


class RolloutRunner:
    """Fills groups with trajectories, from engines and environments."""

    def __init__(
        self,
        engines: EnginePool,
        environments: EnvPool,
        chat: ConversationEncoder,
        decode: Decode,
        sequence_length: int,
        timeout_s: float,
        agents: AgentRuns | None = None,
    ) -> None:
        self._engines, self._environments, self._chat, self._decode = engines, environments, chat, decode
        self._sequence_length, self._timeout_s, self._agents = sequence_length, timeout_s, agents

    def episodes(
        self, group: Group, purpose: Purpose, task: Task | AgentTask, count: int, seed: int, sampling: SamplingParams
    ) -> list[AnyEpisode]:
        """`count` episodes of a group: the same environment or task, with different seeds for the responses."""
        names = [f"{purpose}-{group.number}-{index}" for index in range(count)]
        length, chat = self._sequence_length, self._chat
        if isinstance(task, AgentTask):
            assert self._agents is not None, "a run with an agent has a gateway"
            sampling = replace(sampling, max_new_tokens=min(task.max_tokens, sampling.max_new_tokens))
            limits = group.version, sampling, length, task.max_requests
            sessions = [SessionSpec(name, seed, *limits) for name in names]
            return [AgentEpisode(task, group.problem, session, self._agents) for session in sessions]
        return [Episode(name, task, group.problem, seed, sampling, length, group.version, chat) for name in names]

    async def run_group(
        self, group: Group, episodes: Sequence[AnyEpisode], group_size: int, timer: Timer, places: asyncio.Semaphore
    ) -> None:
        """Runs the episodes of a group concurrently, keeps the first `group_size` that succeed and cancels the rest.

        They are kept in the order of `episodes`. If too many fail, the rest is cancelled too and the group is dropped.
        An episode takes one of `places`, in order of arrival, while it runs. The episodes share an engine, which the
        first of them chooses.
        """
        succeeded: list[AnyEpisode] = []
        failures: list[EpisodeFailure] = []
        chosen: int | None = None

        async def run(episode: AnyEpisode) -> None:
            nonlocal chosen
            async with places:
                with self._engines.assign_engine(chosen) as chosen:
                    failure = await self._run_in_time(episode, chosen, timer)
            if failure is None:
                succeeded.append(episode)
            else:
                failures.append(failure)

        tasks = [asyncio.create_task(run(episode)) for episode in episodes]
        try:
            for ended in asyncio.as_completed(tasks):
                await ended
                if len(succeeded) >= group_size or len(failures) > len(episodes) - group_size:
                    break
        finally:
            await cancel_all(tasks)
        _finish_group(group, sorted(succeeded[:group_size], key=episodes.index), group_size, failures)

    async def run_in_turn(self, group: Group, episodes: Sequence[AgentEpisode], group_size: int, timer: Timer) -> None:
        """Runs the episodes of a group one after the other, until `group_size` of them have succeeded."""
        failed: dict[AgentEpisode, EpisodeFailure] = {}
        for number, episode in enumerate(episodes):
            if number - len(failed) < group_size and (failure := await self._run_in_time(episode, None, timer)):
                failed[episode] = failure
        succeeded = [episode for episode in episodes if episode.trajectory.stop is not None]
        _finish_group(group, succeeded, group_size, list(failed.values()))

    async def _run_in_time(self, episode: AnyEpisode, engine: int | None, timer: Timer) -> EpisodeFailure | None:
        try:
            async with asyncio.timeout(self._timeout_s + episode.grace_s) as deadline:
                return await _failure_of(self._run, episode, engine, timer)
        except TimeoutError:
            if not deadline.expired():
                raise
            return self._timed_out()
        finally:
            episode.start_close()

    async def _run(self, episode: AnyEpisode, engine: int | None, timer: Timer) -> None:
        if isinstance(episode, AgentEpisode):
            return await episode.run(engine)
        with timer.measure("env"):
            await episode.begin(self._environments)
        while (request := episode.request()) is not None:
            with timer.measure("generate"):
                [[result]] = await self._engines.generate([[request]], engine)
            with timer.measure("env"):
                await self._add_response(episode, request, result)

    async def run_lockstep(
        self, runs: Sequence[tuple[Group, Sequence[Episode]]], group_size: int, timer: Timer
    ) -> None:
        """Runs all groups turn by turn: every turn waits for all episodes and sends all of its requests in one call.

        Keeps the first `group_size` successful episodes of each group, in the order of its list.
        """
        all_episodes = [episode for _, episodes in runs for episode in episodes]
        failed: dict[Episode, EpisodeFailure] = {}
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                await self._run_turns(all_episodes, failed, timer)
        except TimeoutError:
            if not deadline.expired():
                raise
            running = [each for each in all_episodes if each not in failed and each.trajectory.stop is None]
            failed |= {episode: self._timed_out() for episode in running}
        finally:
            for episode in all_episodes:
                episode.start_close()
        for group, episodes in runs:
            succeeded = [episode for episode in episodes if episode not in failed]
            failures = [failed[episode] for episode in episodes if episode in failed]
            _finish_group(group, succeeded[:group_size], group_size, failures)

    async def _run_turns(
        self, episodes: Sequence[Episode], failed: dict[Episode, EpisodeFailure], timer: Timer
    ) -> None:
        """Runs all episodes to their end; failed ones are added to `failed` and send no more requests."""

        async def note_failure(episode: Episode, work: Callable[..., Awaitable[None]], *args: object) -> None:
            failure = await _failure_of(work, *args)
            if failure is not None:
                failed[episode] = failure

        with timer.measure("env"):
            await run_all(note_failure(each, each.begin, self._environments) for each in episodes)
        while True:
            requests = [(each, each.request()) for each in episodes if each not in failed]
            turn = [(episode, request) for episode, request in requests if request is not None]
            if not turn:
                return
            with timer.measure("generate"):
                results = await self._engines.generate([[request] for _, request in turn])
            with timer.measure("env"):
                await run_all(
                    note_failure(episode, self._add_response, episode, request, result)
                    for (episode, request), [result] in zip(turn, results, strict=True)
                )

    async def _add_response(self, episode: Episode, request: GenerateRequest, result: GenerateResult) -> None:
        await episode.add_response(request, result, self._decode(result.response_ids, request.sampling.stop_strings))

    def _timed_out(self) -> EpisodeFailed:
        message = f"a trajectory was not over after {self._timeout_s:g} s (trajectory_timeout_s)"
        return EpisodeFailed(TIMED_OUT, message)


def _finish_group(
    group: Group, succeeded: Sequence[AnyEpisode], group_size: int, failures: Sequence[EpisodeFailure]
) -> None:
    if len(succeeded) == group_size:
        group.trajectories = [episode.trajectory for episode in succeeded]
    else:
        group.drop(failures[0].reason, str(failures[0]))


async def _failure_of(work: Callable[..., Awaitable[None]], *args: object) -> EpisodeFailure | None:
    """The failure that the work of one episode ended with, if any; any other exception is a bug and is raised."""
    try:
        await work(*args)
    except (EpisodeFailed, EnvFailure) as failure:
        return failure
    return None


async def run_all(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Runs coroutines concurrently to their end; if one raises or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels tasks that still run, waits for their end, and raises the exception of one that raised."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
