"""The schedule of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.configs.arguments import TrainingArguments


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to the peak over `warmup_steps`, then constant, linear or cosine down to the minimum."""

    peak: float
    minimum: float
    shape: str
    warmup_steps: int
    total_steps: int

    @classmethod
    def of(cls, arguments: TrainingArguments, total_steps: int) -> LearningRate:
        warmup = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * total_steps)
        shape = arguments.lr_scheduler_type
        return cls(arguments.learning_rate, arguments.min_learning_rate, shape, warmup, total_steps)

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0.

        During warm-up step k uses peak (k + 1) / warmup_steps, so no step is wasted at rate 0. Of the K steps after it,
        step k has the share k / K of the way to the minimum behind it, as in Megatron-LM and transformers: the first
        has the peak, the last is 1 / K short of the minimum, and only steps after the end have it.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        share = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.minimum + (self.peak - self.minimum) * share
