"""Processes that run one parallel layout after another, so that each imports torch and Megatron once."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.distributed.process_groups import hold_port, release_port
from tests.processes import PATIENCE_S

SIZE = 4
"""Processes of the pool: the ranks of the largest layout."""

STRATEGIES = 40
"""Most that one scenario builds; each has a port of its own."""

MOST_THREADS = 600
"""Of a process after a scenario: a strategy that is not freed keeps the 32 threads of its process groups awake."""


class RankFailed(AssertionError):
    """A rank raised or ran out of time; the message is its traceback."""


@dataclass
class RankContext:
    """What a scenario gets: who it is, where to write, and strategies, each on a port that rank 0 holds."""

    layout: ParallelLayout
    rank: int
    folder: Path
    arguments: dict[str, Any]
    ports: list[int]
    results: dict[str, Any] = field(default_factory=dict)

    def strategy(
        self,
        model: Path,
        megatron: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        dtype: str = "fp32",
        infer: bool = False,
        packed: bool = False,
        critic: bool = False,
        reward_model: bool = False,
        frozen_parts: Sequence[str] = (),
        replays: bool = False,
        lora: dict[str, Any] | None = None,
        **pipeline: Any,
    ) -> Any:
        """An initialised strategy of this rank; shut it down before asking for the next.

        With `infer` the model is frozen; with `reward_model` too, it is that of role `reward`.
        """
        from roll.configs.arguments import MegatronModelArguments, TrainingArguments, TrainModelArguments
        from roll.configs.devices.megatron import MegatronConfig, MegatronTrainConfig
        from roll.configs.pipeline import SFTConfig
        from roll.configs.roles import (
            ActorTrainConfig,
            CriticConfig,
            MegatronInferArguments,
            MegatronRoleConfig,
            MegatronTrainArguments,
            RewardModelTrainConfig,
        )
        from roll.configs.scoring.scoring_roles import RewardModelRoleConfig
        from roll.platforms import get_platform

        get_platform("cpu").prepare_megatron()
        from roll.distributed.train.megatron_infer import MegatronInferStrategy
        from roll.distributed.train.megatron_strategy import MegatronTrainStrategy

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.ports.pop(0)))
        sizes = {
            "tensor_model_parallel_size": self.layout.tensor,
            "pipeline_model_parallel_size": self.layout.pipeline,
            "context_parallel_size": self.layout.context,
            "expert_model_parallel_size": self.layout.expert,
            "expert_tensor_parallel_size": self.layout.expert_tensor,
        }
        own = {"device_mapping": list(range(self.layout.world_size)), "use_sequence_packing": packed}
        frozen = infer and reward_model
        if frozen:
            worker: MegatronRoleConfig = RewardModelRoleConfig(
                model_args=MegatronModelArguments(model_name_or_path=str(model), dtype=dtype),
                strategy_args=MegatronInferArguments(strategy_config=MegatronConfig(**sizes | (megatron or {}))),
                **own,
            )
        else:
            kind_of_role = RewardModelTrainConfig if reward_model else CriticConfig if critic else ActorTrainConfig
            worker = kind_of_role(
                model_args=TrainModelArguments(
                    model_name_or_path=str(model), dtype=dtype, freeze_module_prefix=[*frozen_parts], **(lora or {})
                ),
                training_args=TrainingArguments(**({"learning_rate": 1e-3} | (training or {}))),
                strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(**sizes | (megatron or {}))),
                **own,
            )
        if replays:
            assert isinstance(worker, ActorTrainConfig)
            worker.router_replay.mode = "R3"
        times = {"start_timeout_s": PATIENCE_S, "rpc_timeout_s": PATIENCE_S}
        roles = {} if critic or frozen else {"actor_train": worker}
        config = SFTConfig(**times | {"response_length": 1024} | roles | pipeline)
        kind = MegatronInferStrategy if infer else MegatronTrainStrategy
        strategy = kind(worker, config, self.layout, self.rank, get_platform("cpu"))
        strategy.initialize()
        return strategy


class RankPool:
    """Runs scenarios on layouts, several at a time as long as processes are free."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))[:SIZE]
        self._idle: list[RankProcess] = []
        self._busy: list[RankProcess] = []
        self._threads = ThreadPoolExecutor(SIZE, thread_name_prefix="rank-pool")
        self._queue = threading.Lock()
        self._changed = threading.Condition()

    def start(
        self, scenario: str, layout: ParallelLayout, folder: Path, deadline_s: float = PATIENCE_S, **arguments: Any
    ) -> Future[list[dict[str, Any]]]:
        """Queues `scenario` ("module:function"), which gets a RankContext on every rank of `layout`.

        The future holds each rank's `results`, or a RankFailed with the first traceback.
        """
        return self._threads.submit(self._run, scenario, layout, folder, deadline_s, arguments)

    def run(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """As `start`, and waits."""
        return self.start(*args, **kwargs).result()

    def close(self) -> None:
        """Ends the processes."""
        self._threads.shutdown(cancel_futures=True)
        self.free_memory()

    def free_memory(self) -> None:
        """Ends the processes that run no scenario; the next one starts others."""
        with self._changed:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _run(
        self, scenario: str, layout: ParallelLayout, folder: Path, deadline_s: float, arguments: dict[str, Any]
    ) -> list[dict[str, Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        processes = self._acquire(layout.world_size)
        deadline = time.monotonic() + deadline_s
        reusable = False
        try:
            processes[0].pipe.send(None)
            [ports] = _answers(processes[:1], deadline)
            for rank, process in enumerate(processes):
                process.pipe.send((scenario, RankContext(layout, rank, folder, arguments, list(ports))))
            results = _answers(processes, deadline)
            reusable = True
            return results
        finally:
            self._release(processes, reusable)

    def _acquire(self, count: int) -> list[RankProcess]:
        """Waits for `count` processes, in the order of the calls, and takes them from the least busy cores."""
        with self._queue, self._changed:
            self._changed.wait_for(lambda: len(self._busy) + count <= SIZE)
            taken = []
            for _ in range(count):
                core = min(self._cores, key=lambda core: sum(process.core == core for process in self._busy))
                process = next((process for process in self._idle if process.core == core), None)
                if process is None:
                    process = RankProcess(core)
                else:
                    self._idle.remove(process)
                self._busy.append(process)
                taken.append(process)
            return taken

    def _release(self, processes: list[RankProcess], reusable: bool) -> None:
        if not reusable:  # a rank may still wait for one that failed
            for process in processes:
                process.kill()
        with self._changed:
            for process in processes:
                self._busy.remove(process)
            self._idle += processes if reusable else []
            self._changed.notify_all()


class RankProcess:
    """A spawned process on one core that runs what it receives until it is killed."""

    def __init__(self, core: int) -> None:
        self.core = core
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, core), daemon=True)
        self._process.start()
        other.close()

    def kill(self) -> None:
        """Ends the process; what it does is lost."""
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _answers(processes: list[RankProcess], deadline: float) -> list[Any]:
    """What every process answers; the first error ends the wait."""
    answers: dict[int, Any] = {}
    while len(answers) < len(processes):
        waiting = {process.pipe: rank for rank, process in enumerate(processes) if rank not in answers}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} did not finish in time")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                error, answer = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} ended without a result") from None
            if error:
                raise RankFailed(f"rank {rank}:\n{error}")
            answers[rank] = pickle.loads(answer)
    return [answers[rank] for rank in range(len(processes))]


def _serve(pipe: Any, core: int) -> None:
    """The life of a process: a None is answered with ports that it holds, a scenario with its results."""
    warnings.filterwarnings("ignore")
    faulthandler.enable()
    from roll.platforms import get_platform

    get_platform("cpu").setup_process([core], threads=1)
    held: list[int] = []
    while True:
        job = pipe.recv()
        try:
            if job is None:
                held = [hold_port() for _ in range(STRATEGIES)]
                answer: Any = held
            else:
                answer = _run_scenario(*job)
                for port in held:
                    release_port(port)
            pipe.send((None, pickle.dumps(answer)))
        except BaseException:
            pipe.send((traceback.format_exc(), b""))


def _run_scenario(scenario: str, context: RankContext) -> dict[str, Any]:
    from roll.distributed.train.megatron_infer import leave_process_group

    module, name = scenario.split(":")
    try:
        getattr(importlib.import_module(module), name)(context)
    finally:
        leave_process_group()
        gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    assert threads <= MOST_THREADS, f"{threads} threads are left: strategies or their groups are not freed"
    return context.results
