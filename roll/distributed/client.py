"""A cluster as processes other than the driver see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.distributed.pending import CallSite, Pending


@dataclass(frozen=True)
class ClusterClient:
    """Calls single ranks of a cluster; made by `Cluster.client`, and can be pickled.

    Attributes:
        role: name of the cluster.
        actors: handle of each rank.
        places: where each rank runs, for messages.
        deadlines: seconds by the method's name.
    """

    role: str
    actors: tuple[Any, ...]
    places: tuple[str, ...]
    deadlines: Mapping[str, float]

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.actors)

    def call(self, rank: int, method: str, *args: Any) -> Pending:
        """The answer of one rank; see `Pending`."""
        site = CallSite(self.role, method, {rank: self.places[rank]})
        return Pending(site, [self.actors[rank].call.remote(method, True, *args)], _only, self.deadlines[method])


def _only(answers: list[Any]) -> Any:
    return answers[0]
