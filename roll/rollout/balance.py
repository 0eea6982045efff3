"""Which engine gets the next request: the one with the fewest tokens outstanding."""

from __future__ import annotations


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
