"""Assembles an RLVR run: prompts, tokenizer and rewards first, then engines and the learner."""

from __future__ import annotations

import logging

from roll.configs.pipeline import RLVRConfig
from roll.configs.plan import make_plan
from roll.configs.queue import runs_in_background
from roll.datasets.prompts import load_prompts
from roll.datasets.records import naming
from roll.datasets.templates import EncodedPrompt, encode_prompts
from roll.distributed.weight_sync.publisher import WeightPublisher
from roll.pipeline.errors import RunError
from roll.pipeline.extensions import load_extensions
from roll.pipeline.publishing import ClockedPublisher
from roll.pipeline.rl_learner import RLLearner
from roll.pipeline.rlvr.rollouter import RolloutInputs, make_rollouter
from roll.pipeline.rlvr.scoring import Scorer
from roll.pipeline.samples import Ask, RolloutSamples, here
from roll.pipeline.session import Session
from roll.pipeline.tokenizer import load_tokenizer
from roll.pipeline.training_loop import TrainingLoop
from roll.rollout.types import SamplingParams
from roll.trackers import TrackerGroup

logger = logging.getLogger(__name__)

OWN_DEADLINE_GRACE_S = 60.0
"""Added to a deadline that the rollouter keeps itself: its message says what it waits for, so it must come first."""


class RLVRPipeline:
    """Everything that can be wrong with the inputs is found by `prepare`, before Ray or an engine starts."""

    def __init__(self, config: RLVRConfig) -> None:
        """Computes the plan; reads no data yet."""
        self._config = config
        self.plan = make_plan(config)
        self._scorer: Scorer | None = None

    async def prepare(self) -> None:
        """Reads and encodes the prompts, starts the rewards and tests them on known answers.

        Raises:
            RunError: a tag that no reward scores, a broken reward, no validation prompts though eval_steps asks, a
                stop string that is not one token.
        """
        config = self._config
        self._tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
        self._samplings = self._sampling("actor_infer"), self._sampling("validation")
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
        with naming(f"{role} ({', '.join(files)})"):
            encoded, dropped = encode_prompts(prompts, self._tokenizer, args.template, self._config.prompt_length)
        if dropped:
            logger.warning(
                "%s: %d of %d prompts are longer than prompt_length %d and were dropped",
                role, dropped, len(prompts), self._config.prompt_length,
            )  # fmt: skip
        return encoded

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The loop, its parts joined to the running clusters."""
        config, clusters = self._config, session.clusters
        rollouter = self._rollouter(session)
        await session.ready()
        publisher = WeightPublisher(clusters["actor_train"], clusters["actor_infer"], config)
        await publisher.setup()
        learner = (load_extensions(config).trainer or RLLearner)(
            config, clusters["actor_train"], clusters.get("reference")
        )
        return TrainingLoop(config, RolloutSamples(rollouter), learner, ClockedPublisher(publisher), trackers)

    def _rollouter(self, session: Session) -> Ask:
        """The way to the rollouter: here, or in a process of its own when it runs in the background."""
        config = self._config
        engines = session.clusters["actor_infer"].client()
        inputs = RolloutInputs(config, self._prompts, self._validation, *self._samplings)
        if not runs_in_background(config):
            return here(make_rollouter(inputs, engines, self._scorer))
        assert self._scorer is not None, "prepare comes first"
        self._scorer.close()
        deadlines = {"take": config.async_training.batch_deadline_s + OWN_DEADLINE_GRACE_S}
        return session.start_service("rollouter", deadlines, make_rollouter, inputs, engines).call

    def _sampling(self, role: str) -> SamplingParams:
        args = getattr(self._config, role).generating_args
        path = f"{role}.generating_args"
        if args.max_new_tokens is None:
            raise RunError(f"{path}.max_new_tokens: is not set")
        stops = [self._tokenizer.encode(text, add_special_tokens=False) for text in args.stop_strings]
        for text, tokens in zip(args.stop_strings, stops, strict=True):
            if len(tokens) != 1:
                raise RunError(f"{path}.stop_strings: {text!r} is {len(tokens)} tokens; it must be one")
        return SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            repetition_penalty=args.repetition_penalty,
            stop_token_ids=(self._tokenizer.eos_token_id, *(tokens[0] for tokens in stops)),
        )

    async def close(self) -> None:
        """Ends the reward processes."""
        if self._scorer is not None:
            self._scorer.close()
