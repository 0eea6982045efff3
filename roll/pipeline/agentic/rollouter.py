"""The rollouter of an agentic run, made where it runs: in the driver, or in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roll.configs.agentic import AgenticConfig
from roll.configs.layouts import role_layout
from roll.datasets.templates import ConversationEncoder
from roll.distributed.env_pool.pool import EnvPool
from roll.distributed.processes import log_file, process_environment
from roll.pipeline.agentic.episode import Task
from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.pipeline.agentic.play import Player
from roll.pipeline.agentic.producer import AgenticProducer
from roll.pipeline.engine_pool import EnginePool, Engines
from roll.pipeline.extensions import load_extensions
from roll.pipeline.rollout_settings import policy_settings, rollout_options
from roll.pipeline.rollouter import Rollouter
from roll.pipeline.sharding import samples_per_optimizer_step
from roll.pipeline.tokenizer import load_tokenizer
from roll.rollout.types import SamplingParams


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
