"""Generation: bounds on running ahead, waits and query filters."""

from __future__ import annotations

from roll.base.errors import Report
from roll.configs.agentic import AgenticConfig
from roll.configs.asynchronous import max_batches_ready, versions_ahead
from roll.configs.pipeline import RLConfig, RLVRConfig, Source
from roll.configs.rewards import QueryFilterConfig

FILTER_ARGUMENTS = {
    "no_filter": (),
    "mean_filter": ("threshold_up", "threshold_down"),
    "std_filter": ("std_threshold",),
}
"""Thresholds of each type of query filter."""


def check_asynchronous(config: RLConfig, report: Report) -> None:
    """Staleness, queue and batches agree with the ratio; query filters keep something."""
    _check_staleness(config, report)
    _check_repeatable(config, report)
    _check_queue(config, report)
    _check_waits(config, report)
    _check_health_checks(config, report)
    if isinstance(config, RLVRConfig):
        for name, reward in config.rewards.items():
            path = f"rewards.{name}.query_filter_config"
            _check_filter(path, reward.query_filter_config, config.num_return_sequences_in_group, config.source, report)


def _check_staleness(config: RLConfig, report: Report) -> None:
    ratio, allowed = config.async_generation_ratio, config.async_training.max_staleness_allowed
    least = versions_ahead(config.async_generation_ratio)
    if allowed is not None and allowed < least:
        report.error(
            "async_training.max_staleness_allowed",
            f"{allowed} would drop samples that async_generation_ratio {ratio:g} admits, up to {least} "
            f"version(s) old; use at least {least}, or a ratio of at most {allowed}",
        )
    if config.async_training.rollouter == "inline" and ratio > 0:
        report.error(
            "async_training.rollouter",
            f"inline generates each batch on request, so nothing runs ahead and async_generation_ratio "
            f"{ratio:g} has no effect; use auto, or a ratio of 0",
        )
    if ratio > max(1, config.max_steps - 1):
        report.warn(
            "async_generation_ratio",
            f"{ratio:g} batches ahead are more than remain in a run of max_steps {config.max_steps}; anything above "
            f"{config.max_steps - 1} has no further effect",
        )


def _check_repeatable(config: RLConfig, report: Report) -> None:
    if config.deterministic and config.async_generation_ratio > 0:
        report.error(
            "deterministic",
            f"true is not possible at async_generation_ratio {config.async_generation_ratio:g}: which weights sample "
            "a token depends on timing; use a ratio of 0, or false",
        )


def _check_queue(config: RLConfig, report: Report) -> None:
    asynchronous = config.async_training
    batches, most = asynchronous.min_batch_count, max_batches_ready(config.async_generation_ratio)
    if batches > most:
        report.error(
            "async_training.min_batch_count",
            f"{batches} batches are never ready at a time: async_generation_ratio {config.async_generation_ratio:g} "
            f"admits {most}; use at most {most}, or a ratio of at least {batches - 1}",
        )
    samples, queue = config.samples_per_batch, asynchronous.max_queue_size
    unit, product = "samples", f" x num_return_sequences_in_group {config.num_return_sequences_in_group} = {samples}"
    if isinstance(config, AgenticConfig):
        samples, unit, product = config.rollout_batch_size, "trajectories", ""
    if queue is not None and queue < batches * samples:
        report.error(
            "async_training.max_queue_size",
            f"{queue} {unit} cannot hold {batches} batch(es) of rollout_batch_size {config.rollout_batch_size}"
            f"{product}, so no batch would ever be ready; use at least {batches * samples}",
        )


def _check_waits(config: RLConfig, report: Report) -> None:
    asynchronous = config.async_training
    if asynchronous.batch_deadline_s < asynchronous.batch_timeout_s:
        report.error(
            "async_training.batch_deadline_s",
            f"{asynchronous.batch_deadline_s:g} ends the run before batch_timeout_s {asynchronous.batch_timeout_s:g} "
            "reports the requests it waits for; use a longer one",
        )
    longest = config.actor_infer.generation_timeout_s
    age = asynchronous.max_sample_age_s
    if age is not None and age < longest and config.async_generation_ratio > 0:
        report.warn(
            "async_training.max_sample_age_s",
            f"{age:g} s is less than actor_infer.generation_timeout_s {longest:g} s, so a response that takes longer "
            "is dropped; use at least that, or lower generation_timeout_s",
        )
    if config.in_flight_policy == "drain" and config.sync_timeout_s < longest:
        report.warn(
            "sync_timeout_s",
            f"{config.sync_timeout_s:g} s limits a weight update, and in_flight_policy drain first waits for "
            f"requests of up to actor_infer.generation_timeout_s {longest:g} s; use at least that",
        )


def _check_health_checks(config: RLConfig, report: Report) -> None:
    interval, timeout, limit = config.health_check_interval_s, config.health_check_timeout_s, config.rpc_timeout_s
    if interval >= limit:
        report.error(
            "health_check_interval_s",
            f"{interval:g} s is the duration of a health check, which rpc_timeout_s {limit:g} s would end as if the "
            f"engine did not answer; use less than {limit:g}, such as {min(2.0, limit / 2):g}",
        )
    elif interval + timeout > limit:
        report.warn(
            "health_check_timeout_s",
            f"{timeout:g} s and health_check_interval_s {interval:g} s are longer than rpc_timeout_s {limit:g} s, "
            f"which ends a health check: an engine has less time to answer; use at most {limit - interval:g}, or a "
            "higher rpc_timeout_s",
        )


def _check_filter(path: str, config: QueryFilterConfig, group: int, source: Source, report: Report) -> None:
    arguments = config.filter_args
    for name in ("threshold_up", "threshold_down", "std_threshold"):
        if getattr(arguments, name) is not None and name not in FILTER_ARGUMENTS[config.type]:
            owner = next(kind for kind, names in FILTER_ARGUMENTS.items() if name in names)
            where, message = f"{path}.filter_args.{name}", f"belongs to type {owner}, but type is {config.type}"
            report.unused(where, message, is_error=not source.unused_by_override(where, [f"{path}.type"]))
    low, high = arguments.threshold_down, arguments.threshold_up
    if config.type == "mean_filter" and low is None and high is None:
        report.error(
            f"{path}.type",
            "mean_filter without thresholds drops nothing; give filter_args, such as threshold_down: 0.1, "
            "threshold_up: 0.9",
        )
    if config.type == "std_filter" and group == 1:
        report.error(
            f"{path}.type",
            "std_filter drops every group, since num_return_sequences_in_group 1 leaves a standard deviation of 0; use "
            "at least 2, or another type",
        )
    if low is not None and high is not None and low >= high:
        report.error(
            f"{path}.filter_args",
            f"no mean score lies between threshold_down {low:g} and threshold_up {high:g}; "
            "threshold_down must be the smaller",
        )
