"""The weight publisher as the training loop sees it: one call, its measures as metrics."""

from __future__ import annotations

from roll.distributed.weight_sync.publisher import WeightPublisher
from roll.rollout.timers import StepClock


class ClockedPublisher:
    """Reports the engines' pause apart from the whole publish."""

    def __init__(self, publisher: WeightPublisher) -> None:
        """Takes a publisher whose groups are set up."""
        self._publisher = publisher
        self._failures = 0

    async def publish(self, version: int, clock: StepClock) -> dict[str, float]:
        """Transfers, verifies where due, and names the version."""
        report = await self._publisher.publish(version)
        clock.add("publish_pause", report.pause_seconds)
        self._failures += report.attempts - 1
        return {
            "publish/bytes": float(report.bytes),
            "publish/verified": float(report.verified),
            "param_sync_requests": float(version + 1 + self._failures),
            "param_sync_count": float(version + 1),
            "sync_failures": float(self._failures),
        }
