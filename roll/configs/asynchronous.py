"""How far generation may run ahead of training, and how long each side waits for the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from roll.base.errors import Finding, error, warning
from roll.base.schema import YEAR_S, Condition, option
from roll.configs.user_code import names_code

if TYPE_CHECKING:
    from roll.configs.pipeline import RLConfig

InFlightPolicy = Literal["retract", "in_place", "drain", "abort_resume"]
"""What happens to running requests at a weight update."""

DEFAULT_MAX_STALENESS = 5
"""Versions; default of `max_staleness_allowed` unless `async_generation_ratio` needs more."""

LARGEST_DENOMINATOR = 1_000_000
"""A ratio is taken as the nearest fraction with a denominator up to this: 0.1 * 3 is 3/10 and 0.29 is 29/100.

Binary floats would make floor((v + 1 + 0.29) * 100) come out one prompt short, and ceil(0.1 * 3 + 0.7) two.
"""


LEAST_RATIO = 0.01
"""Smallest `async_generation_ratio` above 0 that is not warned of."""


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
        usual=(0, 1000),
        only_for=SAMPLES_AGE,
    )
    max_sample_age_s: float | None = option(
        None,
        "Seconds; a group whose prompt was submitted longer ago is dropped when a batch is taken, and counted as "
        "`expired`; null: no limit.",
        gt=0,
        usual=(1.0, YEAR_S),
        only_for=SAMPLES_AGE,
    )
    max_queue_size: int | None = option(
        None,
        "Samples (agentic: trajectories) that may be running or waiting; generation pauses at it, nothing is evicted. "
        "Default: what async_generation_ratio admits.",
        ge=1,
        usual=(1, 1e8),
        only_for=_runs_ahead("there is never more than one batch"),
    )
    min_batch_count: int = option(1, "Batches that must be ready before one is taken.", ge=1, usual=(1, 1000))
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
        0.0, "Batches generation may run ahead; 0 is off, that is synchronous.", ge=0, usual=(0.0, 64.0)
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


def check_asynchronous(config: RLConfig) -> Iterator[Finding]:
    """Staleness, queue and waits agree with the ratio, and classes of the user have the form `module:Class`."""
    yield from _check_staleness(config)
    yield from _check_repeatable(config)
    yield from _check_queue(config)
    yield from _check_waits(config)
    yield from _check_health_checks(config)
    for key in (item.name for item in fields(config.async_training) if item.name.endswith("_class")):
        name = getattr(config.async_training, key)
        if name is not None and not names_code(name):
            yield error(f"async_training.{key}", f"{name!r} is not the name of a class; write module:Class")
    if 0 < config.async_generation_ratio < LEAST_RATIO and "async_generation_ratio" in config.source.given:
        yield warning(
            "async_generation_ratio",
            f"{config.async_generation_ratio:g} lets almost nothing be generated ahead; use 0, or at least "
            f"{LEAST_RATIO}",
        )


def _check_staleness(config: RLConfig) -> Iterator[Finding]:
    ratio, allowed = config.async_generation_ratio, config.async_training.max_staleness_allowed
    least = versions_ahead(config.async_generation_ratio)
    if allowed is not None and allowed < least:
        yield error(
            "async_training.max_staleness_allowed",
            f"{allowed} would drop samples that async_generation_ratio {ratio:g} admits, up to {least} "
            f"version(s) old; use at least {least}, or a ratio of at most {allowed}",
        )
    if config.async_training.rollouter == "inline" and ratio > 0:
        yield error(
            "async_training.rollouter",
            f"inline generates each batch on request, so nothing runs ahead and async_generation_ratio "
            f"{ratio:g} has no effect; use auto, or a ratio of 0",
        )
    if ratio > max(1, config.max_steps - 1):
        yield warning(
            "async_generation_ratio",
            f"{ratio:g} batches ahead are more than remain in a run of max_steps {config.max_steps}; anything above "
            f"{config.max_steps - 1} has no further effect",
        )


def _check_repeatable(config: RLConfig) -> Iterator[Finding]:
    if config.deterministic and config.async_generation_ratio > 0:
        yield error(
            "deterministic",
            f"true is not possible at async_generation_ratio {config.async_generation_ratio:g}: which weights sample "
            "a token depends on timing; use a ratio of 0, or false",
        )


def _check_queue(config: RLConfig) -> Iterator[Finding]:
    asynchronous = config.async_training
    batches, most = asynchronous.min_batch_count, max_batches_ready(config.async_generation_ratio)
    if batches > most:
        yield error(
            "async_training.min_batch_count",
            f"{batches} batches are never ready at a time: async_generation_ratio {config.async_generation_ratio:g} "
            f"admits {most}; use at most {most}, or a ratio of at least {batches - 1}",
        )
    samples, queue = config.samples_per_batch, asynchronous.max_queue_size
    unit, product = "samples", f" x num_return_sequences_in_group {config.num_return_sequences_in_group} = {samples}"
    if config.pipeline == "agentic":
        samples, unit, product = config.rollout_batch_size, "trajectories", ""
    if queue is not None and queue < batches * samples:
        yield error(
            "async_training.max_queue_size",
            f"{queue} {unit} cannot hold {batches} batch(es) of rollout_batch_size {config.rollout_batch_size}"
            f"{product}, so no batch would ever be ready; use at least {batches * samples}",
        )


def _check_waits(config: RLConfig) -> Iterator[Finding]:
    asynchronous = config.async_training
    if asynchronous.batch_deadline_s < asynchronous.batch_timeout_s:
        yield error(
            "async_training.batch_deadline_s",
            f"{asynchronous.batch_deadline_s:g} ends the run before batch_timeout_s {asynchronous.batch_timeout_s:g} "
            "reports the requests it waits for; use a longer one",
        )
    longest = config.actor_infer.generation_timeout_s
    age = asynchronous.max_sample_age_s
    if age is not None and age < longest and config.async_generation_ratio > 0:
        yield warning(
            "async_training.max_sample_age_s",
            f"{age:g} s is less than actor_infer.generation_timeout_s {longest:g} s, so a response that takes longer "
            "is dropped; use at least that, or lower generation_timeout_s",
        )
    if config.in_flight_policy == "drain" and config.sync_timeout_s < longest:
        yield warning(
            "sync_timeout_s",
            f"{config.sync_timeout_s:g} s limits a weight update, and in_flight_policy drain first waits for "
            f"requests of up to actor_infer.generation_timeout_s {longest:g} s; use at least that",
        )


def _check_health_checks(config: RLConfig) -> Iterator[Finding]:
    interval, timeout, limit = config.health_check_interval_s, config.health_check_timeout_s, config.rpc_timeout_s
    if interval >= limit:
        yield error(
            "health_check_interval_s",
            f"{interval:g} s is the duration of a health check, which rpc_timeout_s {limit:g} s would end as if the "
            f"engine did not answer; use less than {limit:g}, such as {min(2.0, limit / 2):g}",
        )
    elif interval + timeout > limit:
        yield warning(
            "health_check_timeout_s",
            f"{timeout:g} s and health_check_interval_s {interval:g} s are longer than rpc_timeout_s {limit:g} s, "
            f"which ends a health check: an engine has less time to answer; use at most {limit - interval:g}, or a "
            "higher rpc_timeout_s",
        )
