"""The account of a batch in the terms that users of asynchronous trainers know."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.pipeline.rollout_types import Item
from roll.rollout.ledger import Ledger
from roll.rollout.policy import STALE

if TYPE_CHECKING:
    from roll.pipeline.rollouter import RolloutOptions


def account_metrics(ledger: Ledger, taken: Sequence[Item], version: int, options: RolloutOptions) -> dict[str, float]:
    """The account in prompts and in samples, some of it under other names too, and the ages as `version` learns."""
    samples = options.samples_per_item
    queue = ledger.queue_metrics(samples)
    ages = [version - item.oldest_version for item in taken]
    return {
        **ledger.metrics(),
        **queue,
        "processed_samples": queue["queue/total_consumed"],
        "total_generated_samples": float(
            (ledger.submitted - ledger.in_flight - ledger.dropped["generation_failed"]) * samples
        ),
        "dropped_stale_samples": float(ledger.dropped[STALE] * samples),
        "generation_errors": float(ledger.dropped["generation_failed"]),
        "avg_sample_age": statistics.fmean(ages),
        "max_sample_age": float(max(ages)),
        "stale_samples_ratio": statistics.fmean(age > options.stale_from for age in ages),
        "queue_size": queue["queue/size"],
        "total_produced": queue["queue/total_produced"],
        "total_consumed": queue["queue/total_consumed"],
        "dropped_samples": queue["queue/dropped_samples"],
    }
