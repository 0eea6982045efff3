"""What a kind of run is, and what a hook of the user is; the kinds are in `kinds`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from roll.pipeline.bottleneck_report import Split
    from roll.pipeline.run import TrainingLoop
    from roll.pipeline.session import Session
    from roll.plan.plan import Plan
    from roll.rollout.source import SampleBatch
    from roll.trackers import TrackerGroup


class Pipeline(Protocol):
    """Assembles the training loop of one kind of run.

    Attributes:
        plan: for `run.json`.
        split: of the devices, for the report on the bottleneck; None where nothing is generated.
    """

    plan: Plan
    split: Split | None

    async def prepare(self) -> None:
        """Reads and checks every input, before Ray starts."""

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The training loop, connected to the running clusters."""

    async def close(self) -> None:
        """Ends what `prepare` started."""


@runtime_checkable
class BatchHook(Protocol):
    """Sees every batch before it is learned from.

    `async_training.batch_hook_class` names a class that is constructed with the run's config, on the driver.
    """

    def before_learning(self, batch: SampleBatch, step: int) -> Mapping[str, float] | None:
        """Reads `batch` or changes the values of its tensors; it must keep its samples.

        Args:
            batch: `data.batch` has the tensors: `input_ids`, `attention_mask`, `position_ids`, `response_mask`,
                `behavior_log_probs` and `weight_version` [B, T], `scores` and `group_ids` [B], and those of turns.
                `data.non_tensor_batch["id"]` names the prompts. Padding samples have no token in `response_mask`.
            step: that learns from it.

        Returns:
            Metrics to add as `batch_hook/<name>`.
        """
