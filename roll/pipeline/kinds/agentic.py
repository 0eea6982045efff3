"""Agents: trajectories of many turns in environments, or of programs that call the policy through the gateway.

Makes every environment once before any process starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial

from roll.agents.tasks import read_tasks
from roll.base.events import EventLog, Repeats
from roll.base.schema import YEAR_S
from roll.configs.agentic import AgenticConfig
from roll.datasets.tokenizer import conversation_encoder, load_tokenizer, response_text
from roll.distributed.calls.remote_actor import RemoteActor
from roll.distributed.gateway.gateway_process import EngineLimits, GatewayProcess
from roll.distributed.gateway.gateway_processes import GatewayProcesses
from roll.distributed.gateway.parsers import reasoning_parser, tool_parser
from roll.distributed.infer.infer_worker import EngineClient
from roll.distributed.processes import log_file, process_environment
from roll.envs import make_env
from roll.gateway.session import Dialogue
from roll.pipeline.kinds.rl import RLPipeline, WorkerFactory
from roll.pipeline.session import Session
from roll.platforms import get_platform
from roll.rollout.agents.agent_episode import AgentRuns, AgentTask
from roll.rollout.agents.agentic_worker import AgenticWorker
from roll.rollout.agents.episode import Task
from roll.rollout.agents.runner import RolloutRunner
from roll.rollout.agents.sessions import ActivityTimers, SessionTotals
from roll.rollout.engine_pool import EnginePool
from roll.rollout.rollout_worker import Purpose
from roll.rollout.types import SamplingParams
from roll.usercode.agents.pool import AgentPool, AgentSpec
from roll.usercode.env_pool import EnvPool, EnvSpec

logger = logging.getLogger(__name__)


class AgenticPipeline(RLPipeline[AgenticConfig]):
    """Samples are trajectories, scored by the environments themselves."""

    async def prepare(self) -> None:
        """Reads the tokenizer and makes one environment of every tag.

        Raises:
            ConfigError: an environment does not exist or does not accept its options.
            DatasetError: the chat template does not let turns be added one by one, or a task file cannot be read.
        """
        await super().prepare()
        conversation_encoder(self._config, self._config.actor_train.data_args, self._tokenizer)
        self._tasks = {tag: self._task(tag) for tag in self._config.custom_envs}
        if self._has_agents:
            make_dialogue(self._config, self._sampling)

    @property
    def _has_agents(self) -> bool:
        return any(entry.is_agent for entry in self._config.custom_envs.values())

    def _task(self, tag: str) -> Task | AgentTask:
        env, config = self._config.custom_envs[tag], self._config
        if env.is_agent:
            spec, rows = AgentSpec.of_entry(tag, env), len(read_tasks(env.tasks.file_name))
            return AgentTask(tag, spec, env.max_tokens_per_step or 0, env.max_requests, rows)
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
        engines = EngineClient(session.infer_clusters["actor_infer"].client()) if self._has_agents else None
        return partial(make_agentic_worker, self._config, self._tasks, self._sampling, engines)

    async def close(self) -> None:
        """Nothing to end: the environments belong to the rollout worker."""


def make_agentic_worker(
    config: AgenticConfig,
    tasks: Mapping[str, Task | AgentTask],
    sampling: Mapping[Purpose, SamplingParams],
    gateway_engines: EngineClient | None,
    engines: EnginePool,
) -> AgenticWorker:
    """The rollout worker, with environments and agents in worker processes that start when they are first used.

    Agents are served by a gateway, whose processes call `gateway_engines`; None where there are no agents.
    """
    tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
    workers, capacity = _processes(config)
    environments = EnvPool(
        workers,
        config.env_step_timeout_s,
        config.start_timeout_s,
        capacity=capacity,
        log=log_file(config, "environments"),
        variables=process_environment(config, threads=1),
        events=EventLog(config.output_dir),
    )
    agents = None if gateway_engines is None else _agent_runs(config, sampling, gateway_engines, engines)
    runner = RolloutRunner(
        engines,
        environments,
        conversation_encoder(config, config.actor_train.data_args, tokenizer),
        partial(response_text, tokenizer, stop_token_ids=_stops(sampling)),
        config.sequence_length or 0,
        config.trajectory_timeout_s,
        agents,
    )
    return AgenticWorker(config, tasks, sampling, runner, environments, agents)


def _processes(config: AgenticConfig) -> tuple[int, int]:
    """Worker processes of environments or agents, and how many of them one holds."""
    managers = [config.train_env_manager, *([config.val_env_manager] if config.eval_steps else [])]
    workers = sum(manager.processes for manager in managers)  # training continues during a validation
    return workers, max(manager.max_env_num_per_worker or manager.environments for manager in managers)


def _agent_runs(
    config: AgenticConfig, sampling: Mapping[Purpose, SamplingParams], client: EngineClient, pool: EnginePool
) -> AgentRuns:
    workers, capacity = _processes(config)
    forking = min(workers, len(os.sched_getaffinity(0)))  # each agent has a process of its own besides
    restarted = not config.takes_turns(get_platform(config.platform).name)
    limits = EngineLimits(config.max_generation_retries, config.actor_infer.max_running_requests, restarted)
    dialogue = partial(make_dialogue, config, sampling)
    waits = {GatewayProcess.active.__name__: YEAR_S}

    def start(name: str) -> RemoteActor[GatewayProcess]:
        return RemoteActor(name, config, waits, GatewayProcess, dialogue, client, limits)

    timers = ActivityTimers(pool.lanes)
    return AgentRuns(
        GatewayProcesses(start, config.gateway.processes, timers, EventLog(config.output_dir), config.max_restarts),
        AgentPool(
            forking,
            config.start_timeout_s,
            capacity=-(-workers * capacity // forking),
            log=log_file(config, "agents"),
            variables=process_environment(config, threads=1),
            events=EventLog(config.output_dir),
        ),
        timers,
        SessionTotals(),
        Repeats(logger),
        config.trajectory_timeout_s,
    )


def _stops(sampling: Mapping[Purpose, SamplingParams]) -> frozenset[int]:
    return frozenset(number for each in sampling.values() for number in each.stop_token_ids)


def make_dialogue(config: AgenticConfig, sampling: Mapping[Purpose, SamplingParams]) -> Dialogue:
    """How a gateway process reads and writes messages.

    Raises:
        RunError: there is no such parser.
    """
    tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
    chat = conversation_encoder(config, config.actor_train.data_args, tokenizer)
    return Dialogue(
        chat,
        partial(response_text, tokenizer, stop_token_ids=_stops(sampling)),
        tool_parser(config.gateway.tool_parser, chat.encoder.source),
        reasoning_parser(config.gateway.reasoning_parser),
        config.gateway.request_sampling == "strict",
    )
