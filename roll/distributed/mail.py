"""Many small calls of one actor: those made together travel as one, and so do the answers that are there together.

A call of a Ray actor costs about a millisecond of processor time on both sides together, more than a turn of a game.
Knows nothing of Ray: whoever makes an `Outbox` says how its letters reach the `Inbox`.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


class CallError(RuntimeError):
    """A call raised; the message says what."""


@dataclass(frozen=True)
class Call:
    """One call on its way: what to run, and the number its answer comes back under."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What came of the call of this number: a value, or in words what it raised."""

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
            task.add_done_callback(lambda _, key=key: self._tasks.pop(key))
        for number in given_up:
            if (box, number) in self._tasks:
                self._tasks[box, number].cancel()

    async def collect(self, box: str) -> list[Answer]:
        """Waits for an answer and returns all there are for this outbox, each once."""
        answers = [await self._answers[box].get()]
        while not self._answers[box].empty():
            answers.append(self._answers[box].get_nowait())
        return answers

    async def _answer(self, box: str, call: Call) -> None:
        try:
            answer = Answer(call.number, await self._run(call.method, *call.args))
        except Exception as error:
            answer = Answer(call.number, None, repr(error))
        self._answers[box].put_nowait(answer)


class Outbox:
    """The caller's side; for one event loop. It collects only while an answer is outstanding.

    Cancelling what `call` returned cancels the call on the other side.
    """

    def __init__(
        self,
        submit: Callable[[str, list[Call], list[int]], Any],
        collect: Callable[[str], Awaitable[list[Answer]]],
    ) -> None:
        """Takes the way to `Inbox.submit`, which need not be waited for, and to `Inbox.collect`."""
        self._submit, self._collect = submit, collect
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._leaving: list[Call] = []
        self._given_up: list[int] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._collector: asyncio.Task[None] | None = None

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """The answer. Fails with `CallError` where the call raised, and with what the way fails with."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        self._send_soon(loop)
        self._leaving.append(Call(number, method, args))
        future = self._waiting[number] = loop.create_future()
        future.add_done_callback(lambda done: self._give_up(number) if done.cancelled() else None)
        return future

    def _give_up(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self._send_soon(asyncio.get_running_loop())
            self._given_up.append(number)

    def _send_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._leaving and not self._given_up:
            loop.call_soon(self._send)

    def _send(self) -> None:
        calls, given_up = self._leaving, self._given_up
        self._leaving, self._given_up = [], []
        try:
            self._submit(self._name, calls, given_up)
        except Exception as error:
            self._fail(error)
            return
        if self._waiting and (self._collector is None or self._collector.done()):
            self._collector = asyncio.create_task(self._gather())

    async def _gather(self) -> None:
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
        """The way is broken, so no answer will come any more."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
