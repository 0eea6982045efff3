"""Load balancing over all engines of actor_infer, with retries of failed requests. Pure asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from roll.rollout.types import GenerateRequest, GenerateResult

QUEUED = 2
"""Requests sent to an engine, in multiples of those it runs at a time: enough that it never waits for work."""


class Engines(Protocol):
    """The engines, called one by one."""

    @property
    def world_size(self) -> int:
        """Number of engines."""

    def generate(self, rank: int, requests: list[GenerateRequest], /) -> Awaitable[list[GenerateResult]]:
        """Results of one engine, in the order of the requests."""


class EnginePool:
    """Sends groups of requests to engines; the requests of a group share an engine, and so its prefix cache."""

    def __init__(self, engines: Engines, retries: int, max_running: int) -> None:
        """Sets the limits.

        Args:
            engines: that generate.
            retries: of a failed request, each on the next engine; after the last it is returned as aborted.
            max_running: requests one engine runs at a time.
        """
        self._engines = engines
        self._retries = retries
        self._balancer = Balancer(engines.world_size)
        self._sessions = Balancer(engines.world_size)
        self._capacity = QUEUED * max_running * engines.world_size
        self._sent = 0
        self._lock = asyncio.Lock()
        self._returned = asyncio.Event()

    @contextmanager
    def assign_engine(self, sessions: int) -> Iterator[int]:
        """The engine with the fewest sessions, for conversations that share a prefix; they count while the block runs.

        Sessions are counted, not tokens: conversations that begin at the same time have sent no request yet.
        """
        engine = self._sessions.choose()
        self._sessions.add(engine, sessions)
        try:
            yield engine
        finally:
            self._sessions.remove(engine, sessions)

    async def generate(
        self, groups: Sequence[list[GenerateRequest]], engine: int | None = None
    ) -> list[list[GenerateResult]]:
        """One result for each request, in the order of the requests; an aborted result has an `error`.

        The groups of one call are sent together, once the engines have room: all to `engine`, or each to the engine
        with the fewest outstanding tokens.
        """
        flat = [request for group in groups for request in group]
        await self._wait_for_room(len(flat))
        try:
            results = await self._generate(groups, flat, engine)
        finally:
            self._sent -= len(flat)
            self._returned.set()
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
        engines: dict[int, int] = dict(enumerate(self._choose_engines(groups, engine)))
        results: dict[int, GenerateResult] = {}
        try:
            for attempt in range(self._retries + 1):
                answers = await self._send(flat, engines)
                results |= answers
                for index in answers:
                    tried = engines.pop(index)
                    self._balancer.remove(tried, _tokens(flat[index]))
                    if answers[index].finish_reason == "abort" and attempt < self._retries:
                        engines[index] = self._assign((tried + 1) % self._engines.world_size, flat[index])
                if not engines:
                    break
        finally:
            for index, sent_to in engines.items():
                self._balancer.remove(sent_to, _tokens(flat[index]))
        return [results[index] for index in range(len(flat))]

    def _choose_engines(self, groups: Sequence[list[GenerateRequest]], engine: int | None) -> list[int]:
        """An engine for each request: the given one, or for each group the one with the fewest outstanding tokens."""
        chosen = []
        for group in groups:
            target = self._balancer.choose() if engine is None else engine
            chosen += [self._assign(target, request) for request in group]
        return chosen

    def _assign(self, engine: int, request: GenerateRequest) -> int:
        self._balancer.add(engine, _tokens(request))
        return engine

    async def _send(self, requests: list[GenerateRequest], engines: dict[int, int]) -> dict[int, GenerateResult]:
        """Sends the requests that have an engine, one call to each engine; the results by index of the request."""
        parts: dict[int, list[int]] = {}
        for index, engine in engines.items():
            parts.setdefault(engine, []).append(index)
        calls = [
            asyncio.ensure_future(self._engines.generate(engine, [requests[index] for index in part]))
            for engine, part in parts.items()
        ]
        try:
            replies = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return {
            index: answer
            for part, answers in zip(parts.values(), replies, strict=True)
            for index, answer in zip(part, answers, strict=True)
        }


class Balancer:
    """Finds the engine with the fewest outstanding tokens by a tournament tree: O(1), a change costs O(log engines).

    The tokens of a request, its prompt and its longest possible response, are outstanding from when it is sent until it
    ends. Ties go to the lowest number, so choices are deterministic.
    """

    def __init__(self, engines: int) -> None:
        """All engines are idle.

        Raises:
            ValueError: fewer than one.
        """
        if engines < 1:
            raise ValueError(f"engines: {engines} is not at least 1")
        self._tokens = [0] * engines
        self._leaves = 1 << (engines - 1).bit_length()
        self._winners = [0] * self._leaves + [min(leaf, engines - 1) for leaf in range(self._leaves)]
        for node in range(self._leaves - 1, 0, -1):
            self._update(node)

    def choose(self) -> int:
        """The engine with the fewest outstanding tokens, the lowest number among equals."""
        return self._winners[1]

    def add(self, engine: int, tokens: int) -> None:
        """A request of so many tokens is sent to an engine."""
        self._set(engine, self._tokens[engine] + tokens)

    def remove(self, engine: int, tokens: int) -> None:
        """A request of so many tokens ended.

        Raises:
            ValueError: the engine has fewer outstanding.
        """
        if tokens > self._tokens[engine]:
            raise ValueError(f"engine {engine} has {self._tokens[engine]} tokens outstanding; {tokens} cannot end")
        self._set(engine, self._tokens[engine] - tokens)

    def outstanding(self, engine: int) -> int:
        """Outstanding tokens of an engine."""
        return self._tokens[engine]

    def _set(self, engine: int, tokens: int) -> None:
        self._tokens[engine] = tokens
        node = (self._leaves + engine) // 2
        while node:
            self._update(node)
            node //= 2

    def _update(self, node: int) -> None:
        left, right = self._winners[2 * node], self._winners[2 * node + 1]
        self._winners[node] = right if self._tokens[right] < self._tokens[left] else left


def _tokens(request: GenerateRequest) -> int:
    """Most tokens that a request may have, prompt included."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens
