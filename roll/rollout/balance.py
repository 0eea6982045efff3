"""Which engine gets the next request: the one with the fewest tokens outstanding."""

from __future__ import annotations

import math


class NoEngine(RuntimeError):
    """Every engine is excluded."""


class Balancer:
    """Outstanding tokens of each engine, as a tournament: `choose` costs O(1), every change O(log engines).

    A token is outstanding from the moment its request is sent (its prompt and the response it may at most have) until
    the request ends. Equal engines are taken in the order of their numbers, so choices repeat.
    """

    def __init__(self, engines: int) -> None:
        """Starts with `engines` idle engines, none excluded.

        Raises:
            ValueError: fewer than one.
        """
        if engines < 1:
            raise ValueError(f"engines: {engines} is not at least 1")
        self._engines = engines
        self._tokens = [0] * engines
        self._excluded: set[int] = set()
        self._leaves = 1 << (engines - 1).bit_length()
        self._winners = [0] * self._leaves + [min(leaf, engines - 1) for leaf in range(self._leaves)]
        for node in range(self._leaves - 1, 0, -1):
            self._play(node)

    def choose(self) -> int:
        """The engine with the fewest outstanding tokens, the lowest number among equals.

        Raises:
            NoEngine: every engine is excluded.
        """
        winner = self._winners[1]
        if winner in self._excluded:
            raise NoEngine(f"none of {self._engines} engines takes requests: all are excluded")
        return winner

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

    def exclude(self, engine: int) -> None:
        """No new request goes to an engine; what it has stays counted until it is removed."""
        self._excluded.add(engine)
        self._set(engine, self._tokens[engine])

    def include(self, engine: int) -> None:
        """An engine takes requests again."""
        self._excluded.discard(engine)
        self._set(engine, self._tokens[engine])

    def _set(self, engine: int, tokens: int) -> None:
        self._tokens[engine] = tokens
        node = (self._leaves + engine) // 2
        while node:
            self._play(node)
            node //= 2

    def _play(self, node: int) -> None:
        left, right = self._winners[2 * node], self._winners[2 * node + 1]
        self._winners[node] = right if self._load(right) < self._load(left) else left

    def _load(self, engine: int) -> float:
        return math.inf if engine in self._excluded else self._tokens[engine]
