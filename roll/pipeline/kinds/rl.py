"""Assembles a reinforcement learning run: rollouter, learner and weight updates around the running clusters."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from roll.base.errors import RunError
from roll.base.events import EventLog
from roll.configs.agentic import AgenticConfig
from roll.configs.defaults import fill_in_mismatch
from roll.configs.pipeline import RLConfig, RLVRConfig
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.datasets.tokenizer import load_tokenizer
from roll.distributed.calls.remote_actor import RemoteActor
from roll.distributed.calls.remote_call import ClusterClient
from roll.distributed.infer.engine_monitor import EngineMonitor
from roll.distributed.infer.infer_worker import EngineClient
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.weights.adapters import AdapterSynchronizer
from roll.distributed.weights.delta_updates import DeltaSynchronizer
from roll.distributed.weights.synchronizer import WeightSynchronizer
from roll.distributed.weights.transport import TRANSPORTS
from roll.pipeline.bottleneck_report import Split
from roll.pipeline.extensions import load_extensions
from roll.pipeline.learning.actor_learner import ActorLearner
from roll.pipeline.learning.engine_probe import EngineProbe
from roll.pipeline.learning.learner import RLLearner
from roll.pipeline.learning.performance import Performance
from roll.pipeline.learning.policies import PoliciesLearner, PolicyRanks
from roll.pipeline.rollout_client import NAME, RolloutClient
from roll.pipeline.run import TrainingLoop
from roll.pipeline.session import Session
from roll.plan.memory import model_shapes
from roll.plan.plan import make_plan
from roll.platforms import get_platform
from roll.rollout.engine_pool import EnginePool, Engines
from roll.rollout.recording import RolloutRecording
from roll.rollout.rollout_worker import Purpose, RolloutWorker
from roll.rollout.rollouter import Rollouter, admission_settings
from roll.rollout.source import SampleSource
from roll.rollout.types import SamplingParams, sampling_params
from roll.trackers import TrackerGroup
from roll.trackers.recording import Recording

logger = logging.getLogger(__name__)

OWN_DEADLINE_GRACE_S = 60.0
"""Added to the rollouter's own deadline, so that the rollouter's error, which names the late prompts, comes first."""

WorkerFactory = Callable[[EnginePool], RolloutWorker]
"""Makes the rollout worker in the process in which the rollouter runs."""

ConfigT = TypeVar("ConfigT", bound=RLConfig)


class RLPipeline(ABC, Generic[ConfigT]):
    """What RLVR and agents share; `prepare` checks every input before Ray or an engine starts.

    Attributes:
        loop: the class of the training loop.
        learner: that of the learner, where the configuration names none.
    """

    loop: ClassVar[type[TrainingLoop]] = TrainingLoop
    learner: ClassVar[type[RLLearner]] = RLLearner

    def __init__(self, config: ConfigT) -> None:
        self._config = config
        self.plan, self.split = make_plan(config), split_of(config)

    async def prepare(self) -> None:
        """Reads the tokenizer and checks the sampling parameters.

        Raises:
            RunError: the tokenizer cannot be read; a stop string is not one token; no such weight transport.
        """
        config = self._config
        if config.weight_transport not in ("auto", *TRANSPORTS):
            known = ", ".join(("auto", *TRANSPORTS))
            raise RunError(f"weight_transport: {config.weight_transport!r} is not registered; use one of {known}")
        fill_in_mismatch(config)  # a model from the hub is on this machine now
        self._tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
        train, val = config.actor_infer.generating_args, config.validation.generating_args
        self._sampling: dict[Purpose, SamplingParams] = {
            "train": replace(
                sampling_params(train, "actor_infer.generating_args", self._tokenizer),
                sampling_mask=config.replays_sampling_mask,
                routing=config.replays_routing,
            ),
            "val": sampling_params(val, "validation.generating_args", self._tokenizer),
        }

    @abstractmethod
    def worker_factory(self, session: Session, own_process: bool) -> WorkerFactory:
        """How to make the rollout worker; in a process of its own, the factory must be picklable."""

    async def build(self, session: Session, trackers: TrackerGroup) -> TrainingLoop:
        """The training loop, connected to the running clusters."""
        config, actor = self._config, session.train_clusters["actor_train"]
        samples = self._start_rollouter(session)
        await session.ready()
        logger.info("reading which weights the trainer sends to the engines")
        devices, infer = session.shared_devices, session.infer_clusters["actor_infer"]
        monitors = await self._watch_engines(session)
        monitor = monitors.pop("actor_infer")
        failures = [session.watch.wait_for_death, *(other.wait_until_lost for other in monitors.values())]
        whole = DeltaSynchronizer if config.weight_update == "delta" else WeightSynchronizer
        way = whole if config.adapters(actor.platform) is None else AdapterSynchronizer
        synchronizer = way(actor, infer, config, devices=devices, monitor=monitor, fatal_errors=failures)
        await synchronizer.setup()
        extensions = load_extensions(config)
        reference, critic = (session.train_clusters.get(role) for role in ("reference", "critic"))
        made: type[RLLearner] = extensions.trainer or self.learner
        learner: ActorLearner
        if config.policies:
            learner = PoliciesLearner(config, actor, reference, made)
        else:
            learner = made(config, actor, reference, *([] if critic is None else [critic]))
        hook = extensions.batch_hook(config) if extensions.batch_hook else None
        engines = EngineClient(infer.client())
        actors: dict[str, ClusterClient[TrainWorker]] = {name: PolicyRanks(actor, name) for name in config.policies}
        probe = EngineProbe(config, engines, actors or {"": actor}, self._sampling["train"], len(self._tokenizer))
        performance = Performance(config.device_roles(), model_shapes(config).get("actor_train"), config.ppo_epochs)
        return self.loop(
            config, samples, learner, synchronizer, trackers,
            batch_hook=hook, devices=devices, engine_check=probe, performance=performance,
        )  # fmt: skip

    async def _watch_engines(self, session: Session) -> dict[str, EngineMonitor]:
        """Starts to watch the engines of every role; the monitors by role.

        Engines that take turns with the trainer are not restarted: the memory that they need may be the trainer's.
        """
        events, monitors = EventLog(self._config.output_dir), {}
        for role, cluster in session.infer_clusters.items():
            actor = role == "actor_infer"
            restarts = not actor or session.shared_devices is None
            since = session.kept_since if actor and role in session.kept else None
            earlier = session.monitors.get(role)
            monitors[role] = EngineMonitor(cluster, self._config, events, actor, restarts, since, earlier)
            monitors[role].start()
            session.close_first(monitors[role].close)
            for engine, cause in session.down.get(role, {}).items():
                await monitors[role].failed(engine, cause, responsive=False)
        session.monitors = {**monitors}
        return monitors

    def _start_rollouter(self, session: Session) -> SampleSource:
        config, engines = self._config, EngineClient(session.infer_clusters["actor_infer"].client())
        background = config.runs_in_background
        factory = self.worker_factory(session, own_process=background)
        if not background:
            rollouter = make_rollouter(config, factory, engines)
            session.close_first(rollouter.close)
            return rollouter
        deadline = config.async_training.batch_deadline_s + OWN_DEADLINE_GRACE_S
        deadlines = {Rollouter.next_batch_and_state.__name__: deadline}

        def start() -> RemoteActor[Rollouter]:
            return session.start_remote_actor(NAME, deadlines, make_rollouter, config, factory, engines)

        events, earlier = EventLog(config.output_dir), session.rollout_client
        session.rollout_client = RolloutClient(start, session.cancel_requests, events, config.max_restarts, earlier)
        return session.rollout_client


def split_of(config: RLConfig) -> Split:
    """How the devices of a run are split, for the report on its bottleneck."""
    generation = {*config.actor_infer.device_mapping}
    training = {rank for role in config.trained_roles().values() for rank in role.device_mapping}
    platform = get_platform(config.platform)
    cpu = platform.name == "cpu"
    keys = []
    for name, reward in config.rewards.items() if isinstance(config, RLVRConfig) else ():
        role = scoring_role(reward)
        keys += [f"rewards.{name}.world_size"] if role is None else [] if cpu else [f"{role}.device_mapping"]
    return Split(
        config.async_generation_ratio,
        len(generation),
        len(training),
        shared=generation == training,
        drains=config.in_flight_policy == "drain",
        critic_apart=config.critic_apart,
        cpu=cpu,
        own_cores=cpu and (config.num_devices_per_node or 0) <= platform.device_count(),
        groups=config.train_env_manager.num_env_groups if isinstance(config, AgenticConfig) else None,
        batch_groups=config.groups_per_batch,
        reward_keys=tuple(dict.fromkeys(keys)),
    )


def make_rollouter(config: RLConfig, make_worker: WorkerFactory, engines: Engines) -> Rollouter:
    """A rollouter that generates with these engines; it is of the class that the configuration names."""
    pool = make_pool(config, engines)
    cls = load_extensions(config).rollouter or Rollouter
    recording = RolloutRecording(Recording(config.output_dir), pool)
    return cls(make_worker(pool), admission_settings(config, config.max_steps), config, recording=recording)


def make_pool(config: RLConfig, engines: Engines) -> EnginePool:
    """The engines behind one call; engines that take turns with the trainer are not restarted."""
    restarted = not config.takes_turns(get_platform(config.platform).name)
    return EnginePool(engines, config.max_generation_retries, config.actor_infer.max_running_requests, restarted)
