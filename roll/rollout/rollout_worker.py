"""The rollout worker: makes groups of scored trajectories, and validations, batches and metrics of them.

RLVR is an environment of one turn, so RLVR and agents share groups, batches, metrics and validation. They differ in how
a group gets its trajectories: `roll.pipeline.kinds.rlvr` sends the requests of all groups in one call and scores
the responses in one batch; `roll.rollout.agents.agentic_worker` runs episodes of many turns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from roll.base.errors import RunError
from roll.base.timers import StepClock, Timer
from roll.datasets.batch import Batch
from roll.rollout.ledger import PromptRequest
from roll.rollout.metrics import rollout_metrics, validation_metrics
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import Group

Purpose = Literal["train", "val"]
"""What a group is generated for; names of requests and seeds derive from it."""

VALIDATION_TRIES = 3
"""Times a failed group of a validation is generated; one that fails every time indicates an error in data or code."""

TIMED_OUT = "trajectory_timeout"
"""Drop reason of a group that reached its deadline; a validation does not retry it, which could take as long again."""


class RolloutWorker(ABC):
    """Makes the groups of a `Rollouter`; no Ray worker and no engine, those are `InferWorker`.

    It generates and scores groups; one that cannot be completed is dropped whole, with a reason.

    Attributes:
        work: kinds of work that are timed, "generate" among them; `time/<name>` of a step comes from them.
        unit: what one group is, in messages.
        spares: key of additional samples that may fail, if there is one.
    """

    work: ClassVar[tuple[str, ...]]
    unit: ClassVar[str] = "prompt"
    spares: ClassVar[str] = ""

    def __init__(self, samples_multiple: int, staleness_threshold: int) -> None:
        """A batch is filled up to `samples_multiple`; samples older than `staleness_threshold` versions are counted."""
        self._samples_multiple, self._staleness_threshold = samples_multiple, staleness_threshold

    @abstractmethod
    def draw(self, requests: Sequence[PromptRequest]) -> list[Group]:
        """The next prompts or environments, one for each request; nothing is generated yet."""

    @abstractmethod
    def validation_groups(self) -> list[Group]:
        """The prompts or environments of a validation, the same every time; nothing is generated yet."""

    @abstractmethod
    async def generate(self, groups: Sequence[Group], purpose: Purpose, timer: Timer) -> None:
        """Generates and scores; afterwards each group has its trajectories or a `drop_reason`."""

    def filter_reason(self, group: Group) -> tuple[str, str] | None:
        """Drop reason of a complete group without a learning signal and the path of its filter; None keeps it."""
        return None

    def policy_of(self, group: Group) -> str:
        """The policy that answers and learns from a group; empty for the only one."""
        return ""

    async def validate(self) -> dict[str, float]:
        """`val/...` over all validation groups; a failed group is generated again with the same seeds.

        Raises:
            RunError: a group failed VALIDATION_TRIES times or timed out; scores of a part would not be comparable.
        """
        groups = self.validation_groups()
        remaining, replayed = groups, 0
        for attempt in range(1, VALIDATION_TRIES + 1):
            await self.generate(remaining, "val", StepClock())
            failed = [group for group in remaining if group.drop_reason is not None]
            if not failed:
                break
            late = next((group for group in failed if group.drop_reason == TIMED_OUT), None)
            if late is not None or attempt == VALIDATION_TRIES:
                first = late or failed[0]
                raise RunError(
                    f"validation group {first.name}: failed {attempt} times, last with {first.drop_reason}: "
                    f"{first.failure}"
                )
            for group in failed:
                group.drop_reason = group.failure = None
            remaining, replayed = failed, replayed + len(failed)
        return self.validation_metrics(groups) | {"val/replayed_groups": float(replayed)}

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        return validation_metrics(groups)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The tensors that the learner takes; masked rows fill it up to whole optimizer steps."""
        return batch_of_groups(groups, multiple=self._samples_multiple)

    def metrics(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """`rollout/...` and `staleness/...` of a batch that the weights of `version` learn from."""
        return rollout_metrics(groups, version, self._staleness_threshold)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and the settings that the groups of a checkpoint depend on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: it was taken with other data or settings.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every process it started."""
