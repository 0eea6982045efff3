"""Assembles a reinforcement learning run: what differs between pipelines is where its samples come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from roll.configs.pipeline import RLConfig
from roll.configs.plan import make_plan
from roll.distributed.weight_sync.publisher import WeightPublisher
from roll.pipeline.errors import RunError
from roll.pipeline.extensions import load_extensions
from roll.pipeline.publishing import ClockedPublisher
from roll.pipeline.rl_learner import RLLearner
from roll.pipeline.rollouter import Rollouter
from roll.pipeline.samples import Ask, RolloutSamples, here
from roll.pipeline.session import Session
from roll.pipeline.tokenizer import load_tokenizer
from roll.pipeline.training_loop import TrainingLoop
from roll.rollout.types import SamplingParams
from roll.trackers import TrackerGroup

if TYPE_CHECKING:
    from roll.distributed.client import ClusterClient

OWN_DEADLINE_GRACE_S = 60.0
"""Added to a deadline that the rollouter keeps itself: its message says what it waits for, so it must come first."""

ConfigT = TypeVar("ConfigT", bound=RLConfig)


class RLPipeline(ABC, Generic[ConfigT]):
    """Everything that can be wrong with the inputs is found by `prepare`, before Ray or an engine starts."""

    def __init__(self, config: ConfigT) -> None:
        """Computes the plan; reads no data yet."""
        self._config = config
        self.plan = make_plan(config)

    async def prepare(self) -> None:
        """Reads the tokenizer and what samples are made of.

        Raises:
            RunError: the tokenizer cannot be read; a stop string is not one token.
        """
        self._tokenizer = load_tokenizer(self._config.actor_train.model_args.model_name_or_path)
        self._samplings = self._sampling("actor_infer"), self._sampling("validation")

    @abstractmethod
    def rollouter_here(self, engines: ClusterClient) -> Rollouter[Any]:
        """One that runs in this process."""

    @abstractmethod
    def rollouter_elsewhere(self, engines: ClusterClient) -> tuple[Any, ...]:
        """A function and its arguments, which make one in another process; what this process held for it is let go."""

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
        config, engines = self._config, session.clusters["actor_infer"].client()
        if not config.runs_in_background:
            rollouter = self.rollouter_here(engines)
            session.close_first(rollouter.close)
            return here(rollouter)
        deadlines = {"take": config.async_training.batch_deadline_s + OWN_DEADLINE_GRACE_S}
        return session.start_service("rollouter", deadlines, *self.rollouter_elsewhere(engines)).call

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
