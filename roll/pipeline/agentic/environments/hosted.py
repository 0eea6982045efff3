"""One environment of a pool: its episode so far, and its repetition where the worker that hosted it died."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from roll.pipeline.agentic.environments.types import EnvFailure, EnvSpec, Opened, Reason, Stepped

AnswerT = TypeVar("AnswerT")


class EnvCalls(Protocol):
    """What an environment needs of its pool."""

    async def place(self, key: int) -> None:
        """Gives the environment a worker."""

    def hosted(self, key: int) -> bool:
        """Whether it has one."""

    def leaving(self, key: int, closing: asyncio.Task[None]) -> None:
        """It is being closed, and holds its place until that is done."""

    async def call(self, key: int, what: str, method: str, *args: Any) -> Any:
        """The answer of its worker; `what` names environment and turn in the failure."""

    def failure(self, reason: Reason, message: str) -> EnvFailure:
        """A failure, counted."""

    async def end(self, key: int, what: str) -> EnvFailure | None:
        """Closes it where it is; gives the failure, counted, where it fails in this."""


class Env:
    """An environment in one episode, hosted by some worker. One call at a time; `close` it also after a failure.

    A call goes on to its end or deadline when whoever awaits it is cancelled, for its thread does too.
    """

    def __init__(self, pool: EnvCalls, key: int, spec: EnvSpec, seed: int) -> None:
        """Is opened by `EnvPool.open`."""
        self._pool, self._key, self._spec, self._seed = pool, key, spec, seed
        self._opened: Opened | None = None
        self._actions: list[str] = []
        self._steps: list[Stepped] = []
        self._call: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failed = False

    async def open(self) -> Opened:
        """Makes and resets it; the pool does this."""
        return await self._alone(self._open())

    async def step(self, text: str) -> Stepped:
        """What an action leads to.

        Raises:
            EnvFailure: the environment raised, hung or died, and is gone.
            EnvWorkerError: its worker died and no other can take it.
            RuntimeError: it is closed, has failed before, or is still in a call.
        """
        return await self._alone(self._step(text))

    def leave(self) -> asyncio.Task[None]:
        """Begins to end it, after its open call if there is one; nothing happens the second time, or where it is gone.

        Returns:
            What can be awaited, and need not be.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            self._pool.leaving(self._key, self._closing)
        return self._closing

    async def close(self) -> None:
        """Ends it; see `leave`."""
        await asyncio.shield(self.leave())

    async def _alone(self, coroutine: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        busy = self._call is not None and not self._call.done()
        if busy or self._failed or self._closing is not None:
            coroutine.close()
            state = "is still in a call" if busy else "has failed" if self._failed else "is closed"
            raise RuntimeError(f"{self._name} {state}")
        self._call = asyncio.create_task(self._noting_failure(coroutine))
        self._call.add_done_callback(lambda call: call.cancelled() or call.exception())
        return await asyncio.shield(self._call)

    async def _noting_failure(self, coroutine: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        try:
            return await coroutine
        except EnvFailure:
            self._failed = True
            raise

    async def _open(self) -> Opened:
        await self._pool.place(self._key)
        self._opened = await self._pool.call(self._key, f"{self._name}, reset", "open", *self._made_from)
        return self._opened

    async def _step(self, text: str) -> Stepped:
        while not self._pool.hosted(self._key):  # also where the next worker dies at once
            await self._replay()
        what = f"{self._name}, turn {len(self._steps) + 1}"
        stepped = await self._pool.call(self._key, what, "step", text)
        self._actions.append(text)
        self._steps.append(stepped)
        return stepped

    async def _replay(self) -> None:
        """Repeats the episode on another worker, within the deadline of one call."""
        await self._pool.place(self._key)
        what = f"{self._name}, {len(self._steps)} turns repeated after its worker died"
        again = await self._pool.call(self._key, what, "replay", *self._made_from, self._actions)
        if again == (self._opened, self._steps):
            return
        closing = await self._pool.end(self._key, what)
        message = f"{what}: it is not repeatable; {self._difference(*again)}"
        raise closing or self._pool.failure("env_died", message)

    def _difference(self, opened: Opened, steps: list[Stepped]) -> str:
        """The first answer that was another one."""
        if opened != self._opened:
            return f"reset gave {opened!r} after {self._opened!r}"
        pairs = enumerate(zip(self._steps, steps, strict=True), 1)
        turn, (before, now) = next((turn, pair) for turn, pair in pairs if pair[0] != pair[1])
        return f"turn {turn} gave {now!r} after {before!r}"

    async def _close(self) -> None:
        if self._call is not None:
            await asyncio.wait([self._call])
        await self._pool.end(self._key, f"{self._name}, close")

    @property
    def _made_from(self) -> tuple[str, dict[str, Any], int]:
        return self._spec.env_type, dict(self._spec.env_config), self._seed

    @property
    def _name(self) -> str:
        return f"environment {self._spec.env_type} with seed {self._seed}"
