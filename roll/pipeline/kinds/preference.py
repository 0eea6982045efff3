"""What the pipelines of preference pairs share: reading them, drawing batches, and the optimizer step on a batch.

Nothing is generated. `dpo.py` and `reward_model.py` add their tensors, their model's output and loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from roll.algorithms.aggregation import LossScale
from roll.algorithms.losses import LOSSES
from roll.base.errors import RunError
from roll.configs.arguments import DataArguments
from roll.configs.pipeline import PreferenceConfig, role_seed
from roll.configs.roles import TrainedRoleConfig
from roll.datasets.batch import Batch
from roll.datasets.micro_batches import OptimizerStepPlan, plan_optimizer_steps
from roll.datasets.preferences import PreferencePair, load_preferences
from roll.datasets.prompts import PromptSampler
from roll.datasets.records import prefix_errors
from roll.datasets.tokenizer import encode_data, load_tokenizer
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.kinds.sft import StoredSamples, warn_of_dropped
from roll.pipeline.learning.actor_learner import ActorLearner
from roll.pipeline.learning.shards import sample_costs, sample_lengths, training_shards
from roll.pipeline.run import TrainingLoop
from roll.pipeline.session import Session
from roll.plan.plan import make_plan
from roll.rollout.source import SampleBatch
from roll.rollout.timers import StepClock
from roll.trackers import TrackerGroup

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

ConfigT = TypeVar("ConfigT", bound=PreferenceConfig)


class PreferencePipeline(ABC, Generic[ConfigT]):
    """A model that learns from pairs; `prepare` checks every input before Ray starts."""

    def __init__(self, config: ConfigT) -> None:
        self._config = config
        self.plan = make_plan(config)

    @abstractmethod
    def learner(self, session: Session) -> PairLearner:
        """The learner, connected to the running clusters."""

    async def prepare(self) -> None:
        """Reads and encodes the pairs."""
        config = self._config
        self._tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
        self._pairs = self._read("actor_train", config.actor_train.data_args)
        self._validation = self._read("validation", config.validation.data_args) if config.eval_steps else []

    def _read(self, role: str, args: DataArguments) -> list[PreferencePair]:
        if not args.file_name:
            raise RunError(f"{role}.data_args.file_name: is not set")
        data = load_preferences(args.file_name, args)
        lengths = (self._config.prompt_length, self._config.sequence_length or 0)
        with prefix_errors(f"{role} ({', '.join(args.file_name)})"):
            encoded, dropped = encode_data(self._config, args, data, self._tokenizer)
        warn_of_dropped(role, dropped, len(data), lengths)
        return encoded

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The training loop, connected to the running clusters."""
        await session.ready()
        learner = self.learner(session)
        samples = PairSamples(self._config, self._pairs, self._validation, learner)
        return TrainingLoop(self._config, samples, learner, None, trackers)

    async def close(self) -> None:
        """Does nothing: `prepare` starts no process."""


class PairLearner(ActorLearner, ABC):
    """Makes one optimizer step of each batch of pairs."""

    loss: ClassVar[str]
    """Name of the loss, which is given what `outputs` returns."""

    def __init__(self, config: PreferenceConfig, actor: Cluster[TrainWorker], loss_config: Any) -> None:
        super().__init__(actor)
        self._config, self._loss_config = config, loss_config

    @abstractmethod
    def collate(self, pairs: Sequence[PreferencePair]) -> Batch:
        """The tensors of P pairs [2 P, T]: the better response of pair i in row 2 i, the worse one in the next."""

    @abstractmethod
    async def outputs(self, data: Batch) -> torch.Tensor:
        """What the current weights give for the tokens of pairs, [2 P, T]."""

    def with_means(self, data: Batch, outputs: torch.Tensor) -> Batch:
        """The pairs with what the loss needs to know of all of them; here nothing."""
        return data

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Returns `actor/...` of the pairs."""
        data, options = batch.data, {"temperature": 1.0, "loss": self.loss, "loss_config": self._loss_config}
        (plan,) = pair_plans(data, self._config.actor_train)
        with clock.measure("train"):
            shards = training_shards(data, plan, options)
            metrics = (await self._actor.call_shards(TrainWorker.train_step, shards))[0]
        return {f"actor/{name}": value for name, value in metrics.items()}

    async def validate(self, data: Batch) -> dict[str, float]:
        """`val/loss`, `val/accuracy` and `val/margin` of pairs under the current weights."""
        scale = LossScale.of(data.batch["response_mask"], self._config.max_sequence_length)
        outputs = await self.outputs(data)
        batch = self.with_means(data, outputs).batch
        loss, metrics = LOSSES[self.loss](outputs, None, batch, scale, self._loss_config)
        return {"val/loss": float(loss), **{f"val/{name}": float(metrics[name]) for name in ("accuracy", "margin")}}


class PairSamples(StoredSamples[PreferencePair]):
    """Draws batches of pairs in a seeded order; validation is the loss and the accuracy on held-out pairs."""

    def __init__(
        self,
        config: PreferenceConfig,
        pairs: list[PreferencePair],
        validation: list[PreferencePair],
        learner: PairLearner,
    ) -> None:
        shuffle, seed = config.actor_train.data_args.shuffle, role_seed(config.seed, "examples")
        super().__init__(pairs, PromptSampler(len(pairs), seed, shuffle), config.actor_train.samples_per_optimizer_step)
        self._validation, self._learner = validation, learner

    def collate(self, items: Sequence[PreferencePair]) -> Batch:
        """The tensors of these pairs."""
        return self._learner.collate(items)

    async def validate(self) -> dict[str, float]:
        """As `PairLearner.validate`, of the held-out pairs."""
        return await self._learner.validate(self.collate(self._validation))


def pair_plans(data: Batch, role: TrainedRoleConfig) -> list[OptimizerStepPlan]:
    """The optimizer steps of one pass over a batch of pairs, with both rows of a pair in the same micro-batch.

    `per_device_train_batch_size` counts pairs; a token limit counts the tokens of all rows.
    """
    rows = torch.tensor(sample_lengths(data)).view(-1, 2)
    limit, packed = role.training_token_limit, role.use_sequence_packing
    lengths = rows.sum(-1) if packed else 2 * rows.amax(-1)
    costs = torch.tensor(sample_costs(rows.flatten().tolist(), role), dtype=torch.float64).view(-1, 2)
    plans = plan_optimizer_steps(
        lengths.tolist(),
        role.layout.data,
        samples_per_step=role.samples_per_optimizer_step,
        costs=(costs.sum(-1) if packed else 2 * costs.amax(-1)).tolist(),
        micro_batch_size=role.training_args.per_device_train_batch_size if limit is None else None,
        max_tokens=limit,
        round_to=(1 if packed else 2) * role.layout.tensor,
        packed=packed,
    )
    return [
        OptimizerStepPlan(
            [_both_rows(shard) for shard in plan.indices],
            [[_both_rows(micro) for micro in shard] for shard in plan.micro_batches],
        )
        for plan in plans
    ]


def _both_rows(pairs: Sequence[int]) -> list[int]:
    return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
