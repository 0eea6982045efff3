"""Agents: trajectories of many turns in environments. Makes every environment once before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from roll.base.events import EventLog
from roll.configs.agentic import AgenticConfig
from roll.datasets.tokenizer import conversation_encoder, load_tokenizer, response_text
from roll.distributed.processes import log_file, process_environment
from roll.envs import make_env
from roll.pipeline.kinds.rl import RLPipeline, WorkerFactory
from roll.pipeline.session import Session
from roll.rollout.agents.agentic_worker import AgenticWorker
from roll.rollout.agents.episode import Task
from roll.rollout.agents.runner import RolloutRunner
from roll.rollout.engine_pool import EnginePool
from roll.rollout.rollout_worker import Purpose
from roll.rollout.types import SamplingParams
from roll.usercode.env_pool import EnvPool, EnvSpec


class AgenticPipeline(RLPipeline[AgenticConfig]):
    """Samples are trajectories, scored by the environments themselves."""

    async def prepare(self) -> None:
        """Reads the tokenizer and makes one environment of every tag.

        Raises:
            ConfigError: an environment does not exist or does not accept its options.
            DatasetError: the chat template does not let turns be added one by one.
        """
        await super().prepare()
        conversation_encoder(self._config, self._config.actor_train.data_args, self._tokenizer)
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

    def worker_factory(self, session: Session, own_process: bool) -> WorkerFactory:
        """The worker starts the environments, each in worker processes, wherever it runs."""
        return partial(make_agentic_worker, self._config, self._tasks, self._sampling)

    async def close(self) -> None:
        """Nothing to end: the environments belong to the rollout worker."""


def make_agentic_worker(
    config: AgenticConfig, tasks: Mapping[str, Task], sampling: Mapping[Purpose, SamplingParams], engines: EnginePool
) -> AgenticWorker:
    """The rollout worker, with environments in worker processes that start when they are first used."""
    tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
    managers = [config.train_env_manager, *([config.val_env_manager] if config.eval_steps else [])]
    environments = EnvPool(
        sum(manager.processes for manager in managers),  # training continues during a validation
        config.env_step_timeout_s,
        config.start_timeout_s,
        capacity=max(manager.max_env_num_per_worker or manager.environments for manager in managers),
        log=log_file(config, "environments"),
        variables=process_environment(config, threads=1),
        events=EventLog(config.output_dir),
    )
    stops = frozenset(number for each in sampling.values() for number in each.stop_token_ids)
    runner = RolloutRunner(
        engines,
        environments,
        conversation_encoder(config, config.actor_train.data_args, tokenizer),
        partial(response_text, tokenizer, stop_token_ids=stops),
        config.sequence_length or 0,
        config.trajectory_timeout_s,
    )
    return AgenticWorker(config, tasks, sampling, runner, environments)
