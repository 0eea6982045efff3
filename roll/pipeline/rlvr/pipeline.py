"""Assembles an RLVR run: prompts, tokenizer and rewards first, then engines and the learner."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from roll.configs.pipeline import RLVRConfig
from roll.datasets.prompts import load_prompts
from roll.datasets.records import prefix_errors
from roll.datasets.templates import EncodedPrompt, encode_prompts
from roll.pipeline.errors import RunError
from roll.pipeline.rl_pipeline import RLPipeline
from roll.pipeline.rlvr.groups import Group
from roll.pipeline.rlvr.rollouter import RolloutInputs, make_rollouter
from roll.pipeline.rlvr.scoring import Scorer
from roll.pipeline.rollouter import Rollouter

if TYPE_CHECKING:
    from roll.distributed.infer_worker import EngineClient

logger = logging.getLogger(__name__)


class RLVRPipeline(RLPipeline[RLVRConfig]):
    """Samples are single responses to prompts, scored by rewards."""

    def __init__(self, config: RLVRConfig) -> None:
        """Computes the plan; reads no data yet."""
        super().__init__(config)
        self._scorer: Scorer | None = None

    async def prepare(self) -> None:
        """Reads and encodes the prompts, starts the rewards and tests them on known answers.

        Raises:
            RunError: a tag that no reward scores, a broken reward, no validation prompts though eval_steps asks, a
                stop string that is not one token.
        """
        await super().prepare()
        config = self._config
        self._prompts = self._read("actor_train", config.actor_train.data_args.file_name)
        if len(self._prompts) < config.rollout_batch_size:
            logger.warning(
                "actor_train: %d prompts for a rollout_batch_size of %d: every batch holds some more than once",
                len(self._prompts), config.rollout_batch_size,
            )  # fmt: skip
        self._validation = self._read("validation", config.validation.data_args.file_name) if config.eval_steps else []
        self._scorer = scorer = Scorer(config.rewards, self._tokenizer)
        for tag in sorted({prompt.tag for prompt in [*self._prompts, *self._validation]}):
            scorer.reward_of(tag)
        await scorer.self_test()

    def _read(self, role: str, files: list[str]) -> list[EncodedPrompt]:
        args = getattr(self._config, role).data_args
        if not files:
            raise RunError(f"{role}.data_args.file_name: names no file")
        prompts = load_prompts(files, args)
        with prefix_errors(f"{role} ({', '.join(files)})"):
            encoded, dropped = encode_prompts(prompts, self._tokenizer, args.template, self._config.prompt_length)
        if dropped:
            logger.warning(
                "%s: %d of %d prompts are longer than prompt_length %d and were dropped",
                role, dropped, len(prompts), self._config.prompt_length,
            )  # fmt: skip
        return encoded

    def rollouter_here(self, engines: EngineClient) -> Rollouter[Group]:
        """With the rewards that `prepare` has started."""
        return make_rollouter(self._inputs(), engines, self._scorer)

    def rollouter_elsewhere(self, engines: EngineClient) -> tuple[Any, ...]:
        """It starts rewards of its own, so those of `prepare` end."""
        assert self._scorer is not None, "prepare comes first"
        self._scorer.close()
        return make_rollouter, self._inputs(), engines

    def _inputs(self) -> RolloutInputs:
        return RolloutInputs(self._config, self._prompts, self._validation, *self._samplings)

    async def close(self) -> None:
        """Ends the reward processes."""
        if self._scorer is not None:
            self._scorer.close()
