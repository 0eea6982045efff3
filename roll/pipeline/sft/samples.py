"""The SFT sample source: prompt and answer pairs, one optimizer step a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.configs.pipeline import SFTConfig
from roll.configs.seeds import role_seed
from roll.datasets.collate import collate_examples
from roll.datasets.prompts import PromptSampler
from roll.datasets.sft import SFTExample
from roll.distributed.protocol import DataProto
from roll.pipeline.clock import StepClock
from roll.pipeline.interfaces import SampleBatch
from roll.pipeline.sharding import cluster_log_probs, samples_per_optimizer_step

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster
    from roll.distributed.train_worker import TrainWorker


class SFTSamples:
    """Draws batches in a seeded order; validation is the loss on the answers of held-out pairs."""

    def __init__(
        self, config: SFTConfig, examples: list[SFTExample], validation: list[SFTExample], actor: Cluster[TrainWorker]
    ) -> None:
        """Takes the encoded pairs and the cluster whose loss is measured."""
        self._config = config
        self._examples = examples
        self._validation = validation
        self._actor = actor
        shuffle = config.actor_train.data_args.shuffle
        self._sampler = PromptSampler(len(examples), role_seed(config.seed, "examples"), shuffle)
        self._batch_size = samples_per_optimizer_step(config.actor_train, actor.layout.data)

    async def next_batch(self, version: int, clock: StepClock) -> SampleBatch:
        """The next `per_device_train_batch_size * gradient_accumulation_steps * dp` pairs."""
        chosen = [self._examples[index] for index in self._sampler.take(self._batch_size)]
        return SampleBatch(DataProto.from_dict(collate_examples(chosen)))

    async def validate(self, version: int) -> dict[str, float]:
        """`val/loss`: mean negative log-prob of an answer token, in nats."""
        data = DataProto.from_dict(collate_examples(self._validation))
        data.meta_info["temperature"] = 1.0
        answer = await cluster_log_probs(self._actor, data, self._config.actor_train)
        mask = data.batch["response_mask"]
        return {"val/loss": float(-(answer.batch["log_probs"] * mask).sum() / mask.sum())}

    async def advance(self, version: int) -> None:
        """Nothing is generated."""

    async def state_dict(self) -> dict[str, Any]:
        """The data cursor."""
        return {"sampler": self._sampler.state_dict()}

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self._sampler.load_state_dict(state["sampler"])

    async def health(self) -> dict[str, Any]:
        """Nothing runs beside the loop."""
        return {}
