"""The agentic way to samples: groups of episodes, played between engines and environments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from roll.configs.agentic import AgenticConfig, EnvManagerConfig
from roll.configs.seeds import role_seed
from roll.distributed.env_pool.pool import EnvPool
from roll.distributed.protocol import DataProto
from roll.pipeline.agentic.batch import batch_of_groups
from roll.pipeline.agentic.episode import Episode, Task
from roll.pipeline.agentic.groups import TagCycle, TrajectoryGroup
from roll.pipeline.agentic.metrics import rollout_metrics, validation_metrics
from roll.pipeline.agentic.play import Player
from roll.pipeline.agentic.side_by_side import side_by_side
from roll.pipeline.errors import RunError
from roll.pipeline.rollout_types import Meter, Unmeasured
from roll.rollout.policy import Ticket
from roll.rollout.types import SamplingParams

VALIDATION_TRIES = 3
"""Of a group whose environment or generation failed; one that always fails is a mistake somewhere."""


class AgenticProducer:
    """Draws environments in a seeded order; a group that cannot be completed is dropped whole, with a reason."""

    work = ("generate", "env")

    def __init__(
        self,
        config: AgenticConfig,
        tasks: Mapping[str, Task],
        player: Player,
        environments: EnvPool,
        sampling: SamplingParams,
        validation_sampling: SamplingParams,
        rows_divide_by: int,
    ) -> None:
        """Takes the tasks by tag and the way to engines and environments."""
        self._config, self._tasks, self._player, self._environments = config, tasks, player, environments
        self._sampling, self._validation_sampling = sampling, validation_sampling
        self._rows_divide_by = rows_divide_by
        train, val = config.train_env_manager, config.val_env_manager
        self._cycle = TagCycle(train.tags, train.num_groups_partition)
        self._val_cycle = TagCycle(val.tags, val.num_groups_partition)
        self._places = self._places_of(train, 1)

    @property
    def last_failure(self) -> str | None:
        """What the last group was dropped for, in words."""
        return self._player.last_failure

    def draw(self, tickets: Iterable[Ticket]) -> list[TrajectoryGroup]:
        """An environment for each ticket, which its number alone decides."""
        seed = self._config.seed
        return [
            TrajectoryGroup(ticket.number, self._cycle.tag(ticket.number), role_seed(seed, "train_env", ticket.number))
            for ticket in tickets
        ]

    async def produce(self, items: list[TrajectoryGroup], meter: Meter) -> None:
        """Plays the groups; never more of them at a time than there are environment groups, whoever asks beside."""
        await self._play(items, "train", self._config.train_env_manager, self._sampling, self._places, meter)

    async def _play(
        self,
        groups: list[TrajectoryGroup],
        purpose: str,
        manager: EnvManagerConfig,
        sampling: SamplingParams,
        places: asyncio.Semaphore,
        meter: Meter,
    ) -> None:
        count, seed = manager.group_size + manager.group_size_redundancy, self._config.seed
        plays = [
            (group, self._player.episodes(group, purpose, self._tasks[group.tag], count, seed, sampling))
            for group in groups
        ]
        if self._config.deterministic:
            at_a_time = manager.num_env_groups or len(plays)
            async with places:
                for first in range(0, len(plays), at_a_time):
                    await self._player.play_together(plays[first : first + at_a_time], manager.group_size, meter)
            return

        async def one(group: TrajectoryGroup, episodes: list[Episode]) -> None:
            async with places:
                await self._player.play(group, episodes, manager.group_size, meter)

        await side_by_side(one(group, episodes) for group, episodes in plays)

    def _places_of(self, manager: EnvManagerConfig, groups: int) -> asyncio.Semaphore:
        """For each environment group; in lock-step one for all of them."""
        return asyncio.Semaphore(1 if self._config.deterministic else manager.num_env_groups or groups)

    def filtered(self, item: TrajectoryGroup) -> None:
        """Every whole group is learned from."""
        return None

    async def validate(self, version: int) -> dict[str, float]:
        """`val/...` over `val_batch_size` trajectories: the same environments and seeds every time.

        A group that failed is played again, with the same seeds.

        Raises:
            RunError: one failed VALIDATION_TRIES times, or was late; a score over a part would not be comparable.
        """
        config, manager = self._config, self._config.val_env_manager
        whole: dict[int, TrajectoryGroup] = {}
        missing = list(range((config.val_batch_size or 0) // manager.group_size))
        places, replayed = self._places_of(manager, len(missing)), 0
        for attempt in range(VALIDATION_TRIES):
            groups = [
                TrajectoryGroup(number, self._val_cycle.tag(number), role_seed(config.seed, "val_env", number))
                for number in missing
            ]
            await self._play(groups, "val", manager, self._validation_sampling, places, Unmeasured())
            whole |= {group.number: group for group in groups if group.drop_reason is None}
            failed = [group for group in groups if group.drop_reason is not None]
            if not failed:
                break
            late = next((group for group in failed if group.drop_reason == "trajectory_timeout"), None)
            if late is not None or attempt == VALIDATION_TRIES - 1:  # there is no time to wait as long again
                first = late or failed[0]
                raise RunError(
                    f"validation environment {first.number}: failed {attempt + 1} times, last with "
                    f"{first.drop_reason}: {first.failure}"
                )
            missing, replayed = [group.number for group in failed], replayed + len(failed)
        told = validation_metrics([whole[number] for number in sorted(whole)])
        return told | {"val/replayed_groups": float(replayed)}

    def batch(self, items: list[TrajectoryGroup]) -> DataProto:
        """One row for each trajectory or turn, made to divide into optimizer steps by masked ones."""
        return batch_of_groups(items, self._config.sample_by or "traj", self._rows_divide_by)

    def metrics(self, items: list[TrajectoryGroup], version: int) -> dict[str, float]:
        """`rollout/...`, `env/...` and `staleness/...`."""
        return rollout_metrics(items, version) | {
            f"env/failures_{reason.removeprefix('env_')}": float(count)
            for reason, count in self._environments.failures.items()
        }

    def encode(self, item: TrajectoryGroup) -> dict[str, Any]:
        """A group as plain values."""
        return item.state_dict()

    def decode(self, state: dict[str, Any]) -> TrajectoryGroup:
        """The group that `encode` was given."""
        return TrajectoryGroup.from_state(state)

    def state_dict(self) -> dict[str, Any]:
        """What the groups of a checkpoint depend on; there is no cursor, a number decides everything."""
        manager = self._config.train_env_manager
        return {"seed": self._config.seed, "group_size": manager.group_size, "tags": self._cycle.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checks `state_dict`.

        Raises:
            ValueError: it was taken with another seed, other tags, or groups of another size.
        """
        for name, mine in self.state_dict().items():
            if state[name] != mine:
                raise ValueError(f"{name}: {mine} cannot go on from a checkpoint with {state[name]}; use that")

    def close(self) -> None:
        """Ends the environments' processes."""
        self._environments.close()
