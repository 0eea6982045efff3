"""Assembles an agentic run: the environments are tried first, then engines and the learner come up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.configs.agentic import AgenticConfig
from roll.datasets.templates import ConversationEncoder
from roll.distributed.env_pool.types import EnvSpec
from roll.envs import make_env
from roll.pipeline.agentic.episode import Task
from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.pipeline.agentic.rollouter import AgenticInputs, make_rollouter
from roll.pipeline.rl_pipeline import RLPipeline
from roll.pipeline.rollouter import Rollouter

if TYPE_CHECKING:
    from roll.distributed.infer_worker import EngineClient


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

    def rollouter_here(self, engines: EngineClient) -> Rollouter[TrajectoryGroup]:
        """Its environments are in processes of their own all the same."""
        return make_rollouter(self.inputs(), engines)

    def rollouter_elsewhere(self, engines: EngineClient) -> tuple[Any, ...]:
        """Nothing is held here."""
        return make_rollouter, self.inputs(), engines

    def inputs(self) -> AgenticInputs:
        """What a rollouter is made of; `prepare` comes first."""
        return AgenticInputs(self._config, self._tasks, *self._samplings)

    async def close(self) -> None:
        """Nothing was started: environments belong to the rollouter."""
