"""A call of ranks of a cluster: the call in progress, and the client that makes such calls from any process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.distributed.calls.remote_errors import CallContext, Failure, ray_failure, seconds_left
from roll.distributed.calls.rpc_batching import RpcClient, rpc_client
from roll.distributed.worker import Worker

T = TypeVar("T")
WorkerT = TypeVar("WorkerT", bound=Worker, covariant=True)
P = ParamSpec("P")
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")
Answer = concurrent.futures.Future[Any] | asyncio.Future[Any]

ALL = None
"""In place of the ranks of a call: every rank."""

FAILURE_GRACE_S = 1.0
"""After a first failure, how long other ranks may still fail: a broken collective fails on several ranks within
milliseconds and the earliest failure is the cause."""


@dataclass(eq=False)
class ClusterClient(Generic[WorkerT]):
    """Calls the ranks of a cluster from any process. It can be pickled.

    Methods of the worker class marked with `register` are called by reference, so that editors and mypy follow them:

        loaded = await actor.call(ALL, TrainWorker.load_checkpoint, folder)

    A call starts at once and returns a `RemoteCall`: `await` it or `.get()` it. Calls of one client reach each rank in
    the order they were made.

    Attributes:
        role: name of the cluster.
        actors: handle of each rank.
        layout: sizes of its parallel dimensions.
        platform: name of the platform that its devices are on.
        locations: where each rank runs, for messages.
        deadlines: seconds by the method's name.
        batched: whether calls of one event loop share messages (`rpc_batching`), which only concurrent workers take;
            such a call is cancelled in the worker when its caller no longer waits, and has no `.get()`.
    """

    role: str
    actors: tuple[Any, ...]
    layout: ParallelLayout
    platform: str
    locations: tuple[str, ...]
    deadlines: Mapping[str, float]
    batched: bool = False
    _clients: dict[int, RpcClient] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without calls in progress."""
        given = self.role, self.actors, self.layout, self.platform, self.locations, self.deadlines, self.batched
        return ClusterClient, given

    @property
    def world_size(self) -> int:
        """Number of ranks; an engine that spans tensor-parallel devices is one."""
        return len(self.actors)

    @overload
    def call(
        self,
        ranks: Sequence[int] | None,
        method: Callable[Concatenate[WorkerT, P], Awaitable[ResultT]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteCall[list[ResultT]]: ...
    @overload
    def call(
        self,
        ranks: Sequence[int] | None,
        method: Callable[Concatenate[WorkerT, P], ResultT],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteCall[list[ResultT]]: ...
    def call(
        self, ranks: Sequence[int] | None, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> RemoteCall[list[Any]]:
        """Calls these ranks, or ALL, with the same arguments; the result is a list in their order."""
        ranks = range(self.world_size) if ranks is None else ranks
        return self._call(method.__name__, dict.fromkeys(ranks, args), ranks, kwargs)

    def call_shards(
        self, method: Callable[[WorkerT, ArgumentT], ResultT], shards: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]:
        """Calls every rank of data index d with `shards[d]`, which is put in the object store once.

        The result is a list by data index, from tensor and context rank 0 of the last pipeline stage.

        Raises:
            ValueError: there is not one shard per data-parallel rank.
        """
        layout, name = self.layout, method.__name__
        if len(shards) != layout.data:
            raise ValueError(f"{self.role}.{name}: {len(shards)} shards; give one to each of {layout.data} data ranks")
        refs = [ray.put(shard) for shard in shards]
        given = {rank: (refs[layout.coordinates(rank).data],) for rank in range(self.world_size)}
        answering = [layout.rank(0, index, layout.pipeline - 1) for index in range(layout.data)]
        return self._call(name, given, answering)

    def _call(
        self,
        name: str,
        given: Mapping[int, tuple[Any, ...]],
        answering: Sequence[int],
        keywords: Mapping[str, Any] | None = None,
    ) -> RemoteCall[list[Any]]:
        """Calls the ranks of `given`, each with its own arguments; the result has the answers of `answering`."""
        if name not in self.deadlines:
            raise AttributeError(f"{self.role} has no method {name!r}; its workers register {sorted(self.deadlines)}")
        answers = [self._send(rank, name, rank in answering, *args, **keywords or {}) for rank, args in given.items()]
        places = [list(given).index(rank) for rank in answering]
        return RemoteCall(
            self._context(name, *given), answers, lambda found: [found[place] for place in places], self.deadlines[name]
        )

    def _context(self, name: str, *ranks: int) -> CallContext:
        return CallContext(self.role, name, {rank: self.locations[rank] for rank in ranks})

    def _send(self, rank: int, *args: Any, **keywords: Any) -> Answer:
        if not self.batched:
            answer: Answer = self.actors[rank].call.remote(*args, **keywords).future()
            return answer
        if rank not in self._clients:
            self._clients[rank] = rpc_client(self.actors[rank])
        return self._clients[rank].call(*args, **keywords)


class RemoteCall(Generic[T]):
    """A call in progress: `await` it, or `get()` its result where there is no event loop.

    The call waits for all ranks, also those whose answer is discarded: their failure is the call's failure. The first
    failure ends the wait, since the other ranks may be blocked on the failed one.
    """

    def __init__(
        self, context: CallContext, answers: Sequence[Answer], collect: Callable[[list[Any]], T], timeout_s: float
    ) -> None:
        """Starts the clock; an enclosing `deadline_scope` may shorten the timeout.

        `collect` makes the result of the `answers`, one for each rank of the context, in that order.
        """
        self._context, self._answers, self._collect = (
            context,
            dict(zip(context.locations, answers, strict=True)),
            collect,
        )
        self._timeout_s = seconds_left(timeout_s)
        self._until = time.monotonic() + self._timeout_s
        self._found: dict[int, Any] = {}

    def get(self) -> T:
        """The result.

        Raises:
            ClusterError: a rank raised, died, or did not answer in time.
        """
        while pending := self._pending():
            concurrent.futures.wait(pending, self._seconds_left(), concurrent.futures.FIRST_COMPLETED)
        return self._result()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        waits = {answer: asyncio.wrap_future(answer) for answer in self._answers.values()}
        for wait in waits.values():
            wait.add_done_callback(retrieve_error)
        try:
            while pending := self._pending():
                open_waits = [waits[answer] for answer in pending]
                await asyncio.wait(open_waits, timeout=self._seconds_left(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for answer in self._answers.values():
                if isinstance(answer, asyncio.Future):  # of a batched call: it is cancelled in the worker too
                    answer.cancel()
        return self._result()

    def _pending(self) -> list[Any]:
        """The answers to wait for; none when time is up, which is FAILURE_GRACE_S after the first failure."""
        for rank, answer in self._answers.items():
            if rank not in self._found and answer.done():
                found = _found(rank, answer)
                if isinstance(found, Failure) and not self._failures():
                    self._until = time.monotonic() + FAILURE_GRACE_S
                self._found[rank] = found
        pending = [answer for rank, answer in self._answers.items() if rank not in self._found]
        return pending if self._seconds_left() > 0 else []

    def _failures(self) -> list[Failure]:
        return [found for found in self._found.values() if isinstance(found, Failure)]

    def _result(self) -> T:
        if failures := self._failures():
            raise self._context.failed(failures)
        if late := [rank for rank in self._answers if rank not in self._found]:
            raise self._context.timed_out(late, self._timeout_s)
        return self._collect([self._found[rank] for rank in self._answers])

    def _seconds_left(self) -> float:
        return self._until - time.monotonic()


def _found(rank: int, answer: Any) -> Any:
    error = answer.exception()
    return answer.result() if error is None else ray_failure(rank, error)


def retrieve_error(wait: asyncio.Future[Any]) -> None:
    """Retrieves the error of a call, also if its caller was cancelled: asyncio logs an error that is not retrieved."""
    if not wait.cancelled():
        wait.exception()
