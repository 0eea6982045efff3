"""Weight updates as the training loop calls them: one call, its measures as metrics."""

from __future__ import annotations

from roll.distributed.weight_sync.synchronizer import WeightSynchronizer
from roll.pipeline.clock import StepClock


class ClockedPublisher:
    """Reports the engines' pause apart from the whole update."""

    def __init__(self, synchronizer: WeightSynchronizer) -> None:
        """Takes a synchronizer that is set up."""
        self._synchronizer = synchronizer

    async def publish(self, version: int, clock: StepClock) -> dict[str, float]:
        """Updates the weights of all engines to `version`."""
        report = await self._synchronizer.update_weights(version)
        clock.add("publish_pause", report.pause_seconds)
        return report.metrics()
