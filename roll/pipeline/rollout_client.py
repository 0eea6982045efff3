"""The rollouter in a process of its own, as the training loop calls it; a new process continues after a dead one."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.base.events import EventLog
from roll.distributed.calls.remote_actor import RemoteActor
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError, one_line
from roll.rollout.rollouter import Rollouter
from roll.rollout.source import SampleBatch

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

NAME = "rollouter"


class RolloutClient:
    """Calls the rollouter; for the methods see `Rollouter`.

    Its state comes with every batch. When its process dies, another one is given the state of the last batch that
    arrived here: prompts that finished later, and those in flight, are generated again under their numbers, seeds and
    deadlines. So none is lost, and none is learned twice.
    """

    def __init__(
        self,
        start: Callable[[], RemoteActor[Rollouter]],
        cancel_requests: Callable[[], Awaitable[None]],
        events: EventLog,
        max_restarts: int,
        earlier: RolloutClient | None = None,
    ) -> None:
        """Starts the process; `RemoteActor.ready` of what `start` returned has to be awaited before the first call.

        `cancel_requests` ends the requests of a dead process in the engines; its death after `max_restarts` restarts
        ends the run. The count of the `earlier` client, before the run started again, continues.
        """
        self._start, self._cancel_requests = start, cancel_requests
        self._events, self._max_restarts = events, max_restarts
        self._remote = start()
        self._state: bytes | None = None
        self._version: int | None = None
        self._stopped = False
        self._restarts: int = 0 if earlier is None else earlier._restarts
        self._restarting = asyncio.Lock()

    async def next_batch(self) -> SampleBatch | None:
        """The next batch; None once `stop` was called."""
        batch, self._state = await self._call(Rollouter.next_batch_and_state)
        if batch is not None and self._restarts:
            batch.metrics["faults/rollouter_restarts"] = float(self._restarts)
        return batch

    async def stop(self) -> None:
        self._stopped = True
        await self._call(Rollouter.stop)

    async def advance(self, version: int) -> None:
        await self._call(Rollouter.advance, version)
        self._version = version

    async def validate(self) -> dict[str, float]:
        return await self._call(Rollouter.validate)

    async def state_dict(self) -> dict[str, Any]:
        return await self._call(Rollouter.state_dict)

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        await self._call(Rollouter.load_state_dict, state)
        self._state = pickle.dumps(state)

    async def health(self) -> dict[str, Any]:
        """What is ready, running and blocking."""
        try:
            return await self._remote.call(Rollouter.health)
        except ClusterError as error:
            return {"error": one_line(error)}

    async def _call(
        self, method: Callable[Concatenate[Rollouter, P], Awaitable[ResultT]], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """The answer of the rollouter, or of the one that replaces it.

        Raises:
            ClusterError: it failed, did not answer in time, or died after its last restart; or a call that it made
                failed.
        """
        while True:
            remote = self._remote
            try:
                return await remote.call(method, *args, **kwargs)
            except ClusterError as error:
                if not _died(error):
                    raise
                async with self._restarting:
                    if self._remote is remote:
                        await self._restart(error)

    async def _restart(self, error: ClusterError) -> None:
        """Replaces the dead process, and a new one that dies before it has the state; calls wait meanwhile."""
        dead, began = self._remote, time.monotonic()
        while self._restarts < self._max_restarts:
            self._restarts += 1
            count = f"restart {self._restarts} of {self._max_restarts}"
            await asyncio.to_thread(dead.shutdown)
            await self._cancel_requests()
            cause = one_line(error).removeprefix(f"{NAME}-0: ")
            try:
                dead = remote = await asyncio.to_thread(self._start)
                await self._restore(remote)
            except ClusterError as failure:
                if not _died(failure):
                    raise
                error = failure
                self._events.record(NAME, "restart failed", f"{cause}; the new process died too ({count})")
                continue
            self._remote = remote
            seconds = time.monotonic() - began
            message = f"{cause}; it continues with the state of the last batch, after {seconds:.1f} s ({count})"
            self._events.record(NAME, "restarted", message, seconds)
            return
        raise error

    async def _restore(self, remote: RemoteActor[Rollouter]) -> None:
        """Gives a new process the state of the last batch, the version of the engines' weights, and a stop."""
        await remote.ready()
        if self._state is not None:
            await remote.call(Rollouter.load_state_dict, pickle.loads(self._state))
        if self._stopped:
            await remote.call(Rollouter.stop)
        if self._version is not None:
            await remote.call(Rollouter.advance, self._version)


def _died(error: ClusterError) -> bool:
    return error.role == NAME and error.kind == PROCESS_DIED
