"""Dynamic sampling: groups that teach nothing are dropped by their scores, and a fresh prompt takes their place."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_SPREAD = "filtered_no_spread"
MEAN_LOW = "filtered_mean_low"
MEAN_HIGH = "filtered_mean_high"

FILTERS: dict[str, dict[str, float]] = {
    "no_filter": {},
    "mean_filter": {"threshold_down": -math.inf, "threshold_up": math.inf},
    "std_filter": {"std_threshold": 0.0},
}
"""`filter_args` of each type of `query_filter_config`, with the values they have when they are not given."""


@dataclass(frozen=True)
class QueryFilter:
    """Which groups are kept: those whose mean lies strictly between two thresholds and whose spread exceeds one.

    Strictly, so that thresholds 0 and 1 drop groups that are all wrong or all right, and a `std_threshold` of 0 drops
    groups whose scores are all equal. NaN drops nothing: such a threshold is not set.
    """

    threshold_down: float = -math.inf
    threshold_up: float = math.inf
    std_threshold: float = math.nan

    @classmethod
    def from_config(cls, section: Mapping[str, Any] | None, path: str = "query_filter_config") -> QueryFilter:
        """Reads `{type: mean_filter, filter_args: {threshold_up: 0.9, threshold_down: 0.1}}` or `type: std_filter`.

        Args:
            section: the section of a reward; None keeps every group.
            path: where it stands, for errors.

        Raises:
            ValueError: an unknown type or key, a value that is no number, or thresholds no mean lies between.
        """
        section = section or {}
        unknown = set(section) - {"type", "filter_args"}
        if unknown:
            raise ValueError(f"{path}.{min(unknown)}: unknown key; known are type and filter_args")
        kind = section.get("type", "no_filter")
        if kind not in FILTERS:
            raise ValueError(f"{path}.type: {kind!r} is none of {', '.join(FILTERS)}")
        arguments = dict(section.get("filter_args") or {})
        for name, value in arguments.items():
            if name not in FILTERS[kind]:
                known = ", ".join(FILTERS[kind]) or "none"
                raise ValueError(f"{path}.filter_args.{name}: unknown key; type {kind} knows {known}")
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise ValueError(f"{path}.filter_args.{name}: {value!r} is not a number")
        made = cls(**{**FILTERS[kind], **arguments})
        if made.threshold_down >= made.threshold_up:
            raise ValueError(
                f"{path}.filter_args: no mean score lies between threshold_down {made.threshold_down:g} and "
                f"threshold_up {made.threshold_up:g}; threshold_down must be the smaller"
            )
        return made

    def reason(self, scores: Sequence[float]) -> str | None:
        """Why a group with these scores is dropped; None keeps it. The spread is the population's."""
        mean = statistics.fmean(scores)
        if mean <= self.threshold_down:
            return MEAN_LOW
        if mean >= self.threshold_up:
            return MEAN_HIGH
        if statistics.pstdev(scores) <= self.std_threshold:
            return NO_SPREAD
        return None


class StarvationLimit:
    """Notices that a filter keeps a batch from ever being full.

    Rule: from one batch to the next, at most `max_resample_factor` groups may be filtered for each that is kept, or
    that times `batch_size` while fewer are kept. So more may be filtered while more than one batch is filled ahead.
    """

    def __init__(self, batch_size: int, max_resample_factor: float) -> None:
        """Starts with the first batch.

        Raises:
            ValueError: the factor is not a positive number.
        """
        if not max_resample_factor > 0:
            raise ValueError(f"max_resample_factor: {max_resample_factor} is not above 0")
        self._batch_size = batch_size
        self._factor = max_resample_factor
        self._filtered: Counter[str] = Counter()
        self._kept = 0

    def keep(self) -> None:
        """A group passed the filter."""
        self._kept += 1

    def filtered(self, reason: str, filter_name: str = "query_filter_config") -> str | None:
        """A group was filtered; gives the text of the error that ends the run when it was one too many.

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
            f"{worst} starves the batch: it dropped {count} of the {total + self._kept} groups that came back since "
            f"the last batch of {self._batch_size}, and {self._kept} were kept; max_resample_factor {self._factor:g} "
            f"allows {allowed:g} to be filtered ({counts}). Widen the filter, use prompts of "
            f"a fitting difficulty, or raise max_resample_factor"
        )

    def taken(self) -> None:
        """A batch was taken; the count begins anew."""
        self._filtered.clear()
        self._kept = 0
