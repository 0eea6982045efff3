"""Batches concurrent calls to one actor into one message, and the answers that are ready into another.

One call of a Ray actor costs about a millisecond of processor time on both sides together, more than a turn of a game;
messages within a node go through a socket instead (`rpc_socket`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import traceback
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roll.distributed.calls.rpc_socket import ActorTransport, Connection, Listener, pickled

logger = logging.getLogger(__name__)


class RpcError(RuntimeError):
    """A call raised; the message is its traceback."""


@dataclass(frozen=True)
class Call:
    """One call; its answer carries the same number."""

    number: int
    method: str
    args: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The result of the call with this number: a value, or the traceback of the exception."""

    number: int
    value: Any
    error: str | None = None


class RpcActor:
    """Base of a Ray actor that serves batched calls concurrently; clients on its node use a socket.

    It keeps answers until the client collects them. Methods are coroutines, so that Ray runs them on the event loop.
    """

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        """`run(method, *args, **keywords)` executes one call."""
        self._execute = run
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._answers: defaultdict[str, asyncio.Queue[Answer]] = defaultdict(asyncio.Queue)
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._listener: Listener | None = None

    async def submit(self, client_id: str, calls: list[Call], cancelled: list[int]) -> None:
        """Starts `calls` of a client and cancels its calls with the numbers in `cancelled`."""
        self._start(client_id, calls, cancelled)

    def _start(self, client_id: str, calls: list[Call], cancelled: list[int]) -> None:
        for call in calls:
            key = (client_id, call.number)
            task = self._tasks[key] = asyncio.create_task(self._answer(client_id, call))
            task.add_done_callback(partial(self._forget, key))
        for number in cancelled:
            if (client_id, number) in self._tasks:
                self._tasks[client_id, number].cancel()

    async def cancel_all(self) -> None:
        """Cancels the calls of all clients, which have died."""
        for task in self._tasks.values():
            task.cancel()

    async def collect(self, client_id: str) -> list[Answer]:
        """Waits for an answer and returns all answers that are ready for this client, each once."""
        answers = [await self._answers[client_id].get()]
        while not self._answers[client_id].empty():
            answers.append(self._answers[client_id].get_nowait())
        return answers

    async def listen(self) -> tuple[str, str]:
        """See `Listener.address`: a socket that takes the messages of `submit` and sends those of `collect`."""
        if self._listener is None:
            self._listener = Listener(self.connection)
        return await self._listener.address()

    async def run_until_death(self) -> None:
        """Does not return: its failure tells how the process ended. A socket may stay open: children have it too."""
        await asyncio.Event().wait()

    def connection(self) -> Connection:
        """The actor's end of a new socket, over which answers are sent as soon as they are ready.

        When it is lost, so are the client's calls: they are cancelled.
        """
        senders: dict[str, asyncio.Task[None]] = {}

        def received(message: tuple[str, list[Call], list[int]]) -> None:
            client_id = message[0]
            if client_id not in senders:
                self._end_client(client_id)  # of an earlier connection
                sender = asyncio.create_task(self._send_answers(client_id, connection))
                senders[client_id] = self._senders[client_id] = sender
            self._start(*message)

        def lost() -> None:
            for client_id, sender in senders.items():
                if self._senders.get(client_id) is sender:
                    self._end_client(client_id)

        connection = Connection(received, lambda error: connection.send(error), lost)
        return connection

    def _end_client(self, client_id: str) -> None:
        sender = self._senders.pop(client_id, None)
        if sender is None:
            return
        sender.cancel()
        for (owner, _), task in self._tasks.items():
            if owner == client_id:
                task.cancel()
        self._answers.pop(client_id, None)

    async def _send_answers(self, client_id: str, connection: Connection) -> None:
        while True:
            answers = await self.collect(client_id)
            try:
                connection.send(answers)
            except Exception:
                try:
                    connection.send([_readable(answer) for answer in answers])
                except Exception:
                    logger.exception("answers could not be sent; the client's calls fail")
                    return connection.close()

    def _forget(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        del self._tasks[key]

    async def _answer(self, client_id: str, call: Call) -> None:
        try:
            answer = Answer(call.number, await self._execute(call.method, *call.args, **call.keywords))
        except Exception as error:
            answer = Answer(call.number, None, "".join(traceback.format_exception(error)))
        self._answers[client_id].put_nowait(answer)


def _readable(answer: Answer) -> Answer:
    """The answer, or one with the traceback if its value cannot be pickled."""
    try:
        pickled(answer)
    except Exception as error:
        return Answer(answer.number, None, "".join(traceback.format_exception(error)))
    return answer


class RpcClient:
    """The caller's side, for one event loop. Cancelling the future of a call cancels the call in the actor.

    A message is sent once `submit` of the previous one has returned, so that a cancellation cannot overtake its call.
    """

    def __init__(
        self,
        submit: Callable[[str, list[Call], list[int]], Awaitable[None]],
        collect: Callable[[str], Awaitable[list[Answer]]],
    ) -> None:
        """`submit` and `collect` reach `RpcActor.submit` and `RpcActor.collect`."""
        self._submit, self._collect = submit, collect
        self._id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._unsent: list[Call] = []
        self._cancelled: list[int] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None

    def call(self, method: str, *args: Any, **keywords: Any) -> asyncio.Future[Any]:
        """The future answer.

        Raises:
            RpcError: the call raised, or its answer cannot be pickled.
            Exception: the transport failed; the transport's own exception.
        """
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: self._cancel(number, done))
        self._unsent.append(Call(number, method, args, keywords))
        self._send_soon()
        return future

    def _cancel(self, number: int, done: asyncio.Future[Any]) -> None:
        if done.cancelled() and self._waiting.pop(number, None) is not None:
            self._cancelled.append(number)
            self._send_soon()

    def _send_soon(self) -> None:
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._unsent or self._cancelled:
                calls, cancelled = self._unsent, self._cancelled
                self._unsent, self._cancelled = [], []
                if self._waiting and (self._collector is None or self._collector.done()):
                    self._collector = asyncio.create_task(self._collect_answers())
                await self._submit(self._id, calls, cancelled)
        except Exception as error:
            self._fail(error)

    async def _collect_answers(self) -> None:
        try:
            while self._waiting:
                for answer in await self._collect(self._id):
                    self._resolve(answer)
        except Exception as error:
            self._fail(error)

    def _resolve(self, answer: Answer) -> None:
        future = self._waiting.pop(answer.number, None)
        if future is None or future.done():  # cancelled meanwhile
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(RpcError(answer.error))

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        self._unsent, self._cancelled = [], []
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)


def rpc_client(actor: Any) -> RpcClient:
    transport = ActorTransport(actor)
    return RpcClient(transport.submit, transport.collect)
