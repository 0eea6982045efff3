"""A cluster as processes other than the driver see it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from roll.distributed.actors import Failure
from roll.distributed.deadlines import seconds_left
from roll.distributed.mail import Outbox, outbox
from roll.distributed.pending import CallSite, died


@dataclass(frozen=True)
class ClusterClient:
    """Calls single ranks of a cluster; made by `Cluster.client`; it can be pickled, and serves one event loop.

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
    _outboxes: dict[int, Outbox] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without what is under way."""
        return ClusterClient, (self.role, self.actors, self.places, self.deadlines)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.actors)

    async def call(self, rank: int, method: str, *args: Any) -> Any:
        """The answer of one rank. Calls made together travel together, see `roll.distributed.mail`.

        Raises:
            ClusterError: the rank raised, died, or did not answer in time.
        """
        site = CallSite(self.role, method, {rank: self.places[rank]})
        timeout_s = seconds_left(self.deadlines[method])
        if rank not in self._outboxes:
            self._outboxes[rank] = outbox(self.actors[rank])
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._outboxes[rank].call(method, *args)
        except TimeoutError:
            raise site.late([rank], timeout_s) from None
        except ray.exceptions.RayError as error:
            answer = died(rank, error)
        if isinstance(answer, Failure):
            raise site.failed([answer])
        return answer
