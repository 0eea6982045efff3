"""Dynamic sampling: groups without a learning signal are dropped by their scores and replaced by new prompts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.configs.scoring.rewards import QueryFilterConfig

ZERO_VARIANCE = "filtered_zero_variance"
MEAN_LOW = "filtered_mean_low"
MEAN_HIGH = "filtered_mean_high"


@dataclass(frozen=True)
class QueryFilter:
    """Keeps groups whose mean score lies strictly between two thresholds and whose standard deviation exceeds a third.

    Strictly, so that thresholds 0 and 1 drop groups that are all wrong or all right, and a `std_threshold` of 0 drops
    groups whose scores are all equal. A threshold of NaN drops nothing.
    """

    threshold_down: float = -math.inf
    threshold_up: float = math.inf
    std_threshold: float = math.nan

    @classmethod
    def from_config(cls, config: QueryFilterConfig) -> QueryFilter:
        """The filter of a reward; thresholds that are not given drop nothing, except that std_filter defaults to 0."""
        given = {name: value for name, value in vars(config.filter_args).items() if value is not None}
        return cls(**({"std_threshold": 0.0} if config.type == "std_filter" else {}) | given)

    def reason(self, scores: Sequence[float]) -> str | None:
        """Drop reason of a group with these scores, or None. The standard deviation is that of the population."""
        mean = statistics.fmean(scores)
        if mean <= self.threshold_down:
            return MEAN_LOW
        if mean >= self.threshold_up:
            return MEAN_HIGH
        if statistics.pstdev(scores) <= self.std_threshold:
            return ZERO_VARIANCE
        return None


class StarvationLimit:
    """Detects that a filter drops so many groups that a batch never fills.

    Rule: from one batch to the next, at most max_resample_factor * max(batch_size, groups kept) groups may be filtered.
    So the limit grows while several batches are generated ahead.
    """

    def __init__(self, batch_size: int, max_resample_factor: float) -> None:
        """Checks the factor.

        Raises:
            ValueError: the factor is not a positive number.
        """
        if not max_resample_factor > 0:
            raise ValueError(f"max_resample_factor: {max_resample_factor} is not above 0")
        self._batch_size = batch_size
        self._factor = max_resample_factor
        self._filtered: Counter[str] = Counter()
        self._kept = 0

    def count_kept(self) -> None:
        self._kept += 1

    def count_filtered(self, reason: str, filter_name: str = "query_filter_config") -> str | None:
        """Counts a filtered group; returns the error that ends the run if it exceeds the limit.

        Args:
            reason: from `QueryFilter.reason`.
            filter_name: path of the filter in the configuration.
        """
        self._filtered[f"{filter_name}: {reason}"] += 1
        total = sum(self._filtered.values())
        allowed = self._factor * max(self._batch_size, self._kept)
        if total <= allowed:
            return None
        worst, count = self._filtered.most_common(1)[0]
        counts = ", ".join(f"{name} {count}" for name, count in self._filtered.most_common())
        return (
            f"{worst} starves the batch: it dropped {count} of the {total + self._kept} groups scored since "
            f"the last batch of {self._batch_size}, and {self._kept} were kept; max_resample_factor {self._factor:g} "
            f"allows {allowed:g} to be filtered ({counts}). Widen the filter, use prompts of "
            f"suitable difficulty, or raise max_resample_factor"
        )

    def reset(self) -> None:
        self._filtered.clear()
        self._kept = 0
