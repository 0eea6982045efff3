"""How far generation may run ahead, what waits for what, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.fields import option

InFlightPolicy = Literal["retract", "in_place", "drain", "abort_resume"]
"""What becomes of requests that run when new weights are published."""


@dataclass
class AsyncTrainingConfig:
    """Bounds of asynchronous training; they apply to synchronous training as well, where they are never reached."""

    staleness_threshold: int = option(
        3, "Versions; samples with an older token count as stale in `stale_samples_ratio`.", minimum=0
    )
    max_staleness_allowed: int | None = option(
        None,
        "Versions; a group with an older token is dropped when a batch is taken. At least "
        "ceil(async_generation_ratio); default: 5, or that where it is more.",
        minimum=0,
    )
    max_queue_size: int | None = option(
        None,
        "Samples (agentic: trajectories) that may be running or waiting; production blocks at it, nothing is evicted. "
        "Default: what async_generation_ratio admits.",
        minimum=1,
    )
    min_batch_count: int = option(1, "Batches that must be ready before one is taken.", minimum=1)
    batch_timeout_s: float = option(
        30.0, "A batch that takes longer is reported with what it waits for, each time this passes.", above=0
    )
    batch_deadline_s: float = option(3600.0, "The run ends when a batch takes longer.", above=0)
    batch_generation_interval_s: float = option(
        0.0, "Least seconds between submissions of prompt batches; 0 turns it off.", minimum=0
    )
    rollouter: Literal["auto", "actor", "inline"] = option(
        "auto",
        "Where generation is driven: in a process of its own beside training (actor), or inline, batch by batch. "
        "auto: actor when async_generation_ratio is above 0.",
    )
    rollouter_class: str | None = option(None, "`module:Class`, a subclass of roll.pipeline.rollouter.Rollouter.")
    trainer_class: str | None = option(None, "`module:Class`, a subclass of roll.pipeline.learner.RLLearner.")
    metrics_class: str | None = option(
        None, "`module:Class`, a roll.trackers.base.Metrics: sees the metrics of every step and may add some."
    )
    monitor_class: str | None = option(
        None, "`module:Class`, a roll.pipeline.health.Monitor; default: one that writes output_dir/health.json."
    )


@dataclass
class AsyncOptions:
    """What RL pipelines add for running ahead."""

    async_generation_ratio: float = option(0.0, "Batches generation may run ahead; 0 is synchronous.", minimum=0)
    in_flight_policy: InFlightPolicy = option(
        "retract",
        "Requests running at a publish recompute their cache under the new weights (retract), go on with the old "
        "cache (in_place), are waited for (drain), or are cut and continued from their exact tokens (abort_resume).",
    )
    async_training: AsyncTrainingConfig = option(
        factory=AsyncTrainingConfig, help="Bounds and waits of asynchronous training."
    )
