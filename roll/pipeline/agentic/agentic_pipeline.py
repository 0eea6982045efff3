"""Assembles an agentic run: the environments are tried first, then engines and the learner come up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.configs.agentic import AgenticConfig
from roll.configs.layouts import role_layout
from roll.datasets.conversation import ConversationEncoder
from roll.distributed.cluster import log_file, process_environment
from roll.envs import make_env
from roll.pipeline.agentic.environments import EnvPool, EnvSpec
from roll.pipeline.agentic.episode import Task
from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.pipeline.agentic.producer import AgenticProducer
from roll.pipeline.agentic.runner import Player
from roll.pipeline.extensions import load_extensions
from roll.pipeline.learner import samples_per_optimizer_step
from roll.pipeline.rl_pipeline import RLPipeline
from roll.pipeline.rollouter import Rollouter, policy_settings, rollout_options
from roll.pipeline.tokenizer import load_tokenizer
from roll.rollout.engine_pool import EnginePool, Engines
from roll.rollout.types import SamplingParams

if TYPE_CHECKING:
    from roll.distributed.client import ClusterClient


class AgenticPipeline(RLPipeline[AgenticConfig]):
    """Samples are trajectories of many turns, scored by the environments themselves."""

    async def prepare(self) -> None:
        """Reads the tokenizer and makes one environment of every tag.

        Raises:
            ConfigError: an environment does not exist or does not take its options.
            DatasetError: the chat template does not let turns be added one by one.
        """
        await super().prepare()
        chat = ConversationEncoder(self._tokenizer, self._config.actor_train.data_args.template)
        chat.follow(self._tokenizer.eos_token_id, [{"role": "user", "content": "next"}])
        self._tasks = {tag: self._task(tag) for tag in self._config.custom_envs}

    def _task(self, tag: str) -> Task:
        env, config = self._config.custom_envs[tag], self._config
        made = make_env(env.env_type, env.env_config, f"custom_envs.{tag}")
        made.close()
        return Task(
            tag=tag,
            spec=EnvSpec(env.env_type, env.env_config),
            max_actions=made.config.max_steps,
            max_tokens=env.max_tokens_per_step or config.max_tokens_per_step or 0,
            system=env.agent_system_template or "",
            template=env.agent_template,
        )

    def rollouter_here(self, engines: ClusterClient) -> Rollouter[TrajectoryGroup]:
        """Its environments are in processes of their own all the same."""
        return make_rollouter(self.inputs(), engines)

    def rollouter_elsewhere(self, engines: ClusterClient) -> tuple[Any, ...]:
        """Nothing is held here."""
        return make_rollouter, self.inputs(), engines

    def inputs(self) -> AgenticInputs:
        """What a rollouter is made of; `prepare` comes first."""
        return AgenticInputs(self._config, self._tasks, *self._samplings)

    async def close(self) -> None:
        """Nothing was started: environments belong to the rollouter."""


@dataclass(frozen=True)
class AgenticInputs:
    """What a rollouter is made of; can be sent to another process.

    Attributes:
        config: of the run.
        tasks: by tag.
        sampling: of training samples.
        validation_sampling: of validation.
    """

    config: AgenticConfig
    tasks: Mapping[str, Task]
    sampling: SamplingParams
    validation_sampling: SamplingParams


def make_rollouter(inputs: AgenticInputs, engines: Engines) -> Rollouter[TrajectoryGroup]:
    """A rollouter that asks these engines and plays environments in processes of its own."""
    config, size = inputs.config, inputs.config.train_env_manager.group_size
    settings, options = policy_settings(config, config.groups_per_batch, size), rollout_options(config, size)
    rollouter = load_extensions(config).rollouter or Rollouter
    return rollouter(make_producer(inputs, engines), settings, options)


def make_producer(inputs: AgenticInputs, engines: Engines) -> AgenticProducer:
    """What plays for it."""
    config = inputs.config
    tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
    managers = [config.train_env_manager, *([config.val_env_manager] if config.eval_steps else [])]
    environments = EnvPool(
        sum(manager.processes for manager in managers),  # training goes on while validation plays
        config.env_step_timeout_s,
        config.start_timeout_s,
        capacity=max(manager.max_env_num_per_worker or manager.environments for manager in managers),
        log=log_file(config, "environments"),
        variables=process_environment(config, threads=1),
    )
    player = Player(
        EnginePool(engines, config.max_generation_retries, config.actor_infer.max_running_requests),
        environments,
        ConversationEncoder(tokenizer, config.actor_train.data_args.template),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        config.sequence_length or 0,
        config.trajectory_timeout_s,
    )
    multiple = samples_per_optimizer_step(config.actor_train, role_layout(config.actor_train).data)
    return AgenticProducer(
        config, inputs.tasks, player, environments, inputs.sampling, inputs.validation_sampling, multiple
    )
