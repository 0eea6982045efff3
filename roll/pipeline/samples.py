"""The rollouter as the training loop sees it, whether it runs in this process or in one of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from roll.pipeline.clock import StepClock
from roll.pipeline.interfaces import SampleBatch
from roll.pipeline.rollouter import Rollouter

Ask = Callable[..., Awaitable[Any]]
"""f(method, *args): calls a coroutine method of `Rollouter`."""


class RolloutSamples:
    """A sample source that asks a rollouter."""

    def __init__(self, ask: Ask) -> None:
        """Takes the way to it."""
        self._ask = ask

    async def next_batch(self, version: int, clock: StepClock) -> SampleBatch:
        """The next batch; the rollouter knows which version learns from it."""
        batch = await self._ask(Rollouter.take)
        for name, seconds in batch.seconds.items():
            clock.add(name, seconds)
        return SampleBatch(batch.data, batch.metrics)

    async def advance(self, version: int) -> None:
        """New weights are published: generation may go further ahead."""
        await self._ask(Rollouter.advance, version)

    async def validate(self, version: int) -> dict[str, float]:
        """`val/...` metrics."""
        return await self._ask(Rollouter.validate, version)

    async def state_dict(self) -> dict[str, Any]:
        """See `Rollouter.state_dict`."""
        return await self._ask(Rollouter.state_dict)

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        await self._ask(Rollouter.load_state_dict, state)

    async def health(self) -> dict[str, Any]:
        """See `Rollouter.health`."""
        return await self._ask(Rollouter.health)


def here(rollouter: Rollouter[Any]) -> Ask:
    """Asks a rollouter of this process."""
    return lambda method, *args: getattr(rollouter, method.__name__)(*args)
