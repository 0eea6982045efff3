"""Load balancing over engines, with retries of failed requests and without engines that died. Pure asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from roll.base.timers import BusyTimer
from roll.rollout.types import GenerateRequest, GenerateResult

logger = logging.getLogger(__name__)

QUEUED = 2
"""Requests sent to an engine, in multiples of those it runs at a time: enough that it never waits for work."""

POLL_S = 0.5
"""Interval of the checks whether an engine that died serves again; a start takes many times as long."""


class EngineDownError(RuntimeError):
    """An engine died, or is being restarted: its requests can be sent to another one."""


class Engines(Protocol):
    """The engines, called one by one."""

    @property
    def world_size(self) -> int:
        """Number of engines."""

    def generate(self, rank: int, requests: list[GenerateRequest], /) -> Awaitable[list[GenerateResult]]:
        """Results of one engine, in the order of the requests.

        Raises:
            EngineDownError: the engine died before it answered all of them.
        """

    def is_serving(self, rank: int, /) -> Awaitable[bool]:
        """Whether an engine runs and has current weights."""


class EnginePool:
    """Sends groups of requests to engines; the requests of a group share an engine, and so its prefix cache.

    Requests of an engine that died are sent again, as they were, to those that serve; where none does, they wait. A
    restarted engine gets requests once it serves.

    Attributes:
        lanes: when each engine had requests of this pool, on the clock `time.monotonic`.
    """

    def __init__(self, engines: Engines, retries: int, max_running: int, restarted: bool = False) -> None:
        """Sets the limits.

        Args:
            engines: that generate.
            retries: of a failed request, each on the next engine; after the last it is returned as aborted.
            max_running: requests one engine runs at a time.
            restarted: whether engines that die are restarted; if not, the death of one is an error.
        """
        self._engines = engines
        self._retries = retries
        self._restarted = restarted
        self.lanes = [BusyTimer(time.monotonic()) for _ in range(engines.world_size)]
        self._balancer = Balancer(engines.world_size)
        self._sessions = Balancer(engines.world_size)
        self._capacity = QUEUED * max_running * engines.world_size
        self._sent = 0
        self._lock = asyncio.Lock()
        self._returned = asyncio.Event()
        self._down: set[int] = set()
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._engine_returned = asyncio.Event()
        self.reissued = 0
        """Requests that were sent again since an engine died."""

    @contextmanager
    def assign_engine(self, engine: int | None = None) -> Iterator[int]:
        """An engine for a conversation, which counts as a session of it while the block runs.

        Sessions are counted, not tokens: conversations that begin at the same time have sent no request yet.

        Args:
            engine: of another conversation with the same prefix; None: the one with the fewest sessions.
        """
        engine = self._sessions.choose() if engine is None else engine
        self._sessions.add(engine, 1)
        try:
            yield engine
        finally:
            self._sessions.remove(engine, 1)

    async def generate(
        self, groups: Sequence[list[GenerateRequest]], engine: int | None = None
    ) -> list[list[GenerateResult]]:
        """One result for each request, in the order of the requests; an aborted result has an `error`.

        The groups of one call are sent together, once the engines have room: all to `engine`, or each to the engine
        with the fewest outstanding tokens.

        Raises:
            EngineDownError: an engine died, and engines are not restarted.
        """
        flat = [request for group in groups for request in group]
        await self._wait_for_room(len(flat))
        self._poll()
        try:
            results = await self._generate(groups, flat, engine)
        finally:
            self._sent -= len(flat)
            self._returned.set()
            if not self._sent:
                self._stop_polls()
        answers = iter(results)
        return [[next(answers) for _ in group] for group in groups]

    async def _wait_for_room(self, count: int) -> None:
        """Waits, first come first served, until the engines can take more requests."""
        async with self._lock:
            while self._sent >= self._capacity:
                self._returned.clear()
                await self._returned.wait()
            self._sent += count

    async def _generate(
        self, groups: Sequence[list[GenerateRequest]], flat: list[GenerateRequest], engine: int | None
    ) -> list[GenerateResult]:
        """One call for each engine; a part that has to be sent again does not wait for the other parts."""
        await self._wait_for_an_engine()
        sent = _SentRequests(flat, self._balancer)
        chosen = iter(range(len(flat)))
        for group in groups:
            target = self._balancer.choose() if engine is None or not self._balancer.is_available(engine) else engine
            for _ in group:
                sent.assign(next(chosen), target)
        calls = [asyncio.ensure_future(self._answer(sent, part)) for part in sent.parts()]
        try:
            await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            sent.end()
        return [sent.results[index] for index in range(len(flat))]

    async def _answer(self, sent: _SentRequests, part: list[int]) -> None:
        """Generates the requests with these indices, which one engine has; sends again what failed or was lost."""
        attempt = 0
        while part:
            engine = sent.engine_of(part[0])
            try:
                answers = await self._ask(engine, [sent.requests[index] for index in part])
            except EngineDownError:
                if not self._restarted:
                    raise
                self._set_down(engine)
                await self._wait_for_an_engine()
                self.reissued += len(part)
                target = self._balancer.choose()
            else:
                sent.results |= dict(zip(part, answers, strict=True))
                failed = [index for index in part if sent.results[index].finish_reason == "abort"]
                sent.finish({*part} - ({*failed} if attempt < self._retries else set()))
                part = failed if attempt < self._retries else []
                attempt += 1
                target = self._balancer.next_after(engine)
            for index in part:
                sent.assign(index, target)

    async def _ask(self, engine: int, requests: list[GenerateRequest]) -> list[GenerateResult]:
        self.lanes[engine].enter(time.monotonic())
        try:
            answers = await self._engines.generate(engine, requests)
        finally:
            self.lanes[engine].exit(time.monotonic())
        return [replace(answer, engine=engine) for answer in answers]

    def _set_down(self, engine: int) -> None:
        """Marks an engine as down: it gets no requests until it serves again."""
        for balancer in (self._balancer, self._sessions):
            balancer.set_available(engine, False)
        self._down.add(engine)
        self._engine_returned.clear()
        self._poll()

    def _poll(self) -> None:
        """Starts to check every engine that is down, until it serves again or no request is left in this pool."""
        for engine in self._down - {*self._polls}:
            self._polls[engine] = asyncio.create_task(self._wait_until_serving(engine))

    def _stop_polls(self) -> None:
        polls, self._polls = self._polls, {}
        for poll in polls.values():
            poll.cancel()

    async def _wait_until_serving(self, engine: int) -> None:
        """Checks an engine until it serves. A check that raises is logged once, and repeated."""
        failed = False
        while True:
            try:
                if await self._engines.is_serving(engine):
                    break
            except Exception:
                if not failed:
                    logger.warning(
                        "engine %d: the check whether it serves failed and is repeated:", engine, exc_info=True
                    )
                failed = True
            await asyncio.sleep(POLL_S)
        for balancer in (self._balancer, self._sessions):
            balancer.set_available(engine, True)
        self._down.remove(engine)
        del self._polls[engine]
        self._engine_returned.set()

    async def _wait_for_an_engine(self) -> None:
        """Waits until at least one engine is not down."""
        while len(self._down) == self._engines.world_size:
            await self._engine_returned.wait()


class _SentRequests:
    """The requests of one call: the engine that each was sent to, which counts it as load, and the results."""

    def __init__(self, requests: list[GenerateRequest], balancer: Balancer) -> None:
        self.requests, self._balancer = requests, balancer
        self.results: dict[int, GenerateResult] = {}
        self._engines: dict[int, int] = {}

    def assign(self, index: int, engine: int) -> None:
        """Counts a request as load of this engine, and no longer of the one that had it."""
        self.finish({index})
        self._engines[index] = engine
        self._balancer.add(engine, _tokens(self.requests[index]))

    def finish(self, indices: Collection[int]) -> None:
        for index in indices:
            if index in self._engines:
                self._balancer.remove(self._engines.pop(index), _tokens(self.requests[index]))

    def end(self) -> None:
        self.finish(list(self._engines))

    def engine_of(self, index: int) -> int:
        return self._engines[index]

    def parts(self) -> list[list[int]]:
        """Indices of the requests by engine."""
        parts: dict[int, list[int]] = {}
        for index, engine in self._engines.items():
            parts.setdefault(engine, []).append(index)
        return list(parts.values())


class Balancer:
    """Finds the engine with the fewest outstanding tokens by a tournament tree: O(1), a change costs O(log engines).

    The tokens of a request, its prompt and its longest possible response, are outstanding from when it is sent until it
    ends. Ties go to the lowest number, so choices are deterministic. An engine that is not available is chosen only
    where none is.
    """

    def __init__(self, engines: int) -> None:
        """Starts with idle engines.

        Raises:
            ValueError: fewer than one.
        """
        if engines < 1:
            raise ValueError(f"engines: {engines} is not at least 1")
        self._tokens = [0] * engines
        self._down = [False] * engines
        self._leaves = 1 << (engines - 1).bit_length()
        self._winners = [0] * self._leaves + [min(leaf, engines - 1) for leaf in range(self._leaves)]
        for node in range(self._leaves - 1, 0, -1):
            self._update(node)

    def choose(self) -> int:
        """The engine with the fewest outstanding tokens, the lowest number among equals."""
        return self._winners[1]

    def add(self, engine: int, tokens: int) -> None:
        self._set(engine, self._tokens[engine] + tokens)

    def remove(self, engine: int, tokens: int) -> None:
        """Removes a request of so many tokens, which ended, from the load of an engine.

        Raises:
            ValueError: the engine has fewer outstanding.
        """
        if tokens > self._tokens[engine]:
            raise ValueError(f"engine {engine} has {self._tokens[engine]} tokens outstanding; {tokens} cannot end")
        self._set(engine, self._tokens[engine] - tokens)

    def outstanding(self, engine: int) -> int:
        return self._tokens[engine]

    def is_available(self, engine: int) -> bool:
        return not self._down[engine]

    def set_available(self, engine: int, available: bool) -> None:
        self._down[engine] = not available
        self._set(engine, self._tokens[engine])

    def next_after(self, engine: int) -> int:
        """The next available engine by number, after the last the first; the same one where no other is."""
        count = len(self._tokens)
        others = [(engine + step) % count for step in range(1, count)]
        return next((other for other in others if self.is_available(other)), engine)

    def _set(self, engine: int, tokens: int) -> None:
        self._tokens[engine] = tokens
        node = (self._leaves + engine) // 2
        while node:
            self._update(node)
            node //= 2

    def _update(self, node: int) -> None:
        left, right = self._winners[2 * node], self._winners[2 * node + 1]
        self._winners[node] = right if self._load(right) < self._load(left) else left

    def _load(self, engine: int) -> tuple[bool, int]:
        return self._down[engine], self._tokens[engine]


def _tokens(request: GenerateRequest) -> int:
    """Most tokens that a request may have, prompt included."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens
