"""Assembles an SFT run: pairs and tokenizer first, then the learner."""

from __future__ import annotations

import logging

from roll.configs.pipeline import SFTConfig
from roll.configs.plan import make_plan
from roll.datasets.records import prefix_errors
from roll.datasets.sft import SFTExample, encode_sft_data, load_sft_data
from roll.pipeline.errors import RunError
from roll.pipeline.session import Session
from roll.pipeline.sft.learner import SFTLearner
from roll.pipeline.sft.samples import SFTSamples
from roll.pipeline.tokenizer import load_tokenizer
from roll.pipeline.training_loop import TrainingLoop
from roll.trackers import TrackerGroup

logger = logging.getLogger(__name__)


class SFTPipeline:
    """Everything that can be wrong with the inputs is found by `prepare`, before Ray starts."""

    def __init__(self, config: SFTConfig) -> None:
        """Computes the plan; reads no data yet."""
        self._config = config
        self.plan = make_plan(config)

    async def prepare(self) -> None:
        """Reads and encodes the pairs."""
        config = self._config
        self._tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
        self._examples = self._read("actor_train")
        self._validation = self._read("validation") if config.eval_steps else []

    def _read(self, role: str) -> list[SFTExample]:
        args = getattr(self._config, role).data_args
        if not args.file_name:
            raise RunError(f"{role}.data_args.file_name: names no file")
        data = load_sft_data(args.file_name, args)
        lengths = (self._config.prompt_length, self._config.sequence_length or 0)
        with prefix_errors(f"{role} ({', '.join(args.file_name)})"):
            encoded, dropped = encode_sft_data(data, self._tokenizer, args.template, *lengths, args.mask_history)
        if dropped:
            logger.warning(
                "%s: %d of %d examples dropped: prompt over %d or all over %d tokens",
                role,
                dropped,
                len(data),
                *lengths,
            )
        return encoded

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The loop, its parts joined to the running cluster."""
        await session.ready()
        actor = session.train_clusters["actor_train"]
        samples = SFTSamples(self._config, self._examples, self._validation, actor)
        learner = SFTLearner(self._config, actor)
        return TrainingLoop(self._config, samples, learner, None, trackers, self._reached)

    def _reached(self, metrics: dict[str, float]) -> bool:
        target = self._config.target_loss
        return target is not None and metrics["val/loss"] <= target

    async def close(self) -> None:
        """Nothing was started."""
