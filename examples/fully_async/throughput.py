"""A custom metric, configured as `async_training.metrics_class`."""

from __future__ import annotations

from collections.abc import Mapping

from roll.configs.pipeline import RLVRConfig


class SamplesPerSecond:
    """Trained samples per second of a step, without the time of validation."""

    def __init__(self, config: RLVRConfig) -> None:
        self._samples = config.rollout_batch_size * config.num_return_sequences_in_group

    def step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """`mine/samples_per_second` of each step; none for step 0, which only validates."""
        if step == 0:
            return {}
        return {"mine/samples_per_second": self._samples / (metrics["time/step"] - metrics.get("time/val", 0.0))}
