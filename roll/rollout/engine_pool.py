"""All engines of actor_infer as one: groups go where the least is to do, failures are tried again, then reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from roll.rollout.types import GenerateRequest, GenerateResult


class Balancer:
    """Outstanding tokens of each engine, as a tournament: `choose` costs O(1), every change O(log engines).

    A token is outstanding from the moment its request is sent (its prompt and the response it may at most have) until
    the request ends. Equal engines are taken in the order of their numbers, so choices repeat.
    """

    def __init__(self, engines: int) -> None:
        """Starts with `engines` idle engines.

        Raises:
            ValueError: fewer than one.
        """
        if engines < 1:
            raise ValueError(f"engines: {engines} is not at least 1")
        self._tokens = [0] * engines
        self._leaves = 1 << (engines - 1).bit_length()
        self._winners = [0] * self._leaves + [min(leaf, engines - 1) for leaf in range(self._leaves)]
        for node in range(self._leaves - 1, 0, -1):
            self._play(node)

    def choose(self) -> int:
        """The engine with the fewest outstanding tokens, the lowest number among equals."""
        return self._winners[1]

    def add(self, engine: int, tokens: int) -> None:
        """A request of so many tokens goes to an engine."""
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
        """Tokens an engine still has to do."""
        return self._tokens[engine]

    def _set(self, engine: int, tokens: int) -> None:
        self._tokens[engine] = tokens
        node = (self._leaves + engine) // 2
        while node:
            self._play(node)
            node //= 2

    def _play(self, node: int) -> None:
        left, right = self._winners[2 * node], self._winners[2 * node + 1]
        self._winners[node] = right if self._tokens[right] < self._tokens[left] else left


QUEUED = 2
"""Requests sent to an engine, in multiples of those it runs at a time: enough that none ever waits for work."""


class Engines(Protocol):
    """The engines, reached one by one."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def call(self, rank: int, method: str, *args: list[GenerateRequest]) -> Awaitable[list[GenerateResult]]:
        """The answer of one engine to `generate`."""


class EnginePool:
    """Sends groups of requests to engines; the members of a group share an engine, and so its prefix cache."""

    def __init__(self, engines: Engines, retries: int, max_running: int) -> None:
        """Takes the engines.

        Args:
            engines: to send to.
            retries: a request is tried so many more times before it comes back aborted.
            max_running: requests one engine runs at a time.
        """
        self._engines = engines
        self._retries = retries
        self._balancer = Balancer(engines.world_size)
        self._residents = Balancer(engines.world_size)
        self._capacity = QUEUED * max_running * engines.world_size
        self._sent = 0
        self._line = asyncio.Lock()
        self._returned = asyncio.Event()

    @contextmanager
    def home(self, members: int) -> Iterator[int]:
        """The engine with the fewest residents, for conversations that share a prefix, as long as the block runs.

        Residents are counted, not tokens: conversations that begin together have asked nothing yet.
        """
        engine = self._residents.choose()
        self._residents.add(engine, members)
        try:
            yield engine
        finally:
            self._residents.remove(engine, members)

    async def generate(
        self, groups: Sequence[list[GenerateRequest]], engine: int | None = None
    ) -> list[list[GenerateResult]]:
        """One result for each request, in the order asked; an aborted result carries its `error`.

        The groups of one call are sent together, when the engines have room for more: all to `engine`, or each where
        the least is to do.
        """
        flat = [request for group in groups for request in group]
        await self._room(len(flat))
        try:
            results = await self._generate(groups, flat, engine)
        finally:
            self._sent -= len(flat)
            self._returned.set()
        answers = iter(results)
        return [[next(answers) for _ in group] for group in groups]

    async def _room(self, count: int) -> None:
        """Waits in line until the engines can take more requests."""
        async with self._line:
            while self._sent >= self._capacity:
                self._returned.clear()
                await self._returned.wait()
            self._sent += count

    async def _generate(
        self, groups: Sequence[list[GenerateRequest]], flat: list[GenerateRequest], engine: int | None
    ) -> list[GenerateResult]:
        engines: dict[int, int] = dict(enumerate(self._homes(groups, engine)))
        results: dict[int, GenerateResult] = {}
        try:
            for attempt in range(self._retries + 1):
                answers = await self._try(flat, engines)
                results |= answers
                for index in answers:
                    tried = engines.pop(index)
                    self._balancer.remove(tried, _tokens(flat[index]))
                    if answers[index].finish_reason == "abort" and attempt < self._retries:
                        engines[index] = self._take((tried + 1) % self._engines.world_size, flat[index])
                if not engines:
                    break
        finally:
            for index, sent_to in engines.items():
                self._balancer.remove(sent_to, _tokens(flat[index]))
        return [results[index] for index in range(len(flat))]

    def _homes(self, groups: Sequence[list[GenerateRequest]], engine: int | None) -> list[int]:
        """An engine for each request; without one given a group goes where the least is to do when its turn comes."""
        homes = []
        for group in groups:
            home = self._balancer.choose() if engine is None else engine
            homes += [self._take(home, request) for request in group]
        return homes

    def _take(self, engine: int, request: GenerateRequest) -> int:
        self._balancer.add(engine, _tokens(request))
        return engine

    async def _try(self, requests: list[GenerateRequest], engines: dict[int, int]) -> dict[int, GenerateResult]:
        """Sends each request whose engine is given once; what comes back, by index."""
        shares: dict[int, list[int]] = {}
        for index, engine in engines.items():
            shares.setdefault(engine, []).append(index)
        calls = [
            asyncio.ensure_future(self._engines.call(engine, "generate", [requests[index] for index in share]))
            for engine, share in shares.items()
        ]
        try:
            replies = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return {
            index: answer
            for share, answers in zip(shares.values(), replies, strict=True)
            for index, answer in zip(share, answers, strict=True)
        }


def _tokens(request: GenerateRequest) -> int:
    """What a request may at most cost."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens
