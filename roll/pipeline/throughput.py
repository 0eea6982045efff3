"""How well a step used the machine, from the times it measured."""

from __future__ import annotations

from collections.abc import Mapping

TRAINER_WORK = ("time/old_log_probs", "time/train")
"""Times in which actor_train computes."""


def throughput(tokens: int, devices: int, times: Mapping[str, float]) -> dict[str, float]:
    """`throughput/...` of one step.

    Args:
        tokens: prompt and response tokens learned from, without padding.
        devices: of all roles together, idle ones included.
        times: `time/...` of the step in seconds, `time/step` among them.
    """
    step = max(times["time/step"], 1e-9)
    return {
        "throughput/tokens_per_second": tokens / step / devices,
        "throughput/trainer_idle": max(0.0, 1 - sum(times.get(name, 0.0) for name in TRAINER_WORK) / step),
    }
