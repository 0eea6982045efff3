"""The gateway as the rollout calls it: starts its processes, gives each a share of the sessions, replaces dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from roll.base.events import EventLog
from roll.base.text import format_count
from roll.distributed.calls.remote_actor import RemoteActor
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError, one_line
from roll.distributed.gateway.gateway_process import GatewayProcess
from roll.rollout.agents.sessions import ActivityTimers, GatewayDiedError, SessionAddress, SessionEnd, SessionSpec

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

NAME = "gateway"

Start = Callable[[str], RemoteActor[GatewayProcess]]
"""Starts a process of that name, without waiting for it."""


class GatewayProcesses:
    """A `Gateway` of several processes. The sessions of one that dies are over; its successor serves new ones."""

    def __init__(self, start: Start, count: int, timers: ActivityTimers, events: EventLog, max_restarts: int) -> None:
        """Starts the processes without waiting; the death of one after `max_restarts` restarts is an error."""
        self._start, self._timers, self._events = start, timers, events
        self._max_restarts, self._restarts = max_restarts, 0
        self._remotes = [start(f"{NAME}-{number}") for number in range(count)]
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._shards: dict[str, int] = {}
        self._discards: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self, spec: SessionSpec) -> SessionAddress:
        """A session in the process with the fewest.

        Raises:
            GatewayDiedError: its process died twice meanwhile.
        """
        with contextlib.suppress(GatewayDiedError):
            return await self._open(spec)
        return await self._open(spec)

    async def _open(self, spec: SessionSpec) -> SessionAddress:
        counts = Counter(self._shards.values())
        shard = min(range(len(self._remotes)), key=lambda number: counts[number])
        address = await self._call(shard, GatewayProcess.open, spec)
        self._shards[address.key] = shard
        return address

    async def finish(self, address: SessionAddress) -> SessionEnd:
        """Ends a session.

        Raises:
            GatewayDiedError: its process died.
        """
        if address.key not in self._shards:
            raise GatewayDiedError("its process died, and the session with it")
        try:
            return await self._call(self._shards[address.key], GatewayProcess.finish, address)
        finally:
            self._shards.pop(address.key, None)

    def discard(self, address: SessionAddress, why: str) -> None:
        """Ends a session, in a task."""
        shard = self._shards.pop(address.key, None)
        if shard is None or self._closed:
            return
        task = asyncio.create_task(self._discard(shard, address, why))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    async def _discard(self, shard: int, address: SessionAddress, why: str) -> None:
        with contextlib.suppress(GatewayDiedError, ClusterError):
            await self._call(shard, GatewayProcess.end_session, address.key, why)

    def close(self) -> None:
        """Kills the processes; may be called twice."""
        self._closed = True
        for task in (*self._serving.values(), *self._watches.values(), *self._discards):
            task.cancel()
        for remote in self._remotes:
            remote.kill()

    async def _call(
        self,
        shard: int,
        method: Callable[Concatenate[GatewayProcess, P], Awaitable[ResultT]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """The answer of a process, once it serves.

        Raises:
            GatewayDiedError: it died; another one is starting.
            ClusterError: it failed otherwise, or died after the last restart.
        """
        remote = self._remotes[shard]
        if shard not in self._serving:
            self._serving[shard] = asyncio.create_task(self._serve(shard, remote))
        try:
            await asyncio.shield(self._serving[shard])
            return await remote.call_batched(method, *args, **kwargs)
        except ClusterError as error:
            if error.kind != PROCESS_DIED or self._closed:
                raise
            self._replace(shard, remote, error)
            raise GatewayDiedError(one_line(error)) from error

    async def _serve(self, shard: int, remote: RemoteActor[GatewayProcess]) -> None:
        await remote.ready()
        await remote.call(GatewayProcess.serve)
        self._watches[shard] = asyncio.create_task(self._watch(shard, remote))

    async def _watch(self, shard: int, remote: RemoteActor[GatewayProcess]) -> None:
        """Times what a process does, and replaces it as soon as it dies."""
        active: frozenset[str] = frozenset()
        try:
            while True:
                active = await remote.call_batched(GatewayProcess.active, active)
                self._timers.changed(shard, active)
        except ClusterError as error:
            if not self._closed:
                with contextlib.suppress(ClusterError):  # the next call raises it
                    self._replace(shard, remote, error)
        finally:
            self._timers.changed(shard, frozenset())

    def _replace(self, shard: int, dead: RemoteActor[GatewayProcess], error: ClusterError) -> None:
        """Starts another process, unless that was done.

        Raises:
            ClusterError: there were too many restarts.
        """
        if self._remotes[shard] is not dead:
            return
        if self._restarts >= self._max_restarts:
            raise error
        self._restarts += 1
        lost = [key for key, owner in self._shards.items() if owner == shard]
        for key in lost:
            del self._shards[key]
        dead.kill()
        remote = self._remotes[shard] = self._start(f"{NAME}-{shard}")
        began, cause = time.monotonic(), one_line(error)
        serving = self._serving[shard] = asyncio.create_task(self._serve(shard, remote))

        def record(done: asyncio.Task[None]) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            seconds, count = time.monotonic() - began, f"restart {self._restarts} of {self._max_restarts}"
            failed = f"{cause}; {format_count(len(lost), 'session')} failed"
            message = f"{failed}; another process serves after {seconds:.1f} s ({count})"
            self._events.record(f"{NAME}-{shard}", "restarted", message, seconds)

        serving.add_done_callback(record)
