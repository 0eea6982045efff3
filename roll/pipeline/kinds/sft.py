"""SFT: supervised fine-tuning on prompt and answer pairs. Reads the pairs before anything starts."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from roll.base.errors import RunError
from roll.configs.arguments import DataArguments
from roll.configs.pipeline import SFTConfig, role_seed
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_examples
from roll.datasets.prompts import PromptSampler
from roll.datasets.records import prefix_errors
from roll.datasets.sft import SFTExample, load_sft_data
from roll.datasets.tokenizer import encode_data, load_tokenizer
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.learning.actor_learner import ActorLearner
from roll.pipeline.learning.shards import cluster_log_probs, training_plans, training_shards
from roll.pipeline.run import TrainingLoop
from roll.pipeline.session import Session
from roll.plan.plan import make_plan
from roll.rollout.source import SampleBatch
from roll.rollout.timers import StepClock
from roll.trackers import TrackerGroup

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")


class SFTPipeline:
    """One role that learns; `prepare` checks every input before Ray starts."""

    def __init__(self, config: SFTConfig) -> None:
        self._config = config
        self.plan = make_plan(config)

    async def prepare(self) -> None:
        """Reads and encodes the pairs."""
        config = self._config
        self._tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
        self._examples = self._read("actor_train", config.actor_train.data_args)
        self._validation = self._read("validation", config.validation.data_args) if config.eval_steps else []

    def _read(self, role: str, args: DataArguments) -> list[SFTExample]:
        if not args.file_name:
            raise RunError(f"{role}.data_args.file_name: is not set")
        data = load_sft_data(args.file_name, args)
        lengths = (self._config.prompt_length, self._config.sequence_length or 0)
        with prefix_errors(f"{role} ({', '.join(args.file_name)})"):
            encoded, dropped = encode_data(self._config, args, data, self._tokenizer)
        warn_of_dropped(role, dropped, len(data), lengths)
        return encoded

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The training loop, connected to the running cluster."""
        await session.ready()
        actor = session.train_clusters["actor_train"]
        samples = SFTSamples(self._config, self._examples, self._validation, actor)
        learner = SFTLearner(self._config, actor)
        return TrainingLoop(self._config, samples, learner, None, trackers, self._target_reached)

    def _target_reached(self, metrics: dict[str, float]) -> bool:
        target = self._config.target_loss
        return target is not None and metrics["val/loss"] <= target

    async def close(self) -> None:
        """Does nothing: `prepare` starts no process."""


def warn_of_dropped(role: str, dropped: int, total: int, lengths: tuple[int, int]) -> None:
    """Logs how many examples are longer than `lengths`, of a prompt and of all."""
    if dropped:
        message = "%s: %d of %d examples dropped: prompt over %d or all over %d tokens"
        logger.warning(message, role, dropped, total, *lengths)


class StoredSamples(ABC, Generic[ItemT]):
    """Draws batches of a dataset in a seeded order."""

    def __init__(self, items: Sequence[ItemT], sampler: PromptSampler, batch_size: int) -> None:
        """Draws `batch_size` of `items` at a time, in the order of `sampler`."""
        self._items, self._sampler, self._batch_size = items, sampler, batch_size

    @abstractmethod
    def collate(self, items: Sequence[ItemT]) -> Batch:
        """The tensors of these items."""

    @abstractmethod
    async def validate(self) -> dict[str, float]:
        """`val/...` of the current weights."""

    async def next_batch(self) -> SampleBatch:
        """The next items, as many as one optimizer step takes."""
        return SampleBatch(self.collate([self._items[index] for index in self._sampler.take(self._batch_size)]))

    async def stop(self) -> None:
        """Does nothing: no call of `next_batch` waits."""

    async def advance(self, version: int) -> None:
        """Does nothing: no engine generates."""

    async def state_dict(self) -> dict[str, Any]:
        """Position in the data."""
        return {"sampler": self._sampler.state_dict()}

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self._sampler.load_state_dict(state["sampler"])

    async def health(self) -> dict[str, Any]:
        """Empty: nothing runs outside of the training loop."""
        return {}


class SFTSamples(StoredSamples[SFTExample]):
    """Pairs of prompt and answer; validation is the loss on the answers of held-out ones."""

    def __init__(
        self, config: SFTConfig, examples: list[SFTExample], validation: list[SFTExample], actor: Cluster[TrainWorker]
    ) -> None:
        shuffle, seed = config.actor_train.data_args.shuffle, role_seed(config.seed, "examples")
        sampler = PromptSampler(len(examples), seed, shuffle)
        super().__init__(examples, sampler, config.actor_train.samples_per_optimizer_step)
        self._config, self._validation, self._actor = config, validation, actor

    def collate(self, items: Sequence[SFTExample]) -> Batch:
        """The tensors of these examples."""
        return Batch(collate_examples(items))

    async def validate(self) -> dict[str, float]:
        """`val/loss`: mean negative log-prob of an answer token, in nats."""
        data = self.collate(self._validation)
        answer = await cluster_log_probs(self._actor, data, self._config.actor_train)
        mask = data.batch["response_mask"]
        return {"val/loss": float(-(answer.batch["log_probs"] * mask).sum() / mask.sum())}


class SFTLearner(ActorLearner):
    """Makes one optimizer step of each batch: negative log-likelihood of the answers."""

    def __init__(self, config: SFTConfig, actor: Cluster[TrainWorker]) -> None:
        super().__init__(actor)
        self._config = config

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Returns `actor/loss` and the metrics of the optimizer."""
        data, options = batch.data, {"temperature": 1.0, "loss": "sft", "loss_config": None}
        (plan,) = training_plans(data, self._config.actor_train, self._actor.platform)
        with clock.measure("train"):
            shards = training_shards(data, plan, options)
            metrics = (await self._actor.call_shards(TrainWorker.train_step, shards))[0]
        return {f"actor/{name}": value for name, value in metrics.items()}
