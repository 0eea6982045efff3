"""From the configuration to what the rollouter and its policy are told."""

from __future__ import annotations

from roll.configs.pipeline import RLConfig
from roll.pipeline.rollouter import RolloutOptions
from roll.rollout.policy import PolicySettings


def policy_settings(config: RLConfig, items_per_batch: int, samples_per_item: int) -> PolicySettings:
    """Bounds of the run, in items; the rules of the configuration have checked that they go together."""
    asynchronous = config.async_training
    queue = asynchronous.max_queue_size
    return PolicySettings(
        batch_size=items_per_batch,
        ratio=config.async_generation_ratio,
        max_staleness=asynchronous.max_staleness_allowed,
        max_queue=None if queue is None else queue // samples_per_item,
        min_batches=asynchronous.min_batch_count,
        total=config.max_steps * items_per_batch,
    )


def rollout_options(config: RLConfig, samples_per_item: int) -> RolloutOptions:
    """How the rollouter behaves."""
    asynchronous = config.async_training
    return RolloutOptions(
        background=config.runs_in_background,
        together=config.deterministic or not config.runs_in_background,
        samples_per_item=samples_per_item,
        failure_rate=config.max_failure_rate,
        resample_factor=config.max_resample_factor,
        report_s=asynchronous.batch_timeout_s,
        deadline_s=asynchronous.batch_deadline_s,
        interval_s=asynchronous.batch_generation_interval_s,
        stale_from=asynchronous.staleness_threshold,
    )
