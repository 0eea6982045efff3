"""What became of one sample's reward, and the judgement of what a reward function returned."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal

Reason = Literal["raised", "timeout", "not_finite", "wrong_type"]


@dataclass(frozen=True)
class RewardOutcome:
    """A score, or why there is none; a failure is never a score of zero.

    Attributes:
        score: the reward, or None.
        reason: why there is no score: the function `raised` (or its process died), passed its deadline (`timeout`),
            returned NaN or infinity (`not_finite`), or something that is not one number (`wrong_type`).
        detail: one line for the log.
    """

    score: float | None
    reason: Reason | None = None
    detail: str = ""


def judge(value: Any) -> RewardOutcome:
    """The outcome of a returned value: one finite real number is a score, anything else a failure."""
    if not isinstance(value, numbers.Real):
        size = f" of length {len(value)}" if hasattr(value, "__len__") else ""
        return RewardOutcome(None, "wrong_type", f"returned {type(value).__name__}{size}, not one number")
    if not math.isfinite(value):
        return RewardOutcome(None, "not_finite", f"returned {value}")
    return RewardOutcome(float(value))
