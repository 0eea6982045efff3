"""Learning from stored examples, which nothing generates; and SFT, supervised fine-tuning on prompt and answer pairs.

`preference.py` has what learns from pairs of responses.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from roll.base.errors import RunError
from roll.base.timers import StepClock
from roll.configs.arguments import DataArguments
from roll.configs.pipeline import PreferenceConfig, SFTConfig, role_seed
from roll.configs.roles import TrainedRoleConfig
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_examples
from roll.datasets.micro_batches import OptimizerStepPlan
from roll.datasets.prompts import PromptSampler
from roll.datasets.records import prefix_errors
from roll.datasets.sft import SFTExample, load_sft_data
from roll.datasets.tokenizer import encode_data, load_tokenizer
from roll.distributed.train.train_worker import TrainWorker
from roll.pipeline.learning.actor_learner import ActorLearner, metric_name
from roll.pipeline.learning.performance import Performance
from roll.pipeline.learning.shards import cluster_log_probs, training_plans, training_shards
from roll.pipeline.run import TrainingLoop
from roll.pipeline.session import Session
from roll.plan.memory import model_shapes
from roll.plan.plan import make_plan
from roll.rollout.source import SampleBatch
from roll.trackers import TrackerGroup

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ConfigT = TypeVar("ConfigT", bound=SFTConfig | PreferenceConfig)


class StoredLearner(ActorLearner, Generic[ItemT]):
    """Makes one optimizer step of each batch of examples."""

    loss: ClassVar[str]
    """Name of the loss, in `roll.algorithms.losses`."""

    def __init__(self, actor: Cluster[TrainWorker], role: TrainedRoleConfig, loss_config: Any = None) -> None:
        super().__init__(actor)
        self._role, self._loss_config = role, loss_config

    @abstractmethod
    def collate(self, items: Sequence[ItemT]) -> Batch:
        """The tensors of examples."""

    @abstractmethod
    def plans(self, data: Batch) -> list[OptimizerStepPlan]:
        """The optimizer steps of one pass over a batch."""

    @abstractmethod
    async def validate(self, data: Batch) -> dict[str, float]:
        """`val/...` of held-out examples under the current weights."""

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        """Returns `actor/...`."""
        (plan,) = self.plans(batch.data)
        options = {"temperature": 1.0, "loss": self.loss, "loss_config": self._loss_config}
        with clock.measure("train"):
            shards = training_shards(batch.data, plan, options)
            metrics = (await self._actor.call_shards(TrainWorker.train_step, shards))[0]
        return {metric_name(name): value for name, value in metrics.items()}


class StoredSamples(Generic[ItemT]):
    """Draws batches of a dataset in a seeded order, each as large as one optimizer step."""

    def __init__(
        self,
        items: Sequence[ItemT],
        held_out: Sequence[ItemT],
        sampler: PromptSampler,
        batch_size: int,
        learner: StoredLearner[ItemT],
    ) -> None:
        self._items, self._held_out, self._learner = items, held_out, learner
        self._sampler, self._batch_size = sampler, batch_size

    async def next_batch(self) -> SampleBatch:
        indices = self._sampler.take(self._batch_size)
        return SampleBatch(self._learner.collate([self._items[index] for index in indices]))

    async def validate(self) -> dict[str, float]:
        return await self._learner.validate(self._learner.collate(self._held_out))

    async def stop(self) -> None:
        """Does nothing: no call of `next_batch` waits."""

    async def advance(self, version: int) -> None:
        """Does nothing: no engine generates."""

    async def state_dict(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict()}

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state["sampler"])

    async def health(self) -> dict[str, Any]:
        return {}


class StoredPipeline(ABC, Generic[ConfigT]):
    """A model that learns from examples; `prepare` checks every input before Ray starts."""

    load: Callable[[list[str], DataArguments], Sequence[Any]]
    """Reads the examples of files."""

    def __init__(self, config: ConfigT) -> None:
        self._config = config
        self.plan, self.split = make_plan(config), None

    @abstractmethod
    def learner(self, clusters: Mapping[str, Cluster[TrainWorker]]) -> StoredLearner[Any]:
        """The learner, connected to the running clusters."""

    async def prepare(self) -> None:
        """Reads and encodes the examples."""
        config = self._config
        self._tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
        self._examples = self._read("actor_train", config.actor_train.data_args)
        self._held_out = self._read("validation", config.validation.data_args) if config.eval_steps else []

    def _read(self, role: str, args: DataArguments) -> list[Any]:
        if not args.file_name:
            raise RunError(f"{role}.data_args.file_name: is not set")
        data, config = self.load(args.file_name, args), self._config
        with prefix_errors(f"{role} ({', '.join(args.file_name)})"):
            encoded, dropped = encode_data(config, args, data, self._tokenizer)
        if dropped:
            message = "%s: %d of %d examples dropped: prompt over %d or all over %d tokens"
            logger.warning(message, role, dropped, len(data), config.prompt_length, config.sequence_length or 0)
        return encoded

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The training loop, connected to the running clusters."""
        await session.ready()
        config, role, learner = self._config, self._config.actor_train, self.learner(session.train_clusters)
        sampler = PromptSampler(len(self._examples), role_seed(config.seed, "examples"), role.data_args.shuffle)
        samples = StoredSamples(self._examples, self._held_out, sampler, role.samples_per_optimizer_step, learner)
        performance = Performance(config.device_roles(), model_shapes(config).get("actor_train"))
        return TrainingLoop(config, samples, learner, None, trackers, self.target_reached, performance=performance)

    def target_reached(self, metrics: dict[str, float]) -> bool:
        return False

    async def close(self) -> None:
        """Does nothing: `prepare` starts no process."""


class SFTPipeline(StoredPipeline[SFTConfig]):
    """One role that learns answers."""

    load = staticmethod(load_sft_data)

    def learner(self, clusters: Mapping[str, Cluster[TrainWorker]]) -> SFTLearner:
        return SFTLearner(clusters["actor_train"], self._config.actor_train)

    def target_reached(self, metrics: dict[str, float]) -> bool:
        target = self._config.target_loss
        return target is not None and metrics["val/loss"] <= target


class SFTLearner(StoredLearner[SFTExample]):
    """Learns by the negative log-likelihood of the answers."""

    loss = "sft"

    def collate(self, items: Sequence[SFTExample]) -> Batch:
        return Batch(collate_examples(items))

    def plans(self, data: Batch) -> list[OptimizerStepPlan]:
        return training_plans(data, self._role, self._actor.platform)

    async def validate(self, data: Batch) -> dict[str, float]:
        """`val/loss`: mean negative log-prob of an answer token, in nats."""
        answer, mask = await cluster_log_probs(self._actor, data, self._role), data.batch["response_mask"]
        return {"val/loss": float(-(answer.batch["log_probs"] * mask).sum() / mask.sum())}
