"""A group of trajectories that face the same environment: complete, or dropped with a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.rollout.types import Trajectory


@dataclass
class TrajectoryGroup:
    """`number` is its position among all groups ever submitted; tag and seed derive from it.

    Attributes:
        tag: which of `custom_envs` it plays.
        seed: of the environment, the same for every member.
        drop_reason: why it cannot be learned from; None while it can.
        failure: the same in words.
    """

    number: int
    tag: str
    seed: int
    trajectories: list[Trajectory] = field(default_factory=list)
    drop_reason: str | None = None
    failure: str | None = None

    @property
    def scores(self) -> list[float]:
        """Of each trajectory."""
        return [trajectory.score for trajectory in self.trajectories]

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest sampled token of any member."""
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        trajectories = [trajectory.state_dict() for trajectory in self.trajectories]
        return {"number": self.number, "tag": self.tag, "seed": self.seed, "trajectories": trajectories}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrajectoryGroup:
        """Restores `state_dict`."""
        trajectories = [Trajectory.from_state(each) for each in state["trajectories"]]
        return cls(state["number"], state["tag"], state["seed"], trajectories)


class TagCycle:
    """Which tag a group plays: each tag as often as its share of the environment groups says, evenly mixed."""

    def __init__(self, tags: list[str], partition: list[int]) -> None:
        """Takes the tags and how many groups of each run at a time."""
        places = [
            ((2 * place + 1) / (2 * count), tag)
            for tag, count in zip(tags, partition, strict=True)
            for place in range(count)
        ]
        self.order = [tag for _, tag in sorted(places, key=lambda place: place[0])]

    def tag(self, number: int) -> str:
        """Of group `number`."""
        return self.order[number % len(self.order)]
