"""How far generation may run ahead of training, and how long each side waits for the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from roll.base.schema import Condition, option

InFlightPolicy = Literal["retract", "in_place", "drain", "abort_resume"]
"""What happens to running requests at a weight update."""

DEFAULT_MAX_STALENESS = 5
"""Versions; default of `max_staleness_allowed` unless `async_generation_ratio` needs more."""

LARGEST_DENOMINATOR = 1_000_000
"""A ratio is taken as the nearest fraction with a denominator up to this: 0.1 * 3 is 3/10 and 0.29 is 29/100.

Binary floats would make floor((v + 1 + 0.29) * 100) come out one prompt short, and ceil(0.1 * 3 + 0.7) two.
"""


def exact_ratio(ratio: float) -> Fraction:
    """`async_generation_ratio` as an exact fraction (see LARGEST_DENOMINATOR).

    Raises:
        ValueError: it is negative, infinite or not a number.
    """
    if not math.isfinite(ratio) or ratio < 0:
        raise ValueError(f"async_generation_ratio: {ratio} is not a finite number of at least 0")
    return Fraction(ratio).limit_denominator(LARGEST_DENOMINATOR)


def versions_ahead(ratio: float) -> int:
    """Largest age in versions that admission allows a sample: ceil(async_generation_ratio)."""
    return math.ceil(exact_ratio(ratio))


def max_batches_ready(ratio: float) -> int:
    """Whole batches that admission allows to be ready at a time: floor(1 + async_generation_ratio)."""
    return math.floor(1 + exact_ratio(ratio))


def _runs_ahead(consequence: str) -> Condition:
    """The condition of keys that only asynchronous training reads."""
    return Condition(
        lambda config, _: config.async_generation_ratio > 0,
        f"async_generation_ratio is 0, so {consequence}",
        ("async_generation_ratio",),
    )


SAMPLES_AGE = _runs_ahead("samples are never stale")

PROMPTS_MIX = _runs_ahead("engines never have older and newer prompts at a time")

REACHED = Condition(
    lambda config, section: section.staleness_threshold < versions_ahead(config.async_generation_ratio),
    "no sample is older than ceil(async_generation_ratio) versions, so stale_samples_ratio is always 0; use less",
    ("async_generation_ratio",),
)


def _whole_versions(value: Any) -> Any:
    """Refuses a fraction, which means something else in another system."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(
            f"{value:g} is not a whole number of versions; where it is the share of samples that may be generated "
            f"ahead, write async_generation_ratio: {value:g}"
        )
    return value


@dataclass
class AsyncTrainingConfig:
    """Bounds of asynchronous training; they apply to synchronous training as well, where they are never reached."""

    staleness_threshold: int = option(
        3,
        "Versions; samples with an older token count as stale in `stale_samples_ratio`.",
        ge=0,
        parse=_whole_versions,
        only_for=(SAMPLES_AGE, REACHED),
    )
    max_staleness_allowed: int | None = option(
        None,
        "Versions; a group with an older token is dropped when a batch is taken. At least "
        "ceil(async_generation_ratio); default: the larger of 5 and that.",
        ge=0,
        only_for=SAMPLES_AGE,
    )
    max_sample_age_s: float | None = option(
        None,
        "Seconds; a group whose prompt was submitted longer ago is dropped when a batch is taken, and counted as "
        "`expired`; null: no limit.",
        gt=0,
        only_for=SAMPLES_AGE,
    )
    max_queue_size: int | None = option(
        None,
        "Samples (agentic: trajectories) that may be running or waiting; generation pauses at it, nothing is evicted. "
        "Default: what async_generation_ratio admits.",
        ge=1,
        only_for=_runs_ahead("there is never more than one batch"),
    )
    min_batch_count: int = option(1, "Batches that must be ready before one is taken.", ge=1)
    batch_timeout_s: float = option(
        30.0, "A batch that takes longer is reported with the requests it waits for, each time this passes.", gt=0
    )
    batch_deadline_s: float = option(3600.0, "The run ends when a batch takes longer.", gt=0)
    batch_generation_interval_s: float = option(
        0.0,
        "Minimum seconds between submissions of prompt batches; 0 turns it off.",
        ge=0,
        only_for=Condition(
            lambda config, _: config.runs_in_background,
            "each batch is generated on request; set async_generation_ratio or async_training.rollouter: actor",
            ("async_generation_ratio", "async_training.rollouter"),
        ),
    )
    rollouter: Literal["auto", "actor", "inline"] = option(
        "auto",
        "Where generation is driven: in its own process, concurrently with training (actor), or inline, batch by "
        "batch. auto: actor when async_generation_ratio is above 0.",
    )
    rollouter_class: str | None = option(None, "`module:Class`, a subclass of roll.rollout.rollouter.Rollouter.")
    trainer_class: str | None = option(None, "`module:Class`, a subclass of roll.pipeline.learning.learner.RLLearner.")
    metrics_class: str | None = option(
        None, "`module:Class`, a roll.trackers.base.Metrics: receives the metrics of every step and may add some."
    )
    monitor_class: str | None = option(
        None, "`module:Class`, a roll.pipeline.health.Monitor; default: one that writes output_dir/health.json."
    )
    batch_hook_class: str | None = option(
        None, "`module:Class`, a roll.pipeline.parts.BatchHook: sees every batch before it is learned from."
    )


@dataclass
class AsyncOptions:
    """The keys of RL pipelines for running ahead."""

    async_generation_ratio: float = option(
        0.0, "Batches generation may run ahead; 0 is off, that is synchronous.", ge=0
    )
    in_flight_policy: InFlightPolicy = option(
        "retract",
        "What requests that run at a weight update do: recompute their cache under the new weights (retract), keep "
        "the old cache (in_place), finish before the update (drain), or stop and continue from their exact tokens "
        "(abort_resume).",
        only_for=_runs_ahead("no request runs during a weight update"),
    )
    allow_uncorrected_off_policy: bool = option(
        False,
        "Train on stale samples without any correction for their age; otherwise such a file is refused.",
        only_for=SAMPLES_AGE,
    )
    async_training: AsyncTrainingConfig = option(
        factory=AsyncTrainingConfig, help="Bounds and waits of asynchronous training."
    )

    @property
    def runs_in_background(self) -> bool:
        """Whether generation is driven by its own process, concurrently with training."""
        kind = self.async_training.rollouter
        return self.async_generation_ratio > 0 if kind == "auto" else kind == "actor"
