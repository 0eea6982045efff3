"""Many small calls of one actor: those made together travel as one letter, and so do the answers there are together.

A call of a Ray actor costs about a millisecond of processor time on both sides together, more than a turn of a game.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


class CallError(RuntimeError):
    """A call raised; the message is its traceback."""


@dataclass(frozen=True)
class Call:
    """One call on its way: what to run, and the number its answer comes back under."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What came of the call of this number: a value, or the traceback of what it raised."""

    number: int
    value: Any
    error: str | None = None


class Inbox:
    """The actor's side: runs the calls it is sent side by side, and keeps their answers until they are collected."""

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        """Takes what runs a call, from its method and arguments."""
        self._run = run
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._answers: defaultdict[str, asyncio.Queue[Answer]] = defaultdict(asyncio.Queue)

    def submit(self, box: str, calls: list[Call], given_up: list[int]) -> None:
        """Begins calls, and cancels those that nobody waits for any more; `box` names the outbox they come from."""
        for call in calls:
            key = (box, call.number)
            task = self._tasks[key] = asyncio.create_task(self._answer(box, call))
            task.add_done_callback(partial(self._forget, key))
        for number in given_up:
            if (box, number) in self._tasks:
                self._tasks[box, number].cancel()

    async def collect(self, box: str) -> list[Answer]:
        """Waits for an answer and returns all there are for this outbox, each once."""
        answers = [await self._answers[box].get()]
        while not self._answers[box].empty():
            answers.append(self._answers[box].get_nowait())
        return answers

    def _forget(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        del self._tasks[key]

    async def _answer(self, box: str, call: Call) -> None:
        try:
            answer = Answer(call.number, await self._run(call.method, *call.args))
        except Exception as error:
            answer = Answer(call.number, None, "".join(traceback.format_exception(error)))
        self._answers[box].put_nowait(answer)


class Mailed:
    """Base of a Ray actor whose event loop serves an inbox; a subclass makes it."""

    _inbox: Inbox

    async def submit(self, box: str, calls: list[Call], given_up: list[int]) -> None:
        """See `Inbox.submit`."""
        self._inbox.submit(box, calls, given_up)

    async def collect(self, box: str) -> list[Answer]:
        """See `Inbox.collect`."""
        return await self._inbox.collect(box)


class Outbox:
    """The caller's side; for one event loop. Cancelling what `call` returned cancels the call on the other side.

    A letter leaves when the one before it has arrived, so that no cancellation overtakes its call.
    """

    def __init__(
        self,
        submit: Callable[[str, list[Call], list[int]], Awaitable[None]],
        collect: Callable[[str], Awaitable[list[Answer]]],
    ) -> None:
        """Takes the transport to `Inbox.submit` and `Inbox.collect`."""
        self._submit, self._collect = submit, collect
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._leaving: list[Call] = []
        self._given_up: list[int] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """The answer.

        Raises:
            CallError: the call raised.
            Exception: the transport failed; what it raised.
        """
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: self._give_up(number, done))
        self._leaving.append(Call(number, method, args))
        self._send_soon()
        return future

    def _give_up(self, number: int, done: asyncio.Future[Any]) -> None:
        if done.cancelled() and self._waiting.pop(number, None) is not None:
            self._given_up.append(number)
            self._send_soon()

    def _send_soon(self) -> None:
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._leaving or self._given_up:
                calls, given_up = self._leaving, self._given_up
                self._leaving, self._given_up = [], []
                if self._waiting and (self._collector is None or self._collector.done()):
                    self._collector = asyncio.create_task(self._gather())
                await self._submit(self._name, calls, given_up)
        except Exception as error:
            self._fail(error)

    async def _gather(self) -> None:
        """Asks for answers while any is outstanding."""
        try:
            while self._waiting:
                for answer in await self._collect(self._name):
                    self._settle(answer)
        except Exception as error:
            self._fail(error)

    def _settle(self, answer: Answer) -> None:
        future = self._waiting.pop(answer.number, None)
        if future is None or future.done():  # given up meanwhile
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(CallError(answer.error))

    def _fail(self, error: Exception) -> None:
        """The transport is broken, so no answer will come any more."""
        waiting, self._waiting = self._waiting, {}
        self._leaving, self._given_up = [], []
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)


def outbox(actor: Any) -> Outbox:
    """To a Ray actor whose class is `Mailed`."""
    return Outbox(
        lambda *letter: asyncio.wrap_future(actor.submit.remote(*letter).future()),
        lambda name: asyncio.wrap_future(actor.collect.remote(name).future()),
    )
