"""The rollout worker of agents: episodes between engines and environments, for training and for validation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from roll.agents.tasks import seed_of_place
from roll.base.timers import Timer
from roll.configs.agentic import AgenticConfig
from roll.configs.environments import EnvManagerConfig
from roll.configs.pipeline import role_seed
from roll.datasets.batch import Batch
from roll.rollout.agents.agent_episode import AgentEpisode, AgentRuns, AgentTask
from roll.rollout.agents.episode import Episode, Task
from roll.rollout.agents.runner import AnyEpisode, RolloutRunner, run_all
from roll.rollout.ledger import PromptRequest
from roll.rollout.metrics import environment_metrics
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.rollout_worker import Purpose, RolloutWorker
from roll.rollout.types import Group, SamplingParams
from roll.usercode.env_pool import EnvPool


class AgenticWorker(RolloutWorker):
    """The rollout worker of episodes in environments; no Ray worker and no engine (`InferWorker`).

    It draws environments in a seeded order; a group that cannot be completed is dropped whole, with a reason.
    """

    work: ClassVar[tuple[str, ...]] = ("generate", "env")
    unit, spares = "group", " or train_env_manager.group_size_redundancy"

    def __init__(
        self,
        config: AgenticConfig,
        tasks: Mapping[str, Task | AgentTask],
        sampling: Mapping[Purpose, SamplingParams],
        runner: RolloutRunner,
        environments: EnvPool,
        agents: AgentRuns | None = None,
    ) -> None:
        super().__init__(config.samples_multiple, config.async_training.staleness_threshold)
        self._agentic, self._tasks, self._sampling = config, tasks, sampling
        self._runner, self._environments, self._agents = runner, environments, agents
        self._train_tags, self._val_tags = TagCycle(config.train_env_manager), TagCycle(config.val_env_manager)
        self._train_places = self._places(config.train_env_manager)

    def draw(self, requests: Sequence[PromptRequest]) -> list[Group]:
        """An environment for each request; tag and seed depend only on the number of the request."""
        return [self._group("train_env", request.number, self._train_tags, request.version) for request in requests]

    def validation_groups(self) -> list[Group]:
        """`val_batch_size` trajectories of validation environments."""
        count = (self._agentic.val_batch_size or 0) // self._agentic.val_env_manager.group_size
        return [self._group("val_env", number, self._val_tags) for number in range(count)]

    def _group(self, seed_name: str, number: int, tags: TagCycle, version: int | None = None) -> Group:
        tag, run_seed = tags.tag(number), self._agentic.seed
        task = self._tasks[tag]
        rows = task.rows if isinstance(task, AgentTask) else 0
        seed = seed_of_place(rows, tags.place(number), role_seed(run_seed, seed_name, number), run_seed)
        return Group(number, tag, seed, f"{tag}-{number}", version=version)

    async def generate(self, groups: Sequence[Group], purpose: Purpose, timer: Timer) -> None:
        """Runs the groups' episodes, over all concurrent calls in at most as many environments as the manager has.

        An environment that has finished its episode takes one of the next group, while others of its group still run.
        In lockstep whole groups run, `num_env_groups` at a time.
        """
        if purpose == "train":
            manager, places = self._agentic.train_env_manager, self._train_places
        else:
            manager = self._agentic.val_env_manager
            places = self._places(manager)
        count, seed = manager.group_size + manager.group_size_redundancy, self._agentic.seed
        runs = [
            (group, self._runner.episodes(group, purpose, self._tasks[group.tag], count, seed, self._sampling[purpose]))
            for group in groups
        ]
        if self._agents is not None and purpose == "train":
            self._agents.timers.timer = timer
        if self._agentic.deterministic:
            async with places:
                return await self._run_deterministic(runs, manager, timer)
        await run_all(
            self._runner.run_group(group, episodes, manager.group_size, timer, places) for group, episodes in runs
        )

    async def _run_deterministic(
        self, runs: Sequence[tuple[Group, Sequence[AnyEpisode]]], manager: EnvManagerConfig, timer: Timer
    ) -> None:
        """Environments in lockstep, then agents one after the other."""
        played = [(group, [each for each in found if isinstance(each, Episode)]) for group, found in runs]
        played, at_a_time = [run for run in played if run[1]], manager.num_env_groups or len(runs)
        for first in range(0, len(played), at_a_time):
            await self._runner.run_lockstep(played[first : first + at_a_time], manager.group_size, timer)
        for group, found in runs:
            if agents := [each for each in found if isinstance(each, AgentEpisode)]:
                await self._runner.run_in_turn(group, agents, manager.group_size, timer)

    def _places(self, manager: EnvManagerConfig) -> asyncio.Semaphore:
        """One for each environment that may run at a time; in lockstep one for all of them."""
        return asyncio.Semaphore(1 if self._agentic.deterministic else manager.environments)

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """`val/...`, also by environment."""
        return super().validation_metrics(groups) | environment_metrics(groups, "val")

    def batch(self, groups: Sequence[Group]) -> Batch:
        multiple = self._agentic.samples_multiple
        return batch_of_groups(groups, self._agentic.sample_by or "traj", multiple, episodes=True)

    def metrics(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """`rollout/...`, `staleness/...` and `env/...`."""
        agents = self._agents
        counts = [*self._environments.failures.items(), *([] if agents is None else agents.pool.failures.items())]
        failures = {f"env/failures_{reason.removeprefix('env_')}": float(count) for reason, count in counts}
        sessions = {} if agents is None else agents.totals.metrics()
        return super().metrics(groups, version) | environment_metrics(groups, "env") | failures | sessions

    def state_dict(self) -> dict[str, Any]:
        """The settings that the groups of a checkpoint depend on; the rest follows from their numbers."""
        manager = self._agentic.train_env_manager
        return {"seed": self._agentic.seed, "group_size": manager.group_size, "tags": self._train_tags.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checks `state_dict`.

        Raises:
            ValueError: it was taken with another seed, other tags, or groups of another size.
        """
        before = {**state, "tags": shortest_cycle(state["tags"])}
        for name, value in self.state_dict().items():
            if before[name] != value:
                raise ValueError(f"{name}: {value} cannot continue from a checkpoint with {before[name]}; use that")

    def close(self) -> None:
        """Ends environments, agents and the gateway."""
        self._environments.close()
        if self._agents is not None:
            self._agents.close()


class TagCycle:
    """The tag of each group: every tag in proportion to its `num_groups_partition`, evenly mixed.

    Attributes:
        order: tags of one cycle.
    """

    def __init__(self, manager: EnvManagerConfig) -> None:
        positions = [
            ((2 * index + 1) / (2 * count), tag)
            for tag, count in zip(manager.tags, manager.num_groups_partition, strict=True)
            for index in range(count)
        ]
        self.order = shortest_cycle([tag for _, tag in sorted(positions, key=lambda item: item[0])])

    def tag(self, number: int) -> str:
        return self.order[number % len(self.order)]

    def place(self, number: int) -> int:
        """How many groups before this one have its tag."""
        cycles, place = divmod(number, len(self.order))
        tag = self.tag(number)
        return cycles * self.order.count(tag) + self.order[:place].count(tag)


def shortest_cycle(order: list[str]) -> list[str]:
    """The shortest beginning of `order` that repeats to `order`, the same however many groups run at a time."""
    return next((order[:n] for n in range(1, len(order)) if order[:n] * (len(order) // n) == order), order)
