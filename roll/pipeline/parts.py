"""The parts of a training loop: what each kind of run makes of them is in `kinds`."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from roll.distributed.weights.report import UpdateReport
    from roll.pipeline.bottleneck_report import Split
    from roll.pipeline.run import TrainingLoop
    from roll.pipeline.session import Session
    from roll.plan.plan import Plan
    from roll.rollout.source import SampleBatch
    from roll.rollout.timers import StepClock
    from roll.trackers import TrackerGroup

T = TypeVar("T")


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


class Learner(Protocol):
    """How a batch becomes an update of the weights."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Updates the weights with the whole batch, as step number `step`; returns `actor/...` and related metrics."""

    async def finish_step(self) -> dict[str, float]:
        """Waits for background work of `learn`, such as writing samples; `memory/...` of trained roles, in bytes."""

    async def save(self, folder: Path) -> None:
        """Begins to write weights, optimizer, schedule and RNG of every trained role; `saved` waits for the end."""

    async def saved(self) -> float:
        """Waits until what `save` began is written, or raises the error with which that ended.

        Returns:
            Seconds that `learn` waited for it.
        """

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""

    async def export_hf(self, folder: Path) -> None:
        """Writes the trained model as a HF folder."""


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


class WeightUpdates(Protocol):
    """Transfers the trained weights to the engines; see `WeightSynchronizer`."""

    async def update_weights(self, version: int) -> UpdateReport:
        """All engines that run generate with the weights of `version` from now on."""

    async def while_idle(self, work: Coroutine[Any, Any, T], /) -> T:
        """The result of `work`, during which the trainer is idle: restarted engines get the weights meanwhile."""

    def health(self) -> dict[str, str]:
        """State of each engine by name."""
