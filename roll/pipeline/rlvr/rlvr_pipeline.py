"""RLVR: responses to prompts, scored by verifiable rewards. Reads prompts and tests rewards before anything starts."""

from __future__ import annotations

import logging
from functools import partial

from roll.configs.errors import RunError
from roll.configs.pipeline import RLVRConfig
from roll.datasets.prompts import load_prompts
from roll.datasets.records import prefix_errors
from roll.datasets.templates import EncodedPrompt, encode_prompts
from roll.pipeline.rl_pipeline import RLPipeline, WorkerFactory
from roll.pipeline.rlvr.rlvr_worker import RLVRWorker, Scorer
from roll.pipeline.rollout_worker import Purpose
from roll.pipeline.tokenizer import load_tokenizer
from roll.rollout.engine_pool import EnginePool
from roll.rollout.types import SamplingParams

logger = logging.getLogger(__name__)


class RLVRPipeline(RLPipeline[RLVRConfig]):
    """Samples are single responses to prompts."""

    def __init__(self, config: RLVRConfig) -> None:
        super().__init__(config)
        self._scorer: Scorer | None = None

    async def prepare(self) -> None:
        """Reads and encodes the prompts, starts the rewards and tests them on known answers.

        Raises:
            RunError: a tag that no reward scores, a broken reward, no validation prompts though eval_steps is set, a
                stop string that is not one token.
        """
        await super().prepare()
        config = self._config
        train = self._read("actor_train", config.actor_train.data_args.file_name)
        if len(train) < config.rollout_batch_size:
            logger.warning(
                "actor_train: %d prompts for a rollout_batch_size of %d: every batch holds some more than once",
                len(train),
                config.rollout_batch_size,
            )
        val = self._read("validation", config.validation.data_args.file_name) if config.eval_steps else []
        self._prompts: dict[Purpose, list[EncodedPrompt]] = {"train": train, "val": val}
        self._scorer = scorer = Scorer(config.rewards, self._tokenizer)
        for tag in sorted({prompt.tag for prompt in [*train, *val]}):
            scorer.reward_of(tag)
        await scorer.self_test()

    def _read(self, role: str, files: list[str]) -> list[EncodedPrompt]:
        args = getattr(self._config, role).data_args
        if not files:
            raise RunError(f"{role}.data_args.file_name: is not set")
        prompts = load_prompts(files, args)
        with prefix_errors(f"{role} ({', '.join(files)})"):
            encoded, dropped = encode_prompts(prompts, self._tokenizer, args.template, self._config.prompt_length)
        if dropped:
            logger.warning(
                "%s: %d of %d prompts are longer than prompt_length %d and were dropped",
                role,
                dropped,
                len(prompts),
                self._config.prompt_length,
            )
        return encoded

    def worker_factory(self, own_process: bool) -> WorkerFactory:
        """In this process with the rewards that `prepare` has started, elsewhere with rewards of its own."""
        scorer = self._scorer
        assert scorer is not None, "prepare comes first"
        if own_process:
            scorer.close()
            scorer = None
        return partial(make_rlvr_worker, self._config, self._prompts, self._sampling, scorer)

    async def close(self) -> None:
        """Ends the reward processes."""
        if self._scorer is not None:
            self._scorer.close()


def make_rlvr_worker(
    config: RLVRConfig,
    prompts: dict[Purpose, list[EncodedPrompt]],
    sampling: dict[Purpose, SamplingParams],
    scorer: Scorer | None,
    engines: EnginePool,
) -> RLVRWorker:
    """The rollout worker; without a scorer it starts the rewards itself."""
    if scorer is None:
        scorer = Scorer(config.rewards, load_tokenizer(config.actor_train.model_args.model_name_or_path))
    return RLVRWorker(config, prompts, sampling, engines, scorer)
