"""The order in which prompts are drawn: endless, seeded, and resumable to the exact position."""

from __future__ import annotations

import random
from typing import Any


class PromptSampler:
    """A cursor over the indices 0 .. size-1, pass after pass.

    Every pass (epoch) yields each index once, in an order that depends on the seed and the number of the pass alone.

    Args:
        size: how many prompts there are.
        seed: of the orders.
        shuffle: false keeps every pass in the order of the file.

    Raises:
        ValueError: there are no prompts.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        """Stands before the first index of the first pass."""
        if size < 1:
            raise ValueError("a sampler needs at least one prompt")
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Complete passes so far."""
        return self._epoch

    def take(self, count: int) -> list[int]:
        """The next `count` indices; a pass that ends is followed by the next one, so none is lost."""
        taken: list[int] = []
        while len(taken) < count:
            part = self._order[self._position : self._position + count - len(taken)]
            taken += part
            self._position += len(part)
            if self._position == self._size:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the cursor stands; plain values, ready for JSON."""
        return {
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state_dict` was taken.

        Raises:
            ValueError: it was taken with another number of prompts, seed or shuffling: the orders would differ.
        """
        here = self.state_dict()
        changed = [key for key in ("size", "seed", "shuffle") if state[key] != here[key]]
        if changed:
            told = ", ".join(f"{key} was {state[key]} and is {here[key]}" for key in changed)
            raise ValueError(f"the data cursor cannot be resumed: {told}; use the data and seed the run began with")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
