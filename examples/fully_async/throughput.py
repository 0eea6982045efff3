"""A metric of one's own: `async_training.metrics_class` names this class."""

from __future__ import annotations

from collections.abc import Mapping

from roll.configs.pipeline import RLVRConfig


class SamplesPerSecond:
    """Samples learned from by the time of the step, validation left out."""

    def __init__(self, config: RLVRConfig) -> None:
        """Takes the run's config, as every such class does."""
        self._samples = config.rollout_batch_size * config.num_return_sequences_in_group

    def step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """`mine/samples_per_second` of every step but line 0, which learned nothing."""
        if step == 0:
            return {}
        return {"mine/samples_per_second": self._samples / (metrics["time/step"] - metrics.get("time/val", 0.0))}
