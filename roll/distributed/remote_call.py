"""A call of all ranks of a cluster: the call in progress, and a client that makes such calls from any process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import ray

from roll.configs.parallel_layout import ParallelLayout
from roll.distributed.remote_errors import CallContext, Failure, ray_failure, seconds_left
from roll.distributed.worker import Worker

T = TypeVar("T")
WorkerT = TypeVar("WorkerT", bound=Worker, covariant=True)
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

FAILURE_GRACE_S = 1.0
"""After a first failure, how long other ranks may still fail: a broken collective fails on several ranks within
milliseconds and the earliest failure is the cause."""


@dataclass(frozen=True)
class ShardsClient(Generic[WorkerT]):
    """Calls the ranks of a cluster from any process; `Cluster.shards_client` makes it. It can be pickled.

    Attributes:
        role: name of the cluster.
        actors: handle of each rank.
        layout: of the ranks.
        platform: name of the platform that its devices are on.
        locations: where each rank runs, for messages.
        deadlines: seconds by the method's name.
    """

    role: str
    actors: tuple[Any, ...]
    layout: ParallelLayout
    platform: str
    locations: tuple[str, ...]
    deadlines: Mapping[str, float]

    @overload
    def call_shards(
        self, method: Callable[[WorkerT, ArgumentT], Awaitable[ResultT]], shards: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]: ...
    @overload
    def call_shards(
        self, method: Callable[[WorkerT, ArgumentT], ResultT], shards: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]: ...
    def call_shards(self, method: Callable[[Any, Any], Any], shards: Sequence[Any]) -> RemoteCall[list[Any]]:
        """See `Cluster.call_shards`."""
        layout, ranks = self.layout, range(len(self.actors))
        check_length(f"{self.role}.{method.__name__}", shards, layout.data, "data-parallel ranks")
        refs = [ray.put(shard) for shard in shards]
        arguments = {rank: (refs[layout.coordinates(rank).data],) for rank in ranks}
        answering = [layout.rank(0, index, layout.pipeline - 1) for index in range(layout.data)]
        return self.call_ranks(method.__name__, arguments, answering)

    def call_ranks(
        self,
        name: str,
        arguments: Mapping[int, tuple[Any, ...]],
        answering: Sequence[int],
        keywords: Mapping[str, Any] | None = None,
    ) -> RemoteCall[list[Any]]:
        """Calls method `name` on each rank r of `arguments` with `arguments[r]`.

        Returns:
            The answers of the ranks in `answering`, in their order.
        """
        if name not in self.deadlines:
            raise AttributeError(f"{self.role} has no method {name!r}; its workers register {sorted(self.deadlines)}")
        refs = [
            self.actors[rank].call.remote(name, rank in answering, *given, **(keywords or {}))
            for rank, given in arguments.items()
        ]
        context = CallContext(self.role, name, {rank: self.locations[rank] for rank in arguments})
        places = [list(arguments).index(rank) for rank in answering]
        return RemoteCall(context, refs, lambda answers: [answers[place] for place in places], self.deadlines[name])


def check_length(name: str, arguments: Sequence[object], length: int, receivers: str) -> None:
    """Raises ValueError unless there is one argument for each receiver of the call `name`."""
    if len(arguments) != length:
        raise ValueError(
            f"{name}: needs a list with one entry for each of {length} {receivers}, got {len(arguments)} entries"
        )


class RemoteCall(Generic[T]):
    """A call in progress: `await` it, or `get()` its result where there is no event loop.

    The call waits for all ranks, also those whose answer is discarded: their failure is the call's failure. The first
    failure ends the wait, since the other ranks may be blocked on the failed one.
    """

    def __init__(
        self,
        context: CallContext,
        refs: Sequence[ray.ObjectRef[Any]],
        collect: Callable[[list[Any]], T],
        timeout_s: float,
    ) -> None:
        """Starts the clock; an enclosing `deadline_scope` may shorten the timeout.

        `collect` makes the result of the answers of `refs`, one for each rank of the context, in that order.
        """
        self._context, self._refs, self._collect = context, dict(zip(context.locations, refs, strict=True)), collect
        self._timeout_s, self._start = seconds_left(timeout_s), time.monotonic()

    def get(self) -> T:
        """The result.

        Raises:
            ClusterError: a rank raised, died, or did not answer in time.
        """
        answers: dict[int, Any] = {}
        while len(answers) < len(self._refs):
            open_ranks = [rank for rank in self._refs if rank not in answers]
            ready, _ = ray.wait([self._refs[rank] for rank in open_ranks], timeout=self._remaining())
            if not ready:
                raise self._context.timed_out(open_ranks, self._timeout_s)
            self._fetch(answers, ready)
            if _failures(answers):
                rest = [ref for rank, ref in self._refs.items() if rank not in answers]
                more = ray.wait(rest, num_returns=len(rest), timeout=FAILURE_GRACE_S)[0] if rest else []
                self._fetch(answers, more)
                raise self._context.failed(_failures(answers))
        return self._collect([answers[rank] for rank in self._refs])

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        waits = {rank: asyncio.wrap_future(_future(ref)) for rank, ref in self._refs.items()}
        for wait in waits.values():
            wait.add_done_callback(retrieve_error)
        answers: dict[int, Any] = {}
        while len(answers) < len(waits):
            open_ranks = [rank for rank in waits if rank not in answers]
            done, _ = await asyncio.wait(
                [waits[rank] for rank in open_ranks], timeout=self._remaining(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise self._context.timed_out(open_ranks, self._timeout_s)
            _take_done(answers, waits)
            if _failures(answers):
                if len(answers) < len(waits):
                    await asyncio.wait(waits.values(), timeout=FAILURE_GRACE_S)
                _take_done(answers, waits)
                raise self._context.failed(_failures(answers))
        return self._collect([answers[rank] for rank in waits])

    def _fetch(self, answers: dict[int, Any], ready: Sequence[ray.ObjectRef[Any]]) -> None:
        ranks = {ref: rank for rank, ref in self._refs.items()}
        for ref in ready:
            rank = ranks[ref]
            try:
                answers[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                answers[rank] = ray_failure(rank, error)

    def _remaining(self) -> float:
        return max(0.0, self._start + self._timeout_s - time.monotonic())


def _future(ref: ray.ObjectRef[Any]) -> Future[Any]:
    return ref.future()


def retrieve_error(wait: asyncio.Future[Any]) -> None:
    """Retrieves the error of a call, also if its caller was cancelled: asyncio logs an error that is not retrieved."""
    if not wait.cancelled():
        wait.exception()


def _take_done(answers: dict[int, Any], waits: Mapping[int, asyncio.Future[Any]]) -> None:
    for rank, wait in waits.items():
        if wait.done() and rank not in answers:
            error = wait.exception()
            answers[rank] = wait.result() if error is None else ray_failure(rank, error)


def _failures(answers: Mapping[int, Any]) -> list[Failure]:
    return [answer for answer in answers.values() if isinstance(answer, Failure)]
